"""Room for the tier's own books: manifests, journals and notes are written also when data has filled the tier.

They lie in the same tmpfs as the data, and the kernel lets programs fill it to the last page. What then could not be
noted could not be done either: not even a file could be removed, which is what a full tier needs. So the limit is
raised by what is written; the ballast's keeper sets it right again, to the size or to what is used, within seconds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tierfs.ram.tmpfs import is_tmpfs_mount, resize_tmpfs

T = TypeVar("T")
#: Beside the bytes themselves: a last page, a directory's, and what a program that writes meanwhile may take.
_MARGIN_BYTES = 128 << 10
#: A program that writes at full speed may be faster than we are: twice the margin each time, 32 MiB at last.
_TRIES = 9


def with_room(path: Path, size_bytes: int, write: Callable[[], T]) -> T:
    """What `write` returns, which writes so many bytes at `path` or leaves all as it was (ENOSPC). With a plain
    directory as the tier, or without root, the error stays."""
    for attempt in range(_TRIES):
        try:
            return write()
        except OSError as error:
            if error.errno != errno.ENOSPC or not _widen(path, 2 * size_bytes + (_MARGIN_BYTES << attempt)):
                raise
    return write()


def _widen(path: Path, by_bytes: int) -> bool:
    """False where the limit is not ours."""
    try:
        mount = _mount_of(path)
        if not (mount / "ballast").is_file() or not is_tmpfs_mount(mount):
            return False
        statistics = os.statvfs(mount)
        used = (statistics.f_blocks - statistics.f_bfree) * statistics.f_frsize
        resize_tmpfs(mount, max(used, statistics.f_blocks * statistics.f_frsize) + by_bytes)
    except OSError:
        return False
    return True


def _mount_of(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    device = path.lstat().st_dev
    while path.parent != path and path.parent.lstat().st_dev == device:
        path = path.parent
    return path
