"""The version of a sealed file, as an attribute of its inode: `NODE/TOKEN`, new for each seal after writing.

It survives renames, hard links and the daemon, and only what is whole carries it: while a file is a stub, or is being
written, it has none that counts. Root uses `trusted.tierfs.version`; others have `user.tierfs.version`. Neither can be
seen or set through the mount.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from tierfs.catalog.records import check_version
from tierfs.errors import RecordDamaged
from tierfs.hydrate.stubs import MarkDamaged, read_mark

ATTRIBUTES = ("trusted.tierfs.version", "user.tierfs.version")
_ABSENT = (errno.ENODATA, errno.ENOTSUP)


def attribute() -> str:
    """The attribute that this process sets."""
    return ATTRIBUTES[0] if os.geteuid() == 0 else ATTRIBUTES[1]


def new_version(node: str) -> str:
    return check_version(f"{node}/{uuid.uuid4().hex}")


def read_version(file: int | str | Path) -> str | None:
    """The version that a file has, by path (symbolic links are not followed) or descriptor; None for none.

    A damaged one counts as none: the bytes can't be named by it. OSError (FileNotFoundError).
    """
    for name in ATTRIBUTES:
        try:
            data = os.getxattr(file, name) if isinstance(file, int) else os.getxattr(file, name, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise
        with contextlib.suppress(RecordDamaged):
            return check_version(os.fsdecode(data))
        return None
    return None


def whole_version(file: int | str | Path) -> str | None:
    """The same where the file has all of its bytes; None for a stub. OSError."""
    version = read_version(file)
    if version is None:
        return None
    try:
        return version if read_mark(file) is None else None
    except MarkDamaged:
        return None


def write_version(file: int | Path, version: str) -> None:
    """OSError; for a path that is a symbolic link too."""
    data = os.fsencode(check_version(version))
    if isinstance(file, int):
        os.setxattr(file, attribute(), data)
        return
    with _writable(file):
        os.setxattr(file, attribute(), data, follow_symlinks=False)


def remove_version(file: Path) -> None:
    """None there is no error. OSError."""
    with _writable(file):
        for name in ATTRIBUTES:
            try:
                os.removexattr(file, name, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (*_ABSENT, errno.EPERM):
                    raise


def open_for_reading(path: Path) -> int:
    """A descriptor of a regular file, also where its mode lets nobody read. OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except PermissionError:
        with _writable(path):
            fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return fd


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Who is not root may not mark a file that its owner may not write: the owner changes that for a moment."""
    mode = 0
    if os.geteuid() != 0:
        info = path.lstat()
        if stat.S_ISREG(info.st_mode) and info.st_mode & 0o600 != 0o600:
            mode = stat.S_IMODE(info.st_mode)
            path.chmod(mode | 0o600)
    try:
        yield
    finally:
        if mode:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)


def files_below(top: Path) -> Iterator[Path]:
    """The regular files below; symbolic links are not followed. Nothing there is fine."""
    pending = [str(top)]
    while pending:
        directory = pending.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)
