"""What happens to names in the mount, and what it means for steps.

The file system calls `before_*` ahead of an operation (which may be refused, or answered by a new inode) and the rest
after it: `tierfs.steps.events.StepTracker`. After a crash of the daemon a call may come again."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import trio

from tierfs.errors import NotAStep
from tierfs.steps import generations, wishes
from tierfs.steps.commits import check_commit, commit
from tierfs.steps.completion import waits_for_last_file
from tierfs.steps.durability import wait_for_file, wait_for_level
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.manifest import FileEntry
from tierfs.steps.markers import is_data_file_name
from tierfs.steps.moves import Moves, drop
from tierfs.steps.names import StepPath
from tierfs.steps.record import SHARD_SUFFIXES, StepRecord, Writer, same_bytes, sealed_stub
from tierfs.steps.registry import Key, StepRegistry
from tierfs.steps.report import describe_tiers, step_tier
from tierfs.steps.stub_moves import StubMoves

log = logging.getLogger("tierfs.steps")

#: renameat2(2), include/uapi/linux/fs.h: both names stay and change places.
RENAME_EXCHANGE = 2


class Steps:
    """Implements `StepTracker` on a registry. Called from one trio thread."""

    def __init__(self, registry: StepRegistry) -> None:
        self.registry = registry
        self._writing: dict[int, Key] = {}
        self._moves = Moves(registry, self._writing)
        self._stubs = StubMoves(registry)
        #: A marker that was found good and is about to be renamed into place, and the files it names.
        self._checked: dict[Key, tuple[str, frozenset[str]]] = {}

    @property
    def invalidate(self) -> Callable[[str, str], None]:
        return self.registry.invalidate

    @invalidate.setter
    def invalidate(self, told: Callable[[str, str], None]) -> None:
        self.registry.invalidate = told

    # --- a save, in its order

    def created(self, rel: str, pid: int) -> None:
        where = self.registry.names.locate(rel)
        self.registry.cluster.made(rel)
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
        generations.drop_stale_markers(self.registry, record, where.inner)
        current = record.manifest.overwrite
        if current is not None and where.inner in current.old_files:
            # A file that was removed is written anew, and the old marker would vouch for it.
            generations.hide_markers(self.registry, record)
        self._seal_link(record, where.inner)

    def opened_for_write(self, rel: str, nodeid: int, pid: int) -> None:
        where = self.registry.names.locate(rel)
        self.registry.cluster.opened(rel, nodeid)
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
        writer = None
        if record is not None:
            writer = record.writers.pop(nodeid, None)
            record.writer_left.set()
            record.writer_left = trio.Event()
            record.touch()
            self.registry.judge_soon(record)
        # Also where no writer was known: the file was opened elsewhere and moved in, or before this daemon began.
        where = self.registry.names.locate(rel) if rel is not None else None
        now_in = self.registry.at_or_new(where) if where is not None and where.inner else None
        if where is None or now_in is None:
            if rel is not None and (where is None or not where.inner):  # also a file that is named as a step
                self.registry.cluster.sealed(rel, nodeid)
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
        if self.registry.object_tier.is_stub(info.st_ino):
            entry = sealed_stub(record.directory / inner, entry) or entry
        before = record.manifest.files.get(inner)
        record.manifest.files[inner] = entry
        if record.is_complete:
            if before is None:
                record.manifest.added.add(inner)
            record.manifest.bytes += entry.size_bytes - (before.size_bytes if before is not None else 0)
            self.registry.object_tier.changed(record)
        record.touch()
        if entry.checksum is None:
            self.registry.checksum_soon(record, {inner})
        self.registry.judge_soon(record)
        self.registry.cluster.sealed(f"{record.rel}/{inner}", info.st_ino)
        return entry

    def times_set(self, rel: str | None, before: os.stat_result, after: os.stat_result) -> None:
        where = self.registry.names.locate(rel) if rel is not None else None
        record = self.registry.at(where) if where is not None else None
        entry = record.manifest.files.get(where.inner) if record is not None and where is not None else None
        if record is None or where is None or entry is None or not entry.sealed:
            return
        seen = FileEntry(before.st_size, before.st_mtime_ns, before.st_ino)
        # Of a stub the inode's own time says nothing: bringing bytes moves it.
        if same_bytes(seen, entry) or (entry.ino == seen.ino and self.registry.object_tier.is_stub(entry.ino)):
            record.manifest.files[where.inner] = replace(entry, mtime_ns=after.st_mtime_ns)
            record.unsaved = True
            self.registry.cluster.changed(record)

    def resume(self, nodeids: Iterable[int]) -> None:
        """After a takeover: these inodes are open for writing. Their steps are not complete before they are closed."""
        wanted = set(nodeids)
        now = time.monotonic()
        for record in self.registry.records.values() if wanted else ():
            for inner, entry in record.manifest.files.items():
                if entry.ino in wanted:
                    record.writers[entry.ino] = Writer(inner, 0, now)
                    self._writing[entry.ino] = record.key
                    record.manifest.files[inner] = FileEntry(entry.size_bytes, entry.mtime_ns, entry.ino)

    # --- changes that a complete step must survive

    def before_lookup(self, rel: str, pid: int) -> bool:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        if where is not None and record is not None:
            if not record.manifest.populated and where.inner:
                return True
            if self.registry.rules.match(where.inner) is not None:
                self._looked_for_marker(record, pid)
        return self.registry.cluster.may_have(rel) and not os.path.lexists(self.registry.root / rel)

    def _looked_for_marker(self, record: StepRecord, pid: int) -> None:
        current = record.manifest.overwrite
        if current is None:
            record.looked_for_marker(pid)
        elif not current.removed_only and record.is_left_by_all(but=pid):
            # Somebody is about to load what nobody will finish any more.
            try:
                generations.give_up(self.registry, record, "every process that wrote is gone")
            except OSError as error:  # the marker stays out of sight, and the upkeep tries again
                log.error("the old generation can't be put back: %s", error, extra=self.registry.extra(record))

    def before_listing(self, rel: str) -> bool:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        return self.registry.cluster.shares or (record is not None and not record.manifest.populated)

    async def populate(self, rel: str, *, listing: bool) -> None:
        if listing:
            await self.registry.cluster.show_listing(rel)
        else:
            await self.registry.cluster.show(rel)
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        if record is not None and not self.registry.is_shared(record):
            await self.registry.object_tier.populate(record)

    async def before_mkdir(self, rel: str, mode: int, uid: int, gid: int) -> None:
        await self.registry.room_for_new_step(rel)
        await self.registry.cluster.make_directory(rel, mode, uid, gid)

    async def before_create(self, rel: str, pid: int, *, exclusive: bool) -> None:
        if exclusive:
            await self.registry.cluster.claim(rel)
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        if record is None or where is None or not self.registry.cluster.shares or not record.is_complete:
            return
        if is_data_file_name(where.inner.rpartition("/")[2]) is not None and where.inner not in record.manifest.files:
            # A rank more than before: the ranks whose files are replaced may all be on other nodes.
            await self.registry.cluster.show_listing(record.rel)
            if record.is_complete and where.inner not in record.manifest.files:
                generations.begin(self.registry, record, pid)
                generations.hide_markers(self.registry, record)

    async def before_link(self, old: str | None, new: str | None, nodeid: int) -> None:
        await self._stubs.before_link(old, new, nodeid)

    async def before_write_open(self, rel: str, pid: int, *, truncate: bool) -> bool:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None and where.inner else None
        if where is None or record is None:
            await self.registry.cluster.before_write(rel, _inode(self.registry.root / rel))
            return False
        if record.is_complete and record.is_protected(where.inner, self.registry.rules):
            generations.begin(self.registry, record, pid)
        record.touch(pid)
        generations.drop_stale_markers(self.registry, record, where.inner)
        if not record.is_of_old_generation(where.inner):
            await self.registry.cluster.before_write(rel, _inode(self.registry.root / rel))
            if record.is_complete and record.is_protected(where.inner, self.registry.rules):
                # Another node completed the step meanwhile, with this very file.
                return await self.before_write_open(rel, pid, truncate=truncate)
            return False
        generations.hide_markers(self.registry, record)
        return await generations.renew(self.registry, record, where.inner, truncate=truncate)

    async def before_truncate(self, rel: str, pid: int) -> bool:
        return await self.before_write_open(rel, pid, truncate=False)

    async def before_unlink(self, rel: str, pid: int) -> None:
        self._before_removal(rel, pid)

    def is_out_of_sight(self, rel: str) -> bool:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None and where.inner else None
        return where is not None and record is not None and generations.is_hidden(self.registry, record, where.inner)

    def after_unlink(self, rel: str) -> None:
        self.registry.cluster.gone(rel)
        where = self.registry.names.locate(rel)
        if where is None:
            self._latest_removed(rel)
            return
        record = self.registry.at(where)
        if record is None:
            return
        drop(self.registry, record, where.inner)
        record.touch()
        self.registry.judge_soon(record)

    async def before_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        await self._stubs.before_rename(old, new, exchange=bool(flags & RENAME_EXCHANGE))
        source, target = self.registry.names.locate(old), self.registry.names.locate(new)
        record = self.registry.at(target) if target is not None and target.inner else None
        if record is not None and target is not None and source is not None and source.step_rel == target.step_rel:
            self._checked.pop(record.key, None)  # of a rename that failed
            marker = self.registry.rules.commit_rename(source.inner, target.inner)
            if marker is not None and not flags & RENAME_EXCHANGE:
                completes = self._makes_whole(record, target.inner)
                path = self.registry.root / old
                named = await check_commit(self.registry, record, marker, path, completes=completes)
                if named is not None:
                    self._checked[record.key] = target.inner, named
        if source is None or target is None or self._is_directory(old):
            await self.registry.cluster.before_move(old, new)
        self._before_removal(old, pid)
        if flags & RENAME_EXCHANGE:
            self._before_removal(new, pid)
        if record is not None and target is not None:
            if record.is_complete and record.is_protected(target.inner, self.registry.rules):
                generations.begin(self.registry, record, pid)
            generations.drop_stale_markers(self.registry, record, target.inner)
            current = record.manifest.overwrite
            if current is not None and target.inner in current.old_files:
                generations.hide_markers(self.registry, record)
            record.touch(pid)

    def after_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        self.registry.cluster.moved(old, new)
        if flags & RENAME_EXCHANGE:
            self._moves.exchanged(old, new)
            return
        if self._is_directory(new):
            self._moves.directory_moved(old, new)
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
        if not (is_open := target.inner in record.open_names()):
            self._seal(record, target.inner)
        checked, named = self._checked.pop(record.key, ("", frozenset()))
        if checked == target.inner and not is_open and self._makes_whole(record, target.inner):
            commit(self.registry, record, marker=target.inner, named=named)
        else:
            self.registry.judge_soon(record)

    async def wait_for_level(self, rel: str) -> None:
        await self.flushed(rel, _inode(self.registry.root / rel))
        await wait_for_level(self.registry, rel)

    async def flushed(self, rel: str, nodeid: int) -> None:
        where = self.registry.names.locate(rel)
        if self.registry.cluster.shares and rel and (where is None or not where.inner):
            await self.registry.cluster.flushed(rel, nodeid)

    def attributes_set(self, rel: str | None) -> None:
        if rel:
            self.registry.cluster.attributes_set(rel)

    async def synced(self, rel: str, nodeid: int) -> None:
        await wait_for_file(self.registry, rel, nodeid)

    def before_rmdir(self, rel: str) -> bool:
        if self.registry.latest.clear_for_rmdir(rel):
            self.registry.invalidate(rel, LATEST)
        return self.before_listing(rel)

    def after_rmdir(self, rel: str) -> None:
        where = self.registry.names.locate(rel)
        if where is None:
            if rel:
                self.registry.latest.removed_by_program(rel)
                self.registry.cluster.gone(rel)
            return
        record = self.registry.at(where)
        if record is not None and where.inner == "":
            self.registry.object_tier.removed(record)
            self.registry.cluster.removed(record)
            self.registry.forget(record)
        else:
            self.registry.cluster.gone(rel)

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

    def is_likely_large(self, rel: str) -> bool:
        where = self.registry.names.locate(rel)
        return where is not None and where.inner != "" and PurePosixPath(rel).suffix in SHARD_SUFFIXES

    def xattrs(self, rel: str, st: os.stat_result) -> dict[str, bytes]:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None else None
        values = {"user.tierfs.tier": b"ram"}
        if self.registry.object_tier.is_stub(st.st_ino):
            is_on_disk = record is not None and self.registry.object_tier.on_disk(record)
            values["user.tierfs.tier"] = b"disk" if is_on_disk else b"object"
        if where is None and stat.S_ISDIR(st.st_mode) and (most := wishes.max_steps_of(self.registry.root / rel)):
            values[f"user.tierfs.{wishes.MAX_STEPS}"] = str(most).encode()
        if where is None or record is None:
            return values
        if not where.inner:
            values["user.tierfs.tier"] = step_tier(self.registry.object_tier.describe(record)).encode()
        values["user.tierfs.state"] = record.shown_state.encode()
        values["user.tierfs.generation"] = str(record.generation_of(where.inner)).encode()
        if not where.inner:
            if record.is_complete:
                values["user.tierfs.level"] = describe_tiers(self.registry, record)["level"].encode()
            values.update({f"user.tierfs.{name}": text.encode() for name, text in wishes.of(record.directory).items()})
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

    def wished(self, rel: str, name: str, value: str) -> None:
        where = self.registry.names.locate(rel)
        if name == wishes.MAX_STEPS and where is None:
            wishes.put_max_steps(self.registry.root / rel, value)
            return
        record = self.registry.at_or_new(where) if where is not None and not where.inner else None
        if record is None or name not in wishes.NAMES:
            raise NotAStep(f"nobody can wish for {name} of {rel}: it is for {'namespaces' if record else 'steps'}")
        settings = self.registry.settings
        policy = settings.for_namespace(record.manifest.namespace).persist.policy
        wishes.put(record.directory, name, value, has_object_tier=bool(settings.object) and policy != "none")
        if name == "tiers" and "object" in value.split(","):
            self.registry.object_tier.asked_for(record)

    def hidden(self, dir_rel: str, name: str) -> bool:
        return name == LATEST and self.registry.latest.mode == "hidden" and self.registry.latest.is_ours(dir_rel)

    # --- parts of the above

    def _before_removal(self, rel: str, pid: int) -> None:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None and where.inner else None
        if record is None or where is None:
            return
        if record.is_complete and (
            record.is_protected(where.inner, self.registry.rules)
            or (self._is_directory(rel) and self._holds_protected(record, where.inner))
        ):
            generations.begin(self.registry, record, pid)
        record.touch(pid)

    def _holds_protected(self, record: StepRecord, inner: str) -> bool:
        """A file below the directory is part of what was committed."""
        below = inner + "/"
        return any(
            name.startswith(below) and record.is_protected(name, self.registry.rules) for name in record.manifest.files
        )

    def _is_directory(self, rel: str) -> bool:
        path = self.registry.root / rel
        return path.is_dir() and not path.is_symlink()

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
        drop(self.registry, record, source.inner)
        now_in = self.registry.at_or_new(target) if target is not None else None
        for nodeid, writer in list(record.writers.items()):
            if writer.inner == source.inner:
                self._moves.writer_moved(record, nodeid, now_in, target.inner if target is not None else "")
        record.touch()
        self.registry.judge_soon(record)

    def _latest_made(self, rel: str) -> None:
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory:
            self.registry.latest.made_by_program(directory)

    def _latest_removed(self, rel: str) -> None:
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory:
            self.registry.latest.removed_by_program(directory)


def _inode(path: Path) -> int:
    """0 where nothing is there."""
    try:
        return path.lstat().st_ino
    except OSError:
        return 0
