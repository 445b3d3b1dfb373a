"""`tierfs status`, `ls` and `stat`: what there is, without changing anything."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from mount.cli.durability import (
    cluster_facts,
    disk_facts,
    gateway_facts,
    in_ram,
    leaving_fact,
    level_cell,
    object_facts,
    render_durability,
)

DEGRADED = 3
_MOST_GROWING = 5

STATE_STYLES = {
    "writing": "yellow",
    "complete": "green",
    "replicated": "green",
    "persisted": "green",
    "abandoned": "red",
}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    from mount.cli.object_commands import seconds

    status = subparsers.add_parser(
        "status",
        help="the mount, its steps and its problems",
        description="Shows a mounted instance: its processes, its RAM, every step and what is wrong.",
        epilog="examples:\n"
        "  tierfs status\n"
        "  tierfs status --watch\n"
        "  tierfs status /ckpt --json | jq -r '.steps[] | [.namespace, .step, .state] | @tsv'\n\n"
        "exit codes: 0 all is well, 3 there are problems, 4 not mounted",
    )
    status.add_argument(
        "directory", metavar="DIR", nargs="?", help="mount point or name; may be left out when there is only one"
    )
    status.add_argument("--watch", action="store_true", help="show it again and again, until q or Ctrl-C")
    status.add_argument("--every", metavar="S", type=seconds, default=2.0, help="with --watch: so often (default 2 s)")
    add_json(status)
    status.set_defaults(run=run_status)

    ls = subparsers.add_parser(
        "ls",
        help="list a directory with the state of what is in it",
        description="Lists a directory of the mount with states and sizes; a step is one line with all its bytes.",
        epilog="examples:\n  tierfs ls /ckpt\n  tierfs ls /ckpt/run1",
    )
    ls.add_argument("path", metavar="PATH", nargs="?", help="directory in the mount; default: here, or the root")
    add_json(ls)
    ls.set_defaults(run=run_ls)

    stat = subparsers.add_parser(
        "stat",
        help="all that is known of one file, step or directory",
        description="Shows one file, step or directory: owner, size, state, tier, generation, checksum.",
        epilog="examples:\n  tierfs stat /ckpt/run1/step_500\n  tierfs stat /ckpt/run1/latest --json",
    )
    stat.add_argument("path", metavar="PATH", help="path in the mount")
    add_json(stat)
    stat.set_defaults(run=run_stat)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The one `--json` switch; what it prints is documented in docs/cli.md."""
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run_status(arguments: argparse.Namespace) -> int:
    from mount.cli.client import request
    from mount.cli.tables import Screen, print_json

    if arguments.watch:
        return _watch_status(arguments)
    status = request(arguments.directory, "status")
    if arguments.json:
        print_json(status)
    else:
        sys.stdout.write(render_status(status, Screen.of(sys.stdout)))
    return DEGRADED if any(problem["severity"] == "error" for problem in status.get("problems", [])) else 0


def _watch_status(arguments: argparse.Namespace) -> int:
    """Until it is ended. With --json one document a line, for programs."""
    from mount.cli.client import request
    from mount.cli.live_screen import show
    from mount.cli.tables import Screen
    from mount.cli.top_command import LEAST_S

    every_s = max(LEAST_S, arguments.every)
    screen = Screen.of(sys.stdout)

    def frame(columns: int, rows: int) -> list[str]:
        return render_status(request(arguments.directory, "status"), screen).splitlines()

    while arguments.json:
        print(json.dumps(request(arguments.directory, "status")), flush=True)
        time.sleep(every_s)
    show(frame, every_s=every_s)
    return 0


def run_ls(arguments: argparse.Namespace) -> int:
    from mount.cli.tables import Screen, print_json
    from mount.cli.targets import find_target

    answer = find_target(arguments.path).request("ls")
    if arguments.json:
        print_json(answer)
    else:
        sys.stdout.write(render_listing(answer, Screen.of(sys.stdout)))
    return 0


def run_stat(arguments: argparse.Namespace) -> int:
    from mount.cli.tables import Screen, print_json
    from mount.cli.targets import find_target

    answer = find_target(arguments.path).request("stat")
    if arguments.json:
        print_json(answer)
    else:
        sys.stdout.write(render_stat(answer, Screen.of(sys.stdout)))
    return 0


def render_status(status: dict[str, Any], screen: Any) -> str:
    from mount.cli.tables import Cell, Column, plain, render_facts, render_table
    from tierfs.units import format_age, format_size

    ram, channel = status["ram"], status.get("channel") or {}
    used, size = format_size(ram["used_bytes"]), format_size(ram["size_bytes"])
    passthrough = (
        Cell("on", "green")
        if status["passthrough"]
        else Cell(f"off: {channel.get('reason') or 'no reason given'}", "yellow")
    )
    keeper = f"keeper {status['keeper_pid']}" if status["keeper_pid"] is not None else "no keeper"
    takeovers = status.get("takeovers", 0)
    up = f", up {format_age(status['uptime_s'])}" if status.get("uptime_s") is not None else ""
    again = f", taken over {takeovers} time{'s' * (takeovers != 1)}" if takeovers else ""
    pages = f", {ram['huge_pages']} huge pages" if ram.get("huge_pages") not in (None, "", "never") else ""
    swap = ", may be swapped" if ram.get("noswap") is False else ""
    text = render_facts(
        [
            ("instance", Cell(f"{status['name']} on {status['mountpoint']} (tierfs {status['version']})", "bold")),
            ("unmounted", leaving_fact(status)),
            ("passthrough", passthrough),
            ("processes", f"daemon {status['daemon_pid']}, {keeper}{up}{again}"),
            ("ram", f"{used} of {size} used, {format_size(ram['free_bytes'])} free{pages}{swap}"),
            ("ballast", _ballast(ram)),
            *cluster_facts(status),
            *disk_facts(status),
            *object_facts(status),
            *gateway_facts(status),
            ("pages", ", ".join(status.get("pages", []))),
        ],
        screen,
    )
    latest = {entry["namespace"]: entry.get("latest") for entry in status.get("namespaces", [])}
    rows = [_step_row(step, latest.get(step["namespace"]) == step["step"]) for step in status.get("steps", [])]
    if rows:
        columns = [
            Column("NAMESPACE"),
            Column("STEP"),
            Column("STATE"),
            Column("LEVEL"),
            Column("GEN", right=True),
            Column("FILES", right=True),
            Column("SIZE", right=True),
            Column("IN RAM", right=True),
            Column("AGE", right=True),
            Column("MARKS"),
        ]
        text += "\n" + render_table(columns, rows, screen)
    else:
        text += "\nno steps yet\n"
    text += render_durability(status, screen)
    growing = status.get("growing", [])
    if growing:
        more = f", and {len(growing) - _MOST_GROWING} more" if len(growing) > _MOST_GROWING else ""
        shown = ", ".join(f"{each['path']} ({format_size(each['size_bytes'])})" for each in growing[:_MOST_GROWING])
        text += f"\nbeing written: {plain(shown, screen)}{more}\n"
    problems = status.get("problems", [])
    if problems:
        text += "\n"
    for problem in problems:
        path = f"{problem['path']}: " if problem.get("path") else ""
        style = "red" if problem["severity"] == "error" else "yellow"
        text += f"{screen.paint(problem['severity'], style)}: {plain(path + problem['message'], screen)}\n"
    return text


def _ballast(ram: dict[str, Any]) -> str:
    from tierfs.units import format_size

    if not ram.get("ballast_target_bytes"):
        return "none" if ram.get("ballast_bytes") else "off"
    ready, target = ram["ballast_bytes"], ram["ballast_target_bytes"]
    return f"{format_size(ready)} ready" if ready >= target else f"{format_size(ready)} of {format_size(target)} ready"


def _step_row(step: dict[str, Any], is_latest: bool) -> list[Any]:
    from mount.cli.tables import Cell
    from tierfs.units import format_age, format_size

    marks = [
        "latest" if is_latest else "",
        "pinned" if step.get("pinned") else "",
        "being overwritten" if step.get("overwriting") else "",
        step.get("note") or "",
    ]
    return [
        step["namespace"] or "/",
        step["step"],
        Cell(step["state"], STATE_STYLES.get(step["state"], "")),
        level_cell(step),
        str(step["generation"]),
        str(step["files"]),
        format_size(step["bytes"]),
        in_ram(step),
        format_age(step["age_s"]) if step.get("age_s") is not None else "-",
        ", ".join(mark for mark in marks if mark),
    ]


def render_listing(answer: dict[str, Any], screen: Any) -> str:
    from mount.cli.tables import Cell, Column, render_table
    from tierfs.units import format_local, format_size

    if not answer["entries"]:
        return "empty\n"
    # A mount without an object tier and other nodes has but one level, which is no news.
    tiered = any(
        entry.get("object") or entry.get("disk") or entry.get("level") in ("object", "replica", "disk")
        for entry in answer["entries"]
    )
    rows = []
    for entry in answer["entries"]:
        is_directory = entry["type"] in ("dir", "directory")
        size = "" if is_directory and not entry.get("step") else format_size(entry["size_bytes"])
        state = entry.get("state") or ""
        rows.append(
            [
                Cell(state, STATE_STYLES.get(state, "")),
                level_cell(entry) if tiered else "",
                size,
                format_local(entry["mtime"]),
                entry["name"] + ("/" if is_directory else ""),
            ]
        )
    columns = [Column("STATE"), Column("LEVEL"), Column("SIZE", right=True), Column("CHANGED"), Column("NAME")]
    return render_table(columns, rows, screen)


def _archived(archive: dict[str, Any]) -> str:
    from tierfs.units import format_local

    at = f" {format_local(archive['at'])}" if archive["at"] else ""
    return f"{archive['state']}{at}" + (f": {archive['error']}" if archive["error"] else "")


def render_stat(answer: dict[str, Any], screen: Any) -> str:
    from mount.cli.tables import Cell, render_facts
    from tierfs.units import format_local, format_size

    state, size = answer.get("state") or "", answer["size_bytes"]
    exact = f" ({size} bytes)" if size >= 1024 else ""
    facts: list[tuple[str, Any]] = [
        ("path", Cell(answer["path"] or "/", "bold")),
        ("type", answer["type"]),
        ("size", f"{format_size(size)}{exact}"),
        ("mode", f"{answer['mode'] & 0o7777:04o}, uid {answer['uid']}, gid {answer['gid']}"),
        ("changed", format_local(answer["mtime"])),
        ("state", Cell(state, STATE_STYLES.get(state, ""))),
        ("tier", answer.get("tier") or ""),
        ("generation", "" if answer.get("generation") is None else str(answer["generation"])),
        ("sealed", "" if answer["type"] != "file" else "yes" if answer.get("sealed") else "no"),
        ("checksum", answer.get("checksum") or ""),
    ]
    step = answer.get("step")
    if step:
        pinned = ", pinned" if step.get("pinned") else ""
        overwriting = ", being overwritten" if step.get("overwriting") else ""
        files = f"{step['files']} file{'s' * (step['files'] != 1)}"
        summary = f"{step['state']}, {files}, {format_size(step['bytes'])}{pinned}{overwriting}"
        facts.append(("step", f"{step['step']}: {summary}"))
        if step.get("object") or step.get("disk"):
            facts.append(("level", level_cell(step)))
            if step.get("archive"):
                facts.append(("archive", _archived(step["archive"])))
            facts.append(("in RAM", in_ram(step)))
        if step.get("completed_at") is not None:
            facts.append(("completed", format_local(step["completed_at"])))
        facts.append(("note", step.get("note") or ""))
    return render_facts(facts, screen)
