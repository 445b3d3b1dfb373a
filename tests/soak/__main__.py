"""`python -m soak`: a soak of so many minutes, its report, and exit code 1 where anything was violated."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    from soak.faults import FAULTS
    from soak.object_faults import OBJECT_FAULTS
    from soak.running import soak

    kinds = [*FAULTS, *OBJECT_FAULTS]
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random; printed")
    parser.add_argument("--faults", default="", help=f"only these, with commas: {', '.join(kinds)}; none is 'none'")
    parser.add_argument("--json", type=Path, help="write the report there, too")
    parser.add_argument("--out", type=Path, help="directory of the report and of logs; default /tmp/tierfs-soak-SEED")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--size", default="320M", help="of each node's RAM tier")
    parser.add_argument("--pace", type=float, default=5, help="seconds between two saves of a trainer")
    arguments = parser.parse_args()
    chosen = arguments.faults.split(",") if arguments.faults else kinds
    if wrong := set(chosen) - {*kinds, "none"}:
        parser.error(f"no such faults: {', '.join(sorted(wrong))}")
    if os.geteuid() != 0:
        parser.error("it makes network namespaces and mounts: run it as root")
    out = arguments.out or Path(f"/tmp/tierfs-soak-{arguments.seed}")
    report = soak(
        minutes=arguments.minutes, seed=arguments.seed, kinds=chosen, out=out, nodes=arguments.nodes,
        size=arguments.size, pace_s=arguments.pace,
    )  # fmt: skip
    report.write()
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    print("\n" + report.text(), flush=True)
    print(f"report and logs are in {out}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
