"""What the ranks do while their nodes are updated."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from rig import checkpoints
from rig.ranks import Rank

KEEP = 2


def save_and_load_until_stopped(rank: Rank, directory: str, size_bytes: int, stop: Path) -> list[int]:
    """Saves seeds 1, 2, 3, … as steps and loads each at once, until `stop` exists; the seeds of the steps at the end.

    Rank 0 reports each. Any failed operation, and any bit that is not as it was saved, fails the rank.
    """
    root, seed = rank.root / directory, 0
    while True:
        told = torch.tensor([int(stop.exists())])
        dist.broadcast(told, src=0)
        if told.item():
            return list(range(max(1, seed - KEEP + 1), seed + 1))
        seed += 1
        checkpoints.save(root / f"step_{seed}", seed, size_bytes)
        checkpoints.check(root / f"step_{seed}", seed, size_bytes)
        if seed > KEEP:
            checkpoints.check(root / f"step_{seed - 1}", seed - 1, size_bytes)
            if rank.rank == 0:
                shutil.rmtree(root / f"step_{seed - KEEP}")
        if rank.rank == 0:
            rank.report(seed)
