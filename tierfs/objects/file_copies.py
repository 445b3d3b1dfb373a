"""One file's bytes to another on this host, without passing through this process: shared on disk where the file system
can do that (Btrfs, XFS), else copied by the kernel or by the file server."""

from __future__ import annotations

import errno
import os

from tierfs.errors import ObjectCorrupt
from tierfs.objects.store import MIB, Flow

#: Between two looks at whether to stop.
PIECE_BYTES = 16 * MIB
#: copy_file_range(2) says these where it can't do it between these two file systems.
_CANT = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def copy_file(source: int, target: int, size_bytes: int, flow: Flow) -> None:
    """All bytes of `source` to `target`, which is empty. OSError; ObjectCorrupt where there are fewer."""
    at, by_range = 0, True
    while at < size_bytes:
        piece = min(PIECE_BYTES, size_bytes - at)
        flow.passing(piece)
        if by_range:
            try:
                copied = os.copy_file_range(source, target, piece, at, at)
            except OSError as error:
                if error.errno not in _CANT:
                    raise
                by_range = False
                os.lseek(target, at, os.SEEK_SET)
                continue
        else:
            copied = os.sendfile(target, source, at, piece)
        if not copied:
            raise ObjectCorrupt(f"a file ended after {at} of {size_bytes} bytes while it was copied")
        at += copied
