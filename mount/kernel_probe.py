"""What this kernel's FUSE offers, found out by a real mount that lasts some milliseconds.

The probe speaks the first words of the protocol itself (include/uapi/linux/fuse.h): it reads the INIT request, accepts
passthrough, and registers a backing file on a tmpfs, as the channel does.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mount import kernel_mount
from tierfs.errors import MountError
from tierfs.ram.tmpfs import TmpfsGrant, mount_tmpfs, unmount_tmpfs

_INIT = 26
_INIT_EXT, _PASSTHROUGH, _HAS_RESEND = 1 << 30, 1 << 37, 1 << 39
_BACKING_OPEN = (1 << 30) | (16 << 16) | (229 << 8) | 1  # _IOW(229, 1, struct fuse_backing_map)
_READ_BYTES = 1 << 18  # more than the least that the kernel takes for a read, FUSE_MIN_READ_BUFFER
_INIT_WITHIN_MS = 5000


@dataclass(frozen=True)
class KernelOffer:
    """`passthrough_refusal` says why passthrough can't be had, "" when a backing file was really registered."""

    proto: tuple[int, int]
    resend: bool
    passthrough_refusal: str
    tmpfs: TmpfsGrant


def probe_kernel() -> KernelOffer:
    """Mounts a tmpfs and a FUSE connection in a temporary place and takes both away. Needs root, else MountError."""
    with tempfile.TemporaryDirectory(prefix="tierfs-doctor-") as name:
        tier, place = Path(name) / "ram", Path(name) / "ckpt"
        tier.mkdir()
        place.mkdir()
        grant = mount_tmpfs(tier, 4 << 20, huge_pages="always", noswap=True)
        try:
            return _probe_fuse(place, tier / "backing", grant)
        finally:
            unmount_tmpfs(tier)


def _probe_fuse(place: Path, backing: Path, grant: TmpfsGrant) -> KernelOffer:
    fd = kernel_mount.open_device()
    try:
        kernel_mount.mount_device(fd, str(place), source="tierfs-doctor", allow_other=False)
        try:
            return _shake_hands(fd, backing, grant)
        finally:
            kernel_mount.unmount(str(place), force=True)
    finally:
        os.close(fd)


def _shake_hands(fd: int, backing: Path, grant: TmpfsGrant) -> KernelOffer:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(_INIT_WITHIN_MS):
        raise MountError("the kernel sent no FUSE INIT request")
    request = os.read(fd, _READ_BYTES)
    _, opcode, unique = struct.unpack_from("<IIQ", request)
    if opcode != _INIT:
        raise MountError(f"the kernel's first FUSE request is {opcode} and not INIT")
    major, minor, readahead, flags = struct.unpack_from("<IIII", request, 40)
    if flags & _INIT_EXT and len(request) >= 60:
        flags |= struct.unpack_from("<I", request, 56)[0] << 32
    accepted = flags & (_INIT_EXT | _PASSTHROUGH | _HAS_RESEND)
    body = struct.pack(
        "<IIIIHHIIHHII24x",
        major,
        minor,
        readahead,
        accepted & 0xFFFFFFFF,
        12,  # max_background
        9,  # congestion_threshold
        1 << 17,  # max_write
        1,  # time_gran, ns
        32,  # max_pages
        0,  # map_alignment
        accepted >> 32,
        1,  # max_stack_depth: the backing file's file system may not be stacked itself
    )
    os.write(fd, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
    refusal = _try_passthrough(fd, backing) if flags & _PASSTHROUGH else _why_not_offered()
    return KernelOffer((major, minor), bool(flags & _HAS_RESEND), refusal, grant)


def _try_passthrough(fd: int, backing: Path) -> str:
    file = os.open(backing, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The ioctl returns the new id. It ends with the connection, so nobody has to close it here.
        fcntl.ioctl(fd, _BACKING_OPEN, bytearray(struct.pack("<iIQ", file, 0, 0)))
    except OSError as error:
        return f"the kernel refused a backing file: {error.strerror}"
    finally:
        os.close(file)
    return ""


def _why_not_offered() -> str:
    release = os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if version < (6, 9):
        return f"Linux {release} is older than 6.9"
    return f"Linux {release} was built without CONFIG_FUSE_PASSTHROUGH"
