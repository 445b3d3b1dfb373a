"""Requests that the kernel sends again after the daemon was replaced, and how to tell that they were already done.

The dead daemon may have made the directory and died before it said so. Its successor finds the name taken, or the
source of a rename gone: where the channel says that just this kind of request was sent again, that is success.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from mount import syscalls
from mount.nodes import NodeTable

if TYPE_CHECKING:
    from mount.channel import Channel

_EXCHANGED = "trusted.tierfs.exchange"


class Replays:
    """Answers "was this my own work?" for one mount. Operations are named as the channel names them."""

    def __init__(self, nodes: NodeTable, channel: Channel) -> None:
        self._nodes = nodes
        self._channel = channel

    def resent(self, operation: str, nodeid: int) -> bool:
        return self._channel.resent(operation, nodeid)

    def must_be_own(self, operation: str, directory: int, name: bytes, kind: int | None) -> None:
        """The name is taken. Returns if this request took it when it came first; else FileExistsError."""
        if self.resent(operation, directory):
            st = os.stat(name, dir_fd=self._nodes.fd(directory), follow_symlinks=False)
            if kind is None or stat.S_IFMT(st.st_mode) == kind:
                return
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def open_own_creation(self, directory: int, name: bytes, flags: int) -> int:
        """CREATE found its name taken: by itself when it came first, or by somebody whom the kernel did not see."""
        if self.resent("create", directory):
            return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._nodes.fd(directory))
        # ESTALE makes the kernel look the name up and open it, with the checks that belong to an open.
        number = errno.EEXIST if flags & os.O_EXCL else errno.ESTALE
        raise OSError(number, os.strerror(number))

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> None:
        """renameat2(2), so that `was_renamed` can tell afterwards."""
        old_fd, new_fd = self._nodes.fd(old_dir), self._nodes.fd(new_dir)
        if not flags & syscalls.RENAME_EXCHANGE:
            syscalls.rename_at(old_fd, old, new_fd, new, flags)
            return
        # Done twice it would be undone, so the one that moves to `new` carries a mark until it is answered.
        source = os.open(old, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=old_fd)
        try:
            path = f"/proc/self/fd/{source}"
            with suppress(OSError):
                os.setxattr(path, _EXCHANGED, _mark(new_dir, new))
            try:
                syscalls.rename_at(old_fd, old, new_fd, new, flags)
            except OSError:
                with suppress(OSError):
                    os.removexattr(path, _EXCHANGED)
                raise
        finally:
            os.close(source)

    def forget_exchange(self, directory: int, name: bytes) -> None:
        """The exchange that brought `name` here is about to be answered."""
        target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._nodes.fd(directory))
        try:
            with suppress(OSError):
                os.removexattr(f"/proc/self/fd/{target}", _EXCHANGED)
        finally:
            os.close(target)

    def was_renamed(self, old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> bool:
        """Whether this rename was sent again and had done its work when it came first."""
        if not self.resent("rename2" if flags else "rename", old_dir):
            return False
        new_fd = self._nodes.fd(new_dir)
        try:
            target = os.open(new, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=new_fd)
        except FileNotFoundError:
            return False
        try:
            if flags & syscalls.RENAME_EXCHANGE:
                with suppress(OSError):
                    return os.getxattr(f"/proc/self/fd/{target}", _EXCHANGED) == _mark(new_dir, new)
                return False
            return not _exists(self._nodes.fd(old_dir), old)
        finally:
            os.close(target)


def _mark(directory: int, name: bytes) -> bytes:
    return b"%d %s" % (directory, name)


def _exists(directory_fd: int, name: bytes) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
