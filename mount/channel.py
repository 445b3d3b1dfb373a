"""The kernel channel: passthrough, counts of open handles and takeover, between /dev/fuse and pyfuse3.

The work is done in C (`channel_c/`, where `channel.h` explains it and names the files); this is its Python face. A
process has one channel, made before pyfuse3 is imported anywhere in it, because pyfuse3 must find the channel's
`fuse_session_new` before libfuse's.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tierfs.errors import MountError

KINDS: Final = {"auto": 0, "customio": 1, "socketpair": 2}

# include/uapi/linux/fuse.h, enum fuse_opcode
OPCODES: Final = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 8: "mknod", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 13: "link", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 21: "setxattr", 22: "getxattr", 23: "listxattr", 24: "removexattr", 25: "flush",
    26: "init", 27: "opendir", 28: "readdir", 29: "releasedir", 30: "fsyncdir", 31: "getlk", 32: "setlk",
    33: "setlkw", 34: "access", 35: "create", 36: "interrupt", 37: "bmap", 38: "destroy", 39: "ioctl", 40: "poll",
    41: "notify_reply", 42: "batch_forget", 43: "fallocate", 44: "readdirplus", 45: "rename2", 46: "lseek",
    47: "copy_file_range", 48: "setupmapping", 49: "removemapping", 50: "syncfs", 51: "tmpfile", 52: "statx",
}  # fmt: skip
OPCODE_NUMBERS: Final = {name: number for number, name in OPCODES.items()}

_OP_MAX = 64
_HANDLE_MAX = 136  # 8 bytes and MAX_HANDLE_SZ of open_by_handle_at(2)


@dataclass(frozen=True)
class ChannelInfo:
    """What was agreed with libfuse and the kernel. `kind` is "" before `Channel.device()` was called.

    `proto` is the kernel's FUSE version, (0, 0) while INIT is not answered; `reason` says why passthrough or resend is
    off ("" when both are on).
    """

    kind: str
    passthrough: bool
    resend: bool
    proto: tuple[int, int]
    reason: str


class Handles(NamedTuple):
    """Open handles of an inode; `writers` are those opened O_WRONLY or O_RDWR."""

    opens: int
    writers: int


class Channel:
    """The process's one channel. Raises MountError where it can't be made.

    `fuse_fd` is a mounted /dev/fuse; the channel sets its blocking mode and reads all of it. `state_path` is a file
    on a tmpfs that only this mount uses. With `takeover` the connection's former process is dead and its state is
    there; otherwise the file is made anew.
    """

    def __init__(
        self, fuse_fd: int, state_path: Path, *, kind: str, passthrough: bool, resend: bool, takeover: bool
    ) -> None:
        if kind not in KINDS:
            raise MountError(f"unknown kind of channel {kind!r}: use one of {', '.join(KINDS)}")
        if "pyfuse3" in sys.modules:
            raise MountError("pyfuse3 was imported before the channel was made; make the channel first")
        self._kind = KINDS[kind]
        self._device = -1
        self._c = _load()
        error = self._c.tierfs_channel_open(fuse_fd, os.fsencode(state_path), passthrough, resend, takeover)
        if error == errno.EOPNOTSUPP:
            raise MountError("this mount can't be taken over: its kernel does not resend requests; mount it anew")
        if error == errno.EPROTO:
            raise MountError(f"{state_path} is not the state of a channel of this version; mount anew")
        if error == errno.ENOBUFS:
            raise MountError("pipes of 128 KiB can't be had here: raise /proc/sys/fs/pipe-user-pages-soft")
        if error == errno.EBUSY:
            raise MountError("this process has a channel already")
        if error:
            raise MountError(f"the kernel channel could not be opened with {state_path}: {os.strerror(error)}")

    def device(self) -> str:
        """Connects libfuse; returns what pyfuse3.init() takes as its mount point. Call it after importing pyfuse3."""
        if self._device < 0:
            got = self._c.tierfs_channel_start(self._kind)
            if got == -errno.ENOSYS:
                raise MountError("this libfuse has no custom I/O (3.14 or newer has); use the channel kind socketpair")
            if got < 0:
                raise MountError(f"the kernel channel could not be started: {os.strerror(-got)}")
            self._device = got
        return f"/dev/fd/{self._device}"

    def attach(self, nodeid: int, fd: int, handle: bytes) -> None:
        """Names the file behind an inode; to be called in the open or create handler before it answers.

        `fd` is open O_RDWR without O_APPEND; the channel keeps a duplicate until the last handle is released.
        `handle` (at most 136 bytes) is given back by `open_nodes()` after a takeover. Calling it again is harmless.
        Raises OSError (ENFILE: 65,536 inodes are open already).
        """
        error = self._c.tierfs_channel_attach(nodeid, fd, handle, len(handle))
        if error:
            raise OSError(error, os.strerror(error))

    def fd(self, nodeid: int) -> int | None:
        """The attached file's descriptor (the channel's: not to be closed), while any handle is open."""
        fd = int(self._c.tierfs_channel_fd(nodeid))
        return fd if fd >= 0 else None

    def handles(self, nodeid: int) -> Handles:
        """The handles open now. In a release handler the one being released is no longer counted."""
        both = int(self._c.tierfs_channel_handles(nodeid))
        return Handles(both & 0xFFFFFFFF, both >> 32)

    def open_nodes(self) -> list[tuple[int, bytes, Handles]]:
        """Every inode with open handles, or with a RELEASE to be answered: (node id, handle, counts).

        After a takeover the file system attaches each again before it starts pyfuse3. `handle` is empty for an
        inode that was never attached. One without handles may be gone (ESTALE): its RELEASE was done, not answered.
        """
        nodes = []
        nodeid, length = ctypes.c_uint64(), ctypes.c_uint32()
        counts, handle = (ctypes.c_uint32 * 2)(), ctypes.create_string_buffer(_HANDLE_MAX)
        at = 0
        while at := self._c.tierfs_channel_row(at, ctypes.byref(nodeid), counts, handle, ctypes.byref(length)):
            nodes.append((nodeid.value, handle.raw[: length.value], Handles(counts[0], counts[1])))
        return nodes

    def takeover_active(self) -> bool:
        """True until every request that the kernel sent again after a takeover has been answered."""
        return bool(self._c.tierfs_channel_resent(0, 0))

    def resent(self, operation: str, nodeid: int) -> bool:
        """True if an unanswered request of this kind ("mkdir", "rename2", …) on this node was sent again.

        The dead process may have done it already, so its effect found in place is success. `nodeid` is the one in
        the request's header: the parent directory for operations on names.
        """
        return bool(self._c.tierfs_channel_resent(OPCODE_NUMBERS[operation], nodeid))

    def info(self) -> ChannelInfo:
        """What was agreed; complete once the kernel's INIT was answered (`Operations.init` is called just before)."""
        numbers, reason = (ctypes.c_uint32 * 7)(), ctypes.create_string_buffer(200)
        self._c.tierfs_channel_info(numbers, reason)
        kind = next((name for name, number in KINDS.items() if number and number == numbers[0]), "")
        # The version is known from the request, the rest only once libfuse answered it.
        proto = (numbers[3], numbers[4]) if numbers[6] else (0, 0)
        return ChannelInfo(kind, bool(numbers[1]), bool(numbers[2]), proto, reason.value.decode("utf-8", "replace"))

    def takeovers(self) -> int:
        """How often this mount's process was replaced."""
        return self.counters()["takeovers"]

    def counters(self) -> dict[str, int]:
        """Since the mount was made: requests by kind, "bytes_read" and "bytes_written" by the channel itself (not by
        passthrough), "resent" requests, "takeovers"."""
        numbers = (ctypes.c_uint64 * (_OP_MAX + 3))()
        self._c.tierfs_channel_counters(numbers)
        counted = {OPCODES.get(op, f"opcode_{op}"): numbers[op] for op in range(_OP_MAX) if numbers[op]}
        state = (ctypes.c_uint32 * 7)()
        self._c.tierfs_channel_info(state, ctypes.create_string_buffer(200))
        return counted | {
            "bytes_read": numbers[_OP_MAX],
            "bytes_written": numbers[_OP_MAX + 1],
            "resent": numbers[_OP_MAX + 2],
            "takeovers": state[5],
        }


def _load() -> ctypes.PyDLL:
    """The shim, before libfuse in the global scope. PyDLL: the calls are short, giving up the GIL would cost more."""
    found = importlib.util.find_spec("mount._channel")
    if found is None or found.origin is None:
        raise MountError("the compiled part of the kernel channel is missing; install with `pip install .`")
    library = ctypes.PyDLL(found.origin, mode=ctypes.RTLD_GLOBAL)
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    signatures: dict[str, tuple[list[type], type | None]] = {
        "open": ([ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int], ctypes.c_int),
        "start": ([ctypes.c_int], ctypes.c_int),
        "attach": ([u64, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_int),
        "fd": ([u64], ctypes.c_int),
        "handles": ([u64], u64),
        "row": ([u32, pointer, pointer, pointer, pointer], u32),
        "resent": ([u32, u64], ctypes.c_int),
        "info": ([pointer, pointer], None),
        "counters": ([pointer], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, f"tierfs_channel_{name}")
        function.argtypes, function.restype = arguments, result
    return library
