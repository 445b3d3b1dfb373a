"""`TieredStager`: what it stages is the checkpoint's file, and the stock reader loads it, whatever comes between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_compat import TieredStager, TieredStorageWriter, list_steps
from rig import checkpoints
from rig.checkpoints import MIB
from rig.instance import Instance, wait_until
from rig.ranks import Job, Rank, run_ranks

SIZE = 12 * MIB


def overwrite(state: dict[str, Any]) -> None:
    """Training goes on: what is staged must not see it."""
    for tensor in state["model"].values():
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).zero_()


def save_async(rank: Rank, root: Path) -> None:
    """The last one has other shapes, and no file is ready for it."""
    group = dist.new_group(backend="gloo")
    stager = TieredStager(root)
    stager.prepare(checkpoints.state(0, SIZE))
    sizes = {1: SIZE, 2: SIZE, 3: SIZE, 4: SIZE // 2}
    for seed, size in sizes.items():
        state = checkpoints.state(seed, size)
        writer = TieredStorageWriter(namespace=root, step=seed, stager=stager, crc32=seed == 2)
        future = dcp.async_save(state, storage_writer=writer, process_group=group)
        overwrite(state)
        future.result()
        checkpoints.check(root / f"step_{seed}", seed, size)
    with checkpoints.quiet():  # over a step that is complete
        writer = TieredStorageWriter(namespace=root, step=4, stager=stager)
        dcp.async_save(checkpoints.state(5, SIZE), storage_writer=writer, process_group=group).result()
    checkpoints.check(root / "step_4", 5, SIZE)
    for seed in (1, 2, 3):
        checkpoints.check(root / f"step_{seed}", seed, SIZE)
    assert list(root.glob(f".tierfs-stage-*-{rank.rank}-*")), "the next save's file is ready"
    stager.close()
    dist.barrier()
    assert not list(root.glob(".tierfs-stage-*"))


def test_staged_tensors_are_the_file_and_load_bit_for_bit(ckpt_root: Path) -> None:
    run_ranks(save_async, ckpt_root)
    assert [step.number for step in list_steps(ckpt_root)] == [1, 2, 3, 4]
    state = 3 * 3 * SIZE // 10  # what the ranks do not share lies in the file once, and nothing twice
    total = sum(path.stat().st_size for path in (ckpt_root / "step_3").glob("*.distcp"))
    assert total < SIZE + MIB and total >= state - MIB


def save_alone(rank: Rank, root: Path) -> None:
    """Everything that a state dict may hold: views, shared storages, empty and sparse tensors, objects, lists."""
    base = torch.arange(600_000, dtype=torch.float32)
    state: dict[str, Any] = {
        "view": base[1000:2000],
        "transposed": base.view(600, 1000).t(),
        "tied": base,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(5, 5)),
        "list": [torch.ones(3), {"deep": torch.full((2, 2), 4, dtype=torch.bfloat16)}],
        "object": {"lr": 0.1, "names": ["a", "b"]},
    }
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    stager = TieredStager(root)
    for step in (1, 2):
        future = dcp.async_save(state, storage_writer=TieredStorageWriter(namespace=root, step=step, stager=stager))
        future.result()
    base.zero_()
    target = {key: torch.zeros_like(value) for key, value in expected.items()}
    loaded: dict[str, Any] = {**target, "list": [torch.zeros(3), {"deep": torch.zeros(2, 2, dtype=torch.bfloat16)}]}
    loaded["object"] = {"lr": 0.0, "names": ["", ""]}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(root / "step_2")))
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key
    assert torch.equal(loaded["list"][1]["deep"], torch.full((2, 2), 4, dtype=torch.bfloat16))
    assert loaded["object"] == {"lr": 0.1, "names": ["a", "b"]}
    stager.close()


def test_all_that_a_state_dict_may_hold_is_staged(ckpt_root: Path) -> None:
    run_ranks(save_alone, ckpt_root, world=1)


def prepare_and_wait(rank: Rank, root: Path) -> None:
    stager = TieredStager(root)
    stager.prepare(checkpoints.state(0, SIZE))
    rank.report("ready")
    while True:
        dist.barrier()


def test_a_killed_trainer_leaves_nothing_for_good(ckpt_root: Path) -> None:
    job = Job(prepare_and_wait, ckpt_root, world=1)
    job.next_event()
    job.kill()
    assert len(list(ckpt_root.glob(".tierfs-stage-*"))) == 1
    run_ranks(save_alone, ckpt_root, world=1)
    wait_until(lambda: not list(ckpt_root.glob(".tierfs-stage-*")), "the next one removed it")


def save_without_room(rank: Rank, root: Path, size: int) -> None:
    stager = TieredStager(root)
    stager.prepare({"big": torch.empty(size // 4)})
    assert not list(root.glob(".tierfs-stage-*")), "nothing is left of what did not fit"
    state = checkpoints.state(1, SIZE)
    dcp.async_save(state, storage_writer=TieredStorageWriter(namespace=root, step=1, stager=stager)).result()
    checkpoints.check(root / "step_1", 1, SIZE)
    stager.close()


def test_without_room_it_is_staged_in_plain_memory(shared_instance: Instance, ckpt_root: Path) -> None:
    size = os.statvfs(ckpt_root).f_blocks * os.statvfs(ckpt_root).f_frsize + 64 * MIB
    run_ranks(save_without_room, ckpt_root, size, world=1)
