"""The few system calls of the RAM tier that Python has no name for: fallocate(2), mount(2), umount2(2), madvise(2).

Each raises OSError with the kernel's errno. `ctypes.CDLL` releases the GIL for the length of a call, so that a
thread in one of these never holds up the others.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# include/uapi/linux/falloc.h
FALLOC_FL_KEEP_SIZE = 0x01

# include/uapi/linux/mount.h
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32

# include/linux/fs.h
MNT_DETACH = 2

# include/uapi/asm-generic/mman-common.h, Linux 5.14
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

# include/uapi/linux/fcntl.h, include/uapi/linux/fs.h
AT_FDCWD = -100
RENAME_EXCHANGE = 2

_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MAP_FAILED = ctypes.c_void_p(-1).value


def _failure(path: str | None = None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Allocate (or with a mode, change) `length` bytes at `offset`. All or nothing; goes on after EINTR."""
    while _libc.fallocate(fd, mode, offset, length) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, data.encode()) != 0:
        raise _failure(target)


def umount(target: str, flags: int = 0) -> None:
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise _failure(target)


def exchange(directory: int, name: str, other: Path) -> None:
    """The entry `name` of the directory and `other` change places, at once: renameat2(2)."""
    result = _libc.renameat2(directory, os.fsencode(name), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE))
    if result != 0:
        raise _failure(str(other))


@contextmanager
def shared_mapping(fd: int, offset: int, length: int) -> Iterator[int]:
    """The address of a range of a file, mapped shared and writable for as long as the context lasts."""
    address = _libc.mmap(None, length, _PROT_READ | _PROT_WRITE, _MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        raise _failure()
    try:
        yield int(address)
    finally:
        _libc.munmap(address, length)


def populate(address: int, length: int, *, writing: bool = True) -> None:
    """Touch every page of a mapped range for writing, or for reading, without copying anything.

    Raises EINVAL before Linux 5.14, and EFAULT where the file became shorter meanwhile.
    """
    while _libc.madvise(address, length, MADV_POPULATE_WRITE if writing else MADV_POPULATE_READ) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()
