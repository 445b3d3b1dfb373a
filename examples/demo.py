"""tierfs in a minute: save and load PyTorch checkpoints through a mount, kill its daemon meanwhile, send them to the
object tier, drop them from memory, load them back.

Run it with `make demo`. Everything happens in a temporary directory, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

TIERFS = Path(sys.executable).parent / "tierfs"
RANKS = 2
LAYERS, ROWS, COLUMNS = 6, 8192, 1024  # 6 layers of 32 MiB in float32: 192 MiB, half of it a rank
SIZE_MIB = LAYERS * ROWS * COLUMNS * 4 >> 20


# ---------------------------------------------------------------- the training job: stock PyTorch, nothing of tierfs


def state_dict(step: int) -> dict[str, Any]:
    """A model sharded over the ranks; which numbers it holds follows from the step."""
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
    rows = ROWS // RANKS
    layers = {
        f"layer{i}.weight": DTensor.from_local(
            torch.rand(rows, COLUMNS, generator=generator), mesh, [Shard(0)], run_check=False
        )
        for i in range(LAYERS)
    }
    return {"model": layers, "step": step}


def train(rank: int, store: str, root: str) -> None:
    """One rank: saves step 1 and step 2, loads both and compares every bit."""
    dist.init_process_group("gloo", init_method=f"file://{store}-train", rank=rank, world_size=RANKS)
    for step in (1, 2):
        state = state_dict(step)
        dist.barrier()
        begin = time.monotonic()
        dcp.save(state, checkpoint_id=f"{root}/step_{step}")
        tell(f"rank {rank} saved its half of step_{step} in {time.monotonic() - begin:.2f} s")
    load_and_compare(rank, root)
    dist.destroy_process_group()


def restart(rank: int, store: str, root: str) -> None:
    """One rank of a later job: loads both and compares every bit."""
    dist.init_process_group("gloo", init_method=f"file://{store}-restart", rank=rank, world_size=RANKS)
    load_and_compare(rank, root)
    dist.destroy_process_group()


def load_and_compare(rank: int, root: str) -> None:
    for step in (1, 2):
        expected, loaded = state_dict(step), state_dict(99)
        begin = time.monotonic()
        dcp.load(loaded, checkpoint_id=f"{root}/step_{step}")
        seconds = time.monotonic() - begin
        for name, weight in expected["model"].items():
            if not torch.equal(weight.to_local(), loaded["model"][name].to_local()):
                raise SystemExit(f"rank {rank}: {name} of step_{step} differs from what was saved")
        tell(f"rank {rank} loaded step_{step} in {seconds:.2f} s: every bit is as it was saved")


# ---------------------------------------------------------------- what the demo does around it


def tell(sentence: str) -> None:
    print(f"  {sentence}", flush=True)


@contextlib.contextmanager
def stage(sentence: str) -> Iterator[None]:
    print(f"\n{sentence}", flush=True)
    begin = time.monotonic()
    yield
    tell(f"({time.monotonic() - begin:.2f} s)")


def tierfs(*arguments: str | Path, show: bool = False) -> str:
    command = ["tierfs", *map(str, arguments)]
    if show:
        print(f"  $ {' '.join(command)}", flush=True)
    done = subprocess.run([TIERFS, *command[1:]], capture_output=True, text=True, timeout=60)
    if show:
        print("".join(f"    {line}\n" for line in done.stdout.splitlines()), end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def status(mountpoint: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(tierfs("status", mountpoint, "--json"))
    return answer


def kill_daemon_during_step_2(mountpoint: Path, root: Path, job: Any) -> None:
    """Waits until the second save is writing, then sends SIGKILL to the daemon."""
    pid = status(mountpoint)["daemon_pid"]
    written = 0
    while written < 8 << 20:
        if job.join(timeout=0.002):
            raise SystemExit("the job ended before its second save")
        with contextlib.suppress(OSError):
            written = (root / "step_2" / "__0_0.distcp").stat().st_size
    os.kill(pid, signal.SIGKILL)
    tell(f"SIGKILL to the daemon (process {pid}) while step_2 is being written")


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    scratch = Path(tempfile.mkdtemp(prefix="tierfs-demo-"))
    mountpoint, root, objects = scratch / "ckpt", scratch / "ckpt" / "demo", scratch / "bucket"
    mountpoint.mkdir()
    is_mounted = False
    try:
        with stage(
            "Mount a file system for checkpoints: 1 GiB of this machine's memory, and a directory as object tier."
        ):
            options = f"name=demo-{os.getpid()},size=1G,object=file://{objects},persist.policy=demand"
            tierfs("mount", mountpoint, "-o", options, show=True)
            is_mounted = True
            root.mkdir()
        before = status(mountpoint)
        passthrough = "the kernel moves the bytes (passthrough)" if before["passthrough"] else "without passthrough"
        tell(f"daemon {before['daemon_pid']}, keeper {before['keeper_pid']}, {passthrough}")

        with stage(
            f"Train on {RANKS} ranks with stock PyTorch: save {SIZE_MIB} MiB twice, load it, kill the daemon meanwhile."
        ):
            job = torch.multiprocessing.spawn(train, (str(scratch / "store"), str(root)), RANKS, join=False)
            kill_daemon_during_step_2(mountpoint, root, job)
            while not job.join():
                pass
        after = status(mountpoint)
        tell(f"no save and no load failed; daemon {after['daemon_pid']} took over from {before['daemon_pid']}")

        with stage("What the file system knows of it."):
            tierfs("status", mountpoint, show=True)
            tierfs("ls", root, show=True)

        with stage(
            "Send both steps to the object tier (s3://bucket/prefix would do as well), drop their copies in memory."
        ):
            tierfs("flush", root, "--wait", show=True)
            tierfs("evict", root / "step_1", root / "step_2", show=True)
            tierfs("status", mountpoint, show=True)
            tierfs("ls", root / "step_2", show=True)
            tell(f"in the object tier, for every tool: {', '.join(sorted(os.listdir(objects / 'demo' / 'step_2')))}")

        with stage("Restart the training: a load finds the files where they were, and their bytes come back."):
            torch.multiprocessing.spawn(restart, (str(scratch / "store"), str(root)), RANKS)
            tierfs("ls", root, show=True)

        with stage("Unmount, and give back the memory with the checkpoints in it."):
            tierfs("umount", "--discard", mountpoint, show=True)
            is_mounted = False
        print("\nAll went well.")
    finally:
        if is_mounted:
            subprocess.run([TIERFS, "umount", "--discard", "--lazy", mountpoint], capture_output=True, timeout=150)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
