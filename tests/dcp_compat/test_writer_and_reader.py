"""`TieredStorageWriter` and `TieredStorageReader` against the stock ones, both ways, on a real mount and two ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_compat import TieredStorageReader, TieredStorageWriter, latest, list_steps, step_path
from rig import checkpoints
from rig.checkpoints import MIB
from rig.instance import Instance, mounted
from rig.ranks import Rank, run_ranks
from tierfs.errors import LevelNotReached

SIZE = 8 * MIB
MODES: list[dict[str, Any]] = [
    {},
    {"thread_count": 4},
    {"single_file_per_rank": False},
    {"sync_files": False},
    {"collectives": False},
    {"serialization_format": dcp.filesystem.SerializationFormat.SAFETENSORS},
]


def save(step: Path, seed: int, *, collectives: bool = True, **options: Any) -> None:
    with checkpoints.quiet():
        dcp.save(
            checkpoints.state(seed, SIZE),
            storage_writer=TieredStorageWriter(step, **options),
            use_collectives=collectives,
        )


def load(seed: int, **options: Any) -> TieredStorageReader:
    """With the reader, which is compared bit for bit."""
    target = checkpoints.empty_state(SIZE)
    reader = TieredStorageReader(**options)
    with checkpoints.quiet():
        dcp.load(target, storage_reader=reader)
    assert not checkpoints.differences(target, seed, SIZE)
    return reader


def both_ways(rank: Rank, root: Path) -> None:
    for number, mode in enumerate(MODES[:5]):
        ours, theirs = root / f"step_{number}", root / "stock" / f"step_{number}"
        for seed in (1, 2) if not mode else (1,):  # the second over the first
            save(ours, seed, **mode)
            checkpoints.check(ours, seed, SIZE)
            checkpoints.save(theirs, seed, SIZE, **mode)
            load(seed, path=theirs)
            load(seed, namespace=root, step=number)


def test_each_loads_what_the_other_saved_in_every_mode_and_over_an_existing_step(ckpt_root: Path) -> None:
    run_ranks(both_ways, ckpt_root)


def save_as_stock(rank: Rank, root: Path) -> None:
    for number, mode in enumerate(MODES):
        save(root / f"step_{number}", 3, crc32=True, **mode)
        checkpoints.save(root / "stock" / f"step_{number}", 3, SIZE, **mode)


def test_with_sums_its_files_are_the_stock_ones_bit_for_bit(ckpt_root: Path) -> None:
    run_ranks(save_as_stock, ckpt_root)
    for number, mode in enumerate(MODES):
        ours, theirs = ckpt_root / f"step_{number}", ckpt_root / "stock" / f"step_{number}"
        names = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in ours.iterdir()) == names
        for name in names:
            if not name.endswith(".distcp"):
                continue  # the marker tells its own path
            if "serialization_format" in mode:  # PyTorch's own code, whose header lists tensors in a random order
                assert (ours / name).stat().st_size == (theirs / name).stat().st_size
            else:
                assert (ours / name).read_bytes() == (theirs / name).read_bytes(), (mode, name)


def save_only(rank: Rank, step: Path, seed: int) -> None:
    save(step, seed)


def load_only(rank: Rank, namespace: Path, seed: int) -> tuple[str, list[str]]:
    reader = load(seed, namespace=namespace)
    return Path(reader.path).name, [path.name for path, _ in reader.skipped]


def test_another_number_of_ranks_loads_it(ckpt_root: Path) -> None:
    run_ranks(save_only, ckpt_root / "step_1", 1)
    assert run_ranks(load_only, ckpt_root, 1, world=1) == [("step_1", [])]


def refuse_to_overwrite(rank: Rank, step: Path) -> None:
    save(step, 1)
    with pytest.raises(BaseException, match="overwrite"):
        save(step, 2, overwrite=False)
    checkpoints.check(step, 1, SIZE)


def test_overwrite_false_refuses_and_touches_nothing(ckpt_root: Path) -> None:
    run_ranks(refuse_to_overwrite, ckpt_root / "step_1")


def test_all_ranks_go_back_to_the_newest_step_that_each_can_read(
    shared_instance: Instance, ckpt_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before is cut into other pieces, since another number of ranks saved it."""
    run_ranks(save_only, ckpt_root / "step_1", 1)
    run_ranks(save_only, ckpt_root / "iter_0000002", 2, world=1)
    run_ranks(save_only, ckpt_root / "step_3", 3)
    run_ranks(save_only, ckpt_root / "step_4", 4)
    (ckpt_root / "step_5").mkdir()
    (ckpt_root / "step_5" / "__0_0.distcp").write_bytes(b"a save that broke off")
    tier = shared_instance.ram_path / "root" / ckpt_root.name
    os.truncate(tier / "step_3" / "__1_0.distcp", 1000)  # only rank 1 reads its own
    (tier / "step_4" / ".metadata").write_bytes(b"no pickle")
    assert [step.path.name for step in list_steps(ckpt_root)] == ["step_1", "iter_0000002", "step_3", "step_4"]
    newest = latest(ckpt_root)
    assert newest is not None and newest.number == 4
    assert step_path(ckpt_root, 2) == ckpt_root / "iter_0000002"
    assert run_ranks(load_only, ckpt_root, 2) == [("iter_0000002", ["step_4", "step_3"])] * 2


@pytest.fixture(scope="module")
def with_objects(scratch: Path) -> Iterator[Path]:
    """The root of a mount with an object tier to which nothing goes unasked."""
    options = {"object": f"file://{scratch}/store", "persist.policy": "demand", "persist.settle_s": "0.1"}
    (scratch / "store").mkdir()
    with mounted(scratch / "with-objects", f"writer-{os.getpid()}", size="500M", options=options) as instance:
        yield instance.mountpoint


def save_to_tiers(rank: Rank, root: Path) -> None:
    writer = TieredStorageWriter(namespace="run", step=1, root=root)
    for step in range(1, 4):
        writer.begin(step, tiers=("ram", "object") if step == 2 else ("ram", "replica"))
        dcp.save(checkpoints.state(step, SIZE), storage_writer=writer)
        assert writer.step == step
        if step == 2:
            assert writer.saved.future("object", 60).result(60) == root / "run" / "step_2"
        else:
            writer.wait("ram", 10)
            with pytest.raises(LevelNotReached, match="not 'object' within"):
                writer.wait("object", 0.2)
    writer.begin(4, tiers=("ram", "object"), durability="object")
    dcp.save(checkpoints.state(4, SIZE), storage_writer=writer)
    assert writer.saved.level() == "object", "the save waited for it"
    third = TieredStorageWriter(root / "run" / "step_3").saved
    assert third.persist()  # asked for later
    third.wait("object", 60)


def test_each_step_goes_where_its_save_says(with_objects: Path) -> None:
    run_ranks(save_to_tiers, with_objects)


def test_on_another_file_system_it_saves_and_says_what_it_can_not(scratch: Path) -> None:
    run_ranks(save_only, scratch / "plain" / "step_1", 1, world=1)
    assert run_ranks(load_only, scratch / "plain", 1, world=1) == [("step_1", [])]
    saved = TieredStorageWriter(scratch / "plain" / "step_1").saved
    saved.wait("ram", 0)
    with pytest.raises(LevelNotReached, match="no tierfs mount"):
        saved.wait("object", 1)


def test_what_names_no_step_or_tier_is_refused(scratch: Path) -> None:
    for wrong in ({}, {"path": "x", "namespace": "y"}, {"namespace": "y"}, {"path": "x", "tiers": ("object",)}):
        with pytest.raises(ValueError):
            TieredStorageWriter(**wrong)
    with pytest.raises(ValueError):
        TieredStorageWriter("x", durability="tape")
    with pytest.raises(RuntimeError, match="not saved yet"):
        _ = TieredStorageWriter(scratch / "nowhere").saved
