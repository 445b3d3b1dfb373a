"""`TieredStager`: what it stages is the checkpoint's file, and the stock reader loads it, whatever comes between."""

from __future__ import annotations

import contextlib
import os
import time
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
    job = Job(prepare_and_wait, ckpt_root, world=2)
    job.next_event()
    job.next_event()
    job.kill()
    assert len(list(ckpt_root.glob(".tierfs-stage-*"))) == 2
    run_ranks(save_alone, ckpt_root, world=1)  # one rank less
    wait_until(lambda: not list(ckpt_root.glob(".tierfs-stage-*")), "the next one removed them")


class Stopping(TieredStorageWriter):
    """Tells when all shards are in their step, and never writes the marker."""

    by: Rank

    def finish(self, metadata: Any, results: Any) -> None:
        self.by.report("staged and moved")
        time.sleep(600)


def overwrite_and_stop(rank: Rank, root: Path) -> None:
    stager = TieredStager(root)
    group = dist.new_group(backend="gloo")
    state = checkpoints.state(1, SIZE)
    writer = TieredStorageWriter(namespace=root, step=1, stager=stager)
    dcp.async_save(state, storage_writer=writer, process_group=group).result()
    last = Stopping(namespace=root, step=1, stager=stager)
    last.by = rank
    with checkpoints.quiet():
        dcp.async_save(checkpoints.state(2, SIZE), storage_writer=last, process_group=group).result()


def check_only(rank: Rank, step: Path, seed: int) -> None:
    checkpoints.check(step, seed, SIZE)


def test_a_trainer_that_is_killed_before_its_marker_leaves_the_old_step_whole(ckpt_root: Path) -> None:
    job = Job(overwrite_and_stop, ckpt_root)
    assert job.next_event() == "staged and moved"
    job.kill()
    run_ranks(check_only, ckpt_root / "step_1", 1)
    run_ranks(save_alone, ckpt_root / "next", world=1)


def save_twice_at_once(rank: Rank, root: Path) -> None:
    """Two jobs that know nothing of each other save one step, as one does that was taken for dead."""
    dist.barrier()
    seed = rank.rank + 1
    stager = TieredStager(root)
    state = {"weight": torch.full((1 << 20,), float(seed)), "seed": seed}
    with checkpoints.quiet():
        for _ in range(5):
            writer = TieredStorageWriter(namespace=root, step=1, stager=stager)
            with contextlib.suppress(BaseException):  # one of them may be refused
                dcp.async_save(state, storage_writer=writer, no_dist=True).result()
    stager.close()
    dist.barrier()


def load_alone(rank: Rank, root: Path) -> tuple[int, float, float]:
    target = {"weight": torch.zeros(1 << 20), "seed": 0}
    dcp.load(target, storage_reader=dcp.FileSystemReader(str(root / "step_1")), no_dist=True)
    return target["seed"], target["weight"].min().item(), target["weight"].max().item()


def test_two_jobs_that_save_one_step_at_once_leave_that_of_one_or_the_other(ckpt_root: Path) -> None:
    run_ranks(save_twice_at_once, ckpt_root)
    [(seed, least, most)] = run_ranks(load_alone, ckpt_root, world=1)
    assert seed in (1, 2) and least == most == seed
    assert not list(ckpt_root.glob(".tierfs-stage-*"))


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
