"""Unmounting an instance from outside, and waiting until nothing of it runs any more."""

from __future__ import annotations

import errno
import time
from typing import NamedTuple

from mount import kernel_mount, ram_mount
from mount.launch import answers
from mount.runtime import Instance, is_running, other_on, read_process, read_record, real_mountpoint
from mount.still_sending import end_sending, has_object_tier
from tierfs.errors import InstanceError, MountError
from tierfs.units import format_size

_LAZY_WAIT_S = 2.0


class Unmounted(NamedTuple):
    mountpoint: str
    """"" when it was not mounted."""
    goes_on: str
    """Of a lazy unmount: which process still serves open files; "" when all have ended."""


def unmount_instance(
    instance: Instance, *, lazy: bool, timeout_s: float, must_be_mounted: bool, send: bool = True
) -> Unmounted:
    """Unmounts it and waits for its processes; a lazy one waits a moment only.

    Without `send` the daemon does not go on sending what is owed to the object tier: the next mount does. MountError
    when it is in use (with the processes that use it) or its processes don't end in time; InstanceError when it is not
    mounted and must be.
    """
    record = read_record(instance)
    if record is None:  # it was found by its name
        if must_be_mounted or is_running(instance):
            raise InstanceError(
                f"{instance.mount_record} is damaged, so nobody knows where {instance.name} is mounted: unmount it by "
                f"its mount point, then `tierfs umount --discard {instance.name}` frees what it left"
            )
        return Unmounted("", "")
    mountpoint = record.mountpoint
    entry = kernel_mount.find_mount(mountpoint)
    is_mounted = entry is not None and entry.is_tierfs and other_on(mountpoint, instance) is None
    daemon, keeper = read_process(instance.daemon_pid), read_process(instance.keeper_pid)
    runs = is_running(instance)
    if not is_mounted and not runs:
        if must_be_mounted:
            raise InstanceError(f"{instance.name} is not mounted on {mountpoint}. {what_stays(instance)}".rstrip())
        return Unmounted("", "")
    if is_mounted and runs:
        _unmount(mountpoint, lazy=lazy)
    elif is_mounted:
        kernel_mount.detach_dead(mountpoint)
    if not send and runs and has_object_tier(instance):
        end_sending(instance, within_s=min(timeout_s, _LAZY_WAIT_S) if lazy else timeout_s)
    deadline = time.monotonic() + (min(timeout_s, _LAZY_WAIT_S) if lazy else timeout_s)
    for process, what in ((daemon, "daemon"), (keeper, "keeper")):
        if process is not None and not process.wait(max(0.0, deadline - time.monotonic())):
            if lazy:
                return Unmounted(mountpoint, f"{what} {process.pid}")
            raise MountError(
                f"the mount is gone, but the {what} {process.pid} still runs after {timeout_s:.0f} s: a container, or "
                f"whatever else has a mount namespace of its own, may hold a copy of it (`lsns -t mnt`); see "
                f"{instance.log_directory}"
            )
    if keeper is None and instance.directory.exists():
        ram_mount.end_instance(instance)
    return Unmounted(mountpoint, "")


def _unmount(mountpoint: str, *, lazy: bool) -> None:
    try:
        kernel_mount.unmount(mountpoint, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _in_use(mountpoint, kernel_mount.holders(mountpoint)) from error
        if error.errno == errno.EPERM:
            raise MountError(f"{mountpoint} was mounted by another user, so unmounting it needs root") from error
        if error.errno != errno.EINVAL:  # EINVAL: somebody else was faster
            raise MountError(f"{mountpoint} can't be unmounted: {error.strerror}") from error


def refuse_in_use(instance: Instance) -> None:
    """MountError where programs use the mount, as far as this user may see: before something that takes its time."""
    record = read_record(instance)
    if record is not None and (found := kernel_mount.holders(record.mountpoint)):
        raise _in_use(record.mountpoint, found)


def _in_use(mountpoint: str, found: list[kernel_mount.Holder]) -> MountError:
    busy = "; ".join(str(holder) for holder in found)
    return MountError(
        f"{mountpoint} is in use by {busy or 'processes that this user may not see'}: end them, or unmount with --lazy"
    )


def forget_unknown_mount(target: str) -> bool:
    """Unmounts a tierfs mount whose runtime directory is gone, so that there is nobody to wait for.

    False when there is none at `target`.
    """
    place = real_mountpoint(target)
    entry = kernel_mount.find_mount(str(place))
    if entry is None or not entry.is_tierfs:
        return False
    if answers(place, timeout_s=2.0):
        _unmount(str(place), lazy=False)
    else:
        kernel_mount.detach_dead(str(place))
    return True


def what_stays(instance: Instance) -> str:
    """What of it is left in memory, for people; "" when nothing is."""
    if not instance.directory.exists() or not ram_mount.holds_files(instance):
        return ""
    return (
        f"{format_size(ram_mount.stored_bytes(instance))} stay in the RAM tier: the next mount of {instance.name} "
        f"finds them, `tierfs umount --discard {instance.name}` frees them"
    )
