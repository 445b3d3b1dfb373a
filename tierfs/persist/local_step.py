"""A complete step as this node is about to send it: what its files were when that began, and whether they still are."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from tierfs.checksum import from_text, to_text
from tierfs.errors import TierfsError
from tierfs.persist.layout import file_key, is_own
from tierfs.persist.object_manifest import MODE_BITS, ObjectDirectory, ObjectFile
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord, same_bytes
from tierfs.steps.registry import StepRegistry
from tierfs.steps.upkeep import checksum_path


class Superseded(Exception):
    """The step is not what it was when its sending began: it begins anew with what is there now."""


class LocalStep:
    """`entries` and `stats` by the path inside the step, as they were found by `read`; empty where it was not.

    `is_mine` tells of a file whether this node is to send it; others may come and go here as long as their sizes stay.
    """

    def __init__(
        self,
        registry: StepRegistry,
        record: StepRecord,
        *,
        hydrate: Callable[[int], Awaitable[None]],
        is_stub: Callable[[int], bool],
    ) -> None:
        self.record = record
        self.namespace, self.step = record.key
        self.generation = record.manifest.generation
        self.completed_at = record.manifest.completed_at or 0.0
        self.marker = record.manifest.marker
        self.entries: dict[str, FileEntry] = {}
        self.stats: dict[str, os.stat_result] = {}
        self.directory = ObjectDirectory(0, 0o755, 0, 0)
        self.is_mine: Callable[[str], bool] = lambda inner: True
        self._registry = registry
        self._hydrate = hydrate
        self._is_stub = is_stub
        self._device = -1

    @property
    def age(self) -> tuple[int, float]:
        return self.generation, self.completed_at

    @property
    def bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())

    async def read(self) -> None:
        """Look at every file. Raises PathRefused for a name that no object can have, Superseded, TierfsError."""
        known = dict(self.record.manifest.files)
        if not self.record.manifest.populated or not known:
            raise TierfsError(f"{self.record.rel} has no file in this mount, so there is nothing to persist")
        for inner in known:
            if not is_own(inner):
                file_key(self.namespace, self.step, inner)
        self._device = self._registry.root.stat().st_dev
        found = await trio.to_thread.run_sync(
            _stat_all, self.record.directory, [name for name in known if not is_own(name)]
        )
        if found is None:
            raise Superseded
        top, stats = found
        self.directory = ObjectDirectory(top.st_mtime_ns, top.st_mode & MODE_BITS, top.st_uid, top.st_gid)
        for inner, info in stats.items():
            entry = known[inner]
            if self.record.manifest.files.get(inner) != entry or not entry.sealed or not stat.S_ISREG(info.st_mode):
                raise Superseded
            seen = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, None, True)
            if not self.is_mine(inner):
                if info.st_size != entry.size_bytes:
                    raise Superseded
            elif not same_bytes(seen, entry):
                # Times that a program set after the file was closed, or bytes that came by a mapping: what is there.
                self.record.manifest.files[inner] = entry = seen
                self.record.unsaved = True
            self.entries[inner] = entry
        self.stats = stats

    def is_current(self) -> bool:
        """The record still describes what was read; of what was not, that there is still no more of it here than names
        that somebody looked for."""
        now = self.record.manifest
        if not self.stats:
            return self._is_here() and not now.populated
        return (
            self._is_here()
            and self.entries.keys() == {inner for inner in now.files if not is_own(inner)}
            and all(self._is_same(inner) for inner in self.entries)
        )

    def check(self, inner: str | None = None) -> None:
        """Raises Superseded where the step, or this file of it, changed."""
        if not (self.is_current() if inner is None else self._is_here() and self._is_same(inner)):
            raise Superseded

    def _is_here(self) -> bool:
        record = self.record
        return (
            self._registry.records.get((self.namespace, self.step)) is record
            and record.is_complete
            and record.manifest.generation == self.generation
        )

    def _is_same(self, inner: str) -> bool:
        now = self.record.manifest.files.get(inner)
        if now is None or not now.sealed:
            return False
        before = self.entries[inner]
        return same_bytes(now, before) if self.is_mine(inner) else now.size_bytes == before.size_bytes

    async def open(self, inner: str) -> int:
        """A descriptor of the very file that was read, with all its bytes in RAM. Superseded, NoRoom, ObjectError."""
        self.check(inner)
        if self._is_stub(self.entries[inner].ino):
            await self._hydrate(self.entries[inner].ino)
            self.check(inner)
        try:
            fd = os.open(self.record.directory / inner, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            raise Superseded from None
        if not self.is_unchanged(inner, fd):
            os.close(fd)
            raise Superseded
        return fd

    def is_unchanged(self, inner: str, fd: int) -> bool:
        """The file behind the descriptor is what was read. On another device it is none of ours: somebody made a
        symlink of a directory."""
        info, entry = os.fstat(fd), self.entries[inner]
        return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns) == (
            self._device,
            entry.ino,
            entry.size_bytes,
            entry.mtime_ns,
        )

    def sealed_checksum(self, inner: str) -> int | None:
        """What was summed up when the file was closed; None where that has not been done yet."""
        text = self.record.manifest.files[inner].checksum if self._is_same(inner) else self.entries[inner].checksum
        return from_text(text) if text is not None else None

    async def checksum(self, inner: str) -> int:
        """The same, computed now where nobody did."""
        sealed = self.sealed_checksum(inner)
        if sealed is not None:
            return sealed
        os.close(await self.open(inner))  # all its bytes are here
        stopped = False
        try:
            summed = await trio.to_thread.run_sync(
                checksum_path,
                self.record.directory / inner,
                self.entries[inner],
                lambda: stopped,
                abandon_on_cancel=True,
            )
        except OSError:
            raise Superseded from None
        finally:
            stopped = True
        if summed is None:
            raise Superseded
        self.learn(inner, summed.full)
        return summed.full

    def learn(self, inner: str, checksum: int) -> None:
        """The file's checksum is known now."""
        self.check(inner)
        entry = self.record.manifest.files[inner]
        if entry.checksum is None:
            entry = FileEntry(entry.size_bytes, entry.mtime_ns, entry.ino, to_text(checksum), True)
            self.entries[inner] = self.record.manifest.files[inner] = entry
            self.record.unsaved = True

    def object_file(self, inner: str, checksum: int, chunks: tuple[int, ...]) -> ObjectFile:
        info = self.stats[inner]
        return ObjectFile(
            size_bytes=info.st_size,
            checksum=checksum,
            chunks=chunks,
            mtime_ns=info.st_mtime_ns,
            mode=info.st_mode & MODE_BITS,
            uid=info.st_uid,
            gid=info.st_gid,
        )


def _stat_all(directory: Path, names: list[str]) -> tuple[os.stat_result, dict[str, os.stat_result]] | None:
    """In a thread, since it takes time by the number of files. None where one is not there."""
    try:
        return os.lstat(directory), {name: os.lstat(directory / name) for name in names}
    except OSError:
        return None
