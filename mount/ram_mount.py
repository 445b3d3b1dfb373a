"""Puts the RAM tier of an instance in place, and takes it away or leaves it for the next mount.

As root it is a tmpfs of its own on `R/ram`. Without root it is a plain directory below /dev/shm, to which `R/ram`
is a link. What is in it belongs to `tierfs.ram`; here only its life is decided.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from mount import kernel_mount
from mount.runtime import Instance, read_record, unregister
from tierfs.errors import MountError
from tierfs.ram import tmpfs
from tierfs.settings import Settings
from tierfs.units import format_size

log = logging.getLogger("tierfs.keeper")


def prepare_ram(instance: Instance, settings: Settings, *, privileged: bool) -> None:
    """Mounts the tier, or finds the one that an earlier mount of the instance left, with all its steps."""
    if not privileged:
        _prepare_directory(instance)
        return
    instance.ram.mkdir(mode=0o700, exist_ok=True)
    if tmpfs.is_tmpfs_mount(instance.ram):
        if tmpfs.resize_tmpfs(instance.ram, settings.size) > settings.size:
            log.warning("the RAM tier holds more than its new size, %s", format_size(settings.size))
        log.info("found the RAM tier of an earlier mount again, with %s in it", format_size(stored_bytes(instance)))
        return
    grant = tmpfs.mount_tmpfs(
        instance.ram, settings.size, huge_pages=settings.ram.huge_pages, noswap=settings.ram.noswap
    )
    for note in grant.notes:
        log.warning("RAM tier: %s", note)


def _prepare_directory(instance: Instance) -> None:
    if instance.ram.is_dir():
        log.info("found the RAM tier of an earlier mount again, with %s in it", format_size(stored_bytes(instance)))
        return
    instance.ram.unlink(missing_ok=True)  # a link whose directory is gone
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK | os.X_OK):
        instance.ram.mkdir(mode=0o700)
        return
    parent = shared / f"tierfs-{os.geteuid()}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.geteuid():
            raise MountError(f"{parent} belongs to another user; ask them or root to remove it")
        parent.chmod(0o700)
        place = parent / instance.name
        place.mkdir(mode=0o700, exist_ok=True)
        instance.ram.symlink_to(place)
    except OSError as error:
        raise MountError(f"the RAM tier can't be made in {parent}: {error.strerror}") from error


def ram_exists(instance: Instance) -> bool:
    """Whether a tier is in place: not after a reboot or a `--discard`, when only other files of it may be left."""
    return instance.ram.is_symlink() or (instance.ram / "root").is_dir() or tmpfs.is_tmpfs_mount(instance.ram)


def holds_files(instance: Instance) -> bool:
    """Whether anything a program wrote is in the tier. Says yes when it can't tell."""
    for name in ("root", "generations"):
        try:
            with os.scandir(instance.ram / name) as entries:
                if next(entries, None) is not None:
                    return True
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def stored_bytes(instance: Instance) -> int:
    """Bytes allocated to files that programs wrote, each counted once; old generations included."""
    total, seen = 0, set()
    for name in ("root", "generations"):
        for directory, _, files in os.walk(instance.ram / name):
            for file in files:
                with suppress(OSError):
                    found = (Path(directory) / file).lstat()
                    if found.st_ino not in seen:
                        seen.add(found.st_ino)
                        total += found.st_blocks * 512
    return total


def release_ram(instance: Instance) -> int:
    """The end of a mount. Returns how many bytes stay in the tier for the next mount.

    The memory of a tier without files is given back. Otherwise only the ballast goes, which is room and no data.
    """
    if holds_files(instance):
        (instance.ram / "ballast").unlink(missing_ok=True)
        return stored_bytes(instance)
    _free_ram(instance)
    return 0


def discard_ram(instance: Instance) -> None:
    """Frees the tier with all it holds, and removes the runtime directory.

    MountError when the tmpfs is still in use; nothing is removed then.
    """
    _free_ram(instance)
    unregister(instance)
    # Should anything still be mounted in there, rmtree must not reach into it.
    if not any(Path(entry.mountpoint).is_relative_to(instance.directory) for entry in kernel_mount.mount_table()):
        shutil.rmtree(instance.directory, ignore_errors=True)


def end_instance(instance: Instance, *, keep_log: bool = False) -> int:
    """Clears up after a mount. Returns how many bytes stay in the RAM tier for the next one.

    When none do the runtime directory goes too, except with `keep_log`, for somebody who has to read the log in it.
    """
    record = read_record(instance)
    for path in (instance.daemon_pid, instance.daemon_ready, instance.channel_state, instance.control_socket):
        path.unlink(missing_ok=True)
    if record is not None and record.made_mountpoint:
        with suppress(OSError):
            Path(record.mountpoint).rmdir()
    try:
        stay_bytes = release_ram(instance)
    except (MountError, OSError) as error:
        log.error("%s", error)
        stay_bytes = stored_bytes(instance)
        keep_log = True
    instance.keeper_pid.unlink(missing_ok=True)
    if holds_files(instance):
        log.info(
            "%s stay in the RAM tier: the next mount of %r finds them, `tierfs umount --discard %s` frees them",
            format_size(stay_bytes),
            instance.name,
            instance.name,
        )
    elif not keep_log:
        discard_ram(instance)
    return stay_bytes


def _free_ram(instance: Instance) -> None:
    if tmpfs.is_tmpfs_mount(instance.ram):
        try:
            tmpfs.unmount_tmpfs(instance.ram)
        except (OSError, MountError) as error:
            holders = "; ".join(str(holder) for holder in kernel_mount.holders(str(instance.ram)))
            raise MountError(
                f"the RAM tier {instance.ram} is still in use ({holders or error}); end what uses it, then "
                f"`tierfs umount --discard {instance.name}`"
            ) from error
    elif instance.ram.is_symlink():
        place = instance.ram.resolve()
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            place.parent.rmdir()
        instance.ram.unlink(missing_ok=True)
    elif instance.ram.is_dir():
        shutil.rmtree(instance.ram, ignore_errors=True)
