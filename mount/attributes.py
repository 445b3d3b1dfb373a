"""What the kernel is told of a file and of the whole file system, in pyfuse3's words, and what it has set."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pyfuse3

from mount import syscalls

if TYPE_CHECKING:
    from tierfs.ram.tier import RamUsage

# All changes go through this mount, and what the daemon changes itself it invalidates.
ENTRY_TIMEOUT_S = 60.0
ATTR_TIMEOUT_S = 60.0
# Stores through a shared mapping reach the backing file unseen and move its mtime.
GROWING_ATTR_TIMEOUT_S = 1.0
# tmpfs with huge pages says 2 MiB, which Python takes as the size of its buffers; see docs/semantics.md.
BLOCK_SIZE_BYTES = 64 << 10
STATFS_BLOCK_BYTES = 4096
NAME_MAX = 255


def entry_of(
    st: os.stat_result, nodeid: int, *, links: int, mtime_ns: int, is_growing: bool
) -> pyfuse3.EntryAttributes:
    """The attributes of a backing file; those given by name differ from what `st` says, or may."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = nodeid
    entry.generation = 0
    entry.entry_timeout = ENTRY_TIMEOUT_S
    entry.attr_timeout = GROWING_ATTR_TIMEOUT_S if is_growing else ATTR_TIMEOUT_S
    entry.st_mode = st.st_mode
    entry.st_nlink = links
    entry.st_uid = st.st_uid
    entry.st_gid = st.st_gid
    entry.st_rdev = st.st_rdev
    entry.st_size = st.st_size
    entry.st_blksize = BLOCK_SIZE_BYTES
    entry.st_blocks = st.st_blocks
    entry.st_atime_ns = st.st_atime_ns
    entry.st_mtime_ns = mtime_ns
    entry.st_ctime_ns = st.st_ctime_ns
    return entry


def statfs_of(usage: RamUsage) -> pyfuse3.StatvfsData:
    answer = pyfuse3.StatvfsData()
    answer.f_bsize = BLOCK_SIZE_BYTES
    answer.f_frsize = STATFS_BLOCK_BYTES
    answer.f_blocks = usage.size_bytes // STATFS_BLOCK_BYTES
    answer.f_bfree = answer.f_bavail = usage.free_bytes // STATFS_BLOCK_BYTES
    answer.f_files = usage.files + usage.files_free
    answer.f_ffree = answer.f_favail = usage.files_free
    answer.f_namemax = NAME_MAX
    return answer


def set_owner_and_mode(path: str, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
    """Of what is at `path`, those that the request names. OSError."""
    if fields.update_uid or fields.update_gid:
        os.chown(path, attr.st_uid if fields.update_uid else -1, attr.st_gid if fields.update_gid else -1)
    if fields.update_mode:
        os.chmod(path, stat.S_IMODE(attr.st_mode))  # noqa: PTH101


def set_times(path: str, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields) -> None:
    """The same of its times."""
    syscalls.set_times(
        path.encode(),
        attr.st_atime_ns if fields.update_atime else None,
        attr.st_mtime_ns if fields.update_mtime else None,
    )
