"""Names of other nodes, made here when somebody looks: for one name that was looked up, or a whole listing.

What the catalogue has at that moment is what shows, as long as it can be asked; with it away, what was known. A file of
another node becomes a stub of its version, or has its bytes where they are here already or small. Files that this node
writes, and has not published yet, stay; a marker shows only once its generation is complete.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tierfs.catalog.keys import state_key, tree_below, tree_key
from tierfs.catalog.records import FileRecord, StepState
from tierfs.cluster import placing
from tierfs.cluster.copies import Copies
from tierfs.cluster.making import FileMaker, version_at
from tierfs.cluster.shown_names import ShownNames
from tierfs.cluster.step_files import StepFiles, is_shard
from tierfs.cluster.view import Seen, View
from tierfs.errors import CatalogError, PathRefused, TierfsError
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.names import StepPath, safe_relative
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.cluster")

#: How long a commit waits for this node's own view of it.
SEEN_WITHIN_S = 5.0

#: So many steps are remembered in which other nodes' additions have names here.
STEPS_WITH_ADDITIONS = 1000

#: Files that are made before other requests have their turn: some 100 µs each.
AT_ONCE = 8


@dataclass(frozen=True)
class Shown:
    """Which generation of a step shows here, and whether it is complete."""

    generation: int
    is_complete: bool


class Showing(ShownNames):
    """Used from the trio thread. `take` (set by `tierfs.cluster.taking`) brings a step to what another node committed;
    `is_completing` says of a step that this node is about to make it complete itself, `is_being_emptied` that a program
    removed files of it here. With `operations_applied` it is waited for renames that the catalogue has and this tree
    not yet."""

    def __init__(self, registry: StepRegistry, view: View, copies: Copies, maker: FileMaker) -> None:
        super().__init__(registry, view, copies, maker)
        self.take: Callable[[Key], Awaitable[object]] = _take_nothing
        self.is_completing: Callable[[Key], bool] = lambda key: False
        self.is_being_emptied: Callable[[Key], bool] = lambda key: False
        self.operations_applied: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._locks: dict[Key, trio.Lock] = {}
        #: Files that were added to complete steps and have names here: their versions. An addition may go again.
        self._additions: dict[Key, dict[str, str]] = {}

    # --- asked by the mount

    def may_have(self, rel: str) -> bool:
        """A name that is not here may be on other nodes. Without asking anybody."""
        try:
            directory, _, name = safe_relative(rel).rpartition("/")
        except PathRefused:
            return False
        if rel in self.view.tree:
            return True
        if name == LATEST and directory:
            # The link is each node's own; a file of that name is a program's, where its framework has one.
            steps = self.registry.of_namespace(directory)
            if any(not self.registry.names.has_own_latest(record.key[1]) for record in steps):
                return False
        return not directory or directory in self.view.tree or self.is_directory(directory)

    async def show(self, rel: str) -> None:
        """See `tierfs.steps.cluster.Cluster.show`."""
        where = self.registry.names.locate(rel)
        if where is None or not where.inner:
            await self.view.caught_up([tree_key(rel), *self._state_keys(where)])
            await self.operations_applied()
            await self._show_name(rel, where)
            return
        record = self.registry.at(where)
        if record is not None and record.is_complete and placing.look(self.root, rel) is not None:
            return  # of a step that nobody looked into as a whole: what is there of it is right
        step_rel = where.step_rel
        await self.view.caught_up([tree_key(rel), tree_key(step_rel), *self._state_keys(where)])
        await self.operations_applied()
        record = await self._step(where)
        if record is None:
            return
        if rel in self.view.tree:
            await self.place_tree(rel)
        if placing.look(self.root, rel) is None:
            await self._show_in_step(record, where.inner, everything=False)

    async def show_listing(self, rel: str) -> None:
        """See `tierfs.steps.cluster.Cluster.show_listing`. "" is the mount's root."""
        where = self.registry.names.locate(rel) if rel else None
        if where is None:
            await self.view.caught_up([], [tree_below(rel) if rel else "t/"])
            await self.operations_applied()
            await self._place_below(rel)
            return
        await self.view.caught_up([tree_key(where.step_rel), *self._state_keys(where)], [tree_below(where.step_rel)])
        await self.operations_applied()
        record = await self._step(where)
        if record is None:
            return
        await self._place_below(record.rel, deep=True)
        await self._show_in_step(record, where.inner, everything=True)

    # --- names outside of steps' files

    async def _show_name(self, rel: str, where: StepPath | None) -> None:
        await self.place_tree(rel)
        if where is not None:
            await self._step(where)

    async def _place_below(self, rel: str, *, deep: bool = False) -> None:
        pending = [rel]
        placed = 0
        while pending:
            directory = pending.pop()
            for name in list(self.view.path_below(directory)):
                inner = f"{directory}/{name}" if directory else name
                try:
                    if not self.is_placed(inner):
                        await self.place_tree(inner)
                except (OSError, TierfsError) as error:
                    self.cannot(inner, error)
                    continue
                if deep:
                    pending.append(inner)
                placed += 1
                if placed % AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()

    # --- files of steps

    async def _step(self, where: StepPath) -> StepRecord | None:
        """The step's record, at the generation that the catalogue says is complete."""
        key = where.namespace, where.step
        record = self.registry.at(where)
        if record is None or not self.is_directory(where.step_rel):
            await self.place_tree(where.step_rel)
            record = self.registry.at(where)
        state = self.view.states.get(key)
        if state is not None and self.is_to_take(record, state):
            try:
                await self.take(key)
            except (OSError, TierfsError) as error:  # what is here shows; whoever follows the catalogue tries again
                self.cannot(where.step_rel, error)
            record = self.registry.at(where)
        return record

    def is_to_take(self, record: StepRecord | None, state: Seen[StepState]) -> bool:
        """Another node completed a generation that this one does not have so."""
        if record is None:
            return True
        manifest = record.manifest
        if manifest.overwrite is None and manifest.state == "complete":
            return manifest.generation < state.record.generation
        if self.is_completing(record.key) or (state.record.node == self.copies.node and manifest.files):
            return False  # this node is just about it, or does it again when it joins
        if self.was_emptied(record):
            return False
        writing = manifest.overwrite.generation if manifest.overwrite is not None else manifest.generation
        return writing <= state.record.generation

    def was_emptied(self, record: StepRecord) -> bool:
        """A program removed here what there was of the step: its commit came too late, and is about to be withdrawn."""
        return not record.manifest.files and not record.is_complete and self.is_being_emptied(record.key)

    def shown(self, record: StepRecord) -> Shown | None:
        """None while nothing of other nodes shows: an overwrite that did not hide the old marker yet."""
        manifest = record.manifest
        if manifest.overwrite is not None:
            return None if manifest.overwrite.removed_only else Shown(manifest.overwrite.generation, False)
        return Shown(manifest.generation, manifest.state == "complete")

    async def files_of(self, key: Key, generation: int) -> tuple[StepFiles | None, bool]:
        """What the catalogue has now, or what was known of it; and whether it was asked."""
        try:
            return await self.view.files(key, generation, fresh=True), True
        except CatalogError as error:
            log.debug("files of other nodes show as they were known: %s", error.message)
            return self.view.known_files(key, generation), False

    async def _show_in_step(self, record: StepRecord, inner: str, *, everything: bool) -> None:
        """One name, or all of the step's; `everything` of a complete step makes it populated."""
        async with self.lock(record.key):
            shown = self.shown(record)
            if shown is None or self.registry.records.get(record.key) is not record:
                return
            files, is_fresh = await self.files_of(record.key, shown.generation)
            if files is None or self.shown(record) != shown:
                return
            if everything:
                names: Iterable[str] = self._names_to_look_at(record, files, is_complete=shown.is_complete)
            elif inner in files.files:
                names = [inner]
            else:
                if any(name.startswith(inner + "/") for name in files.files):
                    placing.make_directory(self.root, f"{record.rel}/{inner}")
                    self.tell(f"{record.rel}/{inner}")
                return
            done = await self.place_files(record, files, names, is_complete=shown.is_complete)
            if not everything or self.registry.records.get(record.key) is not record:
                return
            if is_fresh and not shown.is_complete:
                await self._remove_vanished(record, files)
            elif is_fresh:
                self._remove_additions(record, files)
            if shown.is_complete and done and is_fresh and not record.manifest.populated:
                self.populated(record, files)

    def _names_to_look_at(self, record: StepRecord, files: StepFiles, *, is_complete: bool) -> Iterable[str]:
        """Of a complete step that was shown before only additions may be others."""
        if not is_complete or not record.manifest.populated:
            return files.files
        added = {inner for part in files.added.values() for inner in part}
        return [inner for inner in files.files if inner in added or inner not in record.manifest.files]

    def populated(self, record: StepRecord, files: StepFiles) -> None:
        """All names of the complete step are there."""
        manifest = record.manifest
        manifest.populated = True
        manifest.added |= {inner for part in files.added.values() for inner in part} & manifest.files.keys()
        manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
        self.registry.save_or_later(record)
        self.registry.crash("show:populated")

    async def place_files(
        self, record: StepRecord, files: StepFiles, names: Iterable[str], *, is_complete: bool, by_force: bool = False
    ) -> bool:
        """Make these of the step's files, markers last. With the step's lock held. False where one can't be made (it
        is logged), or the step became another meanwhile. `by_force` also in place of shards that only this node knows:
        they did not become part of the generation."""
        shown = self.shown(record)
        markers = self.registry.rules
        chosen = sorted(
            (inner for inner in names if is_complete or markers.match(inner) is None),
            key=lambda inner: (markers.match(inner) is not None, inner),
        )
        wanted = []
        for at, inner in enumerate(chosen):
            if at % (4 * AT_ONCE) == 0:
                await trio.lowlevel.checkpoint()
            if not is_complete and self._is_lost_here(files.files[inner]):
                continue
            if self._is_wanted(record, files, inner, by_force=by_force):
                wanted.append(inner)
        fetched = await self.maker.fetch_all([files.files[inner] for inner in wanted])
        all_made = True
        told: set[str] = set()
        gone = self._removed_since(files)
        additions = {inner for part in files.added.values() for inner in part}
        for at, inner in enumerate(wanted):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
                gone = self._removed_since(files)
            if self.registry.records.get(record.key) is not record or self.shown(record) != shown:
                return False
            file = files.files[inner]
            # A program may have made or removed it since, here or on another node.
            if (f"{record.rel}/{inner}", file.version) not in gone and self._is_wanted(
                record, files, inner, by_force=by_force
            ):
                all_made &= self.place_file(record, file, inner, fetched.get(file.version), told=told)
                if inner in additions:
                    self._note_addition(record.key, inner, file.version)
        return all_made

    def _removed_since(self, files: StepFiles) -> set[tuple[str, str]]:
        """Paths and versions that programs of other nodes removed after the parts were read. Who follows them did so
        before the names were here."""
        return {
            (seen.record.path, seen.record.version)
            for seen in self.view.operations.values()
            if seen.record.kind == "unlink" and seen.mod_revision > files.revision
        }

    def place_file(
        self,
        record: StepRecord,
        file: FileRecord,
        inner: str,
        data: bytes | None,
        *,
        told: set[str] | None = None,
    ) -> bool:
        """Make the file; False where that can't be done (it is logged). `told` are directories in which the kernel
        knows already that something is new: it keeps no names that are not there, so one of many is enough."""
        rel = f"{record.rel}/{inner}"
        try:
            self._make_parents(record, inner)
            is_new = placing.look(self.root, rel) is None
            record.manifest.files[inner] = self.maker.make(self.root, rel, file, (*record.key, inner), data)
        except (OSError, TierfsError) as error:
            self.cannot(rel, error)
            return False
        record.unsaved = True
        directory = rel.rpartition("/")[0]
        if not is_new or told is None or directory not in told:
            self.tell(rel)
        if told is not None:
            told.add(directory)
        self.registry.crash("show:made")
        return True

    def _is_lost_here(self, file: FileRecord) -> bool:
        """This node's own file, which is not here: it was removed, and what the catalogue has of it is about to be told
        anew. A stub would be taken for the file, and told."""
        return file.node == self.copies.node and not self.copies.has(file.version)

    def _is_wanted(self, record: StepRecord, files: StepFiles, inner: str, *, by_force: bool) -> bool:
        """The file is to be made; notes one that is there already."""
        file, rel = files.files[inner], f"{record.rel}/{inner}"
        if self.removed_here(rel) or inner in record.open_names():
            return False
        try:
            standing, version = self.maker.standing(self.root, rel, file)
            if standing == "same":
                entry = record.manifest.files.get(inner)
                if entry is None or not entry.sealed:
                    record.manifest.files[inner] = self.maker.entry_of(record.directory / inner, file)
                    record.unsaved = True
                return False
        except (OSError, TierfsError) as error:
            self.cannot(rel, error)
            return False
        if standing == "in the way":
            self.cannot(rel, NotADirectoryError("something else has the name"))
            return False
        if standing == "absent" or record.is_of_old_generation(inner):
            return True
        if by_force and (is_shard(inner, file) or self.registry.rules.match(inner) is not None):
            return True
        return self.is_known(files, inner, version)

    def is_known(self, files: StepFiles, inner: str, version: str) -> bool:
        """The catalogue knows of the version that stands under the name, so that what it says of the name counts."""
        if not version:
            return False
        if version.partition("/")[0] != self.copies.node:
            return True
        parts = (*files.parts.values(), *files.added.values())
        return any(inner in part and part[inner].version == version for part in parts)

    async def _remove_vanished(self, record: StepRecord, files: StepFiles) -> None:
        """Files of other nodes that are no longer part of the step that is being written."""
        shown = self.shown(record)
        gone = [inner for inner in record.manifest.files if inner not in files.files]
        for at, inner in enumerate(gone):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
                if self.registry.records.get(record.key) is not record or self.shown(record) != shown:
                    return
            if inner in record.open_names() or record.is_of_old_generation(inner):
                continue
            try:
                version, _ = version_at(record.directory / inner)
                theirs = bool(version) and version.partition("/")[0] != self.copies.node
                if theirs and self.registry.rules.match(inner) is None:
                    self.remove_file(record, inner)
            except FileNotFoundError:
                record.manifest.files.pop(inner, None)
            except OSError as error:
                self.cannot(f"{record.rel}/{inner}", error)

    def _note_addition(self, key: Key, inner: str, version: str) -> None:
        if key not in self._additions and len(self._additions) >= STEPS_WITH_ADDITIONS:
            del self._additions[next(iter(self._additions))]
        self._additions.setdefault(key, {})[inner] = version

    def _remove_additions(self, record: StepRecord, files: StepFiles) -> None:
        """Additions of other nodes that are no longer part of the complete step."""
        known = self._additions.get(record.key, {})
        for inner in [inner for inner in known if inner not in files.files and inner not in record.open_names()]:
            version = known.pop(inner)
            try:
                if version_at(record.directory / inner)[0] == version:
                    self.remove_file(record, inner)
            except FileNotFoundError:
                pass
            except OSError as error:
                self.cannot(f"{record.rel}/{inner}", error)

    def remove_file(self, record: StepRecord, inner: str) -> None:
        """Take a file of the step out of the tree. OSError."""
        rel = f"{record.rel}/{inner}"
        info = placing.look(self.root, rel)
        if info is not None and not stat.S_ISDIR(info.st_mode):
            placing.remove_file(self.root, rel)
            self.maker.on_replaced(info.st_ino)
        record.manifest.files.pop(inner, None)
        record.manifest.added.discard(inner)
        record.unsaved = True
        self.tell(rel)

    async def show_committed(self, record: StepRecord, marker: str | None) -> bool:
        """The step was committed by this node: what the others wrote gets its names here, before the marker does.

        False where the catalogue can't be asked what that is.
        """
        manifest = record.manifest
        generation = manifest.overwrite.generation if manifest.overwrite is not None else manifest.generation
        key = record.key

        def is_seen() -> bool:
            seen = self.view.states.get(key)
            return seen is not None and seen.record.generation >= generation

        await self.view.until(is_seen, within_s=SEEN_WITHIN_S)
        try:
            files = await self.view.files(key, generation, fresh=True)
        except CatalogError as error:
            log.warning("names of other nodes' files are made later: %s", error, extra=self.registry.extra(record))
            return False
        async with self.lock(key):
            names = [inner for inner in files.files if inner != marker]
            await self.place_files(record, files, names, is_complete=True, by_force=True)
        return True

    def _make_parents(self, record: StepRecord, inner: str) -> None:
        """Directories that the catalogue does not have one by one."""
        rel = record.rel
        for name in inner.split("/")[:-1]:
            rel = f"{rel}/{name}"
            seen = self.view.tree.get(rel)
            like = seen.record if seen is not None and seen.record.kind == "dir" else None
            if placing.make_directory(self.root, rel, like):
                self.tell(rel)

    # --- inside

    @asynccontextmanager
    async def lock(self, key: Key) -> AsyncIterator[None]:
        """One at a time makes names in a step."""
        lock = self._locks.setdefault(key, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting and self._locks.get(key) is lock:
                del self._locks[key]

    def _state_keys(self, where: StepPath | None) -> Sequence[str]:
        return [state_key(where.namespace, where.step)] if where is not None else []


async def _take_nothing(key: Key) -> None:
    pass
