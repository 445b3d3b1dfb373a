"""`tierfs top`: an instance while it works, drawn again every second."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mount.cli.top_frame import Snapshot


#: More often would be work for the daemon that nobody can read.
LEAST_S = 0.2


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    from mount.cli.object_commands import seconds

    top = subparsers.add_parser(
        "top",
        help="a live view: nodes, steps on their way through the tiers, rates, lag",
        description="Shows an instance while it works: its RAM, the other nodes, each step's way through the tiers and "
        "its rate, and how far copies and the object tier lag behind. `q` ends it. In a pipe it prints one frame.",
        epilog="examples:\n  tierfs top\n  tierfs top /ckpt --every 5\n  tierfs top --once",
    )
    top.add_argument(
        "directory", metavar="DIR", nargs="?", help="mount point or name; may be left out when there is only one"
    )
    top.add_argument("--every", metavar="S", type=seconds, default=1.0, help="draw it so often (default 1 s)")
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    from mount.cli.live_screen import show
    from mount.cli.tables import Screen
    from mount.cli.top_frame import render_frame

    screen = Screen.of(sys.stdout)
    before: Snapshot | None = None
    drawn: Snapshot | None = None

    def frame(columns: int, rows: int) -> list[str]:
        nonlocal before, drawn
        # Drawn again because the terminal has another size: rates over so short a time would be noise.
        if drawn is None or time.time() - drawn.at >= every_s / 2:
            before, drawn = drawn, _look(arguments.directory)
        return render_frame(drawn, before, screen, columns, rows)

    every_s = max(LEAST_S, arguments.every)
    show(frame, every_s=every_s, once=arguments.once or not sys.stdout.isatty())
    return 0


def _look(directory: str | None) -> Snapshot:
    from mount.cli.client import request
    from mount.cli.top_frame import Snapshot

    status = request(directory, "status")
    nodes = request(directory, "nodes") if status.get("cluster") else None
    return Snapshot(status, nodes, time.time())
