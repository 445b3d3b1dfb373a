"""A step of the object tier that somebody looks into gets its directories and stubs; until then it is only a name."""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import trio

from tierfs.errors import ObjectCorrupt, ObjectMissing
from tierfs.hydrate.eviction import LEAST_BYTES
from tierfs.hydrate.stubs import MarkDamaged, StubMark, make_stub, read_mark
from tierfs.hydrate.table import StubTable
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest
from tierfs.steps.manifest import FileEntry
from tierfs.steps.names import safe_relative
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.hydrate")

#: Small files that are brought by themselves after a step was looked into; markers always are.
SMALL_FILES = 1000


class Population:
    def __init__(
        self,
        registry: StepRegistry,
        table: StubTable,
        bring_soon: Callable[[Iterable[int]], None],
    ) -> None:
        self._registry = registry
        self._table = table
        #: None: there is no object tier.
        self.manifest_of: Callable[[str, str], Awaitable[ObjectManifest]] | None = None
        self._bring_soon = bring_soon
        self._locks: dict[tuple[str, str], trio.Lock] = {}
        self._limiter = trio.CapacityLimiter(4)

    async def populate(self, record: StepRecord) -> None:
        """See `Hydration.populate`. Done again after a crash it goes on where it was."""
        if record.manifest.populated:
            return
        if self._registry.is_shared(record):
            await self._registry.cluster.show_listing(record.rel)  # the catalogue says what is in it
            return
        lock = self._locks.setdefault(record.key, trio.Lock())
        async with lock:
            if not record.manifest.populated:
                await self._populate(record)
        if not lock.statistics().tasks_waiting:
            self._locks.pop(record.key, None)

    async def _populate(self, record: StepRecord) -> None:
        namespace, step = record.key
        if self.manifest_of is None:
            raise ObjectMissing(f"{record.rel} is in the object tier, and this node has none")
        manifest = await self.manifest_of(namespace, step)
        scratch = self._registry.tier.generations / f"{uuid.uuid4().hex}.stub"
        try:
            made = await trio.to_thread.run_sync(_make_tree, record.directory, manifest, scratch, limiter=self._limiter)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectCorrupt(f"{namespace}/{step} can't be shown: {error}") from None
        if self._registry.records.get(record.key) is not record:
            return  # removed meanwhile
        for inner, (entry, mark) in made.items():
            if mark is not None:
                self._table.add(entry.ino, mark, record.directory / inner)
        record.manifest.files = {inner: entry for inner, (entry, _) in made.items()}
        record.manifest.bytes = sum(entry.size_bytes for entry, _ in made.values())
        record.manifest.populated = True
        self._registry.save_or_later(record)
        self._registry.crash("populate:saved")
        for inner in list(made)[:1]:
            self._registry.invalidate(record.rel, inner.partition("/")[0])  # and with it the directory's attributes
        self._bring_soon(self._worth_bringing(record, made))

    def _worth_bringing(self, record: StepRecord, made: dict[str, tuple[FileEntry, StubMark | None]]) -> list[int]:
        """Markers, and other small files."""
        rules, marker = self._registry.rules, record.manifest.marker
        stubs = [(inner, entry) for inner, (entry, mark) in made.items() if mark is not None]
        markers = [entry.ino for inner, entry in stubs if inner == marker or rules.match(inner) is not None]
        small = [entry.ino for _, entry in stubs if entry.size_bytes < LEAST_BYTES]
        return list(dict.fromkeys(markers + small[:SMALL_FILES]))


def _make_tree(top: Path, manifest: ObjectManifest, scratch: Path) -> dict[str, tuple[FileEntry, StubMark | None]]:
    """Make directories and stubs below `top`. Each file's entry, with its mark where it is a stub. In a thread."""
    made: dict[str, tuple[FileEntry, StubMark | None]] = {}
    newest: dict[str, int] = {}
    for inner, file in sorted(manifest.files.items()):
        safe_relative(inner)
        _make_directories(top, inner, file)
        mark = StubMark(manifest.namespace, manifest.step, inner, file.size_bytes, file.checksum, file.mtime_ns)
        made[inner] = _make_file(top / inner, file, mark, scratch)
        directory = inner.rpartition("/")[0]
        while directory:
            newest[directory] = max(newest.get(directory, 0), file.mtime_ns)
            directory = directory.rpartition("/")[0]
    for directory, mtime_ns in newest.items():
        os.utime(top / directory, ns=(mtime_ns, mtime_ns))
    own = manifest.directory
    if own.mtime_ns:
        os.utime(top, ns=(own.mtime_ns, own.mtime_ns))
    return made


def _make_directories(top: Path, inner: str, like: ObjectFile) -> None:
    parts = inner.split("/")[:-1]
    directory = top
    for part in parts:
        directory = directory / part
        try:
            directory.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(directory.lstat().st_mode):
                raise
            continue
        if (like.uid, like.gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.chown(directory, like.uid, like.gid)
        directory.chmod(0o755)


def _make_file(path: Path, file: ObjectFile, mark: StubMark, scratch: Path) -> tuple[FileEntry, StubMark | None]:
    found = _found(path, mark)
    if found is None:
        make_stub(scratch, mark, mode=file.mode, uid=file.uid, gid=file.gid)
        scratch.rename(path)
        found = path.lstat().st_ino, bool(file.size_bytes)
    ino, is_stub = found
    return FileEntry(file.size_bytes, file.mtime_ns, ino, mark.checksum_text, True), mark if is_stub else None


def _found(path: Path, mark: StubMark) -> tuple[int, bool] | None:
    """The inode of what an interrupted attempt left under the name, if that is good, and whether it is a stub."""
    try:
        info = path.lstat()
        left = read_mark(path)
    except (FileNotFoundError, MarkDamaged):
        return None
    if left is not None:
        return (info.st_ino, True) if left == mark and info.st_size == mark.size_bytes else None
    is_whole = stat.S_ISREG(info.st_mode) and (info.st_size, info.st_mtime_ns) == (mark.size_bytes, mark.mtime_ns)
    return (info.st_ino, False) if is_whole else None
