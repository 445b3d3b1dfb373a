"""`TieredStorageWriter` and `TieredStorageReader` against the stock ones, both ways, on a real mount and two ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from dcp_compat import TieredStager, TieredStorageReader, TieredStorageWriter, latest, list_steps, step_path
from rig import checkpoints
from rig.checkpoints import MIB
from rig.instance import Instance, mounted
from rig.ranks import Rank, run_ranks
from tierfs.errors import LevelNotReached

SIZE = 8 * MIB
MODES: list[dict[str, Any]] = [
    {"thread_count": 1},
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
        for seed in (1, 2) if number == 0 else (1,):  # the second over the first
            save(ours, seed, **mode)
            checkpoints.check(ours, seed, SIZE)
            checkpoints.save(theirs, seed, SIZE, **mode)
            load(seed, path=theirs)
            load(seed, namespace=root, step=number)


def test_each_loads_what_the_other_saved_in_every_mode_and_over_an_existing_step(ckpt_root: Path) -> None:
    run_ranks(both_ways, ckpt_root)


def save_as_stock(rank: Rank, root: Path) -> None:
    for number, mode in enumerate(MODES):
        same = {"thread_count": 1, **mode}  # the stock writer's default
        save(root / f"step_{number}", 3, crc32=True, **same)
        checkpoints.save(root / "stock" / f"step_{number}", 3, SIZE, **same)


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


def both_ways_in_background(rank: Rank, root: Path, kind: AsyncCheckpointerType) -> None:
    """Two saves, of which the second reuses what the planner keeps of the first."""
    group = dist.new_group(backend="gloo")
    writers: dict[str, Any] = {
        "ours": TieredStorageWriter(root / "ours" / "step_1"),
        "stock": dcp.FileSystemWriter(str(root / "stock" / "step_1")),
    }
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for seed in (1, 2):
        for name, writer in writers.items():
            step = root / name / f"step_{seed}"
            dcp.async_save(
                checkpoints.state(seed, SIZE),
                checkpoint_id=str(step),
                storage_writer=writer,
                planner=planner if name == "ours" else None,
                process_group=group,
                async_checkpointer_type=kind,
            ).result()
    for seed in (1, 2):
        checkpoints.check(root / "ours" / f"step_{seed}", seed, SIZE)
        load(seed, path=root / "stock" / f"step_{seed}")
        load(seed, path=root / "ours" / f"step_{seed}")


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType), ids=lambda kind: kind.value)
def test_each_loads_what_the_other_saved_in_the_background(ckpt_root: Path, kind: AsyncCheckpointerType) -> None:
    run_ranks(both_ways_in_background, ckpt_root, kind)
    assert [step.number for step in list_steps(ckpt_root / "ours")] == [1, 2]


def both_ways_alone(rank: Rank, root: Path) -> None:
    """Each rank for itself, as `no_dist` says."""
    state = {"weight": torch.full((300, 1000), float(rank.rank + 1)), "rank": rank.rank}
    for name, writer in (("ours", TieredStorageWriter), ("stock", dcp.FileSystemWriter)):
        step = root / f"{name}-{rank.rank}" / "step_1"
        dcp.save(state, storage_writer=writer(step), no_dist=True)
        for reader in (dcp.FileSystemReader(step), TieredStorageReader(step, no_dist=True)):
            target = {"weight": torch.zeros(300, 1000), "rank": -1}
            dcp.load(target, storage_reader=reader, no_dist=True)
            assert torch.equal(target["weight"], state["weight"]) and target["rank"] == rank.rank
    newest = TieredStorageReader(namespace=root / f"ours-{rank.rank}", no_dist=True)
    target = {"weight": torch.zeros(300, 1000), "rank": -1}
    dcp.load(target, storage_reader=newest, no_dist=True)
    assert target["rank"] == rank.rank and Path(newest.path).name == "step_1"


def test_each_rank_alone_without_collectives_between_them(ckpt_root: Path) -> None:
    run_ranks(both_ways_alone, ckpt_root)


def save_for_others(rank: Rank, root: Path, saver: str) -> None:
    step = root / saver / "step_1"
    if saver == "stock":
        checkpoints.save(step, 1, SIZE)
    elif saver == "ours":
        save(step, 1, thread_count=2)
    else:
        stager = TieredStager(root / saver)
        group = dist.new_group(backend="gloo")
        writer = TieredStorageWriter(namespace=root / saver, step=1, stager=stager)
        dcp.async_save(checkpoints.state(1, SIZE), storage_writer=writer, process_group=group).result()
        stager.close()


def load_resharded(rank: Rank, root: Path, savers: list[str]) -> None:
    """By rows as it was saved, whatever number of ranks that were; and by columns, which no rank wrote in one piece."""
    whole = checkpoints.whole(1, SIZE)
    mesh = init_device_mesh("cpu", (rank.world,))
    for saver in savers:
        for make in (dcp.FileSystemReader, TieredStorageReader):
            target = checkpoints.empty_state(SIZE)
            dcp.load(target, storage_reader=make(root / saver / "step_1"))
            assert not checkpoints.differences(target, 1, SIZE), (saver, make)
            columns = {
                name: distribute_tensor(torch.zeros_like(whole[name]), mesh, [Shard(1)], src_data_rank=None)
                for name in checkpoints.SHARDED
            }
            dcp.load({"model": columns}, storage_reader=make(root / saver / "step_1"))
            for name, loaded in columns.items():
                expected = whole[name].chunk(rank.world, dim=1)[rank.rank]
                assert torch.equal(loaded.to_local().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (3, 2)])
def test_it_is_loaded_by_another_number_of_ranks_and_cut_otherwise(ckpt_root: Path, before: int, after: int) -> None:
    savers = ["ours", "stock", "staged"]
    for saver in savers:
        run_ranks(save_for_others, ckpt_root, saver, world=before)
    run_ranks(load_resharded, ckpt_root, savers, world=after)


def save_only(rank: Rank, step: Path, seed: int) -> None:
    save(step, seed)


def load_only(rank: Rank, namespace: Path, seed: int) -> tuple[str, list[str]]:
    reader = load(seed, namespace=namespace)
    return Path(reader.path).name, [path.name for path, _ in reader.skipped]


def save_another_step_than_the_others(rank: Rank, root: Path) -> str:
    try:
        save(root / f"step_{5 + rank.rank}", 1)
    except BaseException as error:
        return str(error)
    return ""


def test_ranks_that_do_not_agree_on_the_step_complete_none(ckpt_root: Path) -> None:
    told = run_ranks(save_another_step_than_the_others, ckpt_root)
    assert all("Input/output error" in each for each in told), "each rank hears of it"
    assert list_steps(ckpt_root) == []
    run_ranks(save_only, ckpt_root / "step_6", 2)
    assert [step.number for step in list_steps(ckpt_root)] == [6]


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


def test_as_many_threads_write_as_the_rank_has_cores_but_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks, threads in ((1, "", 1), (2, "", 2), (2, "2", 1), (64, "8", 2), (64, "odd", 2), (4, "8", 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert TieredStorageWriter("step_1").thread_count == threads
        assert TieredStorageWriter("step_1", thread_count=5).thread_count == 5


def test_what_names_no_step_or_tier_is_refused(scratch: Path) -> None:
    for wrong in ({}, {"path": "x", "namespace": "y"}, {"namespace": "y"}, {"path": "x", "tiers": ("object",)}):
        with pytest.raises(ValueError):
            TieredStorageWriter(**wrong)
    with pytest.raises(ValueError):
        TieredStorageWriter("x", durability="tape")
    with pytest.raises(RuntimeError, match="not saved yet"):
        _ = TieredStorageWriter(scratch / "nowhere").saved
