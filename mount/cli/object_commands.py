"""`tierfs flush, wait, prefetch, repair`: what is asked of the object tier, and of other nodes, by hand."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mount.cli.read_commands import add_json


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    flush = subparsers.add_parser(
        "flush",
        help="send complete steps to the object tier",
        description="Owes complete steps to the object tier, whatever the policy says; none alone refuses. They are\n"
        "sent in the background; with --wait the command returns once they are there.",
        epilog="examples:\n"
        "  tierfs flush /ckpt/run1/step_500 --wait\n"
        "  tierfs flush --all --wait --timeout 600       everything there is, with a progress bar\n\n"
        "exit codes: 0 on their way (with --wait: there), 1 some step can't be sent or time is up, 4 not mounted",
    )
    flush.add_argument("paths", metavar="PATH", nargs="*", help="step, or a directory with all steps below it")
    flush.add_argument("--all", action="store_true", help="every complete step of the instance")
    flush.add_argument("--wait", action="store_true", help="return once they are in the object tier")
    flush.add_argument("--timeout", type=seconds, metavar="S", help="with --wait: give up after S seconds, or 5min")
    add_json(flush)
    flush.set_defaults(run=run_flush)

    wait = subparsers.add_parser(
        "wait",
        help="wait until a step is durable",
        description="Waits until a step has reached a level: `ram` is complete in RAM, `disk` lies on this node's\n"
        "disk, `replica` is held by other nodes too, `object` is committed in the object tier.",
        epilog="examples:\n"
        "  tierfs wait /ckpt/run1/step_500 --level object\n"
        "  tierfs wait /ckpt/run1/step_500 --timeout 300 || echo 'not durable yet'\n\n"
        "exit codes: 0 reached, 1 not in time, or it never will be, 2 there is no object tier, disk tier, or other\n"
        "node, 4 not mounted",
    )
    wait.add_argument("path", metavar="PATH", help="step's directory in the mount")
    wait.add_argument(
        "--level",
        choices=("ram", "disk", "replica", "object"),
        default="object",
        help="what to wait for (default object)",
    )
    wait.add_argument("--timeout", type=seconds, metavar="S", help="give up after S seconds, or 5min (default: never)")
    add_json(wait)
    wait.set_defaults(run=run_wait)

    prefetch = subparsers.add_parser(
        "prefetch",
        help="bring steps of the disk, the object tier or other nodes into RAM",
        description="Fetches what of the paths is on the disk, in the object tier or on other nodes only, so that a\n"
        "load finds all of it in this node's RAM. Refused before anything is fetched where the RAM tier can't hold it.",
        epilog="examples:\n  tierfs prefetch /ckpt/run1/latest\n"
        "  tierfs prefetch /ckpt/run1/step_500 /ckpt/run2/step_80\n"
        "  tierfs prefetch /ckpt/run1/latest --files '__[0-7]_*' --files .metadata    what ranks 0 to 7 load\n\n"
        "exit codes: 0 all of it is in RAM, 1 it is not there or can't be had, 2 there is no object tier, no disk\n"
        "tier and no other node, 4 not mounted",
    )
    prefetch.add_argument(
        "--files",
        metavar="GLOB",
        action="append",
        default=[],
        help="only files whose path inside their step matches (* matches / too); may be given several times",
    )
    prefetch.add_argument("paths", metavar="PATH", nargs="+", help="step, or a file or directory in one")
    add_json(prefetch)
    prefetch.set_defaults(run=run_prefetch)

    repair = subparsers.add_parser(
        "repair",
        help="make damaged copies good from good ones",
        description="Reads this node's copies of complete steps, and those in the object tier, and makes a damaged\n"
        "one good from a good one: on another node, in RAM here, or in the object tier. What is whole nowhere is\n"
        "withdrawn: no program takes it for a checkpoint.",
        epilog="examples:\n  tierfs repair --dry-run          only say what would be done\n"
        "  tierfs repair /ckpt/run1/step_500\n\n"
        "exit codes: 0 in order or mended, 1 something is lost, was left or failed, or with --dry-run there is work\n"
        "to do, 4 not mounted",
    )
    repair.add_argument("path", metavar="PATH", nargs="?", help="step or directory; default: everything")
    repair.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
    add_json(repair)
    repair.set_defaults(run=run_repair)


def run_flush(arguments: argparse.Namespace) -> int:
    from mount.cli.client import request
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target
    from tierfs.errors import PathRefused

    if not arguments.paths and not arguments.all:
        raise PathRefused("name the steps to flush, or say --all")
    if arguments.timeout is not None and not arguments.wait:
        raise PathRefused("--timeout says how long --wait takes at most; say --wait, too")
    targets = [find_target(path, follow=True) for path in arguments.paths] or [find_target(None)]
    mounts = {target.instance for target in targets}
    if len(mounts) > 1:
        raise PathRefused("the paths lie in several mounts; flush one at a time")
    with ProgressLine("sending", enabled=not arguments.json) as line:
        answer = request(
            mounts.pop(),
            "flush",
            paths=[] if arguments.all else [target.rel for target in targets],
            wait=arguments.wait,
            within_s=arguments.timeout if arguments.wait else None,
            on_progress=line.show,
        )
    if arguments.json:
        print_json(answer)
    else:
        print_failures(answer["failed"])
        if answer["steps"] or answer.get("already") or not answer["failed"]:
            print(_flushed(answer, waited=arguments.wait))
    return 1 if answer["failed"] else 0


def _flushed(answer: dict[str, Any], *, waited: bool) -> str:
    from tierfs.units import format_size

    steps, already = answer["steps"], answer.get("already", 0)
    amount = f"{count_of(steps, 'step')}, {format_size(answer['bytes'])}"
    before = f"; {count_of(already, 'step')} there before" if already else ""
    if not steps:
        return f"nothing to send{before}"
    return f"{amount} {'in the object tier' if waited else 'on the way to the object tier'}{before}"


def run_wait(arguments: argparse.Namespace) -> int:
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target, require_inside

    target = require_inside(find_target(arguments.path, follow=True), arguments.path, "wait for")
    with ProgressLine("waiting", enabled=not arguments.json) as line:
        answer = target.request("wait", level=arguments.level, seconds=arguments.timeout, on_progress=line.show)
    if arguments.json:
        print_json(answer)
    elif answer["reached"]:
        print(f"{shown(answer['path'])}: reached the level {answer['level']}")
    else:
        print(
            f"tierfs: {shown(answer['path'])} did not reach the level {answer['level']} within "
            f"{arguments.timeout:g} s; `tierfs status` says what it waits for",
            file=sys.stderr,
        )
    return 0 if answer["reached"] else 1


def run_prefetch(arguments: argparse.Namespace) -> int:
    from mount.cli.client import request
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target
    from tierfs.errors import PathRefused
    from tierfs.units import format_size

    targets = [find_target(path, follow=True) for path in arguments.paths]
    mounts = {target.instance for target in targets}
    if len(mounts) > 1:
        raise PathRefused("the paths lie in several mounts; prefetch from one at a time")
    with ProgressLine("fetching", enabled=not arguments.json) as line:
        answer = request(
            mounts.pop(),
            "prefetch",
            paths=[each.rel for each in targets],
            files=arguments.files,
            on_progress=line.show,
        )
    if arguments.json:
        print_json(answer)
    else:
        before = f"; {count_of(answer['already'], 'file')} there before" if answer.get("already") else ""
        print(f"fetched {count_of(answer['files'], 'file')}, {format_size(answer['bytes'])}{before}")
    return 0


def run_repair(arguments: argparse.Namespace) -> int:
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from mount.cli.targets import find_target

    target = find_target(arguments.path)
    with ProgressLine("checking", enabled=not arguments.json) as line:
        answer = target.request("repair", dry_run=arguments.dry_run, on_progress=line.show)
    actions = answer["actions"]
    bad = [each for each in actions if each["action"] in ("lost", "left")]
    if arguments.json:
        print_json(answer)
    else:
        for each in actions:
            print(f"{shown(each['path'])}: {shown(each['action'])}: {shown(each['reason'])}")
        verb = "to do" if arguments.dry_run else "done"
        print(f"{count_of(answer['checked'], 'step')} checked, {count_of(len(actions), 'repair')} {verb}")
    return 1 if bad or (arguments.dry_run and actions) else 0


def print_failures(failures: list[dict[str, str]]) -> None:
    """One line each on standard error."""
    for each in failures:
        print(f"tierfs: {shown(each['path'])}: {shown(each['reason'])}", file=sys.stderr)


def count_of(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shown(text: str) -> str:
    """A name, as standard output may show it."""
    from mount.cli.tables import Screen, plain

    return plain(text, Screen.of(sys.stdout))


def seconds(text: str) -> float:
    """`300`, `5min`: the durations that settings take, too."""
    from tierfs.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
