"""`tierfs mount` and `tierfs umount`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mount = subparsers.add_parser(
        "mount",
        help="mount an instance",
        description="Mounts an instance and returns when the mount is ready; two processes keep it running.",
        epilog="examples:\n  tierfs mount /ckpt\n  tierfs mount /ckpt -o name=job1,size=200GiB\n"
        "  tierfs mount /ckpt --config /etc/tierfs/job1.toml --foreground   as a systemd service, Type=notify",
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
        "--timeout", type=float, default=30.0, metavar="S", help="how long the mount may take (default 30 s)"
    )
    mount.add_argument("--daemon-module", default="mount.daemon", help=argparse.SUPPRESS)  # for tests of the keeper
    mount.set_defaults(run=run_mount)

    umount = subparsers.add_parser(
        "umount",
        help="unmount an instance",
        description="Unmounts an instance and waits for its processes. Steps in the RAM tier stay there for the next "
        "mount, unless --discard is given.",
        epilog="examples:\n  tierfs umount /ckpt\n  tierfs umount --discard job1   also after a plain umount\n\n"
        "exit codes: 0 unmounted, 1 in use or failed, 4 not mounted",
    )
    umount.add_argument("target", metavar="MOUNTPOINT|NAME", help="the mount point or the instance's name")
    umount.add_argument("--discard", action="store_true", help="also free the RAM tier, with every step in it")
    umount.add_argument("--lazy", action="store_true", help="take it out of the tree now, though files are open")
    umount.add_argument("--timeout", type=float, default=120.0, metavar="S", help="how long to wait (default 120 s)")
    umount.set_defaults(run=run_umount)


def run_mount(args: argparse.Namespace) -> int:
    from mount.keeper import keep, set_up_log
    from mount.launch import LaunchFailed, prepare_mount, start_detached
    from mount.processes import service_is_ready
    from tierfs.units import format_size

    prepared = prepare_mount(args.mountpoint, args.options, config=args.config)
    if args.foreground:
        set_up_log(prepared.notes)
        return keep(prepared.instance, daemon_module=args.daemon_module, on_ready=service_is_ready)
    try:
        said = start_detached(prepared, timeout_s=args.timeout, daemon_module=args.daemon_module)
    except LaunchFailed as error:
        if error.log_tail:
            print(f"the last lines of {error.log_path}:\n{error.log_tail}", file=sys.stderr)
        raise
    for note in prepared.notes:
        print(f"tierfs: {note}", file=sys.stderr)
    size = format_size(prepared.settings.size)
    passthrough = {True: ", passthrough on", False: ", passthrough off"}.get(said.get("passthrough", ""), "")
    print(f"mounted {prepared.instance.name} on {prepared.record.mountpoint} (RAM tier {size}{passthrough})")
    return 0


def run_umount(args: argparse.Namespace) -> int:
    from mount.ram_mount import discard_ram, stored_bytes
    from mount.runtime import find_instance
    from mount.unmounting import forget_unknown_mount, unmount_instance, what_stays
    from tierfs.errors import MountError, NotFound
    from tierfs.units import format_size

    try:
        instance = find_instance(args.target)
    except NotFound as error:
        if not forget_unknown_mount(args.target):
            raise error from None
        print(f"unmounted {args.target}")
        return 0
    done = unmount_instance(instance, lazy=args.lazy, timeout_s=args.timeout, must_be_mounted=not args.discard)
    if done.mountpoint:
        print(f"unmounted {done.mountpoint}")
    if done.goes_on and args.discard:
        raise MountError(
            f"programs still use files of the mount: end them, then `tierfs umount --discard {instance.name}`"
        )
    if done.goes_on:
        print(f"programs still use files of the mount; its {done.goes_on} goes on until they close them")
        return 0
    if args.discard and instance.directory.exists():
        freed = stored_bytes(instance)
        discard_ram(instance)
        print(f"freed the RAM tier of {instance.name}: {format_size(freed)} discarded")
    elif stay := what_stays(instance):
        print(stay)
    return 0
