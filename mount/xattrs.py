"""Which extended attributes a program sees, and which it may set.

user.tierfs.*             made up from the state of steps; a few take wishes (mount/wishes.py)
user.*                    kept with the backing file
system.posix_acl_access   a list that says no more than the mode bits is accepted and sets them
system.posix_acl_default  none, and removing it succeeds in finding none
trusted.*, security.*     not shown: the tier keeps its own records there
"""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pyfuse3

from mount.nodes import NodeTable

VIRTUAL = b"user.tierfs."
_ACL_ACCESS = b"system.posix_acl_access"
# include/uapi/linux/posix_acl_xattr.h: a version (2), then entries of tag, permissions, id.
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_VERSION = 2
_ACL_SHIFT = {0x01: 6, 0x04: 3, 0x20: 0}  # ACL_USER_OBJ, ACL_GROUP_OBJ, ACL_OTHER


def is_virtual(name: bytes) -> bool:
    return name.startswith(VIRTUAL)


def get(nodes: NodeTable, nodeid: int, name: bytes) -> bytes:
    """The value kept with the backing file.

    Names that are never shown are refused before anything is opened: the kernel asks for security.capability often.
    """
    _refuse_unseen(name)
    return os.getxattr(nodes.proc(nodeid), name)


def names(nodes: NodeTable, nodeid: int) -> list[bytes]:
    """The names to list. The virtual ones are not among them: cp, rsync and tar would copy them, and fail."""
    listed = map(os.fsencode, os.listxattr(nodes.proc(nodeid)))
    return [name for name in listed if name.startswith(b"user.") and not is_virtual(name)]


def put(nodes: NodeTable, nodeid: int, name: bytes, value: bytes) -> None:
    if name == _ACL_ACCESS:
        mode = _mode_of_acl(value) | (nodes.stat(nodeid).st_mode & 0o7000)
        Path(nodes.proc(nodeid)).chmod(mode)
        return
    if not name.startswith(b"user."):
        raise pyfuse3.FUSEError(errno.ENOTSUP)
    os.setxattr(nodes.proc(nodeid), name, value)


def remove(nodes: NodeTable, nodeid: int, name: bytes) -> None:
    if is_virtual(name):
        raise pyfuse3.FUSEError(errno.EPERM)
    if not name.startswith(b"user."):
        raise pyfuse3.FUSEError(errno.ENODATA)
    os.removexattr(nodes.proc(nodeid), name)


def _refuse_unseen(name: bytes) -> None:
    if name.startswith(b"user."):
        return
    raise pyfuse3.FUSEError(errno.ENOTSUP if name.startswith(b"system.") else errno.ENODATA)


def _mode_of_acl(value: bytes) -> int:
    """The permission bits of a list that has only the three entries every file has. ENOTSUP for any other."""
    if len(value) != _ACL_HEADER.size + 3 * _ACL_ENTRY.size or _ACL_HEADER.unpack_from(value)[0] != _ACL_VERSION:
        raise pyfuse3.FUSEError(errno.ENOTSUP)
    mode = 0
    for tag, permissions, _ in _ACL_ENTRY.iter_unpack(value[_ACL_HEADER.size :]):
        if tag not in _ACL_SHIFT:
            raise pyfuse3.FUSEError(errno.ENOTSUP)
        mode |= (permissions & 7) << _ACL_SHIFT[tag]
    return mode
