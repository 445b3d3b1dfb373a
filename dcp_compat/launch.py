"""Runs a training script whose first shard is on its way before the script is read.

    torchrun --nproc-per-node 8 -m dcp_compat.launch run1 train.py --its-own arguments

runs `train.py` as torchrun would, and meanwhile prefetches what the rank will load of the namespace's newest step. In a
script the same is `dcp_compat.prefetch("run1")`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dcp_compat.prefetching import prefetch


def main() -> None:
    """`python -m dcp_compat.launch NAMESPACE SCRIPT [ARGUMENT...]`."""
    if len(sys.argv) < 3:
        raise SystemExit("usage: -m dcp_compat.launch NAMESPACE SCRIPT [ARGUMENT...]")
    namespace, script = sys.argv[1:3]
    prefetch(namespace)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
