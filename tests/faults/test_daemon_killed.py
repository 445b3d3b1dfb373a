"""The daemon dies by SIGKILL at random moments of a running training, and the training notices nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import check_step, check_steps, save_until_stopped
from rig.instance import Instance
from rig.ranks import Job, run_ranks

SIZE = 24 * MIB


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new-steps", "overwriting-one-step"])
def test_daemon_killed_at_random_moments_costs_nobody_anything(
    instance: Instance, tmp_path: Path, moments: int, dice: random.Random, overwrite: bool
) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    stop = tmp_path / "stop"
    job = Job(save_until_stopped, root, SIZE, overwrite, stop)
    job.next_event()
    begin = time.monotonic()
    job.next_event()
    round_s = time.monotonic() - begin
    daemon = instance.daemon_pid()
    try:
        for _ in range(moments):
            time.sleep(dice.uniform(0, 1.5 * round_s))
            os.kill(daemon, signal.SIGKILL)
            daemon = instance.wait_for_new_daemon(daemon)
            job.next_event()
        stop.touch()
        seeds = job.wait()[0]
    finally:
        job.kill()
    if overwrite:
        run_ranks(check_step, root / "step_1", seeds[-1], SIZE)
    else:
        run_ranks(check_steps, root, seeds, SIZE)
    assert instance.status()["takeovers"] == moments
    states = {step["step"]: step["state"] for step in instance.status()["steps"]}
    assert states == dict.fromkeys(["step_1"] if overwrite else [f"step_{seed}" for seed in seeds], "complete")
