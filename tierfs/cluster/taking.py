"""Bringing a step to what another node committed, and back where the commit was withdrawn.

Each may be interrupted at any instruction and is done again when the catalogue is read the next time: what is here is
compared with what the catalogue says, and the manifest says `complete` only after the files are there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import trio

from tierfs.catalog.records import StepState
from tierfs.cluster import placing
from tierfs.cluster.making import version_at
from tierfs.cluster.showing import AT_ONCE, Showing
from tierfs.cluster.step_files import StepFiles
from tierfs.cluster.view import View
from tierfs.errors import CatalogError
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key
from tierfs.transport.peers import SMALL_FILE_BYTES
from tierfs.units import format_size

log = logging.getLogger("tierfs.cluster")

#: A step of so many parts is large: its small files are fetched when somebody looks.
EAGER_PARTS = 64


class Taking:
    """Used from the trio thread."""

    def __init__(self, showing: Showing) -> None:
        self._showing = showing
        self._registry = showing.registry
        self._view = showing.view
        self._copies = showing.copies
        self._maker = showing.maker
        showing.take = self.take

    async def take(self, key: Key, *, anyway: bool = False) -> bool:
        """Make the step here what the catalogue says is complete. True when it is (also when it was already).

        `anyway`: also where the same generation is complete here, with other files: this node's are given up.

        OSError (ENOSPC), TierfsError (CatalogUnavailable): as it was, or done in part; it is to be done again.
        """
        async with self._showing.lock(key):
            rel = "/".join(key)
            state, tree = self._view.states.get(key), self._view.tree.get(rel)
            if state is None or tree is None or self._showing.removed_here(rel) or self._showing.is_moving_here(rel):
                return False
            record = await self._record(key, tree.create_revision)
            if record is None or self._showing.was_emptied(record):
                return False
            if anyway and record.is_complete and record.manifest.generation == state.record.generation:
                self._give_up_own(record, state.record)
            done = await self._take(record, state.record)
        self._registry.update_latest(key[0])
        return done

    async def _record(self, key: Key, create_revision: int) -> StepRecord | None:
        rel = f"{key[0]}/{key[1]}"
        where = self._registry.names.locate(rel)
        if where is None or where.inner or (where.namespace, where.step) != key:
            log.warning("%s is a step on other nodes, but not by the settings of this one", rel)
            return None
        record = self._registry.records.get(key)
        if record is not None and record.manifest.joined not in (0, create_revision):
            if was_renamed(self._view, rel, record.manifest.joined):
                record.manifest.joined = create_revision
                record.unsaved = True
            else:
                self.forget(record)  # it was deleted, and this is another one of its name
                record = None
        if record is None or not record.directory.is_dir():
            await self._showing.place_tree(rel)
            record = self._registry.at_or_new(where)
        if record is not None and record.manifest.joined == 0:
            record.manifest.joined = create_revision
        return record

    async def _take(self, record: StepRecord, state: StepState) -> bool:
        manifest, current = record.manifest, record.manifest.overwrite
        if current is not None and current.generation > state.generation:
            return False  # this node writes the next one
        if current is None and manifest.state == "complete" and manifest.generation >= state.generation:
            return True
        is_empty = not manifest.files and not record.writers and current is None
        if is_empty and manifest.state != "complete":
            self._begin_unpopulated(record, state)
            await self._show_marker(record, state)
            return True
        files = await self._view.files(record.key, state.generation)
        if current is not None and current.generation == state.generation:
            return await self._in_place(record, state, files)
        if manifest.state == "complete":
            return await self._swap(record, state, files)
        return await self._in_place(record, state, files)

    def _give_up_own(self, record: StepRecord, state: StepState) -> None:
        """What was completed here is not what counts: as if it were of an older generation, and not complete."""
        manifest = record.manifest
        if manifest.completed_at == state.completed_at or not manifest.populated:
            return
        manifest.state = "writing"
        manifest.completed_at = None
        manifest.generation = max(0, state.generation - 1)
        manifest.note = f"another commit counts, by {state.node}"
        self._registry.save_or_later(record)
        self._registry.crash("take:given-up")

    # --- a step of which nothing is here

    def _begin_unpopulated(self, record: StepRecord, state: StepState) -> None:
        manifest = record.manifest
        manifest.populated = False
        manifest.bytes = state.bytes
        manifest.added.clear()
        self._complete(record, state, populated=False)
        self._registry.crash("take:recorded")

    async def _show_marker(self, record: StepRecord, state: StepState) -> None:
        """The one file that everybody who looks for a whole step asks for."""
        file, marker = state.marker_file, state.marker
        if file is None or marker is None:
            return
        fetched = await self._maker.fetch_all([file])
        if (
            self._is_still(record, state.generation)
            and placing.look(self._registry.root, f"{record.rel}/{marker}") is None
        ):
            self._showing.place_file(record, file, marker, fetched.get(file.version))

    async def bring_small(self, key: Key) -> None:
        """The other small files of a step that another node completed, so that they outlive their author."""
        record, state = self._registry.records.get(key), self._view.states.get(key)
        if record is None or state is None or not record.is_complete or len(state.record.parts) > EAGER_PARTS:
            return
        async with self._showing.lock(key):
            if not self._is_still(record, state.record.generation):
                return
            files = await self._view.files(key, state.record.generation)
            small = [inner for inner, file in files.files.items() if file.size_bytes < SMALL_FILE_BYTES]
            if self._is_still(record, state.record.generation):
                await self._showing.place_files(record, files, small, is_complete=True)

    def _is_still(self, record: StepRecord, generation: int) -> bool:
        is_known = self._registry.records.get(record.key) is record
        return is_known and record.is_complete and record.manifest.generation == generation

    # --- a step that this node writes too

    async def _in_place(self, record: StepRecord, state: StepState, files: StepFiles) -> bool:
        """Own files that are part of it stay; what is not goes; others' come, and the marker last."""
        manifest, shown = record.manifest, self._showing.shown(record)
        current = manifest.overwrite
        if current is not None and current.removed_only:
            current.removed_only = False  # the old markers are no part of the new generation
            shown = self._showing.shown(record)
        newer = current is not None or manifest.generation < state.generation
        here = await trio.to_thread.run_sync(record.scan)
        # Markers first: at no moment one stands beside files that are not its own.
        for at, inner in enumerate(sorted(here, key=lambda name: (self._registry.rules.match(name) is None, name))):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if self._is_to_go(record, files, inner, newer=newer):
                self._showing.remove_file(record, inner)
        self._registry.crash("take:removed")
        if not await self._showing.place_files(record, files, files.files, is_complete=True, by_force=True):
            return False
        here = await trio.to_thread.run_sync(record.scan)
        if self._registry.records.get(record.key) is not record or self._showing.shown(record) != shown:
            return False
        manifest.files = {inner: self._with_checksum(record, files, inner, entry) for inner, entry in here.items()}
        manifest.added = {inner for part in files.added.values() for inner in part} & here.keys()
        manifest.added |= here.keys() - files.files.keys()
        manifest.populated = True
        manifest.bytes = sum(entry.size_bytes for entry in here.values())
        self._registry.crash("take:in-place")
        self._complete(record, state, populated=True)
        return True

    def _is_to_go(self, record: StepRecord, files: StepFiles, inner: str, *, newer: bool) -> bool:
        if inner in record.open_names():
            log.warning(
                "a file is being written in a step that another node completed",
                extra=self._registry.extra(record, inner),
            )
            return False
        wanted = files.files.get(inner)
        try:
            version, _ = version_at(record.directory / inner)
        except FileNotFoundError:
            return False
        if wanted is not None:
            # A file that is replaced stays till then; a marker may not.
            return version != wanted.version and self._registry.rules.match(inner) is not None
        if record.is_of_old_generation(inner) or self._registry.rules.match(inner) is not None:
            return True
        is_own = not version or version.partition("/")[0] == self._copies.node
        # What only this node knows of is an addition that is published later, unless it is of an older generation.
        return newer and record.manifest.overwrite is None if is_own else True

    def _with_checksum(self, record: StepRecord, files: StepFiles, inner: str, entry: FileEntry) -> FileEntry:
        file = files.files.get(inner)
        if file is None or entry.checksum is not None or file.checksum is None or entry.size_bytes != file.size_bytes:
            return entry
        return replace(entry, checksum=file.checksum)

    # --- a generation that is complete here, and another that took its place

    async def _swap(self, record: StepRecord, state: StepState, files: StepFiles) -> bool:
        """Build the new tree aside and let both change places. Who has files of the old one open keeps them."""
        registry, manifest = self._registry, record.manifest
        generation, current = manifest.generation, manifest.overwrite
        aside = registry.tier.generations / f"{uuid.uuid4().hex}.swap"
        names = set(files.files) if manifest.populated else {state.marker or ""} & files.files.keys()
        fetched = await self._maker.fetch_all([files.files[inner] for inner in names])
        later: list[Callable[[], None]] = []
        try:
            aside.mkdir(mode=0o700)
            entries: dict[str, FileEntry] = {}
            for at, inner in enumerate(sorted(names)):
                if at % AT_ONCE == AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                file = files.files[inner]
                self._make_parents(record, aside, inner)
                entries[inner] = self._maker.make(
                    aside, inner, file, (*record.key, inner), fetched.get(file.version), later=later,
                    shown_at=record.directory,
                )  # fmt: skip
            registry.crash("swap:built")
            is_same = registry.records.get(record.key) is record and manifest.generation == generation
            if not is_same or manifest.overwrite is not current or manifest.state != "complete":
                return False
            # From here to the end nothing else has its turn.
            self._keep_open(record, aside, entries)
            new = {entry.ino for entry in entries.values()}
            replaced = {entry.ino for entry in manifest.files.values()} - new
            _make_alike(record.directory, aside)
            placing.exchange(registry.root, record.rel, aside)
            registry.crash("swap:exchanged")
            manifest.files = entries
            manifest.added = {inner for part in files.added.values() for inner in part} & entries.keys()
            manifest.bytes = sum(entry.size_bytes for entry in entries.values()) if manifest.populated else state.bytes
            registry.invalidate(*record.key)
            for ino in replaced:
                self._maker.on_replaced(ino)
            self._complete(record, state, populated=manifest.populated)
            for at, tell in enumerate(later):
                if at % AT_ONCE == AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                with contextlib.suppress(FileNotFoundError):  # it was replaced or removed again
                    tell()
            return True
        finally:
            registry.discard(aside)

    def _make_parents(self, record: StepRecord, aside: Path, inner: str) -> None:
        rel = ""
        for name in inner.split("/")[:-1]:
            rel = f"{rel}/{name}" if rel else name
            seen = self._view.tree.get(f"{record.rel}/{rel}")
            placing.make_directory(aside, rel, seen.record if seen is not None and seen.record.kind == "dir" else None)

    def _keep_open(self, record: StepRecord, aside: Path, entries: dict[str, FileEntry]) -> None:
        """Files that a program is writing into the old generation go along: they become additions."""
        for inner in record.open_names() - entries.keys():
            source = record.directory / inner
            try:
                info = source.lstat()
                self._make_parents(record, aside, inner)
                os.link(source, aside / inner, follow_symlinks=False)
            except FileNotFoundError:
                continue
            entries[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino)

    # --- what all of them end with

    def _complete(self, record: StepRecord, state: StepState, *, populated: bool) -> None:
        """The manifest says so, and what stood for the old generation goes. Doesn't fail."""
        registry, manifest = self._registry, record.manifest
        old_directory = registry.old_directory(record)
        manifest.state = "complete"
        manifest.generation = state.generation
        manifest.completed_at = state.completed_at
        manifest.marker = state.marker
        manifest.overwrite = None
        manifest.note = state.note
        record.first_write_at = None
        record.only_looked.clear()
        if populated:
            registry.object_tier.completed(record)
        registry.cluster.completed(record)
        registry.save_or_later(record)
        registry.crash("take:saved")
        if old_directory is not None:
            registry.discard(old_directory)
        if populated:
            registry.checksum_soon(
                record, {inner for inner, entry in manifest.files.items() if entry.sealed and entry.checksum is None}
            )
        registry.clear_problems(record.rel)
        registry.lines.write(
            manifest.namespace,
            f"complete: {state.files} files, {format_size(state.bytes)}, generation {state.generation}, "
            f"committed by {state.node}",
            step=manifest.number,
        )
        log.info("step is complete, committed by %s", state.node, extra=registry.extra(record))
        registry.update_latest(manifest.namespace)
        registry.make_room(0)
        registry.wake.set()

    # --- and back

    async def withdrawn(self, key: Key) -> None:
        """The commit was withdrawn (a file was removed by a program): the step is being written again, its files stay,
        and its marker goes unless this node wrote it."""
        async with self._showing.lock(key):
            record = self._registry.records.get(key)
            if record is None or self._view.states.get(key) is not None or record.manifest.state != "complete":
                return
            manifest = record.manifest
            if manifest.overwrite is not None:
                return  # its end decides: there is nothing to put back that others would take for complete
            for inner in list(manifest.files):
                if self._registry.rules.match(inner) is None:
                    continue
                try:
                    if version_at(record.directory / inner)[0].partition("/")[0] != self._copies.node:
                        self._showing.remove_file(record, inner)
                except OSError as error:
                    self._showing.cannot(f"{record.rel}/{inner}", error)
            manifest.state = "writing"
            manifest.completed_at = None
            manifest.added.clear()
            manifest.populated = True  # what it lacks shows as in any step that is written
            here = await trio.to_thread.run_sync(record.scan)
            if self._registry.records.get(key) is not record:
                return
            manifest.files = here
            manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
            manifest.note = "no longer complete: a node removed files of it"
            record.touch()
            self._registry.save_or_later(record)
            self._registry.lines.write(manifest.namespace, manifest.note, level="WARNING", step=manifest.number)
            self._registry.update_latest(manifest.namespace)

    async def removed(self, key: Key, create_revision: int) -> None:
        """The step's directory, as it was made at that revision, was removed from the catalogue."""
        async with self._showing.lock(key):
            record = self._registry.records.get(key)
            if record is not None and record.manifest.joined == create_revision:
                self.forget(record)
            elif record is None and f"{key[0]}/{key[1]}" not in self._view.tree:
                self._copies.forget_step(key)

    def forget(self, record: StepRecord) -> None:
        """Another node removed the step: it goes here at once."""
        if self._registry.records.get(record.key) is not record:
            return
        log.info("removed by another node", extra=self._registry.extra(record))
        self._registry.lines.write(record.manifest.namespace, "removed by another node", step=record.manifest.number)
        self._registry.remove(record)
        self._copies.forget_step(record.key)

    async def follow(self, key: Key) -> None:
        """`take`, and what comes along with it. Raises as that does."""
        if await self.take(key):
            try:
                await self.bring_small(key)
            except CatalogError as error:
                log.debug("small files come when somebody looks: %s", error.message)


def was_renamed(view: View, rel: str, joined: int) -> bool:
    """The step has its name by a rename that came after its directory: that is why the catalogue got it again."""
    return any(
        seen.record.kind == "rename"
        and seen.mod_revision > joined
        and (rel == seen.record.target or rel.startswith(seen.record.target + "/"))
        for seen in view.operations.values()
    )


def _make_alike(old: Path, new: Path) -> None:
    """Owner, mode and times of the step's directory; it is as new as its newest file."""
    info, newest = old.stat(), new.stat()
    if (info.st_uid, info.st_gid) != (newest.st_uid, newest.st_gid):
        os.chown(new, info.st_uid, info.st_gid)
    new.chmod(stat.S_IMODE(info.st_mode))
    times = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in os.scandir(new)]
    os.utime(new, ns=(info.st_atime_ns, max([info.st_mtime_ns, *times])))
