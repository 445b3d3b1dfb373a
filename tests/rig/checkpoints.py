"""State dicts whose every bit follows from a seed, saved and loaded with the stock calls of PyTorch DCP.

Any rank of any world can work out what a checkpoint must hold, so a load is compared bit for bit without keeping
what was saved. Every element differs between two seeds: a load that mixes two saves can't pass for either.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

MIB = 1 << 20
COLUMNS = 1024
SHARDED, REPLICATED = ("w0", "w1", "exp_avg"), ("embed", "norm")


def _bits(name: str, seed: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1009)
    words = torch.empty(elements * dtype.itemsize // 4, dtype=torch.int32).random_(generator=generator)
    return words.bitwise_xor_((seed * 0x9E3779B1 + 1) & 0x7FFFFFFF).view(dtype)


def _tensors(seed: int, size_bytes: int) -> dict[str, torch.Tensor]:
    """The full tensors: nine tenths of the bytes are to be sharded by rows, the rest is the same on all ranks."""
    rows = max(12, size_bytes * 3 // 10 // (COLUMNS * 4) // 12 * 12)  # 1, 2, 3 and 4 ranks divide it
    full = {name: _bits(name, seed, rows * COLUMNS, torch.float32).view(rows, COLUMNS) for name in SHARDED}
    full["embed"] = _bits("embed", seed, rows * COLUMNS // 2, torch.bfloat16).view(-1, COLUMNS)
    full["norm"] = _bits("norm", seed, 8, torch.float32)
    return full


def _is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def state(seed: int, size_bytes: int) -> dict[str, Any]:
    """This rank's part of the state dict: DTensors over all ranks where there are several, else whole tensors."""
    tensors: dict[str, torch.Tensor] = _tensors(seed, size_bytes)
    if _is_distributed():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in SHARDED:
            local = tensors[name].chunk(dist.get_world_size())[dist.get_rank()].clone()
            tensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        tensors["embed"] = DTensor.from_local(tensors["embed"], mesh, [Replicate()], run_check=False)
    return {"model": tensors, "step": seed, "note": f"seed {seed}"}


def whole(seed: int, size_bytes: int) -> dict[str, torch.Tensor]:
    """The tensors of the model as they are before any rank takes its part."""
    return _tensors(seed, size_bytes)


def differences(loaded: dict[str, Any], seed: int, size_bytes: int) -> list[str]:
    """What differs, by a single bit or more, between this rank's part of `loaded` and what `seed` makes."""
    expected = state(seed, size_bytes)
    wrong = [name for name in expected["model"] if not _same_bits(loaded["model"][name], expected["model"][name])]
    return wrong + [name for name in ("step", "note") if loaded[name] != expected[name]]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    local_one, local_other = (t.to_local() if isinstance(t, DTensor) else t for t in (one, other))
    return torch.equal(local_one.view(torch.uint8), local_other.view(torch.uint8))


def empty_state(size_bytes: int) -> dict[str, Any]:
    """A state dict to load into; nothing in it equals what any seed above 0 makes."""
    return {**state(0, size_bytes), "step": -1, "note": ""}


@contextlib.contextmanager
def quiet() -> Any:
    """Without DCP's warnings about overwriting, which the tests mean to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(step: Path, seed: int, size_bytes: int, *, collectives: bool = True, **writer: Any) -> None:
    """`dcp.save` with a stock FileSystemWriter, which takes `writer` as its options."""
    save_state(step, state(seed, size_bytes), collectives=collectives, **writer)


def save_state(step: Path, state_dict: dict[str, Any], *, collectives: bool = True, **writer: Any) -> None:
    """The same for a state dict that is made already."""
    with quiet():
        dcp.save(
            state_dict,
            storage_writer=dcp.FileSystemWriter(str(step), **writer),
            use_collectives=collectives,
        )


def load(step: Path, size_bytes: int) -> dict[str, Any]:
    """`dcp.load` of this rank's part."""
    target = empty_state(size_bytes)
    with quiet():
        dcp.load(target, storage_reader=dcp.FileSystemReader(str(step)))
    return target


def check(step: Path, seed: int, size_bytes: int) -> None:
    """Loads the step and fails naming each entry that differs by a bit from what `seed` makes."""
    wrong = differences(load(step, size_bytes), seed, size_bytes)
    assert not wrong, f"{step} should hold seed {seed}, but these differ: {wrong}"


def identify(step: Path, seeds: Iterable[int], size_bytes: int) -> int:
    """Which of `seeds` the step holds as a whole; fails when it is a mixture."""
    loaded = load(step, size_bytes)
    wrong = {seed: differences(loaded, seed, size_bytes) for seed in seeds}
    for seed, names in wrong.items():
        if not names:
            return seed
    raise AssertionError(f"{step} holds no seed whole; what differs for each: {wrong}")
