"""`tierfs mount` and `tierfs umount`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mount.runtime import Instance

END_WITHIN_S = 120.0


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
    mount.add_argument(
        "--replace",
        action="store_true",
        help="where it is mounted, exchange its processes for new ones, with these settings; programs go on",
    )
    mount.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="with --foreground: a file that is there while this process keeps the mount; when another one takes it, "
        "stay until told to stop, as in a Kubernetes pod",
    )
    mount.add_argument(
        "--watchdog",
        type=float,
        metavar="S",
        help="with --foreground: kill a daemon that does not answer for so long, and start another (default: what "
        "systemd's WatchdogSec= says, else never)",
    )
    mount.add_argument("--daemon-module", default="mount.daemon", help=argparse.SUPPRESS)  # for tests of the keeper
    mount.set_defaults(run=run_mount)

    umount = subparsers.add_parser(
        "umount",
        help="unmount an instance",
        description="Sends what is owed to the object tier, then unmounts an instance and waits for its processes.\n"
        "Steps in the RAM tier stay there for the next mount, unless --discard is given. It stays mounted when not\n"
        "all could be sent in time, and after Ctrl-C meanwhile.",
        epilog="examples:\n  tierfs umount /ckpt\n"
        "  tierfs umount --no-flush /ckpt     now; what is owed stays in RAM, and the next mount sends it\n"
        "  tierfs umount --discard job1       also after a plain umount\n\n"
        "exit codes: 0 unmounted, 1 in use, not all sent in time or failed, 4 not mounted",
    )
    umount.add_argument("target", metavar="MOUNTPOINT|NAME", help="the mount point or the instance's name")
    umount.add_argument("--discard", action="store_true", help="also free the RAM tier, with every step in it")
    umount.add_argument("--lazy", action="store_true", help="take it out of the tree now, though files are open")
    umount.add_argument("--no-flush", action="store_true", help="don't send what is owed to the object tier first")
    umount.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="how long the sending may take (default: persist.flush_timeout_s), and then the end of the processes "
        "(default 120 s)",
    )
    umount.set_defaults(run=run_umount)


def run_mount(args: argparse.Namespace) -> int:
    from mount.keeping import keep, set_up_log
    from mount.launch import LaunchFailed, object_tier_problem, prepare_mount, start_detached
    from mount.notify import service_is_ready, watchdog_s
    from tierfs.errors import SettingsError
    from tierfs.units import format_size

    if not args.foreground and (args.ready_file is not None or args.watchdog is not None):
        raise SettingsError("--ready-file and --watchdog are for --foreground only")
    if args.watchdog is not None and args.watchdog <= 0:
        raise SettingsError("--watchdog takes a number of seconds that is greater than 0")
    prepared = prepare_mount(args.mountpoint, args.options, config=args.config, replace=args.replace)
    if args.foreground:
        set_up_log(prepared.notes)
        ready_file: Path | None = args.ready_file

        def tell_ready() -> None:
            if ready_file is not None:
                ready_file.touch()
            service_is_ready()

        def take_back() -> None:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)

        take_back()  # of a process before this one, in the same place
        try:
            return keep(
                prepared.instance,
                daemon_module=args.daemon_module,
                on_ready=tell_ready,
                on_let_go=take_back,
                replace=prepared.replaces,
                stays=ready_file is not None,
                watchdog_s=args.watchdog or watchdog_s(),
            )
        finally:
            take_back()
    try:
        said = start_detached(prepared, timeout_s=args.timeout, daemon_module=args.daemon_module)
    except LaunchFailed as error:
        if error.log_tail:
            print(f"the last lines of {error.log_path}:\n{error.log_tail}", file=sys.stderr)
        raise
    for note in [*prepared.notes, *filter(None, [object_tier_problem(prepared)])]:
        print(f"tierfs: {note}", file=sys.stderr)
    size = format_size(prepared.settings.size)
    passthrough = {True: ", passthrough on", False: ", passthrough off"}.get(said.get("passthrough", ""), "")
    done = "replaced the processes of" if prepared.replaces else "mounted"
    print(f"{done} {prepared.instance.name} on {prepared.record.mountpoint} (RAM tier {size}{passthrough})")
    return 0


def run_umount(args: argparse.Namespace) -> int:
    from mount.ram_mount import discard_ram, stored_bytes
    from mount.runtime import find_instance, is_running
    from mount.still_sending import has_object_tier, is_unmounted
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
    still_sent = is_running(instance) and is_unmounted(instance)
    if not args.no_flush and (args.discard or not args.lazy):
        _flush(instance, args, mounted=not still_sent)
    done = unmount_instance(
        instance,
        lazy=args.lazy,
        timeout_s=END_WITHIN_S if args.timeout is None else args.timeout,
        must_be_mounted=not args.discard and not still_sent,
        send=not (args.no_flush or args.discard),
    )
    if done.mountpoint or still_sent:
        print(f"unmounted {done.mountpoint or instance.name}")
    if done.goes_on and args.discard:
        raise MountError(
            f"programs still use files of the mount: end them, then `tierfs umount --discard {instance.name}`"
        )
    if done.goes_on and not args.no_flush and has_object_tier(instance):
        print(f"its {done.goes_on} goes on until its files are closed and what is owed is in the object tier")
        return 0
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


def _flush(instance: Instance, args: argparse.Namespace, *, mounted: bool) -> None:
    """Sends what is owed to the object tier. MountError, and it stays mounted, when that is not all in time.

    One that is no longer `mounted` sends of its own accord, and ends as soon as it is done.
    """
    from mount.cli.client import request
    from mount.cli.object_commands import count_of, shown
    from mount.cli.progress import ProgressLine
    from mount.runtime import is_running
    from mount.unmounting import refuse_in_use
    from tierfs.errors import InstanceError, MountError
    from tierfs.settings_sources import settings_from_json
    from tierfs.units import format_size

    if not is_running(instance) or not instance.settings.exists():
        return
    settings = settings_from_json(instance.settings.read_text())
    if not settings.object or not settings.persist.flush_on_umount:
        return
    if mounted and not args.lazy:
        refuse_in_use(instance)
    timeout_s = settings.persist.flush_timeout_s if args.timeout is None else args.timeout
    try:
        with ProgressLine("sending") as line:
            done = request(instance, "drain", seconds=timeout_s, on_progress=line.show)
    except InstanceError as error:
        if not mounted:
            return
        raise MountError(
            f"what is owed to the object tier can't be sent: {error.message}; --no-flush unmounts without"
        ) from error
    if done["steps"]:
        print(f"sent {count_of(done['steps'], 'step')}, {format_size(done['bytes'])}, to the object tier")
    if done["left"]:
        names = ", ".join(shown(rel) for rel in done["left"][:5])
        more = f" and {len(done['left']) - 5} more" if len(done["left"]) > 5 else ""
        why = f" ({done['problem']})" if done.get("problem") else ""
        lost = "are lost with --no-flush" if args.discard else "--no-flush unmounts without; the next mount sends them"
        raise MountError(
            f"{'still mounted: ' * mounted}within {timeout_s:g} s not all was sent{why}. Not durable: {names}{more} "
            f"({format_size(done['bytes_left'])}). `tierfs status` shows how it goes on; {lost}"
        )
