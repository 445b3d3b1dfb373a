"""`tierfs upgrade`: after another version was installed, instances that are mounted get its processes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mount.runtime import Instance

#: A daemon that does not say its version in this time is exchanged.
_TELLS_WITHIN_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """`before` and `after` are versions; "" is one that can't be told."""

    name: str
    mountpoint: str
    outcome: Literal["upgraded", "current", "would upgrade", "failed", "not mounted"]
    before: str
    after: str
    error: str = ""


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    upgrade = subparsers.add_parser(
        "upgrade",
        help="give mounted instances the processes of the version that is installed now",
        description="Exchanges the keeper and the daemon of each mounted instance for those of the version that is\n"
        "installed now, with the settings that they have. Programs go on: what they ask meanwhile waits for a moment.\n"
        "Where the new version does not come to serve, the old keeper takes the instance back.",
        epilog="examples:\n  pip install --upgrade tierfs && tierfs upgrade    every instance of this user\n"
        "  tierfs upgrade /ckpt --force                       also where it runs this version: new processes\n\n"
        "exit codes: 0 all run this version, 1 one failed (it says whether it goes on), 4 one is not mounted\n"
        "To change settings as well: `tierfs mount --replace`. On Kubernetes an image brings the version: see\n"
        "docs/deploy-kubernetes.md. A kernel before 6.9 can't do it: unmount, then mount.",
    )
    upgrade.add_argument(
        "targets", nargs="*", metavar="MOUNTPOINT|NAME", help="which instances (default: all that are mounted)"
    )
    upgrade.add_argument("--force", action="store_true", help="also those that run this version already")
    upgrade.add_argument("--dry-run", action="store_true", help="say what would be done")
    upgrade.add_argument("--json", action="store_true", help="a list with an object for each instance")
    upgrade.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="how long each may take (default 30 s)"
    )
    upgrade.add_argument("--daemon-module", default="mount.daemon", help=argparse.SUPPRESS)  # for tests of the keeper
    upgrade.set_defaults(run=run_upgrade)


def run_upgrade(args: argparse.Namespace) -> int:
    from mount.cli.tables import print_json
    from mount.runtime import all_instances, find_instance, is_running
    from tierfs.errors import InstanceError

    chosen = [find_instance(target) for target in args.targets]
    if not args.targets:
        chosen = [instance for instance in all_instances() if is_running(instance)]
        if not chosen and not args.json:
            print("no instance is mounted")
    outcomes = []
    for instance in chosen:
        outcome = _upgrade(instance, args)
        if outcome.outcome == "not mounted" and not args.targets:
            continue  # it was unmounted meanwhile
        outcomes.append(outcome)
        if not args.json:
            stream = sys.stderr if outcome.error else sys.stdout
            print(_line(outcome), file=stream, flush=True)
    if args.json:
        print_json([asdict(outcome) for outcome in outcomes])
    if any(outcome.outcome == "failed" for outcome in outcomes):
        return 1
    return InstanceError.exit_code if any(outcome.error for outcome in outcomes) else 0


def _upgrade(instance: Instance, args: argparse.Namespace) -> Outcome:
    """One after the other, and each whatever became of the one before."""
    from mount.launch import LaunchFailed, prepare_upgrade, start_detached
    from mount.replacing import has_spare
    from mount.runtime import is_running, read_record
    from tierfs import __version__
    from tierfs.errors import InstanceError, TierfsError

    record = read_record(instance)
    mountpoint = record.mountpoint if record is not None else ""
    if not is_running(instance):
        return Outcome(
            instance.name, mountpoint, "not mounted", "", "", "it is not mounted: mount it with `tierfs mount`"
        )
    before = _version(instance)
    if before == __version__ and not args.force:
        return Outcome(instance.name, mountpoint, "current", before, before)
    if args.dry_run:
        return Outcome(instance.name, mountpoint, "would upgrade", before, __version__)
    try:
        start_detached(prepare_upgrade(instance), timeout_s=args.timeout, daemon_module=args.daemon_module)
    except InstanceError as error:
        return Outcome(instance.name, mountpoint, "not mounted", before, "", error.message)
    except (TierfsError, OSError) as error:
        goes_on = is_running(instance) or has_spare(instance)
        message = error.message if isinstance(error, TierfsError) else str(error)
        what = "goes on as it was" if goes_on else "and is not mounted any more"
        tail = f"\n{error.log_tail}" if isinstance(error, LaunchFailed) and error.log_tail else ""
        return Outcome(
            instance.name, mountpoint, "failed", before, before if goes_on else "", f"{what}: {message}{tail}"
        )
    return Outcome(instance.name, mountpoint, "upgraded", before, __version__)


def _version(instance: Instance) -> str:
    from mount.cli.client import request
    from tierfs.errors import TierfsError

    try:
        return str(request(instance, "status", timeout_s=_TELLS_WITHIN_S, within_s=_TELLS_WITHIN_S)["version"])
    except (TierfsError, KeyError):
        return ""  # of a daemon that hangs, or is just being started again


def _line(outcome: Outcome) -> str:
    place = f"{outcome.name} on {outcome.mountpoint}"
    if outcome.outcome == "current":
        return f"{place}: runs {outcome.before} already"
    if outcome.outcome == "failed":
        return f"{place}: not upgraded, {outcome.error}"
    if outcome.outcome == "not mounted":
        return f"{place}: {outcome.error}"
    return f"{place}: {outcome.outcome}, {outcome.before or 'unknown version'} -> {outcome.after}"
