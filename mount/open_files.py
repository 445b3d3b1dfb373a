"""The files that programs have open: their backing descriptors, which of them grow, and when their room is freed.

The channel counts the handles and keeps the descriptor; this decides what that means. A file's room is free the
moment it has neither a name nor a handle, and freeing much of it is done in a thread, since it takes milliseconds.

With passthrough the kernel itself holds what is open, so an open file that lost its name outlives the daemon. Without,
it would die with the daemon's descriptor; it gets a name that nobody sees, in `unlinked/` of the tier, until it is
closed.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio

from mount import syscalls
from mount.nodes import Node, NodeTable

if TYPE_CHECKING:
    from mount.channel import Channel
    from mount.stub_files import StubFiles
    from tierfs.ram.tier import RamTier

# The kernel frees some 10 GB/s of huge pages: this much takes about 10 ms.
FREE_IN_THREAD_BYTES = 64 << 20
# A program may have looked a name up, and open it only after another file took its place. A replaced file this small
# stays until the kernel forgets it, a moment later, and is opened as on any file system. A larger one is gone when
# unlink or rename returns: the open gets ESTALE and the kernel looks again; who loses this race twice sees it.
FORGOTTEN_SOON_BYTES = 1 << 20


def is_writing(flags: int) -> bool:
    """Whether an open with these flags makes a writer."""
    return flags & os.O_ACCMODE != os.O_RDONLY


class OpenFiles:
    """The open files of one mount. Handlers call it from the trio thread."""

    def __init__(self, nodes: NodeTable, channel: Channel, tier: RamTier, log: logging.Logger) -> None:
        self._nodes = nodes
        self._channel = channel
        self._tier = tier
        self._log = log
        self._threads = trio.CapacityLimiter(4)
        self.growing: set[int] = set()
        self._unlinked = tier.path / "unlinked"
        self._unlinked.mkdir(mode=0o700, exist_ok=True)
        self._kept: set[int] = set()
        #: Inodes that were opened as stubs: the kernel has no passthrough for them until they are closed.
        self.direct: set[int] = set()
        for left in self._unlinked.iterdir():
            # Our names are numbers; whatever else somebody put there must not keep a daemon from starting.
            if left.name.isdecimal() and channel.handles(int(left.name)).opens:
                self._kept.add(int(left.name))
            else:
                with suppress(IsADirectoryError):
                    left.unlink()

    def resume(self, stubs: StubFiles) -> None:
        """After a takeover, before the first request: attach again what programs have open, but stubs."""
        for nodeid, handle, handles in self._channel.open_nodes():
            if not handle and handles.opens:
                self.direct.add(nodeid)
            if stubs.is_stub(nodeid):
                stubs.resumed(nodeid)
                continue
            fd = self._reopen(nodeid, handle)
            if fd < 0:
                self._log.error("a file that a program has open (inode %d) is gone from the RAM tier", nodeid)
                continue
            try:
                self._channel.attach(nodeid, fd, handle)
                if handles.writers:
                    self.begin_writing(nodeid, fd, None)
            finally:
                os.close(fd)

    def open_backing(self, nodeid: int, flags: int) -> int:
        """A descriptor for reading and writing where the daemon may, else as `flags` say; the caller closes it."""
        fd = self._attached(nodeid)
        if fd >= 0:
            return fd
        path = self._nodes.proc(nodeid)
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            if flags & os.O_ACCMODE == os.O_RDWR:
                raise
            return os.open(path, (flags & os.O_ACCMODE) | os.O_CLOEXEC)

    def stat(self, nodeid: int) -> os.stat_result:
        """The attributes of the backing file, whether it is open, nameless or neither."""
        fd = self._attached(nodeid)
        if fd < 0:
            return self._nodes.stat(nodeid)
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _attached(self, nodeid: int) -> int:
        """A descriptor of our own of a file that programs have open, else -1.

        The channel's thread closes its descriptor when the last handle is released, also between two lines here, and
        the number may be another file's by then.
        """
        theirs = self._channel.fd(nodeid)
        if theirs is None:
            return -1
        try:
            fd = os.dup(theirs)
        except OSError:
            return -1
        if os.fstat(fd).st_ino == nodeid:
            return fd
        os.close(fd)
        return -1

    @contextmanager
    def backing(self, nodeid: int) -> Iterator[int]:
        """A descriptor for writing, for the time of the block."""
        fd = self.open_backing(nodeid, os.O_RDWR)
        try:
            yield fd
        finally:
            os.close(fd)

    def attach(self, nodeid: int, fd: int) -> None:
        """Tell the channel which file is behind the open that is being answered."""
        try:
            handle = syscalls.name_to_handle(fd)
        except OSError:
            handle = b""  # a file system without handles: an unlinked open file does not survive a takeover
        self._channel.attach(nodeid, fd, handle)

    def begin_writing(self, nodeid: int, fd: int, expected_bytes: int | None, *, likely_large: bool = False) -> None:
        """A writer opens the file; its shard grows from now until the last writer is gone."""
        if nodeid not in self.growing:
            self._tier.begin_shard(nodeid, fd, expected_bytes, likely_large=likely_large)
            self.growing.add(nodeid)

    def ended_writing(self, nodeid: int) -> bool:
        """A handle was released. True when it was the last of the file's writers, whose shard has ended."""
        if self._channel.handles(nodeid).writers:
            return False
        # A writer that closed while the daemon was being replaced is not counted any more: its release tells.
        if nodeid not in self.growing and not self._channel.resent("release", nodeid):
            return False
        self.growing.discard(nodeid)
        self._tier.end_shard(nodeid)
        return True

    async def truncate(self, nodeid: int, size: int, *, privileged: bool) -> None:
        """Set the size. An unprivileged caller takes set-user-ID and set-group-ID bits away, as with any change."""
        fd = self.open_backing(nodeid, os.O_WRONLY)
        try:
            st = os.fstat(fd)
            if st.st_blocks * 512 - size > FREE_IN_THREAD_BYTES:
                await trio.to_thread.run_sync(os.ftruncate, fd, size, limiter=self._threads)
            else:
                os.ftruncate(fd, size)
            if st.st_mode & (stat.S_ISUID | stat.S_ISGID) and not privileged:
                os.fchmod(fd, _without_privileges(st.st_mode))
        finally:
            os.close(fd)
        if size < st.st_size:
            self._tier.released_room()

    def links(self, st: os.stat_result) -> int:
        """How many names a program can see."""
        return st.st_nlink - (st.st_ino in self._kept)

    def keep(self, victim: Node | None) -> None:
        """`victim` is about to lose a name. If it was the last and the file is open, it must outlive this process."""
        if victim is None or victim.nodeid in self._kept or not self._channel.handles(victim.nodeid).opens:
            return
        is_held = self._channel.info().passthrough and victim.nodeid not in self.direct  # by the kernel itself
        if not is_held and self._nodes.stat(victim.nodeid).st_nlink == 1:
            # With a directory descriptor it is linkat(2), which follows /proc/self/fd.
            os.link(self._nodes.proc(victim.nodeid), f"unlinked/{victim.nodeid}", dst_dir_fd=self._nodes.mount_fd)
            self._kept.add(victim.nodeid)

    async def free(self, nodeid: int) -> None:
        """Free the room of a file that lost its last name, unless a program has it open."""
        if self._channel.handles(nodeid).opens:
            return
        self.direct.discard(nodeid)
        if nodeid in self._kept:
            self._kept.discard(nodeid)
            with suppress(OSError):
                self._nodes.fd(nodeid)
            (self._unlinked / str(nodeid)).unlink(missing_ok=True)
            self._nodes.check_name(nodeid)
        if not self._nodes.is_nameless(nodeid) or self._is_small(nodeid):
            return
        fd = self._nodes.let_go(nodeid)
        if fd >= 0:
            await self.close(fd)

    def _is_small(self, nodeid: int) -> bool:
        st = self._nodes.stat(nodeid)
        return stat.S_ISREG(st.st_mode) and st.st_blocks * 512 <= FORGOTTEN_SOON_BYTES

    async def close(self, fd: int) -> None:
        """Close a descriptor that may be the last thing that holds a large file."""
        st = os.fstat(fd)
        if st.st_nlink or not stat.S_ISREG(st.st_mode):
            os.close(fd)
            return
        if st.st_blocks * 512 > FREE_IN_THREAD_BYTES:
            await trio.to_thread.run_sync(os.close, fd, limiter=self._threads)
        else:
            os.close(fd)
        self._tier.released_room()

    def _reopen(self, nodeid: int, handle: bytes) -> int:
        """Open what was open before a takeover: by name, or by handle if it has none. -1 when it is gone."""
        try:
            return self.open_backing(nodeid, os.O_RDONLY)
        except OSError:
            pass
        try:
            fd = syscalls.open_by_handle(self._nodes.mount_fd, handle, os.O_RDWR)
        except OSError:
            return -1
        if os.fstat(fd).st_ino != nodeid:
            os.close(fd)
            return -1
        self._nodes.adopt(nodeid, os.open(f"/proc/self/fd/{fd}", os.O_PATH | os.O_CLOEXEC))
        return fd


def _without_privileges(mode: int) -> int:
    """The mode after a change by somebody without CAP_FSETID: no set-user-ID, set-group-ID only as a lock mark."""
    mode = stat.S_IMODE(mode) & ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode
