"""Trainings that go on until they are told to stop, or are killed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rig import checkpoints
from rig.ranks import Rank

KEEP = 2


def _all_agree_to_stop(stop: Path) -> bool:
    """Rank 0 looks, all do the same."""
    answer = torch.tensor([int(stop.exists())])
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def save_until_stopped(rank: Rank, root: Path, size_bytes: int, overwrite: bool, stop: Path) -> list[int]:
    """Saves seeds 1, 2, 3, … and loads each at once, until `stop` exists; returns the seeds that are there at the end.

    Each seed is a new step of which the newest two are kept; with `overwrite` each goes into the same step.
    """
    seed = 0
    while not _all_agree_to_stop(stop):
        seed += 1
        step = root / ("step_1" if overwrite else f"step_{seed}")
        checkpoints.save(step, seed, size_bytes)
        checkpoints.check(step, seed, size_bytes)
        if not overwrite and seed > KEEP:
            checkpoints.check(root / f"step_{seed - 1}", seed - 1, size_bytes)
            if rank.rank == 0:
                shutil.rmtree(root / f"step_{seed - KEEP}")
        if rank.rank == 0:
            rank.report(seed)
    return [seed] if overwrite else list(range(max(1, seed - KEEP + 1), seed + 1))


def save_and_wait(rank: Rank, step: Path, seed: int, size_bytes: int) -> None:
    """Saves once. The test may kill it at any moment after "begin"."""
    state = checkpoints.state(seed, size_bytes)
    dist.barrier()
    if rank.rank == 0:
        rank.report("begin")
    begin = time.monotonic()
    checkpoints.save_state(step, state)
    if rank.rank == 0:
        rank.report(time.monotonic() - begin)


def save_steps(rank: Rank, root: Path, seeds: list[int], size_bytes: int) -> None:
    for seed in seeds:
        checkpoints.save(root / f"step_{seed}", seed, size_bytes)


def check_steps(rank: Rank, root: Path, seeds: list[int], size_bytes: int) -> None:
    for seed in seeds:
        checkpoints.check(root / f"step_{seed}", seed, size_bytes)


def check_step(rank: Rank, step: Path, seed: int, size_bytes: int) -> None:
    checkpoints.check(step, seed, size_bytes)


def identify_step(rank: Rank, step: Path, seeds: list[int], size_bytes: int) -> int:
    return checkpoints.identify(step, seeds, size_bytes)
