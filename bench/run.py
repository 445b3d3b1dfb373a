"""Runs every benchmark, prints one table with the goal beside each figure, and keeps the figures in bench/results/,
as JSON and as a picture of the ratios.

Each benchmark is a program beside this one that prints a JSON list of rows with `--json`; README.md says what is in
a row. A benchmark that fails is named, the others still run, and the exit code is then 1. A missed goal is shown but
does not fail the run: figures of a busy machine must not stop anybody.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import table
from plot import svg

HERE = Path(__file__).parent
BENCHMARKS = (
    "datapath",
    "ballast",
    "metadata_rates",
    "watch",
    "object_tier",
    "catalog",
    "cluster",
    "transport_tcp",
    "peer_hydration",
    "receiving",
    "dcp_writers",
    "dcp_stager",
)
TIMEOUT_S = 480
GOAL_MISSED = 3  # exit code of a benchmark that ran well and missed a goal


def run(name: str) -> list[dict[str, Any]]:
    """The rows of one benchmark; its messages go to the terminal as they come."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "tests"), str(HERE)])}
    done = subprocess.run(
        [sys.executable, HERE / f"{name}.py", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
    )
    if done.returncode not in (0, GOAL_MISSED):
        done.check_returncode()
    result = json.loads(done.stdout)
    rows: list[dict[str, Any]] = ballast_rows(result) if name == "ballast" else result
    return [{"benchmark": name, **row} for row in rows]


def ballast_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """ballast.py reports cases; each becomes a row against the one written to /dev/shm."""
    cases = dict(result["cases"])
    baseline = cases.pop("/dev/shm")["gb_per_s"]
    return [
        {
            "what": f"write {result['size_bytes'] >> 20} MiB to the RAM tier, {case}",
            "unit": "GB/s",
            "value": figures["gb_per_s"],
            "against": "/dev/shm",
            "baseline": baseline,
            "ratio": figures["ratio"],
        }
        for case, figures in cases.items()
    ]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    memory_kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def commit() -> str:
    """Which one was measured; with a + where files differ from it. "" where there is no git."""
    told = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty=+"], capture_output=True, text=True)
    return told.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="run this one (may be repeated)")
    arguments = parser.parse_args()
    started, facts, rows, failed = datetime.datetime.now(), machine(), [], []
    for name in arguments.only or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += run(name)
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            failed.append(name)
            print(f"{name} failed: {error}", file=sys.stderr)
    report = {"date": f"{started:%Y-%m-%d %H:%M}", "commit": commit(), "machine": facts, "failed": failed, "rows": rows}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    path = results / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    path.with_suffix(".svg").write_text(svg(report))
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"\n{facts['cpus']} CPUs, {facts['memory_gib']} GiB, Linux {facts['kernel']}\n")
        print(table(rows))
        print(f"\nkept in {path}, and as a picture beside it")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
