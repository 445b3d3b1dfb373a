"""`tierfs commit, pin, unpin, evict, rm, verify`: what is done to a step by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from mount.cli.read_commands import add_json

VERIFY_SILENCE_S = 600.0
"""How long verify may be silent. It reports after each file; the largest take minutes on a busy machine."""

Run = Callable[[argparse.Namespace], int]


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    commit = _add(
        subparsers,
        "commit",
        "complete a step by hand",
        "Completes a step that has no marker: all its files must be closed. From then on it is kept, evicted and\n"
        "loaded as a whole.",
        "example:\n  tierfs commit /ckpt/run1/step_500",
    )
    commit.set_defaults(run=_each("commit", lambda answer: "complete" + _amount(answer)))

    pin = _add(
        subparsers,
        "pin",
        "never drop a step from RAM",
        "Keeps a step in RAM whatever retention says, until it is unpinned or removed. Survives a restart.",
        "example:\n  tierfs pin /ckpt/run1/step_500",
    )
    pin.set_defaults(run=_each("pin", lambda answer: "pinned"))

    unpin = _add(
        subparsers,
        "unpin",
        "let retention drop a step again",
        "Takes a pin away.",
        "example:\n  tierfs unpin /ckpt/run1/step_500",
    )
    unpin.set_defaults(run=_each("unpin", lambda answer: "no longer pinned"))

    evict = _add(
        subparsers,
        "evict",
        "drop a complete step's copy in RAM",
        "Drops a complete step from RAM to make room. Refused when this is its only copy, or it is pinned or in use.",
        "examples:\n"
        "  tierfs evict /ckpt/run1/step_100\n"
        "  tierfs evict --force /ckpt/run1/step_100      also the only copy, and then the step is gone",
    )
    evict.add_argument("--force", action="store_true", help="even if this is the only copy, which is then lost")
    evict.set_defaults(run=_each("evict", lambda answer: "evicted" + _amount(answer), "force"))

    rm = _add(
        subparsers,
        "rm",
        "remove a step or a namespace",
        "Removes a step at once and as a whole: nobody sees half of it. With -r also a namespace and all its steps.",
        "examples:\n  tierfs rm /ckpt/run1/step_100\n  tierfs rm -r /ckpt/run1",
    )
    rm.add_argument("-r", "--recursive", action="store_true", help="also a namespace, with all its steps")
    rm.set_defaults(run=_each("rm", lambda answer: "removed" + _amount(answer), "recursive"))

    verify = subparsers.add_parser(
        "verify",
        help="read sealed files again and compare checksums",
        description="Reads every sealed file of a step, or below a directory, and compares it with what was sealed:\n"
        "the copy in this node's RAM, the one on its disk, those on other nodes, the one in the object tier (all its\n"
        "bytes are fetched), or all of them.",
        epilog="examples:\n  tierfs verify /ckpt/run1/step_500\n  tierfs verify /ckpt\n"
        "  tierfs verify --tier object /ckpt/run1/latest\n\n"
        "exit codes: 0 all files are as they were sealed, 1 some are not or there was nothing to verify, 2 there is\n"
        "no object tier, no disk tier, or no other node, 4 not mounted",
    )
    verify.add_argument("path", metavar="PATH", help="step, file or directory in the mount")
    verify.add_argument(
        "--tier",
        choices=("ram", "disk", "replica", "object", "all"),
        default="ram",
        help="whose copy to read (default: ram)",
    )
    add_json(verify)
    verify.set_defaults(run=run_verify)


def _add(
    subparsers: argparse._SubParsersAction[Any], name: str, text: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=description, epilog=epilog)
    parser.add_argument("paths", metavar="PATH", nargs="+", help="step's directory in the mount")
    add_json(parser)
    return parser


def _each(op: str, sentence: Callable[[dict[str, Any]], str], *switches: str) -> Run:
    """Does `op` to each path; goes on after a failure and ends with the first failure's exit code."""

    def run(arguments: argparse.Namespace) -> int:
        from mount.cli.main import report_error
        from mount.cli.tables import Screen, plain, print_json
        from mount.cli.targets import find_target, require_inside
        from tierfs.errors import TierfsError

        screen = Screen.of(sys.stdout)
        code = 0
        for path in arguments.paths:
            try:
                target = require_inside(find_target(path), path, op)
                answer = target.request(op, **{switch: getattr(arguments, switch) for switch in switches})
            except TierfsError as error:
                this = report_error(error)
                code = code or this
                continue
            if arguments.json:
                print_json(answer)
            else:
                print(f"{plain(target.rel, screen)}: {sentence(answer if isinstance(answer, dict) else {})}")
        return code

    return run


def _amount(answer: dict[str, Any]) -> str:
    from tierfs.units import format_size

    parts = []
    if isinstance(answer.get("files"), int):
        parts.append(f"{answer['files']} file{'s' * (answer['files'] != 1)}")
    if isinstance(answer.get("bytes"), int):
        parts.append(format_size(answer["bytes"]))
    return f" ({', '.join(parts)})" if parts else ""


def run_verify(arguments: argparse.Namespace) -> int:
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import Screen, plain, print_json
    from mount.cli.targets import find_target
    from tierfs.units import format_size

    target = find_target(arguments.path, follow=True)
    with ProgressLine("verifying", enabled=not arguments.json) as line:
        answer = target.request("verify", tier=arguments.tier, timeout_s=VERIFY_SILENCE_S, on_progress=line.show)
    files, bad, unsealed = answer["files"], answer["bad"], answer.get("unsealed", 0)
    stubs, absent = answer.get("stubs", 0), answer.get("not_persisted", 0)
    if arguments.json:
        print_json(answer)
    else:
        screen = Screen.of(sys.stdout)
        for each in bad:
            where = f" ({each['tier']})" if arguments.tier == "all" and each.get("tier") else ""
            print(
                f"{screen.paint('bad', 'red')}: {plain(each['path'], screen)}: {plain(each['reason'], screen)}{where}"
            )
        count = f"{files} file{'s' * (files != 1)}, {format_size(answer['bytes'])}"
        left = f"; {unsealed} without a checksum yet, not verified" if unsealed else ""
        left += f"; {stubs} not in RAM here, not read" if stubs else ""
        left += f"; {absent} step{'s' * (absent != 1)} not in the object tier" if absent else ""
        if bad:
            print(f"{len(bad)} of {count} not as sealed{left}")
        elif files:
            print(f"{screen.mark(True)} {count}: all as sealed{left}")
    if not files and not bad:
        why = (
            f"its {unsealed} files have no checksum yet: wait for it if they were just written, and see that "
            f"steps.checksums is on"
            if unsealed
            else "none of it is in RAM here; --tier object reads it there, --tier replica on other nodes"
            if stubs
            else "there is no sealed file there; name a complete step"
        )
        print(f"tierfs: nothing was verified in {arguments.path}: {why}", file=sys.stderr)
    return 0 if files and not bad else 1
