"""What happens to names in the mount, and what it means for steps.

The file system calls `before_*` ahead of an operation (which may be refused, or answered by a new inode) and the rest
after it. `tierfs.steps.events.StepTracker` is the contract; after a crash of the daemon a call may come again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

import trio

from tierfs.steps import generations
from tierfs.steps.commits import check_commit, commit
from tierfs.steps.completion import waits_for_last_file
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.manifest import FileEntry
from tierfs.steps.markers import is_data_file_name
from tierfs.steps.names import StepPath
from tierfs.steps.record import StepRecord, Writer
from tierfs.steps.registry import Key, StepRegistry

#: The note of a step whose directory got its name by a rename: that rename is its writer's commit (orbax, NeMo).
MOVED_IN = "the directory was moved into place"


class Steps:
    """Implements `StepTracker` on a registry. Called from one trio thread."""

    def __init__(self, registry: StepRegistry) -> None:
        self.registry = registry
        self._writing: dict[int, Key] = {}
        self._checked: dict[Key, frozenset[str]] = {}

    @property
    def invalidate(self) -> Callable[[str, str], None]:
        return self.registry.invalidate

    @invalidate.setter
    def invalidate(self, told: Callable[[str, str], None]) -> None:
        self.registry.invalidate = told

    # --- a save, in its order

    def created(self, rel: str, pid: int) -> None:
        where = self.registry.names.locate(rel)
        if where is None:
            self._latest_made(rel)
            return
        record = self.registry.at_or_new(where)
        if record is None:
            return
        record.touch(pid)
        if where.inner == "":
            self.registry.make_room_for_next(where.namespace)
            return
        current = record.manifest.overwrite
        if current is not None and where.inner in current.old_files:
            # A file that was removed is written anew, and the old marker would vouch for it.
            generations.hide_markers(self.registry, record)
        self._seal_link(record, where.inner)

    def opened_for_write(self, rel: str, nodeid: int, pid: int) -> None:
        where = self.registry.names.locate(rel)
        record = self.registry.at_or_new(where) if where is not None and where.inner else None
        if where is None or record is None:
            return
        now = time.monotonic()
        if record.first_write_at is None:
            record.first_write_at = now
        record.writers.setdefault(nodeid, Writer(where.inner, pid, now))
        self._writing[nodeid] = record.key
        entry = record.manifest.files.get(where.inner)
        if entry is not None and entry.sealed:
            record.manifest.files[where.inner] = FileEntry(entry.size_bytes, entry.mtime_ns, entry.ino)
        record.touch(pid)

    def writer_closed(self, rel: str | None, nodeid: int) -> None:
        key = self._writing.pop(nodeid, None)
        record = self.registry.records.get(key) if key is not None else None
        if record is None:
            return
        writer = record.writers.pop(nodeid, None)
        record.writer_left.set()
        record.writer_left = trio.Event()
        record.touch()
        self.registry.judge_soon(record)
        where = self.registry.names.locate(rel) if rel is not None else None
        now_in = self.registry.at_or_new(where) if where is not None and where.inner else None
        if where is None or now_in is None:
            return
        entry = self._seal(now_in, where.inner)
        rank = is_data_file_name(where.inner.rpartition("/")[2])
        if entry is not None and writer is not None and rank is not None:
            self.registry.lines.written(
                where.namespace, where.number, entry.size_bytes, time.monotonic() - writer.since, rank=rank
            )

    def _seal_link(self, record: StepRecord, inner: str) -> None:
        """A hard link that was made is whole at once: nobody closes it (`cp -al`, `rsync --link-dest`)."""
        try:
            info = os.lstat(record.directory / inner)
        except FileNotFoundError:
            return
        if info.st_nlink > 1 and stat.S_ISREG(info.st_mode) and inner not in record.open_names():
            self._seal(record, inner)

    def _seal(self, record: StepRecord, inner: str) -> FileEntry | None:
        """Fix a closed file's size in the manifest, until it is opened for writing again."""
        try:
            info = os.lstat(record.directory / inner)
        except FileNotFoundError:
            return None
        entry = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, None, True)
        before = record.manifest.files.get(inner)
        record.manifest.files[inner] = entry
        if record.is_complete:
            record.manifest.bytes += entry.size_bytes - (before.size_bytes if before is not None else 0)
        record.touch()
        self.registry.checksum_soon(record, {inner})
        self.registry.judge_soon(record)
        return entry

    # --- changes that a complete step must survive

    def before_lookup(self, rel: str, pid: int) -> None:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        if where is None or record is None or self.registry.rules.match(where.inner) is None:
            return
        current = record.manifest.overwrite
        if current is None:
            record.looked_for_marker(pid)
        elif not current.removed_only and record.is_left_by_all(but=pid):
            # Somebody is about to load what nobody will finish any more.
            generations.give_up(self.registry, record, "every process that wrote is gone")

    async def before_write_open(self, rel: str, pid: int, *, truncate: bool) -> bool:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None and where.inner else None
        if where is None or record is None:
            return False
        if record.is_complete and record.is_protected(where.inner, self.registry.rules):
            generations.begin(self.registry, record, pid)
        record.touch(pid)
        if not record.is_of_old_generation(where.inner):
            return False
        generations.hide_markers(self.registry, record)
        return await generations.renew(self.registry, record, where.inner, truncate=truncate)

    async def before_truncate(self, rel: str, pid: int) -> bool:
        return await self.before_write_open(rel, pid, truncate=False)

    async def before_unlink(self, rel: str, pid: int) -> None:
        self._before_removal(self.registry.names.locate(rel), pid)

    def after_unlink(self, rel: str) -> None:
        where = self.registry.names.locate(rel)
        if where is None:
            self._latest_removed(rel)
            return
        record = self.registry.at(where)
        if record is None:
            return
        entry = record.manifest.files.pop(where.inner, None)
        if record.is_complete and entry is not None:
            record.manifest.bytes -= entry.size_bytes
        record.touch()
        self.registry.judge_soon(record)

    async def before_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        source, target = self.registry.names.locate(old), self.registry.names.locate(new)
        record = self.registry.at(target) if target is not None and target.inner else None
        if record is not None and target is not None and source is not None and source.step_rel == target.step_rel:
            marker = self.registry.rules.commit_rename(source.inner, target.inner)
            if marker is not None:
                named = await check_commit(self.registry, record, marker, self.registry.root / old)
                if named is not None:
                    self._checked[record.key] = named
        self._before_removal(source, pid)
        if record is not None and target is not None:
            if record.is_complete and record.is_protected(target.inner, self.registry.rules):
                generations.begin(self.registry, record, pid)
            current = record.manifest.overwrite
            if current is not None and target.inner in current.old_files:
                generations.hide_markers(self.registry, record)
            record.touch(pid)

    def after_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        path = self.registry.root / new
        if path.is_dir() and not path.is_symlink():
            self._directory_moved(old, new)
            return
        source, target = self.registry.names.locate(old), self.registry.names.locate(new)
        if source is None:
            self._latest_removed(old)
        else:
            self._file_left(source, target)
        if target is None:
            self._latest_made(new)
            return
        record = self.registry.at_or_new(target)
        if record is None or not target.inner:
            return
        if target.inner not in record.open_names():
            self._seal(record, target.inner)
        named = self._checked.pop(record.key, None)
        if named is not None and self._makes_whole(record, target.inner):
            commit(self.registry, record, marker=target.inner, named=named)
        else:
            self.registry.judge_soon(record)

    def before_rmdir(self, rel: str) -> None:
        if self.registry.latest.clear_for_rmdir(rel):
            self.registry.invalidate(rel, LATEST)

    def after_rmdir(self, rel: str) -> None:
        where = self.registry.names.locate(rel)
        if where is None:
            self.registry.latest.removed_by_program(rel)
            return
        record = self.registry.at(where)
        if record is not None and where.inner == "":
            self.registry.forget(record)

    # --- what the file system asks

    def expected_size(self, rel: str) -> int | None:
        """As large as the same file in the newest complete step, or in the generation being overwritten."""
        where = self.registry.names.locate(rel)
        if where is None:
            return None
        mine = self.registry.at(where)
        if mine is not None and mine.manifest.overwrite is not None:
            old = mine.manifest.overwrite.old_files.get(where.inner)
            if old is not None:
                return old.size_bytes
        previous = self.registry.newest_complete(where.namespace, other_than=where.step)
        entry = previous.manifest.files.get(where.inner) if previous is not None else None
        return entry.size_bytes if entry is not None else None

    def xattrs(self, rel: str, st: os.stat_result) -> dict[str, bytes]:
        values = {"user.tierfs.tier": b"ram"}
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        if where is None or record is None:
            return values
        values["user.tierfs.state"] = record.shown_state.encode()
        values["user.tierfs.generation"] = str(record.generation_of(where.inner)).encode()
        entry = record.manifest.files.get(where.inner)
        if (
            entry is not None
            and entry.checksum is not None
            and (entry.size_bytes, entry.mtime_ns)
            == (
                st.st_size,
                st.st_mtime_ns,
            )
        ):
            values["user.tierfs.checksum"] = entry.checksum.encode()
        return values

    def hidden(self, dir_rel: str, name: str) -> bool:
        return name == LATEST and self.registry.latest.mode == "hidden" and self.registry.latest.is_ours(dir_rel)

    # --- parts of the above

    def _before_removal(self, where: StepPath | None, pid: int) -> None:
        record = self.registry.at(where) if where is not None and where.inner else None
        if record is None or where is None:
            return
        if record.is_complete and self._holds_protected(record, where.inner):
            generations.begin(self.registry, record, pid)
        record.touch(pid)

    def _holds_protected(self, record: StepRecord, inner: str) -> bool:
        """The file, or a file below the directory, is part of what was committed."""
        if record.is_protected(inner, self.registry.rules):
            return True
        below = inner + "/"
        return any(name.startswith(below) for name in record.manifest.files)

    def _makes_whole(self, record: StepRecord, inner: str) -> bool:
        """A marker of the whole step: not one rank's, not that of a checkpoint inside the step, and the last file."""
        marker = self.registry.rules.match(inner)
        return (
            marker is not None
            and marker.kind == "dcp"
            and marker.directory == ""
            and not waits_for_last_file(record.manifest.step)
        )

    def _file_left(self, source: StepPath, target: StepPath | None) -> None:
        record = self.registry.at(source)
        if record is None:
            return
        record.manifest.files.pop(source.inner, None)
        if target is not None and target.step_rel == source.step_rel:
            for writer in record.writers.values():
                if writer.inner == source.inner:
                    writer.inner = target.inner
        record.touch()
        self.registry.judge_soon(record)

    def _directory_moved(self, old: str, new: str) -> None:
        namespaces = set()
        for record in list(self.registry.records.values()):
            if record.rel == old or record.rel.startswith(old + "/"):
                namespaces.add(record.manifest.namespace)
                moved = self.registry.names.locate(new + record.rel[len(old) :])
                self.registry.move(record, moved if moved is not None and moved.inner == "" else None)
                namespaces.add(record.manifest.namespace)
                for nodeid in record.writers:
                    self._writing[nodeid] = record.key
        source, target = self.registry.names.locate(old), self.registry.names.locate(new)
        if target is not None and target.inner == "" and self.registry.at(target) is None:
            record_made = self.registry.at_or_new(target)
            if record_made is not None:
                record_made.manifest.note = MOVED_IN
        for where in (source, target):
            inside = self.registry.at(where) if where is not None else None
            if inside is not None and not inside.is_complete:
                inside.manifest.files = inside.scan()
                inside.touch()
                self.registry.judge_soon(inside)
        for namespace in namespaces:
            self.registry.update_latest(namespace)

    def _latest_made(self, rel: str) -> None:
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory:
            self.registry.latest.made_by_program(directory)

    def _latest_removed(self, rel: str) -> None:
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory:
            self.registry.latest.removed_by_program(directory)
