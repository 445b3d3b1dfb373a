"""`dcp.save` and `dcp.load` of one rank: `TieredStorageWriter` against the stock writer and against Amazon's SageMaker
library at the gateway, and how many threads it wants.

By turns, each against the others of its round; seconds, so that less is better. The peak memory of a save is what the
process grew by while it ran, the file's pages in the RAM tier not counted.

Run by run.py, or alone: `PYTHONPATH=tests:bench:. python bench/dcp_writers.py [--json] [--mib 512]`.
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
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from ballast_wait import wait_for_ballast
from dcp_compat import TieredStorageReader, TieredStorageWriter
from measure import Row, as_json, pair, table
from rig.instance import Instance, mounted
from rig.sagemaker import Job, address, free_port, without_logs_left

MIB = 1 << 20
LAYERS = 16
ROUNDS = 5
IDLE_S = 1.0
SHM = Path("/dev/shm")

LIBRARY = "SageMaker's library"

Writer = Callable[[Path], StorageWriter]


def peak_growth(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that `work` takes, and MiB by which this process grew at most (`VmHWM`, reset by clear_refs: proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    begin = time.perf_counter()
    work()
    took = time.perf_counter() - begin
    return took, (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def measure(instance: Instance, shm: Path, size_mib: int) -> list[Row]:
    wait_for_ballast(instance)
    shape = (size_mib * MIB // LAYERS // 4096, 1024)
    state = {f"layer{i}": torch.rand(shape) for i in range(LAYERS)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    mount = instance.mountpoint
    job = Job("library", world=1, gateway=address(instance))
    job.enter()
    kinds: dict[str, tuple[Path, Writer]] = {
        "tierfs": (mount / "ours", TieredStorageWriter),
        "1 thread": (mount / "one", lambda step: TieredStorageWriter(step, thread_count=1)),
        "4 threads": (mount / "four", lambda step: TieredStorageWriter(step, thread_count=4)),
        "with sums": (mount / "sums", lambda step: TieredStorageWriter(step, crc32=True)),
        LIBRARY: (mount / "library", lambda step: job.writer(_number(step))),
        "stock on the mount": (mount / "stock", dcp.FileSystemWriter),
        "stock on /dev/shm": (shm, dcp.FileSystemWriter),
    }
    saves: dict[str, list[float]] = {kind: [] for kind in kinds}
    loads: dict[str, list[float]] = {kind: [] for kind in kinds}
    grown: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(ROUNDS + 1):
        for kind in list(kinds) if turn % 2 else reversed(list(kinds)):
            place, writer = kinds[kind]
            step = place / f"step_{turn}"
            time.sleep(IDLE_S)
            for tensor in (*state.values(), *target.values()):
                tensor.sum()  # in use a moment ago, as in a training
            storage = writer(step)
            took, mib = peak_growth(lambda storage=storage: dcp.save(state, storage_writer=storage, no_dist=True))
            reader = _reader(kind, step, job)
            begin = time.perf_counter()
            dcp.load(target, storage_reader=reader, no_dist=True)
            if turn:  # the first warms torch up
                saves[kind].append(took)
                grown[kind].append(mib)
                loads[kind].append(time.perf_counter() - begin)
            assert all(torch.equal(state[name], target[name]) for name in state)
            shutil.rmtree(step)
    others = [kind for kind in kinds if kind != "tierfs"]
    what = f"DCP save of {size_mib} MiB by TieredStorageWriter"
    rows = [pair(what, "s", saves["tierfs"], kind, saves[kind]) for kind in others]
    rows += [
        pair(f"{what}: memory while it runs", "MiB", grown["tierfs"], kind, [max(one, 1.0) for one in grown[kind]])
        for kind in others[-3:]
    ]
    rows += [
        pair(f"DCP load of {size_mib} MiB by TieredStorageReader", "s", loads["tierfs"], kind, loads[kind])
        for kind in others[-3:]
    ]
    return rows


def _reader(kind: str, step: Path, job: Job) -> StorageReader:
    if kind == LIBRARY:
        return job.reader(_number(step))
    return TieredStorageReader(step) if kind == "tierfs" else dcp.FileSystemReader(step)


def _number(step: Path) -> int:
    return int(step.name.removeprefix("step_"))


def measure_all(size_mib: int) -> list[Row]:
    scratch = Path(tempfile.mkdtemp(prefix="tierfs-bench-"))
    shm = SHM / f"tierfs-bench-{os.getpid()}"
    shm.mkdir()
    try:
        options = {"gateway.listen": f"127.0.0.1:{free_port()}"}
        with mounted(scratch, f"bench-writers-{os.getpid()}", size=f"{size_mib * 5}M", options=options) as instance:
            return measure(instance, shm, size_mib)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    parser.add_argument("--mib", type=int, default=512, help="bytes of the state dict")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with without_logs_left():
        rows = measure_all(arguments.mib)
    print(json.dumps(as_json(rows)) if arguments.json else table(as_json(rows)))
    return 3 if any(row.is_met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
