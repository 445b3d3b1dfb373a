"""What this node holds already is not asked for elsewhere, and takes the place of the stubs that stand for it.

A replica may come to the shelf after its name was made as a stub. Then the stub gives way to it; and a program that has
the stub open is served from the replica.
"""

from __future__ import annotations

import errno
import os
import stat

import trio
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.catalog.records import FileRecord
from tierfs.cluster.copies import Copies
from tierfs.cluster.making import version_at
from tierfs.cluster.showing import Showing
from tierfs.disk.direct_io import copy_range
from tierfs.errors import PeerLacks, PeerUnavailable
from tierfs.hydrate.source import Source
from tierfs.hydrate.stubs import StubMark
from tierfs.steps.registry import Key, StepRegistry

_PIECE_BYTES = 1 << 20
#: Versions whose copy here turned out to be wrong, so many at most.
_WRONG_KEPT = 256


class OwnFirst:
    """A `Source`: this node's own copies, then `others`."""

    def __init__(self, others: Source, copies: Copies) -> None:
        self._others = others
        self._copies = copies
        self._limiter = trio.CapacityLimiter(2)
        self._wrong: dict[str, None] = {}

    @property
    def reads_first(self) -> bool:
        return self._others.reads_first

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        if self._has(mark):
            try:
                return (await self._copies.checksum(mark.version)).chunks
            except PeerLacks:
                pass  # it went just then
        return await self._others.chunks(mark)

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        if self._has(mark):
            try:
                return await self._copy(mark.version, offset, length, fd)
            except PeerLacks:
                pass
        return await self._others.read_range(mark, offset, length, fd, urgent=urgent, retry_for_s=retry_for_s)

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        if self._has(mark):
            if self._copies.path_in_ram(mark.version) is None:
                self._copies.forget_on_disk(mark.version)
                return
            self._wrong[mark.version] = None
            if len(self._wrong) > _WRONG_KEPT:
                del self._wrong[next(iter(self._wrong))]
        else:
            self._others.came_wrong(mark, offset)

    def _has(self, mark: StubMark) -> bool:
        return bool(mark.version) and mark.version not in self._wrong and self._copies.has(mark.version)

    async def _copy(self, version: str, offset: int, length: int, fd: int) -> int:
        """PeerLacks, PeerUnavailable."""
        if self._copies.path_in_ram(version) is None:
            return await self._copy_from_disk(version, offset, length, fd)
        source = self._copies.open_version(version)
        try:
            return await trio.to_thread.run_sync(_copy_range, source, fd, offset, length, limiter=self._limiter)
        except OSError as error:
            raise PeerUnavailable(f"the copy of {version} here can't be read: {error.strerror}") from error
        finally:
            os.close(source)

    async def _copy_from_disk(self, version: str, offset: int, length: int, fd: int) -> int:
        """Past the page cache. PeerLacks."""
        path = self._copies.on_disk(version)
        if path is None:
            raise PeerLacks(f"the disk does not hold the version {version}")
        try:
            return await trio.to_thread.run_sync(copy_range, path, offset, length, fd, limiter=self._limiter)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise  # of where the bytes go
            self._copies.forget_on_disk(version)
            raise PeerLacks(f"the disk's copy of {version} can't be read: {error}") from error


def replace_stub(registry: StepRegistry, showing: Showing, key: Key, inner: str, version: str) -> None:
    """A copy came: where the step has a stub of it under that name, the copy gets the name."""
    record = registry.records.get(key)
    # The stub of a generation that was set aside is told from a file that was written again by its inode.
    if record is None or inner in record.open_names() or record.is_of_old_generation(inner):
        return
    path = record.directory / inner
    try:
        _, mark = version_at(path)
        info = path.lstat()
    except OSError:
        return  # it has no name yet
    if mark is None or mark.version != version or not stat.S_ISREG(info.st_mode):
        return
    mode = stat.S_IMODE(info.st_mode)
    file = FileRecord(mark.size_bytes, mark.mtime_ns, mode, info.st_uid, info.st_gid, version, mark.checksum_text)
    showing.place_file(record, file, inner, None)


def _copy_range(source: int, target: int, offset: int, length: int) -> int:
    """Returns the CRC64NVME of what was written. OSError, PeerLacks."""
    buffer = memoryview(bytearray(min(length, _PIECE_BYTES)))
    crc, end = 0, offset + length
    while offset < end:
        got = os.preadv(source, [buffer[: end - offset]], offset)
        if not got:
            raise PeerLacks("the copy here is shorter than the file that was sealed")
        piece = buffer[:got]
        while piece:
            written = os.pwrite(target, piece, offset)
            crc = crc64nvme(piece[:written], crc)
            piece, offset = piece[written:], offset + written
    return int(crc)
