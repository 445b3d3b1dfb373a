"""What ranks on several nodes do: each through the mount of its own node."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rig import checkpoints
from rig.cluster import Node
from rig.instance import wait_until
from rig.ranks import Rank, Seat, Table


def seats(nodes: Sequence[Node], *, collective_timeout_s: float = 60) -> Table:
    """One rank a node."""
    return Table([Seat(node.host.namespace, node.mountpoint) for node in nodes], collective_timeout_s)


def save_steps(rank: Rank, directory: str, seeds: Sequence[int], size_bytes: int) -> list[float]:
    """Saves each seed as a step of its number. Returns the seconds that each took."""
    seconds = []
    for seed in seeds:
        state = checkpoints.state(seed, size_bytes)
        dist.barrier()
        begin = time.monotonic()
        checkpoints.save_state(rank.root / directory / f"step_{seed}", state)
        seconds.append(time.monotonic() - begin)
    return seconds


def save_step(rank: Rank, step: str, seed: int, size_bytes: int) -> float:
    """Saves once, and says "begin" before: the test may do anything from then on."""
    state = checkpoints.state(seed, size_bytes)
    dist.barrier()
    if rank.rank == 0:
        rank.report("begin")
    begin = time.monotonic()
    checkpoints.save_state(rank.root / step, state)
    return time.monotonic() - begin


def check_steps(rank: Rank, seeds: dict[str, int], size_bytes: int) -> None:
    """Loads each step and compares it with its seed, bit for bit."""
    for step, seed in seeds.items():
        checkpoints.check(rank.root / step, seed, size_bytes)


def identify_step(rank: Rank, step: str, seeds: Sequence[int], size_bytes: int) -> int:
    """Which seed the step holds as a whole; fails when it is a mixture."""
    return checkpoints.identify(rank.root / step, seeds, size_bytes)


def try_step(rank: Rank, step: str, seeds: Sequence[int], size_bytes: int) -> int | str:
    """The same, or the error that the load gave: what never may be is a load that holds none of the seeds."""
    try:
        loaded = checkpoints.load(rank.root / step, size_bytes)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{type(error).__name__}: {error}"
    for seed in seeds:
        if not checkpoints.differences(loaded, seed, size_bytes):
            return seed
    raise AssertionError(f"{step} loads, but holds none of {seeds}")


def save_and_rotate(rank: Rank, directory: str, seeds: Sequence[int], size_bytes: int) -> None:
    """As Megatron does it: a file names the newest step, rank 0 removes all but the newest two, and every rank reads
    what rank 0 wrote."""
    root = rank.root / directory
    tracker = root / "latest_checkpointed_iteration.txt"
    for seed in seeds:
        checkpoints.save(root / f"step_{seed}", seed, size_bytes)
        if rank.rank == 0:
            tracker.write_text(str(seed))
            tracker.stat()
            if (old := root / f"step_{seed - 2}").exists():
                shutil.rmtree(old)
        dist.barrier()
        wait_until(lambda seed=seed: tracker.read_text() == str(seed), "the tracker file's new text", 1)
        checkpoints.check(root / f"step_{seed}", seed, size_bytes)
        dist.barrier()


def save_with_weights(rank: Rank, directory: str, seeds: Sequence[int], size_bytes: int) -> None:
    """Each rank saves its weights by torch.save below `model/`, and all together then everything by DCP."""
    for seed in seeds:
        step = rank.root / directory / f"step_{seed}"
        (step / "model").mkdir(parents=True, exist_ok=True)
        torch.save(checkpoints.state(seed, size_bytes // 4)["note"], step / "model" / f"weights_{rank.rank}.pt")
        dist.barrier()
        checkpoints.save(step, seed, size_bytes)
