"""`tierfs doctor`: what this machine can do for tierfs, and what to change."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mount.doctor import Tried


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what to change",
        description="Looks at FUSE, the kernel, memory, limits, RDMA devices and mounts, one line each. As root it\n"
        "mounts something tiny for a moment, since passthrough can only be known by trying. The object tier and the\n"
        "cluster of the settings given (-o, a file, TIERFS_OBJECT, TIERFS_CATALOG) and of the instances that run are\n"
        "tried as well: written to, read and cleaned up; other nodes are asked for a sign of life.",
        epilog="examples:\n  tierfs doctor\n  tierfs doctor -o object=s3://bucket/ckpt,s3.endpoint_url=http://seaweed:8333\n"
        "  tierfs doctor --config /etc/tierfs/job1.toml\n  tierfs doctor /ckpt\n\n"
        "exit codes: 0 a mount works (perhaps with less than everything), 1 a mount can't work, or not as the\n"
        "settings demand (peer.transport = verbs without a device)",
    )
    doctor.add_argument(
        "directory", metavar="DIR", nargs="?", help="mount point or name: try what this one was mounted with"
    )
    doctor.add_argument("-o", dest="options", metavar="K=V,...", action="append", default=[], help="as for mount")
    doctor.add_argument("--config", metavar="FILE", type=Path, help="settings file, as for mount")
    doctor.add_argument("--json", action="store_true", help="print the answer as JSON")
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from mount.cli.tables import Cell, Column, Screen, print_json, render_table
    from mount.doctor import FAIL, OK, WARN, examine

    findings = examine(_tried(arguments))
    verdicts = {finding.verdict for finding in findings}
    if arguments.json:
        verdict = next(each for each in (FAIL, WARN, OK) if each in verdicts)
        print_json({"verdict": verdict, "findings": [asdict(finding) for finding in findings]})
    else:
        styles = {OK: "green", WARN: "yellow", FAIL: "red"}
        rows: list[list[str | Cell]] = [
            [Cell(finding.verdict, styles[finding.verdict]), finding.check, _line(finding.found, finding.advice)]
            for finding in findings
        ]
        columns = [Column(""), Column("CHECK"), Column("FOUND")]
        sys.stdout.write(render_table(columns, rows, Screen.of(sys.stdout)))
    return 1 if FAIL in verdicts else 0


def _tried(arguments: argparse.Namespace) -> list[Tried]:
    """What to try: of the settings or the instance given; else of all that run, and of a mount here."""
    import socket

    from mount.doctor import Tried
    from mount.runtime import all_instances, find_instance, is_running
    from tierfs.errors import SettingsError, TierfsError
    from tierfs.settings_sources import load_settings, settings_from_json

    if arguments.directory is not None:
        if arguments.options or arguments.config:
            raise SettingsError("DIR is tried as it was mounted; leave out -o and --config, or DIR")
        instances = [find_instance(arguments.directory, below=True)]
    elif arguments.options or arguments.config:
        return [Tried("", load_settings(arguments.config, os.environ, arguments.options, {}))]
    else:
        instances = [one for one in all_instances() if is_running(one)]
    found = []
    for instance in instances:
        try:
            settings = settings_from_json(instance.settings.read_text())
        except (OSError, TierfsError):
            continue
        if settings.object or settings.catalog or settings.disk.path:
            node = settings.node or f"{socket.gethostname()}.{instance.name}"
            found.append(Tried(f"{instance.name}: ", settings, node, is_running(instance)))
    if arguments.directory is None:
        with suppress(TierfsError):
            here = load_settings(None, os.environ, [], {})
            known = [(each.settings.object, each.settings.catalog, each.settings.disk.path) for each in found]
            wanted = here.object, here.catalog, here.disk.path
            if any(wanted) and wanted not in known:
                found.append(Tried("a mount here: " if found else "", here))
    return found


def _line(found: str, advice: str) -> str:
    return f"{found} -> {advice}" if advice else found
