"""`tierfs config show` and `tierfs config check`: the settings, and where each came from."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from mount.cli.read_commands import add_json


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    config = subparsers.add_parser(
        "config",
        help="show or check settings",
        description="Shows the settings of a running instance or those a mount here would have; checks a file.",
    )
    config.set_defaults(run=lambda arguments: config.print_help() or 2)
    actions = config.add_subparsers(metavar="ACTION", title="actions")

    show = actions.add_parser(
        "show",
        help="every setting, its value and its source",
        description="Every setting with its value and where it came from. With DIR: of the running instance. Without:\n"
        "what `tierfs mount` would use, given the same file, environment and -o.",
        epilog="examples:\n  tierfs config show /ckpt\n  tierfs config show -o size=3G,retention.ram_steps=3",
    )
    show.add_argument("directory", metavar="DIR", nargs="?", help="mount point or name of a running instance")
    show.add_argument("-o", dest="options", metavar="KEY=VALUE,...", action="append", default=[], help="as for mount")
    show.add_argument("--config", metavar="FILE", type=Path, help="settings file, as for mount")
    add_json(show)
    show.set_defaults(run=run_show)

    check = actions.add_parser(
        "check",
        help="check a settings file",
        description="Reads a settings file and says what is wrong with it. Exit code 2 when something is.",
        epilog="example:\n  tierfs config check /etc/tierfs/tierfs.toml",
    )
    check.add_argument("file", metavar="FILE", type=Path, help="TOML file")
    check.set_defaults(run=run_check)


def run_show(arguments: argparse.Namespace) -> int:
    from mount.cli.tables import Cell, Column, Screen, print_json, render_table
    from tierfs.errors import SettingsError
    from tierfs.settings_sources import describe_settings, load_settings

    warnings: list[str] = []
    if arguments.directory is not None:
        if arguments.options or arguments.config:
            raise SettingsError("DIR shows a running instance as it was mounted; leave out -o and --config, or DIR")
        from mount.cli.client import request

        rows = request(arguments.directory, "config")
    else:
        settings = load_settings(arguments.config, os.environ, arguments.options, {})
        rows, warnings = describe_settings(settings), settings.warnings
    if arguments.json:
        print_json(rows)
    else:
        screen = Screen.of(sys.stdout)
        cells = [
            [row["key"], _short(row["text"]), Cell(row["source"], "dim" if row["source"] == "default" else "")]
            for row in rows
        ]
        sys.stdout.write(render_table([Column("KEY"), Column("VALUE"), Column("SOURCE")], cells, screen))
    _print_warnings(warnings)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    from tierfs.settings_sources import check_file

    settings = check_file(arguments.file)
    _print_warnings(settings.warnings)
    count = len(settings.sources)
    print(f"{arguments.file}: fine, {count} setting{'s' * (count != 1)}")
    return 0


def _print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"tierfs: warning: {warning}", file=sys.stderr)


def _short(text: str) -> str:
    """Lists and tables would make the table wider than any terminal; --json has them whole."""
    return text if len(text) <= 48 else text[:45] + "..."
