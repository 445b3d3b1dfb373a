"""Before a node goes: others get what only it holds.

The node says that it drains (`NodeRecord.state`). From then on its copies are not counted, so the others make theirs
by the same rules as after a loss, only at once and with this node as a source. Here is waited until that is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio

from tierfs.cluster import placement
from tierfs.cluster.copies import Copies
from tierfs.cluster.counting import Holders
from tierfs.cluster.grouping import DRAINING, Groups
from tierfs.cluster.making import key_of, plain_place
from tierfs.cluster.placement import SERVING
from tierfs.cluster.view import View
from tierfs.errors import CatalogError, PeerError
from tierfs.steps.news import Event
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import SMALL_FILE_BYTES, Peers
from tierfs.units import format_size

log = logging.getLogger("tierfs.cluster")

#: What others hold is looked at so often: holdings are not watched.
LOOK_EVERY_S = 0.3
#: A drain ends when nobody can take what is left, and nothing changed for so long.
HOPELESS_S = 5.0
#: A step whose marker was closed is complete a moment later, or not at all.
JUDGED_WITHIN_S = 2.0
#: Files that others are asked about at the same time.
_ASK_AT_ONCE = 16
_CHECKPOINT_EVERY = 200


@dataclass(frozen=True)
class _File:
    """A file that only this node has; `path` is its step's where that is complete."""

    path: str
    size_bytes: int
    has_taker: bool = True


@dataclass(frozen=True)
class Left:
    """What only this node has. `paths` are steps, and files outside of complete steps; `note` says why it may stay
    so."""

    steps: int = 0
    files: int = 0
    bytes: int = 0
    paths: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_nothing(self) -> bool:
        return self.files == 0 and not self.note


class Drain:
    """`member_changed` has this node's record told again (`Membership.changed`), whose state is `state`.
    `is_persisted(key)`: the object tier has the step as the catalogue says it is complete."""

    def __init__(
        self,
        registry: StepRegistry,
        view: View,
        peers: Peers,
        copies: Copies,
        groups: Groups,
        node: str,
        *,
        member_changed: Callable[[], None],
        is_persisted: Callable[[Key], bool],
    ) -> None:
        self.state = SERVING
        self.left: Left | None = None  # of a drain that goes on or has ended
        self._registry = registry
        self._view = view
        self._peers = peers
        self._copies = copies
        self._groups = groups
        self._node = node
        self._member_changed = member_changed
        self._is_persisted = is_persisted
        self._held_elsewhere: set[str] = set()
        self._is_hopeless = False

    @property
    def is_draining(self) -> bool:
        """The node has said that it goes, whether or not others have everything by now."""
        return self.state == DRAINING

    def stop(self) -> None:
        """The node stays after all."""
        self._be(SERVING)
        self.left = None

    async def drain(self, *, within_s: float, told: Callable[[Left], None] = lambda left: None) -> Left:
        """Hand over what only this node holds; returns what is left, nothing or what could not be done in time.

        It ends early where no other node has room for any of it, or there is none.
        The node stays drained, until it goes or `stop` is called. `told` is called with each change of what is left.
        """
        log.info("draining: other nodes copy what only this one holds")
        self._tell("begun", f"{self._node} drains: other nodes copy what only it holds", Left())
        self._be(DRAINING)
        self._held_elsewhere.clear()
        left = Left(note="nothing was looked at yet")
        hoped_at = trio.current_time()
        with trio.move_on_after(within_s):
            while True:
                if not self.is_draining:
                    log.info("not drained: the node stays after all")
                    self._tell("stopped", f"{self._node} stays after all", left)
                    return Left(note="the node stays after all")
                now = await self._look()
                if now != left or not self._is_hopeless:
                    hoped_at = trio.current_time()
                if now != left:
                    told(now)
                left = self.left = now
                if left.is_nothing or trio.current_time() - hoped_at >= HOPELESS_S:
                    break
                await trio.sleep(LOOK_EVERY_S)
        self.left = left
        if left.is_nothing:
            log.info("drained: other nodes or the object tier have all that this one held")
            self._tell("done", f"{self._node} is drained: others have all that it held", left)
        else:
            shown = ", ".join(left.paths[:10])
            self._tell("ended", f"{self._node} is drained in part: {format_size(left.bytes)} are only here", left)
            log.warning(
                "drained in part: %s of %d files are only here (%s) %s",
                format_size(left.bytes),
                left.files,
                shown,
                left.note,
            )
        return left

    def _tell(self, phase: str, message: str, left: Left) -> None:
        facts = {"phase": phase, "left_steps": left.steps, "left_bytes": left.bytes, "note": left.note}
        self._registry.news.tell(Event("drain", message, facts=facts))

    def _be(self, state: str) -> None:
        self.state = state
        self._member_changed()

    async def _look(self) -> Left:
        """What is left now. The others can only begin once they know that this node drains."""
        others = [record.node for record in self._groups.serving() if record.node != self._node]
        if not others:
            note = "there is no other node that could take it"
        elif not self._groups.is_draining(self._node):
            note = "the other nodes don't know yet"
        else:
            note = ""
        found: list[_File] = []
        steps = 0
        for key in sorted(self._view.states):
            try:
                files = await self._of_step(key, others)
            except CatalogError as error:
                files, note = [], f"the catalogue does not say what others hold: {error.message}"
            steps += bool(files)
            found += files
        found += self._about_to_be_complete()
        found += await self._being_written()
        found += await self._outside_of_steps()
        self._is_hopeless = not others or (bool(found) and not any(file.has_taker for file in found))
        if others and self._is_hopeless:
            note = note or "no other node has room for it"
        paths = tuple(dict.fromkeys(file.path for file in found))
        # With nobody to take it, what nobody needs to take is no reason to wait.
        size = sum(file.size_bytes for file in found)
        return Left(steps, len(found), size, paths, note if found or others else "")

    async def _of_step(self, key: Key, others: list[str]) -> list[_File]:
        """Files of the complete step that too few other nodes hold."""
        seen = self._view.states.get(key)
        if seen is None or self._is_persisted(key):
            return []
        files = await self._view.files(key, seen.record.generation)
        holders = Holders(files, await self._view.holdings(key), self._view.nodes)
        needed = max(1, min(self._groups.replicas(key[0]), len(others)))
        found = []
        for part, of_part in holders.parts():
            lacking = []
            for file in of_part:
                holding = holders.of(file)
                if self._node in holding and len(holding.intersection(others)) < needed:
                    lacking.append(file.size_bytes)
            has_taker = bool(lacking) and self._has_taker(key, part, sum(lacking))
            found += [_File("/".join(key), size, has_taker) for size in lacking]
        return found

    def _has_taker(self, key: Key, name: str, size_bytes: int) -> bool:
        """Another node has room for it, as it says."""
        return bool(placement.candidates(key, name, self._groups.serving(), (self._node,), needed_bytes=size_bytes))

    def _about_to_be_complete(self) -> list[_File]:
        """Steps of this node that are complete here and not in the catalogue, or not yet complete here."""
        found = []
        for record in list(self._registry.records.values()):
            if record.is_complete:
                seen = self._view.states.get(record.key)
                is_known = seen is not None and seen.record.generation >= record.manifest.generation
                if not is_known and not record.is_persisted:
                    found.append(_File(record.rel, record.manifest.bytes))
            elif record.idle_s < JUDGED_WITHIN_S and any(map(self._registry.rules.match, record.manifest.files)):
                found.append(_File(record.rel, 0))
        return found

    async def _being_written(self) -> list[_File]:
        """Sealed files of this node in steps that are not complete, which no partner holds; and what is open."""
        waiting: list[tuple[Key, str, int, str]] = []
        found: list[_File] = []
        for record in list(self._registry.records.values()):
            if record.is_complete:
                continue
            names = record.open_names()
            found += [_File(f"{record.rel}/{inner}", 0) for inner in sorted(names)]
            for inner, entry in list(record.manifest.files.items()):
                version = self._copies.version_of(entry.ino) if inner not in names else None
                if version is None or version in self._held_elsewhere or record.is_of_old_generation(inner):
                    continue
                if version.startswith(f"{self._node}/"):
                    waiting.append((record.key, f"{record.rel}/{inner}", entry.size_bytes, version))
        limiter = trio.CapacityLimiter(_ASK_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for key, _, _, version in waiting:
                nursery.start_soon(self._ask, key[0], version, limiter)
        for key, path, size, version in waiting:
            if version not in self._held_elsewhere:
                found.append(_File(path, size, self._has_taker(key, path, size)))
        return found

    async def _ask(self, namespace: str, version: str, limiter: trio.CapacityLimiter) -> None:
        for partner in self._groups.partners(self._node, max(2, self._groups.replicas(namespace))):
            async with limiter:
                try:
                    await self._peers.checksum(partner, version)
                    self._held_elsewhere.add(version)
                    return
                except PeerError as error:
                    log.debug("%s does not hold %s: %s", partner, version, error)

    async def _outside_of_steps(self) -> list[_File]:
        """Large files of no step that nobody took over yet (`TakingOver`); small ones are on every node."""
        found = []
        for at, (path, seen) in enumerate(list(self._view.tree.items())):
            if at % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                await trio.lowlevel.checkpoint()
            file = seen.record.file
            if file is not None and file.node == self._node and file.size_bytes >= SMALL_FILE_BYTES:
                where = key_of(plain_place(path))
                found.append(_File(path, file.size_bytes, self._has_taker(where, path, file.size_bytes)))
        return found
