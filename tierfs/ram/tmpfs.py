"""The tmpfs behind the RAM tier: mount it, ask what it is, change its limit, unmount it.

Options that an older kernel does not know are left out one by one, and the grant says which. What each is for:

huge=     2 MiB pages: a write is several times faster, and memory registration for RDMA smaller by 512.
          `always` gives even a file of 10 KiB a whole huge page until it is closed and trimmed, and clears that page
          at the first byte. `within_size` gives huge pages only where they will be filled. The kernel must count
          fallocate beyond the end of a file as `filled` for that to serve preallocation; older ones look at the
          file's size alone. `auto` tries, and chooses `within_size` where it works, else `always`.
noswap    Linux 6.4: the pages never go to swap.
inode64   inode numbers are never used twice. Node ids are inode numbers, so without it a stale handle could, after
          2^32 files, meet another file.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierfs.errors import MountError
from tierfs.ram import syscalls
from tierfs.ram.memory import total_memory_bytes

__all__ = [
    "HUGE_PAGE",
    "TmpfsGrant",
    "is_tmpfs_mount",
    "mount_tmpfs",
    "read_grant",
    "resize_tmpfs",
    "total_memory_bytes",
    "unmount_tmpfs",
]

HUGE_PAGE = 2 << 20
_RESIZE_TRIES = 10
_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV
_THP_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_WHY = {
    "noswap": "noswap was refused (Linux 6.4 or later has it): under memory pressure the tier can be swapped out",
    "huge": "huge pages were refused (the kernel lacks CONFIG_TRANSPARENT_HUGEPAGE): writes will be slower",
    "inode64": "inode64 was refused (Linux 5.9 or later has it): node ids may be used again after 2^32 files",
}


@dataclass(frozen=True)
class TmpfsGrant:
    """What a mounted tmpfs really has. `notes` are sentences about what was asked for and refused."""

    huge_pages: str
    noswap: bool
    inode64: bool
    size_bytes: int
    notes: tuple[str, ...] = ()


def mount_tmpfs(path: Path, size_bytes: int, *, huge_pages: str, noswap: bool) -> TmpfsGrant:
    """Mount a private tmpfs (mode 0700, nosuid, nodev) of `size_bytes` on an existing directory.

    `huge_pages` is auto or a value of tmpfs' own `huge=` option. Raises MountError when no set of options works,
    with EPERM's meaning spelt out.
    """
    wanted = {"huge": f"huge={'within_size' if huge_pages == 'auto' else huge_pages}", "inode64": "inode64"}
    if noswap:
        wanted["noswap"] = "noswap"
    dropped = _mount_with_fewest_drops(path, [f"size={size_bytes}", "mode=0700"], wanted)
    notes = tuple(_WHY[name] for name in dropped)
    if "huge" not in dropped and huge_pages != "never":
        notes += _settle_huge_pages(path, huge_pages)
    grant = read_grant(path)
    return TmpfsGrant(grant.huge_pages, grant.noswap, grant.inode64, grant.size_bytes, notes)


def read_grant(path: Path) -> TmpfsGrant:
    """What the tmpfs mounted at `path` has, as the kernel lists it. Raises MountError when there is none."""
    options = _tmpfs_options(path)
    if options is None:
        raise MountError(f"{path} is not a tmpfs mount point; mount the instance again to make one")
    statistics = os.statvfs(path)
    return TmpfsGrant(
        huge_pages=options.get("huge", "never"),
        noswap="noswap" in options,
        # Shown whenever it is on, default or not (shmem_show_options in mm/shmem.c).
        inode64="inode64" in options,
        size_bytes=statistics.f_blocks * statistics.f_frsize,
    )


def resize_tmpfs(path: Path, size_bytes: int) -> int:
    """Set the limit of a mounted tmpfs, or the least above it that what is in use now allows. Returns the limit set.

    Raises OSError when the kernel refuses for another reason than the use (EPERM without root).
    """
    limit = size_bytes
    for _ in range(_RESIZE_TRIES):
        try:
            _remount(path, f"size={limit}")
            return limit
        except OSError as error:
            statistics = os.statvfs(path)
            used = (statistics.f_blocks - statistics.f_bfree) * statistics.f_frsize
            if error.errno != errno.EINVAL or used <= limit:
                raise
            limit = used  # A writer may take more before the next try.
    return statistics.f_blocks * statistics.f_frsize


def _remount(path: Path, option: str) -> None:
    """Change one option. noswap must be repeated where it is on: leaving it out counts as a wish to end it, which tmpfs
    refuses. Kernels before 6.4 refuse it, with a line in the kernel's log each time."""
    repeated = ",noswap" if "noswap" in (_tmpfs_options(path) or {}) else ""
    syscalls.mount("tierfs", str(path), "tmpfs", syscalls.MS_REMOUNT | _FLAGS, option + repeated)


def unmount_tmpfs(path: Path) -> None:
    """Unmount; what was in it is gone. Raises MountError when something in it is open or a working directory."""
    try:
        syscalls.umount(str(path))
    except OSError as error:
        hint = "close what is open in it and try again" if error.errno == errno.EBUSY else "see `findmnt`"
        raise MountError(f"cannot unmount the RAM tier at {path}: {error.strerror}; {hint}") from error


def is_tmpfs_mount(path: Path) -> bool:
    """Whether `path` itself is the mount point of a tmpfs."""
    return _tmpfs_options(path) is not None


def _mount_with_fewest_drops(path: Path, fixed: list[str], wanted: dict[str, str]) -> tuple[str, ...]:
    last: OSError | None = None
    for count in range(len(wanted) + 1):
        for dropped in itertools.combinations(sorted(wanted), count):
            options = fixed + [text for name, text in wanted.items() if name not in dropped]
            try:
                syscalls.mount("tierfs", str(path), "tmpfs", _FLAGS, ",".join(options))
            except OSError as error:
                last = error
                if error.errno != errno.EINVAL:
                    raise _mount_failure(path, error) from error
            else:
                return dropped
    assert last is not None
    raise _mount_failure(path, last) from last


def _mount_failure(path: Path, error: OSError) -> MountError:
    hints = {
        errno.EPERM: "mounting needs root (CAP_SYS_ADMIN); without it the tier can be a plain directory",
        errno.ENOENT: "make the directory first",
        errno.EINVAL: "the kernel refused even the plain options; is the size sensible?",
    }
    hint = hints.get(error.errno or 0, "see the kernel log")
    return MountError(f"cannot mount the RAM tier at {path}: {error.strerror}; {hint}")


def _settle_huge_pages(path: Path, asked: str) -> tuple[str, ...]:
    """Try whether preallocation gets huge pages; with `auto`, move on to `always` when it does not."""
    if _preallocates_huge_pages(path):
        return ()
    if asked == "auto":
        _remount(path, "huge=always")
        if _preallocates_huge_pages(path):
            return ()
    switch = _THP_SWITCH.read_text(encoding="ascii") if _THP_SWITCH.exists() else ""
    why = f"{_THP_SWITCH} says deny" if "[deny]" in switch else f"huge={asked}"
    return (f"preallocated room gets no huge pages here ({why}): writes will be slower",)


def _preallocates_huge_pages(path: Path) -> bool:
    """Whether room given beyond the end of an empty file comes as huge pages.

    Pages given by fallocate hold no data until they are written, and a write of one byte clears the whole page it
    falls in. So SEEK_HOLE, after one byte, tells how large that page is.
    """
    with tempfile.TemporaryFile(dir=path) as probe:
        try:
            syscalls.fallocate(probe.fileno(), syscalls.FALLOC_FL_KEEP_SIZE, 0, 2 * HUGE_PAGE)
        except OSError:
            return True  # No room to try; nothing is known to be wrong.
        os.pwrite(probe.fileno(), b"\1", 0)
        os.ftruncate(probe.fileno(), 2 * HUGE_PAGE)
        return os.lseek(probe.fileno(), 0, os.SEEK_HOLE) >= HUGE_PAGE


def _tmpfs_options(path: Path) -> dict[str, str] | None:
    """Super block options of the topmost mount at `path` when it is a tmpfs (proc(5), /proc/pid/mountinfo)."""
    target = os.path.realpath(path)
    found: dict[str, str] | None = None
    for mount_point, kind, options in _mounts():
        if mount_point == target:
            found = options if kind == "tmpfs" else None
    return found


def _mounts() -> Iterator[tuple[str, str, dict[str, str]]]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.rstrip("\n").partition(" - ")
            mount_point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4])
            kind, _, rest = right.partition(" ")
            options = rest.rpartition(" ")[2]
            pairs = (option.partition("=") for option in options.split(","))
            yield mount_point, kind, {name: value for name, _, value in pairs}
