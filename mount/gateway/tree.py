"""Files of the mount for a process that serves strangers: no link is followed, and never a path below a mere directory.

Every call takes the mount's root anew, so nothing keeps the mount busy between requests, and walks to its file by
descriptors. Once the mount is gone, or another one is in its place, all of them fail with `Unmounted` instead of
writing to the disk that lies below. Blocking: for threads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierfs.errors import MountError
from tierfs.steps.names import safe_relative

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Unmounted(MountError):
    """The mount that this process was started for is not there."""


class Tree:
    """The mount at `mountpoint`, as it is now: it must be mounted when this is made. MountError."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        try:
            self._device = os.stat(mountpoint).st_dev
            is_mounted = self._device != os.stat(mountpoint.parent).st_dev
        except OSError as error:
            raise Unmounted(f"{mountpoint} can't be read: {error.strerror}") from None
        if not is_mounted:
            raise Unmounted(f"nothing is mounted on {mountpoint}")

    def check(self) -> None:
        """Raises Unmounted unless the mount answers."""
        with self._root():
            pass

    def capacity_bytes(self) -> int:
        """What the mount could hold were it empty."""
        with self._root() as root:
            found = os.statvfs(root)
        return found.f_blocks * found.f_frsize

    @contextmanager
    def directory(self, rel: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of the directory at the relative path, "" for the root. OSError, Unmounted, PathRefused."""
        names = safe_relative(rel).split("/") if rel else []
        with self._root() as root:
            fd = os.dup(root)
            try:
                for name in names:
                    inside = _enter(fd, name, make=make)
                    os.close(fd)
                    fd = inside
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def file(self, rel: str, flags: int) -> Iterator[int]:
        """A descriptor of the regular file there. Its directories are made where it may be created."""
        parent, _, name = safe_relative(rel).rpartition("/")
        with self.directory(parent, make=bool(flags & os.O_CREAT)) as directory:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(f"{rel} is no regular file")
            yield fd
        finally:
            os.close(fd)

    def read(self, rel: str, most_bytes: int) -> bytes:
        """The whole of a small file. OSError, also where it is larger than that."""
        with self.file(rel, os.O_RDONLY) as fd:
            pieces, left = [], most_bytes + 1
            while left > 0 and (piece := os.read(fd, min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
        if left <= 0:
            raise OSError(f"{rel} has more than {most_bytes} bytes")
        return b"".join(pieces)

    def write_whole(self, rel: str, data: bytes) -> None:
        """Replaces the file by a rename: who reads it sees the old one or the new one."""
        scratch = f"{rel}.tmp"
        with self.file(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            write_all(fd, data)
        self.rename(scratch, rel)

    def rename(self, old: str, new: str) -> None:
        """Within one directory. A rename that failed leaves nothing under the old name."""
        parent, _, name = safe_relative(new).rpartition("/")
        with self.directory(parent) as directory:
            before = old.rpartition("/")[2]
            try:
                os.rename(before, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with suppress(OSError):
                    os.unlink(before, dir_fd=directory)
                raise

    def unlink(self, rel: str) -> None:
        parent, _, name = safe_relative(rel).rpartition("/")
        with self.directory(parent) as directory:
            os.unlink(name, dir_fd=directory)

    def rmdir(self, rel: str) -> None:
        parent, _, name = safe_relative(rel).rpartition("/")
        with self.directory(parent) as directory:
            os.rmdir(name, dir_fd=directory)

    def size(self, rel: str) -> int | None:
        """Of the regular file there, in bytes; None where there is none."""
        parent, _, name = safe_relative(rel).rpartition("/")
        try:
            with self.directory(parent) as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def attribute(self, rel: str, name: str) -> str:
        """An extended attribute of the directory; "" where it has none. OSError."""
        with self.directory(rel) as directory:
            try:
                return os.getxattr(directory, name).decode("ascii", "replace")
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
                return ""

    def set_attribute(self, rel: str, name: str, value: str) -> None:
        """OSError."""
        with self.directory(rel) as directory:
            os.setxattr(directory, name, value.encode())

    def directories(self, rel: str) -> list[str]:
        """The names of the directories in it, in no order; links are none. [] where there is no such directory."""
        try:
            with self.directory(rel) as directory, os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            fd = os.open(self.mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unmounted(f"{self.mountpoint} is not mounted any more: {error.strerror}") from None
        try:
            if os.fstat(fd).st_dev != self._device:
                raise Unmounted(f"{self.mountpoint} is not mounted any more")
            yield fd
        finally:
            os.close(fd)


def _enter(fd: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, 0o777, dir_fd=fd)
    return os.open(name, _DIRECTORY, dir_fd=fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
