"""Bytes between the RAM tier and the disk past the page cache: what lies in RAM already is not to be there twice.

O_DIRECT where the file system takes it, else ordinary reads and writes whose pages are given back at once. Everything
here blocks, and is to be called in a thread; the interpreter lock is free while bytes move and are summed up.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

#: One read or write: large enough for an NVMe to be busy with one at a time.
PIECE_BYTES = 4 << 20
#: What offsets, lengths and addresses of O_DIRECT are multiples of, as open(2) says for usual logical blocks.
BLOCK_BYTES = 4096


class DirectWriter:
    """A new file on the disk, written from its start to its end by one thread after the other."""

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        """FileExistsError, OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd, self._is_direct = _open(path, flags, mode)
        self._view = memoryview(mmap.mmap(-1, PIECE_BYTES))  # aligned to pages

    def copy(self, source: int, offset: int, length: int) -> int:
        """Write that range of the file `source` at the same place; `offset` is a multiple of PIECE_BYTES, and only the
        last range may end elsewhere. Returns the CRC64NVME of what was written. OSError; EOFError where the source is
        shorter."""
        summed, at, end = 0, offset, offset + length
        while at < end:
            got = _fill(source, self._view[: min(PIECE_BYTES, end - at)], at)
            summed = int(crc64nvme(self._view[:got], summed))
            self._write(got, at)
            at += got
        if not self._is_direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
        return summed

    def finish(self, size_bytes: int) -> None:
        """The file has just these bytes, and they are on the disk. OSError."""
        os.ftruncate(self._fd, size_bytes)  # the last block was written whole
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, length: int, at: int) -> None:
        whole = length
        if self._is_direct:
            whole = _whole_blocks(length)
            self._view[length:whole] = bytes(whole - length)
        done = 0
        while done < length:
            try:
                done += os.pwrite(self._fd, self._view[done:whole], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                _no_longer_direct(self._fd)
                self._is_direct, whole = False, length


def copy_range(path: Path, offset: int, length: int, target: int) -> int:
    """Read a range of a file on the disk into `target`, at the same place. Returns the CRC64NVME of what was written.

    OSError; EOFError where the file is shorter.
    """
    summed = 0
    for at, whole in _pieces(path, offset, length):
        piece = whole
        while piece:
            written = os.pwrite(target, piece, at)
            summed = int(crc64nvme(piece[:written], summed))
            piece, at = piece[written:], at + written
    return summed


def sum_range(path: Path, offset: int, length: int) -> int:
    """The CRC64NVME of a range of a file on the disk. OSError, EOFError."""
    summed = 0
    for _, piece in _pieces(path, offset, length):
        summed = int(crc64nvme(piece, summed))
    return summed


def _pieces(path: Path, offset: int, length: int) -> Iterator[tuple[int, memoryview]]:
    """(place in the file, bytes), one after the other; the bytes are gone with the next ones."""
    fd, is_direct = _open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0)
    view = memoryview(mmap.mmap(-1, PIECE_BYTES))
    at, end = offset, offset + length
    try:
        while at < end:
            start = at - at % BLOCK_BYTES if is_direct else at
            skipped = at - start
            wanted = skipped + end - at
            try:
                got = os.preadv(fd, [view[: _whole_blocks(wanted) if is_direct else wanted]], start)
            except OSError as error:
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                _no_longer_direct(fd)
                is_direct = False
                continue
            piece = view[skipped : min(got, wanted)]
            if not piece:
                raise EOFError(f"{path} ends at {at}")
            yield at, piece
            at += len(piece)
        if not is_direct:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """The names in it are on the disk. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _whole_blocks(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _open(path: Path, flags: int, mode: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, mode), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Linux may have made the file before it refused the flag.
    return os.open(path, flags & ~os.O_EXCL, mode), False


def _no_longer_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _fill(source: int, into: memoryview, at: int) -> int:
    """Read as much as there is room for. EOFError."""
    done = 0
    while done < len(into):
        got = os.preadv(source, [into[done:]], at + done)
        if not got:
            raise EOFError(f"the file ends at {at + done}")
        done += got
    return done
