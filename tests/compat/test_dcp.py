"""Stock PyTorch DCP on two gloo ranks: each documented way to save, and a load that is compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from rig import checkpoints
from rig.ranks import Rank, run_ranks

SIZE = 16 * checkpoints.MIB


def save_and_check(rank: Rank, step: Path, options: dict[str, Any]) -> None:
    checkpoints.save(step, 1, SIZE, **options)
    checkpoints.check(step, 1, SIZE)


@pytest.mark.parametrize(
    "options",
    [
        {"thread_count": 1},
        {"thread_count": 4},
        {"single_file_per_rank": False},
        {"sync_files": False},
        {"collectives": False},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
def test_what_dcp_saves_it_loads_bit_for_bit(ckpt_root: Path, options: dict[str, Any]) -> None:
    run_ranks(save_and_check, ckpt_root / "step_1", options)


def save_by_path(rank: Rank, step: Path) -> None:
    """Without a writer DCP chooses one by looking at the path and its parents."""
    dcp.save(checkpoints.state(1, SIZE), checkpoint_id=str(step))
    target = checkpoints.empty_state(SIZE)
    dcp.load(target, checkpoint_id=str(step))
    assert not checkpoints.differences(target, 1, SIZE)


def test_dcp_chooses_the_mount_by_its_path(ckpt_root: Path) -> None:
    run_ranks(save_by_path, ckpt_root / "not-yet-there" / "step_1")


def save_async(rank: Rank, root: Path, kind: AsyncCheckpointerType) -> None:
    for seed in (1, 2):
        dcp.async_save(
            checkpoints.state(seed, SIZE),
            storage_writer=dcp.FileSystemWriter(str(root / f"step_{seed}")),
            process_group=dist.new_group(backend="gloo"),
            async_checkpointer_type=kind,
        ).result()
    for seed in (1, 2):
        checkpoints.check(root / f"step_{seed}", seed, SIZE)


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType), ids=lambda kind: kind.value)
def test_async_save(ckpt_root: Path, kind: AsyncCheckpointerType) -> None:
    run_ranks(save_async, ckpt_root, kind)


def save_again(rank: Rank, step: Path) -> None:
    for seed, size in ((1, SIZE), (2, SIZE), (3, SIZE // 2), (4, SIZE)):
        checkpoints.save(step, seed, size)
        checkpoints.check(step, seed, size)


def test_save_over_an_existing_step_also_a_smaller_one(ckpt_root: Path) -> None:
    run_ranks(save_again, ckpt_root / "step_1")


def refuse_to_overwrite(rank: Rank, step: Path) -> None:
    checkpoints.save(step, 1, SIZE)
    with pytest.raises(BaseException, match="overwrite"):
        checkpoints.save(step, 2, SIZE, overwrite=False)
    checkpoints.check(step, 1, SIZE)


def test_overwrite_false_refuses_and_touches_nothing(ckpt_root: Path) -> None:
    run_ranks(refuse_to_overwrite, ckpt_root / "step_1")


def save_only(rank: Rank, step: Path, seed: int) -> None:
    checkpoints.save(step, seed, SIZE)


def check_only(rank: Rank, step: Path, seed: int) -> None:
    checkpoints.check(step, seed, SIZE)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_loads_it(ckpt_root: Path, savers: int, loaders: int) -> None:
    run_ranks(save_only, ckpt_root / "step_1", 1, world=savers)
    run_ranks(check_only, ckpt_root / "step_1", 1, world=loaders)


def save_hugging_face(rank: Rank, step: Path) -> None:
    tensors = checkpoints.state(1, SIZE)["model"]
    with checkpoints.quiet():
        dcp.save(
            tensors,
            storage_writer=dcp.HuggingFaceStorageWriter(
                str(step),
                save_distributed=True,
                enable_consolidation=True,
                fqn_to_index_mapping=dict.fromkeys(tensors, 1),
            ),
        )
        target = checkpoints.empty_state(SIZE)
        dcp.load(target["model"], storage_reader=dcp.HuggingFaceStorageReader(str(step)))
    wrong = checkpoints.differences({**target, "step": 1, "note": "seed 1"}, 1, SIZE)
    assert not wrong


def test_hugging_face_writer_consolidates_and_its_reader_loads(ckpt_root: Path) -> None:
    run_ranks(save_hugging_face, ckpt_root / "step_1")
    from safetensors.torch import load_file

    consolidated = list((ckpt_root / "step_1").glob("model*.safetensors"))
    loaded = {name: tensor for path in consolidated for name, tensor in load_file(path).items()}
    expected = checkpoints.state(1, SIZE)["model"]
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)


def rotate(rank: Rank, root: Path) -> None:
    """torchtitan's way: keep the newest two, remove older ones while training goes on."""
    import shutil

    for seed in range(1, 6):
        checkpoints.save(root / f"step-{seed}", seed, SIZE)
        if rank.rank == 0 and seed > 2:
            shutil.rmtree(root / f"step-{seed - 2}")
    checkpoints.check(root / "step-5", 5, SIZE)
    checkpoints.check(root / "step-4", 4, SIZE)


def test_old_steps_are_removed_while_new_ones_are_saved(ckpt_root: Path) -> None:
    run_ranks(rotate, ckpt_root)
    assert sorted(path.name for path in ckpt_root.iterdir() if not path.is_symlink()) == ["step-4", "step-5"]
