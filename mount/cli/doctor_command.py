"""`tierfs doctor`: what this machine can do for tierfs, and what to change."""

from __future__ import annotations

import argparse
import sys


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what to change",
        description="Looks at FUSE, the kernel, memory, limits, RDMA devices and mounts, one line each. As root it "
        "mounts something tiny for a moment, since passthrough can only be known by trying.",
        epilog="exit codes: 0 a mount works (perhaps with less than everything), 1 a mount can't work",
    )
    doctor.add_argument("--json", action="store_true", help="print the answer as JSON")
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from mount.cli.tables import Cell, Column, Screen, print_json, render_table
    from mount.doctor import FAIL, OK, WARN, examine

    findings = examine()
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


def _line(found: str, advice: str) -> str:
    return f"{found} -> {advice}" if advice else found
