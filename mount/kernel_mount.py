"""Mounting and unmounting FUSE by the kernel's own calls, and by `fusermount3` where there is no root.

Constants: include/uapi/linux/mount.h and mount(2), umount2(2); mount options: Documentation/filesystems/fuse.rst.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import select
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mount.runtime import unescape_mount
from tierfs.errors import MountError

MS_NOSUID = 2
MS_NODEV = 4
_FLAGS = {
    "noexec": 8,
    "sync": 16,
    "dirsync": 128,
    "nosymfollow": 256,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
    "lazytime": 1 << 25,
}
MNT_FORCE = 1
MNT_DETACH = 2

FILE_SYSTEM = "fuse.tierfs"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class MountEntry:
    """One line of /proc/self/mountinfo (proc(5))."""

    mount_id: int
    device: str
    """major:minor; the minor number also names /sys/fs/fuse/connections/N."""
    mountpoint: str
    file_system: str
    source: str
    options: str

    @property
    def is_tierfs(self) -> bool:
        return self.file_system == FILE_SYSTEM


@dataclass(frozen=True)
class Holder:
    """A process that keeps a mount busy."""

    pid: int
    command: str
    what: str

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid}, {self.what})"


def mount_table() -> list[MountEntry]:
    """All mounts of this process's namespace, in the order they were made."""
    entries = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        front, _, back = line.partition(" - ")
        fields, (file_system, source, options) = front.split(" "), back.split(" ", 2)
        entries.append(
            MountEntry(
                int(fields[0]), fields[2], unescape_mount(fields[4]), file_system, unescape_mount(source), options
            )
        )
    return entries


def find_mount(mountpoint: str) -> MountEntry | None:
    """The uppermost mount at exactly this path, without touching it."""
    found = [entry for entry in mount_table() if entry.mountpoint == mountpoint]
    return found[-1] if found else None


# --- mounting ---------------------------------------------------------------------------------------------------


def open_device() -> int:
    """A new, unconnected /dev/fuse. MountError says what to do when there is none."""
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        advice = {
            errno.ENOENT: "load the module (modprobe fuse), or give the container the device /dev/fuse",
            errno.ENODEV: "load the module (modprobe fuse)",
            errno.EPERM: "the container's device rules forbid it: allow the device c 10:229",
            errno.EACCES: "give this user read and write access to it",
        }.get(error.errno or 0, "run `tierfs doctor`")
        raise MountError(f"/dev/fuse can't be opened ({error.strerror}): {advice}") from error


def mount_device(
    fd: int, mountpoint: str, *, source: str, allow_other: bool, kernel_options: tuple[str, ...] = ()
) -> None:
    """Mounts the connection `fd` by mount(2); needs CAP_SYS_ADMIN. The mount is always nosuid and nodev."""
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    flags = MS_NOSUID | MS_NODEV
    for name in kernel_options:
        flags |= _FLAGS.get(name, 0)
    target = os.fsencode(mountpoint)
    if _libc.mount(os.fsencode(source), target, FILE_SYSTEM.encode(), ctypes.c_ulong(flags), options.encode()) == 0:
        read_far_ahead(mountpoint)
        return
    number = ctypes.get_errno()
    advice = {
        errno.EPERM: "mounting needs CAP_SYS_ADMIN: run as root, or give the container this capability",
        errno.ENODEV: "the kernel has no FUSE: load the module (modprobe fuse)",
        errno.ENOENT: "make the directory first",
        errno.ENOTDIR: "it is not a directory",
    }.get(number, "run `tierfs doctor`")
    raise MountError(f"mounting on {mountpoint} failed ({os.strerror(number)}): {advice}")


def read_far_ahead(mountpoint: str) -> None:
    """Lets the kernel ask for 2 MiB in advance, where reads are not passed through: 2.5 times as fast as with its
    128 KiB. Needs root and a writable /sys, else it stays as it is. The channel answers INIT so that it holds."""
    entry = find_mount(mountpoint)
    with contextlib.suppress(OSError):
        if entry is not None:
            Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb").write_text("2048")


def fusermount_mount(mountpoint: str, *, source: str, allow_other: bool, kernel_options: tuple[str, ...] = ()) -> int:
    """Mounts by the setuid helper `fusermount3`; returns the connected /dev/fuse.

    The helper sends the descriptor over the socket that _FUSE_COMMFD names (libfuse, lib/mount.c, receive_fd).
    """
    options = [f"fsname={source}", "subtype=tierfs", "nosuid", "nodev", "default_permissions"]
    if allow_other:
        options.append("allow_other")
    options += [name for name in kernel_options if name in ("noexec", "noatime", "sync", "dirsync")]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        result = _fusermount(["-o", ",".join(options), "--", mountpoint], pass_fd=theirs.fileno())
        theirs.close()
        if result.returncode != 0:
            raise MountError(f"mounting on {mountpoint} failed: {_says(result)}")
        item = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(item.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                item.frombytes(data[: item.itemsize])
                os.set_inheritable(item[0], False)
                return item[0]
    raise MountError(f"mounting on {mountpoint} failed: fusermount3 handed no descriptor over")


def other_users_allowed() -> bool:
    """Whether this user may mount with allow_other: root may, others where /etc/fuse.conf says user_allow_other."""
    if os.geteuid() == 0:
        return True
    try:
        lines = Path("/etc/fuse.conf").read_text().splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


# --- unmounting -------------------------------------------------------------------------------------------------


def unmount(mountpoint: str, *, lazy: bool = False, force: bool = False) -> None:
    """Unmounts the uppermost mount at `mountpoint`. OSError: EBUSY in use, EINVAL not a mount, EPERM not ours.

    `lazy` takes it out of the tree and lets it end with its last user; `force` also aborts the FUSE connection, so
    that every request in flight ends with ECONNABORTED.
    """
    if os.geteuid() != 0:
        result = _fusermount(["-u", *(["-z"] if lazy or force else []), "--", mountpoint])
        if result.returncode != 0:
            text = _says(result)
            number = errno.EBUSY if "busy" in text else errno.EINVAL if "not found" in text else errno.EPERM
            raise OSError(number, text, mountpoint)
        return
    if force:
        _libc.umount2(os.fsencode(mountpoint), MNT_FORCE)  # aborts even where it can't unmount
        lazy = find_mount(mountpoint) is not None
        if not lazy:
            return
    if _libc.umount2(os.fsencode(mountpoint), MNT_DETACH if lazy else 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def detach_dead(mountpoint: str) -> int:
    """Detaches every tierfs mount at `mountpoint`, aborting its connection; how many there were."""
    count = 0
    while (entry := find_mount(mountpoint)) is not None and entry.is_tierfs and count < 100:
        try:
            unmount(mountpoint, force=True)
        except OSError as error:
            raise MountError(
                f"the dead mount on {mountpoint} can't be detached ({error.strerror}); try `umount -l {mountpoint}` as "
                "root"
            ) from error
        count += 1
    return count


def connection_is_alive(fd: int) -> bool:
    """False once the mount behind this /dev/fuse is gone or aborted; then poll says POLLERR (fs/fuse/dev.c)."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


def holders(mountpoint: str, *, limit: int = 10) -> list[Holder]:
    """Processes that have a directory, a file or a mapping in the mount open; as far as this user may see.

    Only reads links and tables of /proc, so a hung mount can't hang it.
    """
    entry = find_mount(mountpoint)
    device = "" if entry is None else "{:02x}:{:02x}".format(*(int(part) for part in entry.device.split(":")))
    found: list[Holder] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or len(found) >= limit:
            continue
        what = _held(process, mountpoint, device)
        if what:
            try:
                command = (process / "comm").read_text().strip()
            except OSError:
                continue
            found.append(Holder(int(process.name), command, what))
    return found


def _held(process: Path, mountpoint: str, device: str) -> str:
    prefix = mountpoint.rstrip("/") + "/"

    def inside(link: Path) -> str:
        try:
            target = os.readlink(link)  # noqa: PTH115  Path.readlink would drop a trailing " (deleted)" no better
        except OSError:
            return ""
        return target if target == mountpoint or target.startswith(prefix) else ""

    for name in ("cwd", "root"):
        if target := inside(process / name):
            return f"working directory {target}" if name == "cwd" else f"root directory {target}"
    try:
        for fd in (process / "fd").iterdir():
            if target := inside(fd):
                return f"open file {target}"
        if device:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and (fields[3] == device or fields[5].startswith(prefix)):
                    return f"mapped file {fields[5]}"
    except OSError:
        pass
    return ""


def _fusermount(arguments: list[str], *, pass_fd: int | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    if program is None:
        raise MountError("mounting without root needs fusermount3: install the package fuse3")
    environment = dict(os.environ)
    if pass_fd is not None:
        environment["_FUSE_COMMFD"] = str(pass_fd)
    try:
        return subprocess.run(
            [program, *arguments],
            env=environment,
            pass_fds=() if pass_fd is None else (pass_fd,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except subprocess.TimeoutExpired as error:
        raise MountError(f"{program} did not end within 20 s") from error


def _says(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"fusermount3 ended with {result.returncode}"
