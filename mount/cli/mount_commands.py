"""`tierfs mount` and `tierfs umount`."""

from __future__ import annotations

import argparse
import errno
import sys
from pathlib import Path

from mount import kernel_mount, ram_mount
from mount.keeper import keep, set_up_log
from mount.launch import READY_WITHIN_S, answers, prepare_mount, start_detached
from mount.processes import service_is_ready
from mount.runtime import (
    Instance,
    all_instances,
    find_instance,
    keeper_is_alive,
    read_process,
    read_record,
    real_mountpoint,
)
from tierfs.errors import InstanceError, MountError, NotFound, TierfsError
from tierfs.units import format_size

UNMOUNT_WITHIN_S = 120.0


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mount = subparsers.add_parser(
        "mount",
        help="mount an instance",
        description="Mounts an instance and returns when the mount is ready; two processes keep it running.",
    )
    mount.add_argument("mountpoint", type=Path, metavar="MOUNTPOINT", help="an empty directory; made if it is missing")
    mount.add_argument(
        "-o", action="append", default=[], metavar="K=V,...", dest="options", help="settings, as in fstab(5)"
    )
    mount.add_argument("--config", type=Path, metavar="FILE", help="the settings file (TOML)")
    mount.add_argument(
        "-f", "--foreground", action="store_true", help="stay here, log to standard error, tell systemd when ready"
    )
    mount.add_argument(
        "--timeout", type=float, default=READY_WITHIN_S, metavar="S", help="how long the mount may take (default 30 s)"
    )
    mount.add_argument("--daemon-module", default="mount.daemon", help=argparse.SUPPRESS)  # for tests of the keeper
    mount.set_defaults(run=run_mount)

    umount = subparsers.add_parser(
        "umount",
        help="unmount an instance",
        description="Unmounts an instance and waits for its processes. Steps in the RAM tier stay there for the next "
        "mount, unless --discard is given.",
    )
    umount.add_argument("target", metavar="MOUNTPOINT|NAME", help="the mount point or the instance's name")
    umount.add_argument("--discard", action="store_true", help="also free the RAM tier, with every step in it")
    umount.add_argument("--lazy", action="store_true", help="take it out of the tree now, though files are open")
    umount.add_argument(
        "--timeout", type=float, default=UNMOUNT_WITHIN_S, metavar="S", help="how long to wait (default 120 s)"
    )
    umount.set_defaults(run=run_umount)


def run_mount(args: argparse.Namespace) -> int:
    prepared = prepare_mount(args.mountpoint, args.options, config=args.config)
    for note in prepared.notes:
        print(f"tierfs: {note}", file=sys.stderr)
    if args.foreground:
        set_up_log()
        return keep(prepared.instance, daemon_module=args.daemon_module, on_ready=service_is_ready)
    said = start_detached(prepared, timeout_s=args.timeout, daemon_module=args.daemon_module)
    size = format_size(prepared.settings.size)
    passthrough = {True: ", passthrough on", False: ", passthrough off"}.get(said.get("passthrough", ""), "")
    print(f"mounted {prepared.instance.name} on {prepared.record.mountpoint} (RAM tier {size}{passthrough})")
    return 0


def run_umount(args: argparse.Namespace) -> int:
    try:
        instance = find_instance(args.target)
    except NotFound:
        return _unmount_unknown(args.target)
    record = read_record(instance)
    assert record is not None  # find_instance finds by it
    entry = kernel_mount.find_mount(record.mountpoint)
    is_mounted = entry is not None and entry.is_tierfs
    runs = keeper_is_alive(instance) or read_process(instance.daemon_pid) is not None
    if not is_mounted and not runs:
        if args.discard:
            return _discard(instance)
        raise InstanceError(_not_mounted(instance, record.mountpoint))
    if is_mounted:
        _unmount(instance, record.mountpoint, lazy=args.lazy, is_alive=runs)
    _wait_for_end(instance, args.timeout, lazy=args.lazy)
    if instance.directory.exists() and (instance.keeper_pid.exists() or instance.daemon_pid.exists() or not runs):
        ram_mount.end_instance(instance)  # no keeper was there to do it
    print(f"unmounted {record.mountpoint}")
    if args.discard:
        return _discard(instance) if instance.directory.exists() else 0
    if instance.directory.exists() and ram_mount.holds_files(instance):
        print(_what_stays(instance))
    return 0


def _unmount(instance: Instance, mountpoint: str, *, lazy: bool, is_alive: bool) -> None:
    if not is_alive:
        kernel_mount.detach_dead(mountpoint)
        return
    try:
        kernel_mount.unmount(mountpoint, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            busy = "; ".join(str(holder) for holder in kernel_mount.holders(mountpoint))
            raise MountError(
                f"{mountpoint} is in use by {busy or 'processes that this user may not see'}: end them, or unmount "
                "with --lazy"
            ) from error
        if error.errno == errno.EPERM:
            raise MountError(f"{mountpoint} was mounted by another user, so unmounting it needs root") from error
        if error.errno != errno.EINVAL:  # EINVAL: somebody else was faster
            raise MountError(f"{mountpoint} can't be unmounted: {error.strerror}") from error


def _wait_for_end(instance: Instance, timeout_s: float, *, lazy: bool) -> None:
    for path, what in ((instance.daemon_pid, "daemon"), (instance.keeper_pid, "keeper")):
        process = read_process(path)
        if process is not None and not process.wait(timeout_s):
            if lazy:
                raise MountError(
                    f"the mount is out of the tree, but programs still use files in it, so the {what} {process.pid} "
                    "goes on until they close them"
                )
            raise MountError(
                f"the mount is gone, but the {what} {process.pid} still runs after {timeout_s:.0f} s; "
                f"see {instance.log_directory}"
            )


def _unmount_unknown(target: str) -> int:
    """A mount whose runtime directory is gone: there is nobody to wait for."""
    place = real_mountpoint(target)
    entry = kernel_mount.find_mount(str(place))
    if entry is None or not entry.is_tierfs:
        known = [f"{one.name} ({record.mountpoint})" for one in all_instances() if (record := read_record(one))]
        raise InstanceError(
            f"no tierfs instance is mounted on {target} or has this name; known here: {', '.join(known) or 'none'}"
        )
    if answers(place, timeout_s=2.0):
        kernel_mount.unmount(str(place))
    else:
        kernel_mount.detach_dead(str(place))
    print(f"unmounted {place}")
    return 0


def _discard(instance: Instance) -> int:
    freed = ram_mount.stored_bytes(instance)
    ram_mount.discard_ram(instance)
    print(f"freed the RAM tier of {instance.name}: {format_size(freed)} of checkpoints discarded")
    return 0


def _not_mounted(instance: Instance, mountpoint: str) -> str:
    text = f"{instance.name} is not mounted on {mountpoint}"
    return f"{text}. {_what_stays(instance)}" if ram_mount.holds_files(instance) else text


def _what_stays(instance: Instance) -> str:
    return (
        f"{format_size(ram_mount.stored_bytes(instance))} stay in the RAM tier: the next mount of {instance.name} "
        f"finds them, `tierfs umount --discard {instance.name}` frees them"
    )


def main(arguments: list[str] | None = None) -> int:
    """`python -m mount.cli.mount_commands`: these two commands alone."""
    parser = argparse.ArgumentParser(prog="tierfs")
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except TierfsError as error:
        print(f"tierfs: {error}", file=sys.stderr)
        return error.exit_code
    return status


if __name__ == "__main__":
    sys.exit(main())
