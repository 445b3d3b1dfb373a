"""Steps on a real mount: what a trainer, a loader and a person see of commits, overwrites, crashes and evictions."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import checkpoints
from rig.checkpoints import MIB
from rig.fault_jobs import check_step, identify_step, save_and_wait
from rig.instance import Instance, mounted, wait_until
from rig.ranks import Job, Rank, RankFailed, run_ranks
from tests.conftest import needs_fuse
from tierfs.crash_points import POINTS

SIZE = 4 * MIB


def save(rank: Rank, step: Path, seed: int, size_bytes: int) -> None:
    checkpoints.save(step, seed, size_bytes)


def save_and_load(rank: Rank, step: Path, seeds: list[int], size_bytes: int) -> None:
    for seed in seeds:
        checkpoints.save(step, seed, size_bytes)
        checkpoints.check(step, seed, size_bytes)


@pytest.fixture
def scratch_dir() -> Iterator[Path]:
    needs_fuse()
    path = Path(tempfile.mkdtemp(prefix="tierfs-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def instance(scratch_dir: Path) -> Iterator[Instance]:
    with mounted(scratch_dir, f"steps-{uuid.uuid4().hex[:8]}", size="300M") as made:
        yield made


def state(path: Path) -> str:
    return os.getxattr(path, "user.tierfs.state").decode()


def complete(instance: Instance, step: str = "step_1", namespace: str = "run") -> bool:
    found = instance.steps(namespace).get(step)
    return found is not None and found["state"] == "complete" and not found["overwriting"]


def test_a_commit_that_lacks_a_file_fails_and_the_log_names_it(instance: Instance, tmp_path: Path) -> None:
    step = instance.mountpoint / "run" / "step_1"
    run_ranks(save, tmp_path / "plain", 1, SIZE)
    step.mkdir(parents=True)
    shutil.copyfile(tmp_path / "plain" / "__0_0.distcp", step / "__0_0.distcp")
    shutil.copyfile(tmp_path / "plain" / ".metadata", step / ".metadata.tmp")
    with pytest.raises(OSError) as refused:
        (step / ".metadata.tmp").rename(step / ".metadata")
    assert refused.value.errno == errno.EIO
    lines = [line for line in instance.log(1000).splitlines() if "commit of run/step_1 refused" in line]
    assert [line for line in lines if " ERROR " in line and "__1_0.distcp is missing" in line], lines
    assert state(step) == "writing"
    assert not (step.parent / "latest").is_symlink()
    assert instance.status()["problems"][0]["path"] == "run/step_1"
    shutil.copyfile(tmp_path / "plain" / "__1_0.distcp", step / "__1_0.distcp")
    (step / ".metadata.tmp").rename(step / ".metadata")
    assert state(step) == "complete"
    assert instance.status()["problems"] == []
    run_ranks(check_step, step.parent / "latest", 1, SIZE)


def test_who_has_the_old_file_open_or_mapped_keeps_its_bytes(instance: Instance) -> None:
    step = instance.mountpoint / "run" / "step_1"
    run_ranks(save, step, 1, SIZE, world=1)
    path = step / "__0_0.distcp"
    before = path.read_bytes()
    with path.open("rb") as old, mmap.mmap(old.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        run_ranks(save, step, 2, SIZE, world=1)
        assert mapped[:] == before
        assert old.read() == before
        assert path.read_bytes() != before
        assert os.fstat(old.fileno()).st_ino != path.stat().st_ino
    run_ranks(check_step, step, 2, SIZE, world=1)
    assert os.getxattr(step, "user.tierfs.generation") == b"2"
    assert os.getxattr(path, "user.tierfs.tier") == b"ram"

    def checksum() -> bool:
        try:
            return os.getxattr(path, "user.tierfs.checksum").startswith(b"crc64nvme:")
        except OSError:
            return False

    wait_until(checksum, "a checksum is computed")


def test_a_trainer_killed_half_way_leaves_the_old_step_at_once(instance: Instance) -> None:
    step = instance.mountpoint / "run" / "step_1"
    run_ranks(save, step, 1, SIZE)
    for half in ("__0_0.distcp", "__1_0.distcp"):
        killed = subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={step / half}", "bs=1M", "count=200"], stderr=subprocess.DEVNULL
        )
        wait_until(lambda: state(step) == "writing", "dd has begun to overwrite")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (step / ".metadata").exists(), "the first look puts the old step back"
        run_ranks(check_step, step, 1, SIZE)
        assert os.getxattr(step, "user.tierfs.generation") == b"1"
    job = Job(save_and_wait, step, 2, 40 * MIB)
    job.next_event()
    job.kill()
    wait_until(lambda: complete(instance), "the overwrite is done or undone")
    assert run_ranks(identify_or_none, step, [1], SIZE, world=1) == [1] or run_ranks(
        identify_step, step, [2], 40 * MIB, world=1
    ) == [2]


def identify_or_none(rank: Rank, step: Path, seeds: list[int], size_bytes: int) -> int | None:
    try:
        return checkpoints.identify(step, seeds, size_bytes)
    except Exception:
        return None


@pytest.mark.parametrize("point", POINTS)
def test_the_daemon_dies_at_a_point_and_nobody_notices(scratch_dir: Path, point: str) -> None:
    options = {"debug_crash_at": point}
    with mounted(scratch_dir, f"steps-{uuid.uuid4().hex[:8]}", size="300M", options=options) as instance:
        step = instance.mountpoint / "run" / "step_1"
        run_ranks(save_and_load, step, [1, 2, 3], SIZE, world=1)
        with (step / "__0_0.distcp").open("r+b"):
            pass
        wait_until(lambda: complete(instance), "what was opened and not changed is put back")
        run_ranks(check_step, step, 3, SIZE, world=1)
        with (step / "__0_0.distcp").open("r+b") as file:
            file.write(b"garbage")
            assert not (step / ".metadata").exists(), "a load fails rather than mixes"
        run_ranks(save_and_load, step, [4], SIZE, world=1)
        wait_until(lambda: complete(instance), "the step is complete")
        assert instance.status()["takeovers"] == 1, "the point was passed"
        tier = instance.ram_path
        wait_until(lambda: not [*(tier / "generations").iterdir(), *(tier / "trash").iterdir()], "nothing is left")
        run_ranks(check_step, instance.mountpoint / "run" / "latest", 4, SIZE, world=1)


def test_a_third_step_that_does_not_fit_evicts_the_first(instance: Instance) -> None:
    instance_size, root = 80 * MIB, instance.mountpoint / "run"
    for seed in (1, 2, 3):
        run_ranks(save, root / f"step_{seed}", seed, instance_size, world=1)
        assert (root / "latest").readlink() == Path(f"step_{seed}")
    for seed in (4, 5):
        run_ranks(save, root / f"step_{seed}", seed, instance_size, world=1)
        run_ranks(check_step, root / f"step_{seed - 1}", seed - 1, instance_size, world=1)
        assert not (root / f"step_{seed - 3}").exists()
    assert sorted(path.name for path in root.iterdir())[-1] == "step_5"


def test_no_room_harms_no_complete_step(instance: Instance) -> None:
    size, root = 80 * MIB, instance.mountpoint / "run"
    for seed in (1, 2):
        run_ranks(save, root / f"step_{seed}", seed, size, world=1)
    for step in (root / "step_3", root / "step_2"):  # a new one, and an overwrite
        with pytest.raises(RankFailed, match=r"No space left on device|unexpected pos"):
            run_ranks(save, step, 9, 400 * MIB, world=1)
        shutil.rmtree(root / "step_3", ignore_errors=True)
        for seed in (1, 2):
            wait_until(lambda seed=seed: complete(instance, f"step_{seed}"), "the step is whole")  # type: ignore[misc]
            run_ranks(check_step, root / f"step_{seed}", seed, size, world=1)
    run_ranks(save_and_load, root / "step_4", [4], size, world=1)
