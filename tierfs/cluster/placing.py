"""Making and removing names in this node's tree for what the catalogue says, so that nothing outside can be touched.

A path from the catalogue is walked component by component from the tree's root, and a symbolic link on the way, or
a file in the place of a directory, ends it: NotADirectoryError. Everything is done relative to a descriptor of the last
directory. All of it is short and blocking, and used from the trio thread, where programs' requests are served: what is
looked at stays so until the next await.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierfs.catalog.records import TreeRecord
from tierfs.errors import PathRefused
from tierfs.ram import syscalls
from tierfs.steps.names import safe_relative

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def parent_of(root: Path, rel: str) -> Iterator[tuple[int, str]]:
    """(descriptor of the directory, name in it). PathRefused, FileNotFoundError, NotADirectoryError."""
    *directories, name = safe_relative(_encodable(rel)).split("/")
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in directories:
            inner = os.open(each, _STEP, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


def look(root: Path, rel: str) -> os.stat_result | None:
    """What has the name; None for nothing (also where a directory of the path is missing). NotADirectoryError."""
    try:
        with parent_of(root, rel) as (directory, name):
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def make_directory(root: Path, rel: str, like: TreeRecord | None = None) -> bool:
    """True when it was made; False for a directory that is there. FileExistsError for anything else of that name."""
    with parent_of(root, rel) as (directory, name):
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise
            return False
    if like is not None:
        make_like(root, rel, like)
    return True


def make_like(root: Path, rel: str, like: TreeRecord) -> bool:
    """Give a directory that is there the owner, mode and time of the record; True when it had others."""
    with parent_of(root, rel) as (directory, name):
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        info = os.fstat(fd)
        same = (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (like.uid, like.gid, like.mode)
        _own(fd, like.uid, like.gid, info)
        if stat.S_IMODE(info.st_mode) & 0o777 != like.mode:
            os.fchmod(fd, like.mode | (stat.S_IMODE(info.st_mode) & ~0o777))
        if like.mtime_ns:
            os.utime(fd, ns=(info.st_atime_ns, like.mtime_ns))
        return not same
    finally:
        os.close(fd)


def make_link(root: Path, rel: str, like: TreeRecord) -> None:
    """FileExistsError for anything there already."""
    _encodable(like.target)
    with parent_of(root, rel) as (directory, name):
        os.symlink(like.target, name, dir_fd=directory)
        with contextlib.suppress(PermissionError):
            os.chown(name, like.uid, like.gid, dir_fd=directory, follow_symlinks=False)


def read_link(root: Path, rel: str) -> str | None:
    """None for what is no symbolic link."""
    try:
        with parent_of(root, rel) as (directory, name):
            return os.readlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def put(root: Path, rel: str, scratch: Path, *, mtime_ns: int) -> None:
    """Give the finished file `scratch` the name, in place of a file of it. The directory gets no older, nor the age
    of now: it changed when the file was written. IsADirectoryError."""
    with parent_of(root, rel) as (directory, name), _not_later_than(directory, mtime_ns):
        os.rename(scratch, name, dst_dir_fd=directory)


def remove_file(root: Path, rel: str) -> None:
    """FileNotFoundError, IsADirectoryError."""
    with parent_of(root, rel) as (directory, name):
        os.unlink(name, dir_fd=directory)


def remove_directory(root: Path, rel: str) -> None:
    """OSError (ENOTEMPTY)."""
    with parent_of(root, rel) as (directory, name):
        os.rmdir(name, dir_fd=directory)


def rename(root: Path, old: str, new: str) -> None:
    """Nothing is replaced: FileExistsError."""
    with parent_of(root, old) as (old_directory, old_name), parent_of(root, new) as (new_directory, new_name):
        try:
            os.stat(new_name, dir_fd=new_directory, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(old_name, new_name, src_dir_fd=old_directory, dst_dir_fd=new_directory)
            return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)


def exchange(root: Path, rel: str, other: Path) -> None:
    """The name and `other` change places at once (renameat2)."""
    with parent_of(root, rel) as (directory, name):
        syscalls.exchange(directory, name, other)


def _encodable(path: str) -> str:
    """A text of the catalogue may hold what no file name can. PathRefused."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise PathRefused(f"{path!r} can't be encoded as a file name") from None
    if "\0" in path:
        raise PathRefused(f"{path!r} holds a NUL byte")
    return path


def _own(fd: int, uid: int, gid: int, info: os.stat_result) -> None:
    if (info.st_uid, info.st_gid) != (uid, gid):
        with contextlib.suppress(PermissionError):  # who is not root can't give away
            os.fchown(fd, uid, gid)


@contextmanager
def _not_later_than(directory: int, mtime_ns: int) -> Iterator[None]:
    path = f"/proc/self/fd/{directory}"  # an O_PATH descriptor takes no futimens
    before = os.stat(path)
    try:
        yield
    finally:
        os.utime(path, ns=(before.st_atime_ns, max(before.st_mtime_ns, mtime_ns)))
