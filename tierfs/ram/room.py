"""Who has the tier's room: data, shards that were given room ahead, the ballast, or nobody.

`TmpfsRoom` is the real thing. `PlainRoom` stands in where no tmpfs of our own may be mounted (no root): a directory
whose limit nobody enforces, counted by walking it, with no ballast and no room given ahead.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tierfs.ram import syscalls
from tierfs.ram.ballast import Ballast
from tierfs.ram.tmpfs import HUGE_PAGE

# Room is given in pieces of at most this much: while one is given the shard's writer waits (some 2 ms).
PIECE_BYTES = 256 << 20

_PAGE = os.sysconf("SC_PAGE_SIZE")
_WALK_AGAIN_S = 0.5


@dataclass(frozen=True)
class RoomState:
    """All in bytes. `data_bytes` includes room given ahead; with `free_bytes` it makes up the tier's size."""

    data_bytes: int
    free_bytes: int
    held_bytes: int
    files: int
    files_free: int


class Room(Protocol):
    """What the tier needs of a place that holds its files. Blocking; each call may be made from any thread."""

    def state(self) -> RoomState: ...

    def give(self, fd: int, start: int, end: int, *, from_ballast_only: bool = False, wait_s: float = -1) -> int:
        """Give a file room from offset `start` up to `end`. Returns how far it has room now, at least `start`."""

    def trim(self, fd: int) -> int:
        """Take back what lies beyond the file's end; only while nobody writes to it. Returns the bytes gained."""

    def close(self) -> None: ...


class TmpfsRoom:
    """A tmpfs of our own, with or without a ballast in it."""

    def __init__(self, mount: Path, size_bytes: int) -> None:
        self._mount = mount
        self._size_bytes = size_bytes
        self.ballast = Ballast(mount, size_bytes)

    def state(self) -> RoomState:
        held = self.ballast.held_bytes()
        while True:  # Another thread may move room between the two questions.
            statistics = os.statvfs(self._mount)
            again = self.ballast.held_bytes()
            if again == held:
                break
            held = again
        data = max(0, (statistics.f_blocks - statistics.f_bfree) * statistics.f_frsize - held)
        return RoomState(
            data_bytes=data,
            free_bytes=max(0, self._size_bytes - data),
            held_bytes=held,
            files=statistics.f_files - statistics.f_ffree,
            files_free=statistics.f_ffree,
        )

    def give(self, fd: int, start: int, end: int, *, from_ballast_only: bool = False, wait_s: float = -1) -> int:
        while start < end:
            piece = min(PIECE_BYTES, end - start)
            taken = self.ballast.take(piece, wait_s=wait_s)
            if from_ballast_only:
                piece = min(piece, taken)
            if piece == 0:
                break
            try:
                syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, start, piece)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                    raise
                break
            start += piece
        return start

    def trim(self, fd: int) -> int:
        before = os.fstat(fd)
        if before.st_blocks * 512 <= -(-before.st_size // _PAGE) * _PAGE:
            return 0
        os.ftruncate(fd, before.st_size)
        # Cutting to the same length still counts as a change of the file.
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        return (before.st_blocks - os.fstat(fd).st_blocks) * 512

    def close(self) -> None:
        self.ballast.close()


class PlainRoom:
    """A plain directory, perhaps on a file system shared with others. Sizes are at most half a second old."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._directory = directory
        self._size_bytes = size_bytes
        self._walked: tuple[int, int] = (0, 0)
        self._walked_at = -_WALK_AGAIN_S

    def state(self) -> RoomState:
        now = time.monotonic()
        if now - self._walked_at >= _WALK_AGAIN_S:
            self._walked = self._walk()
            self._walked_at = time.monotonic()
        data, files = self._walked
        statistics = os.statvfs(self._directory)
        free = min(max(0, self._size_bytes - data), statistics.f_bavail * statistics.f_frsize)
        return RoomState(data_bytes=data, free_bytes=free, held_bytes=0, files=files, files_free=statistics.f_favail)

    def give(self, fd: int, start: int, end: int, *, from_ballast_only: bool = False, wait_s: float = -1) -> int:
        return start

    def trim(self, fd: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def _walk(self) -> tuple[int, int]:
        """Bytes held by the files below the directory, each inode once, and how many inodes there are."""
        seen: set[int] = set()
        held = 0
        for parent, directories, names in os.walk(self._directory):
            for name in directories + names:
                with suppress(OSError):
                    state = os.lstat(os.path.join(parent, name))  # noqa: PTH118
                    if state.st_ino not in seen:
                        seen.add(state.st_ino)
                        held += state.st_blocks * 512
        return held, len(seen)


def whole_huge_pages(size_bytes: int) -> int:
    return size_bytes // HUGE_PAGE * HUGE_PAGE
