"""What the shelf need not keep any more: older generations, files that were written again, steps that are gone."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from tierfs.cluster.copies import Copies
from tierfs.cluster.part_files import PartFiles
from tierfs.cluster.pulling import let_go
from tierfs.cluster.view import View
from tierfs.errors import CatalogError, PathRefused
from tierfs.steps.names import unescape_namespace
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.cluster")

#: Shelved files of a step that the catalogue does not have go after so long: it may be about to be published.
ORPHAN_AFTER_S = 60.0


@dataclass(frozen=True)
class Brought:
    """A copy that came here, and the generation that it was offered or planned for."""

    version: str
    generation: int


class ShelfSweep:
    """`brought` is what came while this daemon ran, by (author, path in the step)."""

    def __init__(self, registry: StepRegistry, view: View, copies: Copies, parts: PartFiles) -> None:
        self.brought: dict[Key, dict[tuple[str, str], Brought]] = {}
        self._registry = registry
        self._view = view
        self._copies = copies
        self._parts = parts
        self._to_sweep: set[Key] = set()
        self._orphans: dict[Key, float] = {}

    def soon(self, key: Key) -> None:
        """The step's shelf is looked through with the next `sweep`."""
        self._to_sweep.add(key)

    def later(self, key: Key) -> None:
        """The same after a while, and where the catalogue does not have the step then, it is forgotten."""
        self._orphans.setdefault(key, trio.current_time() + ORPHAN_AFTER_S)

    def all_later(self) -> None:
        """What changed while this node was away: steps of the shelf may be gone, or complete in a newer generation.

        Not at once: a step may be about to be published, and what is being written has to be offered again.
        """
        for key in self._shelf_keys():
            self.later(key)

    def forget(self, key: Key) -> None:
        """The step is gone, or leaves this node's RAM."""
        self.brought.pop(key, None)
        self._to_sweep.discard(key)
        self._orphans.pop(key, None)
        self._copies.forget_step(key)

    def next_at(self) -> float:
        return min(self._orphans.values(), default=math.inf)

    async def sweep(self, forget: Callable[[Key], None]) -> bool:
        """Do what is due; False where some of it has to be done again. `forget` is called for steps that are gone."""
        done = True
        now = trio.current_time()
        for key, at in list(self._orphans.items()):
            if at > now:
                continue
            if "/".join(key) in self._view.tree:
                del self._orphans[key]
                self.soon(key)
            elif self._view.connected:
                forget(key)
            else:
                self._orphans[key] = now + ORPHAN_AFTER_S
        for key in sorted(self._to_sweep):
            try:
                await self._sweep(key)
                self._to_sweep.discard(key)
            except CatalogError as error:
                log.debug("what is not needed of %s can't be told yet: %s", "/".join(key), error)
                done = False
        return done

    async def _sweep(self, key: Key) -> None:
        """Drop what neither the complete generation has nor a newer one. CatalogError."""
        on_shelf = self._copies.shelved_versions(key)
        seen = self._view.states.get(key)
        if not on_shelf:
            return
        complete = seen.record.generation if seen is not None else 0
        brought = self.brought.setdefault(key, {})
        needed = {each.version for each in brought.values() if each.generation >= complete}
        authors = {author_of(version) for version in on_shelf}
        if seen is not None:
            parts = await self._parts.read(key, seen.record, seen.create_revision, authors)
            # What a part carries on from an older generation is of another author than the part.
            needed |= {file.version for files in parts.values() for file in files.values()}
        for version in on_shelf:
            if version not in needed:
                await self._drop(key, version)
        for where, each in list(brought.items()):
            if each.version not in needed:
                del brought[where]

    async def _drop(self, key: Key, version: str) -> None:
        try:
            fd = os.open(self._copies.place(key, version), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        self._copies.drop(key, version)
        await let_go(fd)
        self._registry.tier.released_room()

    def _shelf_keys(self) -> Iterator[Key]:
        for namespace in os.scandir(self._copies.shelf):
            try:
                name = unescape_namespace(namespace.name)
            except PathRefused:
                continue  # cut, since it is very long: it goes with the step
            for step in os.scandir(namespace.path):
                if self._registry.names.locate(f"{name}/{step.name}") is not None:
                    yield name, step.name


def author_of(version: str) -> str:
    return version.rpartition("/")[0]
