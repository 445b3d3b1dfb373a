"""`async_save`: how long the training stands still, and how long until the step is complete.

The stager against a bare copy of the tensors into memory that is there (the stall can't be less), and against stock
`async_save` to the same mount and to /dev/shm. By turns, one rank, each against the others of its round.

Run by run.py, or alone: `PYTHONPATH=tests:bench:. python bench/dcp_stager.py [--json] [--mib 512]`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ballast_wait import wait_for_ballast
from dcp_compat import TieredStager, TieredStorageWriter
from measure import Row, as_json, pair, table
from rig.instance import Instance, mounted

MIB = 1 << 20
LAYERS = 16
ROUNDS = 7
IDLE_S = 3.0  # a step of the training: what is prepared for the next save has this long
SHM = Path("/dev/shm")

Writer = Callable[[Path], dcp.FileSystemWriter]


def stall_total_memory(state: dict[str, torch.Tensor], writer: dcp.FileSystemWriter) -> tuple[float, float, float]:
    """Seconds until `async_save` returns, and until the step is complete; MiB of its own that the trainer has more
    when it returns than before (the pages of the checkpoint's file are the RAM tier's)."""
    before = own_memory_mib()
    begin = time.perf_counter()
    future = dcp.async_save(state, storage_writer=writer, no_dist=True)
    stalled = time.perf_counter()
    grown = own_memory_mib() - before
    future.result()
    return stalled - begin, time.perf_counter() - begin, max(grown, 0.0)


def own_memory_mib() -> float:
    """proc(5), `RssAnon`."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024


def bare_copy(state: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> float:
    """Seconds of a copy into memory that was written before."""
    begin = time.perf_counter()
    for name, tensor in state.items():
        target[name].copy_(tensor)
    return time.perf_counter() - begin


def measure_all(size_mib: int) -> list[Row]:
    scratch = Path(tempfile.mkdtemp(prefix="tierfs-bench-"))
    shm = SHM / f"tierfs-bench-{os.getpid()}"
    shm.mkdir()
    try:
        with mounted(scratch, f"bench-stager-{os.getpid()}", size=f"{size_mib * 5}M") as instance:
            return measure(instance, shm, size_mib)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)


def measure(instance: Instance, shm: Path, size_mib: int) -> list[Row]:
    """One instance for all; what one save leaves is removed before the next."""

    wait_for_ballast(instance)
    shape = (size_mib * MIB // LAYERS // 4096, 1024)
    state = {f"layer{i}": torch.rand(shape) for i in range(LAYERS)}
    buffers = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    root = instance.mountpoint / "run"
    stager = TieredStager(root)
    stager.prepare(state)
    kinds: dict[str, tuple[Path, Writer]] = {
        "tierfs": (root, lambda step: TieredStorageWriter(step, stager=stager)),
        "stock": (instance.mountpoint / "stock", lambda step: dcp.FileSystemWriter(step)),
        "/dev/shm": (shm, lambda step: dcp.FileSystemWriter(step)),
    }
    stalls: dict[str, list[float]] = {kind: [] for kind in (*kinds, "copy")}
    totals: dict[str, list[float]] = {kind: [] for kind in kinds}
    grown: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS + 1):
        for kind in list(kinds) if turn % 2 else reversed(list(kinds)):
            place, writer = kinds[kind]
            time.sleep(IDLE_S)
            for tensor in (*state.values(), *buffers.values()):
                tensor.sum()  # in use a moment ago, as in a training
            copied = bare_copy(state, buffers)
            stall, total, mib = stall_total_memory(state, writer(place / f"step_{turn}"))
            shutil.rmtree(place / f"step_{turn}")
            if turn:  # the first warms torch up
                stalls[kind].append(stall)
                totals[kind].append(total)
                grown[kind].append(mib)
                if kind == "tierfs":
                    stalls["copy"].append(copied)
    stager.close()
    what = f"async_save of {size_mib} MiB with the stager"
    return [
        pair(f"{what}: stall", "s", stalls["tierfs"], "a bare copy", stalls["copy"], "<= 1.1"),
        pair(f"{what}: stall", "s", stalls["tierfs"], "stock on the mount", stalls["stock"]),
        pair(f"{what}: stall", "s", stalls["tierfs"], "stock on /dev/shm", stalls["/dev/shm"]),
        pair(f"{what}: total", "s", totals["tierfs"], "stock on the mount", totals["stock"], "<= 0.5"),
        pair(f"{what}: total", "s", totals["tierfs"], "stock on /dev/shm", totals["/dev/shm"]),
        pair(f"{what}: memory of the trainer", "MiB", grown["tierfs"], "stock on the mount", _from_one(grown["stock"])),
    ]


def _from_one(values: list[float]) -> list[float]:
    """To divide by."""
    return [max(value, 1.0) for value in values]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    parser.add_argument("--mib", type=int, default=512, help="bytes of the state dict")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = measure_all(arguments.mib)
    print(json.dumps(as_json(rows)) if arguments.json else table(as_json(rows)))
    return 3 if any(row.is_met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
