"""Small saves and loads by frameworks that are installed apart from the rest (`make frameworks`), as jobs of ranks.

They are found behind everything else (`sys.path`), so that their being there changes nothing for other tests.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from rig.ranks import Rank

DIRECTORY = Path(os.environ.get("TIERFS_FRAMEWORKS", Path(__file__).parents[2] / ".venv" / "frameworks"))


def is_there(package: str) -> bool:
    return (DIRECTORY / package).is_dir() or importlib.util.find_spec(package) is not None


def find_them() -> None:
    """Once in each process that imports one of them."""
    if str(DIRECTORY) not in sys.path:
        sys.path.append(str(DIRECTORY))


def megatron_core(rank: Rank, step: Path, seed: int, is_async: bool, over: bool = False) -> None:
    """Saves by its own writer, which forks, and loads with its own checks. On a machine without CUDA its calls to it
    are left out: they wait for copies, and place a flag for a collective."""
    find_them()
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]

    def state(value: int) -> dict[str, Any]:
        rows = torch.full((256, 1024), float(value + rank.rank))
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", rows, (0, rank.rank, rank.world)),
            "rng": ShardedObject("rng", {"seed": value}, (rank.world,), (rank.rank,), replica_id=0),
            "iteration": value,
        }

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2)
    if rank.rank == 0:
        step.mkdir(parents=True, exist_ok=over)
    torch.distributed.barrier()
    request = dist_checkpointing.save(
        state(seed), str(step), sharded_strategy=strategy, async_sharded_save=is_async,
        validate_access_integrity=True,
    )  # fmt: skip
    if is_async:
        queue = AsyncCallsQueue(persistent=False)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    torch.distributed.barrier()
    loaded = dist_checkpointing.load(state(-7), str(step))
    assert torch.equal(loaded["weight"], torch.full((256, 1024), float(seed + rank.rank)))
    assert loaded["rng"] == {"seed": seed} and loaded["iteration"] == seed
    for left in multiprocessing.active_children():  # it leaves one that holds what its forks told
        left.terminate()
        left.join(10)


def torchtitan(rank: Rank, root: Path, mode: str, last: int) -> None:
    """Its checkpoint manager saves every step and is to keep two; then another finds the newest."""
    find_them()
    import torch
    from torchtitan.components.checkpoint import CheckpointManager

    class Trained(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(512, 512))

    class States:
        """Something with a state, as its optimizers and schedulers are."""

        def __init__(self, name: str) -> None:
            self.name, self.value = name, torch.zeros(4)

        def state_dict(self) -> dict[str, Any]:
            return {f"{self.name}.value": self.value}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.value = state_dict[f"{self.name}.value"]

    def manager(model: torch.nn.Module, optimizer: States) -> Any:
        config = CheckpointManager.Config(
            enable=True, folder="run1", interval=1, keep_latest_k=2, async_mode=mode, last_save_model_only=False
        )
        return CheckpointManager(
            config,
            dataloader=None,
            model_parts=[model],
            optimizers=optimizer,
            lr_schedulers=States("scheduler"),
            states={"train_state": States("train")},
            sd_adapter=None,
            base_folder=str(root),
        )

    model, optimizer = Trained(), States("optimizer")
    made = manager(model, optimizer)
    for step in range(1, last + 1):
        with torch.no_grad():
            model.weight.fill_(step)
        optimizer.value.fill_(step)
        made.save(step, last_step=step == last)
        made.maybe_wait_for_staging()
    made.maybe_wait_for_saving()
    made.close()
    torch.distributed.barrier()
    model, optimizer = Trained(), States("optimizer")
    made = manager(model, optimizer)
    assert made.load()
    made.close()
    assert model.weight.eq(last).all() and optimizer.value.eq(last).all()


def deepspeed(rank: Rank, run: Path, tag: str) -> None:
    """ZeRO 1 over gloo saves, and an engine of its own loads what its file `latest` names."""
    os.environ.update(
        DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank.rank), RANK=str(rank.rank), WORLD_SIZE=str(rank.world),
        DS_BUILD_OPS="0",
    )  # fmt: skip
    find_them()
    import deepspeed as package
    import torch

    def engine() -> Any:
        model = torch.nn.Linear(256, 256)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        return package.initialize(model=model, config=config, dist_init_required=False)[0]

    trained = engine()
    for _ in range(2):
        loss = trained(torch.ones(1, 256, dtype=torch.bfloat16)).sum()
        trained.backward(loss)
        trained.step()
    trained.save_checkpoint(str(run), tag=tag)
    other = engine()
    path, _ = other.load_checkpoint(str(run))
    assert path is not None and tag in path
    for one, two in zip(trained.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)
