"""System calls that Python's `os` does not offer: file handles, rename with flags, times that can be left out.

Constants are those of `include/uapi/linux/fcntl.h`, `include/uapi/linux/fs.h` and `include/uapi/linux/stat.h`.
Each function raises OSError with the kernel's errno.
"""

from __future__ import annotations

import ctypes
import os
import struct

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
UTIME_OMIT = (1 << 30) - 2
MAX_HANDLE_SZ = 128

_libc = ctypes.CDLL(None, use_errno=True)


class _FileHandle(ctypes.Structure):
    """`struct file_handle` with room for the longest handle there is."""

    _fields_ = (
        ("handle_bytes", ctypes.c_uint),
        ("handle_type", ctypes.c_int),
        ("f_handle", ctypes.c_ubyte * MAX_HANDLE_SZ),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def name_to_handle(fd: int) -> bytes:
    """The file handle of what `fd` refers to: its type (int32, native order), then its bytes.

    A handle finds the file again after its name is gone, also in another process, for as long as something
    keeps the inode alive.
    """
    handle = _FileHandle(handle_bytes=MAX_HANDLE_SZ)
    mount_id = ctypes.c_int()
    _check(_libc.name_to_handle_at(fd, b"", ctypes.byref(handle), ctypes.byref(mount_id), AT_EMPTY_PATH))
    return struct.pack("=i", handle.handle_type) + bytes(handle.f_handle[: handle.handle_bytes])


def open_by_handle(mount_fd: int, encoded: bytes, flags: int) -> int:
    """Open what `name_to_handle` encoded. `mount_fd` is any descriptor (not O_PATH) on the same file system.

    Needs CAP_DAC_READ_SEARCH: EPERM without, ESTALE when the file is gone.
    """
    payload = encoded[4:]
    if len(payload) > MAX_HANDLE_SZ:
        raise OSError(22, "a file handle can't be this long")
    handle = _FileHandle(handle_bytes=len(payload), handle_type=struct.unpack("=i", encoded[:4])[0])
    ctypes.memmove(handle.f_handle, payload, len(payload))
    return _check(_libc.open_by_handle_at(mount_fd, ctypes.byref(handle), flags | os.O_CLOEXEC))


def rename_at(old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> None:
    """renameat2(2)."""
    _check(_libc.renameat2(old_dir, old, new_dir, new, ctypes.c_uint(flags)))


def set_times(path: bytes, atime_ns: int | None, mtime_ns: int | None) -> None:
    """utimensat(2) on `path`, following links; None leaves that time as it is."""
    times = (_Timespec * 2)()
    for slot, value in zip(times, (atime_ns, mtime_ns), strict=True):
        if value is None:
            slot.tv_nsec = UTIME_OMIT
        else:
            slot.tv_sec, slot.tv_nsec = divmod(value, 1_000_000_000)
    _check(_libc.utimensat(AT_FDCWD, path, ctypes.byref(times), 0))
