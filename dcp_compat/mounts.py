"""What can be asked of a directory of the mount: its state, its level, and the wishes it takes (docs/semantics.md).

All of it goes by extended attributes, so it works wherever the mount is seen, in a container too. On any other file
system every answer is "unknown" and no wish is made: scripts run on a laptop's disk as well.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

log = logging.getLogger("tierfs.dcp")

LEVELS = ("ram", "replica", "object")
_ABSENT = (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS, errno.ENOENT, errno.ENOTDIR)
_FUSE_SUPER_MAGIC = 0x65735546  # include/uapi/linux/magic.h


def attribute(path: Path, name: str) -> str:
    """The value of `user.tierfs.NAME`; "" where there is none, as on other file systems. OSError."""
    try:
        return os.getxattr(path, f"user.tierfs.{name}").decode()
    except OSError as error:
        if error.errno in _ABSENT:
            return ""
        raise


def is_tierfs(path: Path) -> bool:
    """True for what is there and on a tierfs mount."""
    return attribute(path, "tier") != ""


def reaches(level: str, wanted: str) -> bool:
    """True where a step of this level is as durable as `wanted`. ValueError for what is no level."""
    if wanted not in LEVELS:
        raise ValueError(f"{wanted!r} is no level; there are {', '.join(LEVELS)}")
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(wanted)


def wish(step: Path, name: str, value: str) -> bool:
    """Asks for something for one step. False, and a line in the log, where this mount can't do it. OSError."""
    try:
        os.setxattr(step, f"user.tierfs.{name}", value.encode())
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        log.warning(
            "%s: %s = %s is not to be had here; the step stays in RAM and where the settings put it", step, name, value
        )
        return False
    return True


def tell_size(fd: int, size_bytes: int) -> None:
    """The file that is open for writing will have this size: the mount makes room for it now. No error is one."""
    try:
        os.setxattr(fd, "user.tierfs.size", str(size_bytes).encode())
    except OSError as error:
        log.debug("no room was made ahead: %s", error)
