"""Ranges of files of the RAM tier as memory: what is summed up is what is sent, and no byte is copied.

A worker maps, never the daemon: a file that is cut under a mapping kills the process with SIGBUS.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import CHUNK_BYTES, combine
from tierfs.errors import NoRoom, StepBusy
from tierfs.ram import syscalls


@dataclass(frozen=True)
class RangeChecksum:
    """`chunks` are those of the file's 16 MiB grid, if the range begins on it; `full` is of the whole range."""

    full: int
    chunks: tuple[int, ...]


class MappedRange:
    """`view` shows the bytes of the file from `offset` on, `length` of them.

    Call `close` when no exception that knows the view is on its way any more (its frames hold slices of it).
    """

    def __init__(self, fd: int, offset: int, length: int, *, writable: bool = False) -> None:
        """ValueError when the file is shorter; OSError."""
        self._map: mmap.mmap | None = None
        self.view = memoryview(b"")
        if not length:
            return
        first = offset - offset % mmap.ALLOCATIONGRANULARITY
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, offset - first + length, flags=mmap.MAP_SHARED, prot=access, offset=first)
        self.view = memoryview(self._map)[offset - first :]

    def close(self) -> None:
        """The mapping keeps a removed file's memory, so it goes even where a slice was left in a cycle of garbage."""
        self.view.release()
        if self._map is None:
            return
        try:
            self._map.close()
        except BufferError:
            gc.collect()
            with suppress(BufferError):  # then it goes with the last slice
                self._map.close()
        self._map = None


def checksum_of(view: memoryview, passing: Callable[[], None] = lambda: None) -> RangeChecksum:
    """`passing` is called before each chunk, and may raise."""
    full, chunks = 0, []
    for start in range(0, len(view), CHUNK_BYTES):
        passing()
        with view[start : start + CHUNK_BYTES] as piece:
            chunks.append(int(crc64nvme(piece)))
            full = combine(full, chunks[-1], len(piece))
    return RangeChecksum(full, tuple(chunks))


def require_size(fd: int, size_bytes: int) -> None:
    """StepBusy when the file has another size by now."""
    now = os.fstat(fd).st_size
    if now != size_bytes:
        raise StepBusy(f"a file changed its size from {size_bytes} to {now} bytes while it was being sent")


def has_hole(fd: int, offset: int, length: int) -> bool:
    """Whether part of the range was never written. Moves the file's position.

    On a tmpfs a read through a mapping fills holes with pages, so such a range is better read than mapped.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) < offset + length
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EINVAL):
            return False
        raise


def make_room(fd: int, offset: int, length: int) -> None:
    """Memory for a range that is about to be written, or NoRoom; the file's size stays."""
    try:
        syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = os.fstatvfs(fd)
            free = room.f_bavail * room.f_frsize
            raise NoRoom(
                f"the RAM tier has {free} bytes free, and {length} are needed to fetch a part of a file",
                needed_bytes=length,
                free_bytes=free,
            ) from None
        if error.errno != errno.EOPNOTSUPP:
            raise
