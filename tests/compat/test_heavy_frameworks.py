"""Frameworks of tests/frameworks-requirements.txt: the real packages, on CPUs, saving to and loading from the mount.

They are heavy and are installed by `make frameworks`, apart from what the other tests need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rig import heavy_frameworks
from rig.instance import Instance, tierfs, wait_until
from rig.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]


def needs(package: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    there = heavy_frameworks.is_there(package)
    return pytest.mark.skipif(not there, reason=f"{package} is not installed: make frameworks")


def states(instance: Instance, namespace: str) -> dict[str, str]:
    return {name: step["state"] for name, step in instance.steps(namespace).items()}


@needs("megatron")
def test_megatron_core_saves_by_forked_writers_and_loads(shared_instance: Instance, ckpt_root: Path) -> None:
    run_ranks(heavy_frameworks.megatron_core, ckpt_root / "iter_0000001", 3, False)
    run_ranks(heavy_frameworks.megatron_core, ckpt_root / "iter_0000002", 4, True)
    run_ranks(heavy_frameworks.megatron_core, ckpt_root / "iter_0000001", 5, True, True)  # over what is complete
    assert states(shared_instance, ckpt_root.name) == {"iter_0000001": "complete", "iter_0000002": "complete"}
    assert os.readlink(ckpt_root / "latest") == "iter_0000002"


@needs("torchtitan")
@pytest.mark.parametrize("mode", ["disabled", "async"])  # its third needs an accelerator
def test_torchtitan_saves_purges_and_finds_its_newest(shared_instance: Instance, ckpt_root: Path, mode: str) -> None:
    run_ranks(heavy_frameworks.torchtitan, ckpt_root, mode, 5)
    kept = states(shared_instance, f"{ckpt_root.name}/run1")
    # It counts before an asynchronous save has made its directory, and not at the last save.
    assert {"step-4", "step-5"} <= set(kept) and "step-1" not in kept
    assert set(kept.values()) == {"complete"}


@needs("deepspeed")
def test_deepspeed_saves_and_loads_by_its_own_latest(shared_instance: Instance, ckpt_root: Path) -> None:
    run_ranks(heavy_frameworks.deepspeed, ckpt_root, "global_step2")
    assert (ckpt_root / "latest").read_text() == "global_step2", "its file of that name is its own"
    assert states(shared_instance, ckpt_root.name) == {"global_step2": "writing"}, "it has no marker"
    tierfs("commit", ckpt_root / "global_step2")
    assert states(shared_instance, ckpt_root.name) == {"global_step2": "complete"}


@needs("ray")
def test_ray_train_keeps_its_checkpoints_there_and_workers_save_with_dcp(
    shared_instance: Instance, ckpt_root: Path
) -> None:
    found = [str(REPOSITORY), str(REPOSITORY / "tests"), str(heavy_frameworks.DIRECTORY)]
    done = subprocess.run(
        [sys.executable, "-m", "rig.ray_training", str(ckpt_root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    kept = [path for path in (ckpt_root / "ray").glob("checkpoint_*") if path.is_dir()]
    assert len(kept) == 1, "two were made, one is to be kept"
    wait_until(lambda: states(shared_instance, f"{ckpt_root.name}/dcp") == {"step_1": "complete", "step_2": "complete"},
               "what its workers saved with DCP is complete")  # fmt: skip
