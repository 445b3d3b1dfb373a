"""What this machine can do for tierfs, and what to change: one finding a line, for people and as JSON."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mount import kernel_mount, ram_mount
from mount.kernel_probe import KernelOffer, probe_kernel
from mount.launch import answers
from mount.runtime import all_instances, keeper_is_alive, read_process
from tierfs.capabilities import SYS_ADMIN, SYS_RESOURCE, is_capable
from tierfs.errors import TierfsError
from tierfs.ram.memory import available_memory_bytes, total_memory_bytes
from tierfs.settings import Settings
from tierfs.units import format_size

OK, WARN, FAIL = "ok", "warn", "fail"

_CUSTOM_IO_SINCE = (3, 14)
_FEW_FILES = 65536
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """`verdict` is ok, warn (works with less) or fail (a mount can't work); `advice` is what to change, if anything."""

    check: str
    verdict: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Tried:
    """Settings whose object tier and cluster are tried. `whose` is put before what is found. `node` is the id of the
    node that has them, which runs where `is_mounted`."""

    whose: str
    settings: Settings
    node: str = ""
    is_mounted: bool = False


def examine(tried: Sequence[Tried] = ()) -> list[Finding]:
    """Looks at everything, by trying where only trying can tell, and never raises.

    Takes well under a second, but for RDMA devices, object tiers and clusters.
    """
    findings: list[Finding] = []
    for check in (
        _fuse_device,
        _privileges,
        _libfuse,
        _kernel,
        _memory,
        _limits,
        _without_root,
        _mount_helper,
        _mounts,
        _left_over,
    ):
        findings += _safely(check)
    from mount.cluster_doctor import examine_cluster  # which need this module
    from mount.disk_doctor import examine_disk_tier
    from mount.object_doctor import examine_object_tier, of_archive
    from mount.rdma_doctor import examine_rdma

    findings += examine_rdma([(each.whose, each.settings) for each in tried] or [("", Settings())])
    for each in tried:
        if each.settings.catalog:
            findings += examine_cluster(each.settings, whose=each.whose, node=each.node, is_mounted=each.is_mounted)
        findings += examine_disk_tier(each.settings, whose=each.whose)
        if each.settings.object:
            findings += examine_object_tier(each.settings, whose=each.whose)
            if each.settings.archive.object:
                findings += examine_object_tier(of_archive(each.settings), whose=f"{each.whose}the archive ")
    return findings


def _safely(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except (OSError, ValueError, KeyError, TierfsError) as error:
        name = check.__name__.strip("_").replace("_", " ")
        return [Finding(name, WARN, f"could not be looked at: {error}")]


# --- FUSE


def _fuse_device() -> Iterator[Finding]:
    try:
        os.close(kernel_mount.open_device())
    except TierfsError as error:
        found, _, advice = error.message.partition(": ")
        yield Finding("FUSE device", FAIL, found, advice)
    else:
        yield Finding("FUSE device", OK, "/dev/fuse opens")


def _privileges() -> Iterator[Finding]:
    if os.geteuid() == 0 and is_capable(SYS_ADMIN):
        yield Finding("privileges", OK, "root with CAP_SYS_ADMIN")
    elif os.geteuid() == 0:
        yield Finding(
            "privileges",
            FAIL,
            "root without CAP_SYS_ADMIN",
            "give the container this capability, or run it privileged",
        )
    else:
        yield Finding(
            "privileges",
            WARN,
            f"user {os.geteuid()}: no kernel passthrough, and the RAM tier is a plain directory in shared memory",
            "mount as root",
        )


def _libfuse() -> Iterator[Finding]:
    try:
        library = ctypes.CDLL("libfuse3.so.3")
    except OSError:
        advice = "install the package libfuse3-3 (Debian, Ubuntu) or fuse3-libs"
        yield Finding("libfuse", FAIL, "libfuse3.so.3 is not installed", advice)
        return
    number = int(library.fuse_version())  # 314 is 3.14, and from 3.17 on so is 3014
    version = (number // 1000, number % 1000) if number >= 1000 else (number // 100, number % 100)
    text = f"libfuse {version[0]}.{version[1]}"
    if hasattr(library, "fuse_session_custom_io"):
        yield Finding("libfuse", OK, f"{text} with custom I/O")
    else:
        yield Finding(
            "libfuse",
            WARN,
            f"{text} has no custom I/O: a socket pair does its work, some 0.2 ms a request slower",
            f"install libfuse {'.'.join(map(str, _CUSTOM_IO_SINCE))} or later",
        )
    if importlib.util.find_spec("pyfuse3") is None:
        yield Finding("pyfuse3", FAIL, "not installed", "pip install pyfuse3")


# --- the kernel


def _kernel() -> Iterator[Finding]:
    release = f"Linux {os.uname().release}"
    if os.geteuid() != 0 or not is_capable(SYS_ADMIN):
        yield Finding("kernel", OK, f"{release}; passthrough, huge pages and noswap can only be tried as root")
        return
    try:
        offer = probe_kernel()
    except (TierfsError, OSError) as error:
        yield Finding("kernel", FAIL, f"{release}: a mount on trial failed: {error}", "change what this line says")
        return
    yield Finding("kernel", OK, f"{release}, FUSE {offer.proto[0]}.{offer.proto[1]}")
    yield from _offered(offer)


def _offered(offer: KernelOffer) -> Iterator[Finding]:
    if offer.passthrough_refusal:
        yield Finding(
            "passthrough",
            WARN,
            f"{offer.passthrough_refusal}; the daemon moves the bytes itself, more slowly",
            "boot Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH=y",
        )
    else:
        yield Finding("passthrough", OK, "tried: programs read and write the RAM tier directly")
    if offer.resend:
        yield Finding("resend", OK, "requests survive the death of the daemon")
    else:
        yield Finding(
            "resend",
            WARN,
            "not offered: when the daemon dies the mount is made anew, and programs with open files get errors",
            "boot Linux 6.9 or later",
        )
    huge = offer.tmpfs.huge_pages
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    enabled = setting.read_text() if setting.exists() else ""
    if "[deny]" in enabled:
        yield Finding("huge pages", WARN, "denied for shared memory: writes are slower", f"echo never > {setting}")
    elif huge == "never":
        advice = "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y"
        yield Finding("huge pages", WARN, "none for tmpfs: writes are slower", advice)
    else:
        yield Finding("huge pages", OK, f"tmpfs has huge={huge}")
    swaps = Path("/proc/swaps").read_text().splitlines()[1:]
    if offer.tmpfs.noswap:
        yield Finding("noswap", OK, "the RAM tier stays out of swap")
    elif swaps:
        yield Finding(
            "noswap", WARN, "unknown to this kernel, and there is swap", "boot Linux 6.4 or later, or swapoff -a"
        )
    else:
        yield Finding("noswap", OK, "unknown to this kernel, but there is no swap")
    if not offer.tmpfs.inode64:
        yield Finding("inode64", WARN, "refused: node ids may come again after 2^32 files", "boot Linux 5.9 or later")


# --- memory and limits


def _memory() -> Iterator[Finding]:
    total, available = total_memory_bytes(), available_memory_bytes()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limited = f", limited by the control group to {format_size(total)}" if total < machine * 0.99 else ""
    text = f"{format_size(machine)}{limited}; {format_size(available)} available"
    if available < total // 2:
        yield Finding(
            "memory",
            WARN,
            f"{text}, less than the default RAM tier of {format_size(total // 2)}",
            f"mount with -o size={max(1, int(available * 0.8) // _MIB)}MiB, or free memory",
        )
    else:
        yield Finding("memory", OK, f"{text}; the default RAM tier is {format_size(total // 2)}")


def _limits() -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES and not is_capable(SYS_RESOURCE):
        yield Finding(
            "open files",
            WARN,
            f"at most {files}; the daemon needs one for each file that programs look at",
            f"raise it: ulimit -Hn {1 << 20}, LimitNOFILE={1 << 20}",
        )
    else:
        yield Finding("open files", OK, "the limit is high enough, or can be raised")


# --- users and mounts


def _without_root() -> Iterator[Finding]:
    needed = os.geteuid() != 0
    program = shutil.which("fusermount3")
    if program is None:
        yield Finding(
            "fusermount3",
            FAIL if needed else OK,
            "not installed; only needed to mount without root",
            "install the package fuse3" if needed else "",
        )
    elif not os.stat(program).st_mode & stat.S_ISUID and needed:
        yield Finding("fusermount3", FAIL, f"{program} is not setuid root", f"chmod u+s {program} as root")
    else:
        yield Finding("fusermount3", OK, program)
    if needed and not kernel_mount.other_users_allowed():
        yield Finding(
            "other users",
            WARN,
            "can't be let into a mount of this user",
            "add the line user_allow_other to /etc/fuse.conf as root",
        )


def _mount_helper() -> Iterator[Finding]:
    missing = [path for path in ("/sbin/mount.tierfs", "/sbin/mount.fuse.tierfs") if not Path(path).exists()]
    if not missing:
        yield Finding("mount helper", OK, "mount -t fuse.tierfs and /etc/fstab work")
        return
    beside = Path(sys.executable).parent / "mount.tierfs"
    helper = beside if beside.exists() else shutil.which("mount.tierfs") or "$(command -v mount.tierfs)"
    yield Finding(
        "mount helper",
        WARN,
        f"{' and '.join(missing)} not installed: mount -t fuse.tierfs and /etc/fstab don't work, `tierfs mount` does",
        "; ".join(f"ln -s {helper} {path}" for path in missing),
    )


def _mounts() -> Iterator[Finding]:
    entries = [entry for entry in kernel_mount.mount_table() if entry.is_tierfs]
    for entry in entries:
        if not answers(Path(entry.mountpoint), timeout_s=2.0):
            yield Finding(
                "mounts",
                WARN,
                f"{entry.mountpoint} does not answer: its processes are dead or hang",
                f"`tierfs mount` or `tierfs umount {entry.mountpoint}`",
            )
    if entries:
        yield Finding("mounts", OK, ", ".join(entry.mountpoint for entry in entries))


def _left_over() -> Iterator[Finding]:
    for instance in all_instances():
        if keeper_is_alive(instance):
            continue
        if (daemon := read_process(instance.daemon_pid)) is not None:
            yield Finding(
                "instances",
                WARN,
                f"{instance.name} is served by the daemon {daemon.pid}, but nobody would replace it: its keeper was "
                "killed",
                "`tierfs mount` it again, which adopts the daemon",
            )
        elif ram_mount.holds_files(instance):
            yield Finding(
                "instances",
                OK,
                f"{instance.name} is not mounted and keeps {format_size(ram_mount.stored_bytes(instance))} in memory",
                f"`tierfs umount --discard {instance.name}` frees them",
            )
