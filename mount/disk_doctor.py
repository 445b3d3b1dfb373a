"""What `tierfs doctor` finds out about a local-disk tier, by writing to it as a daemon would."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from mount.doctor import OK, WARN, Finding
from tierfs.cluster.versions import attribute
from tierfs.settings import Settings
from tierfs.units import format_size

CHECK = "disk tier"


def examine_disk_tier(settings: Settings, *, whose: str = "") -> Iterator[Finding]:
    """Writes a file beside the tier's own and removes it. `whose` is put before what is found. Never raises."""
    path = settings.disk.path
    if path is None:
        return
    place = path if path.is_dir() else path.parent
    about = f"{whose}{path}"
    if not place.is_dir():
        yield Finding(CHECK, WARN, f"{about}: there is no {place}", "mount the disk, or correct disk.path")
        return
    scratch = place / f".tierfs-doctor-{uuid.uuid4().hex}"
    try:
        yield from _written(scratch, settings, about)
        yield from _room(place, settings, about)
    except OSError as error:
        yield Finding(CHECK, WARN, f"{about} can't be written to: {error.strerror}", "see its owner and mount options")
    finally:
        scratch.unlink(missing_ok=True)


def _written(scratch: Path, settings: Settings, about: str) -> Iterator[Finding]:
    fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, b"tierfs")
        os.fsync(fd)
        yield Finding(CHECK, OK, f"{about} can be written to")
        if settings.catalog:
            try:
                os.setxattr(fd, attribute(), b"doctor")
            except OSError as error:
                yield Finding(
                    CHECK,
                    WARN,
                    f"{about}: the file system takes no extended attributes ({error.strerror}), by which other nodes "
                    f"ask for its files",
                    "use ext4, XFS or another one that does",
                )
    finally:
        os.close(fd)
    try:
        os.close(os.open(scratch, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        yield Finding(CHECK, WARN, f"{about}: no O_DIRECT here, so bytes pass through the page cache")


def _room(place: Path, settings: Settings, about: str) -> Iterator[Finding]:
    found = os.statvfs(place)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    text = f"{about}: {format_size(free)} of {format_size(size)} are free"
    if settings.disk.size > size:
        yield Finding(
            CHECK, WARN, f"{text}, and disk.size is {format_size(settings.disk.size)}", "make disk.size smaller"
        )
    else:
        yield Finding(CHECK, OK, text)
    if place.stat().st_dev == Path("/").stat().st_dev:
        yield Finding(
            CHECK,
            WARN,
            f"{about} lies on the root file system",
            "if a disk of its own was meant, it is not mounted",
        )
