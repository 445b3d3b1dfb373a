"""The trainer dies half way through an overwrite: the step is then all old or all new, never a mixture."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import identify_step, save_and_wait, save_steps
from rig.instance import Instance, wait_until
from rig.ranks import Job, run_ranks

SIZE = 24 * MIB
SETTLES_WITHIN_S = 30


def settled(instance: Instance) -> bool:
    step = instance.steps("run")["step_1"]
    return bool(step["state"] == "complete" and not step["overwriting"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("daemon_too", [False, True], ids=["trainer", "trainer-and-daemon"])
def test_overwrite_killed_half_way_loads_all_old_or_all_new(
    instance: Instance, moments: int, dice: random.Random, daemon_too: bool
) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    step = root / "step_1"
    run_ranks(save_steps, root, [1], SIZE)
    job = Job(save_and_wait, step, 2, SIZE)
    job.next_event()
    save_s = job.next_event()
    job.wait()
    daemon = instance.daemon_pid()
    held, seen = 2, {"old": 0, "new": 0}
    for seed in range(3, 3 + max(4, moments // 3)):
        job = Job(save_and_wait, step, seed, SIZE)
        job.next_event()
        time.sleep(dice.uniform(0, 1.3 * save_s))
        if daemon_too:
            os.kill(daemon, signal.SIGKILL)
        job.kill()
        if daemon_too:
            daemon = instance.wait_for_new_daemon(daemon)
        wait_until(lambda: settled(instance), "the overwrite is finished or undone", SETTLES_WITHIN_S)
        found = run_ranks(identify_step, step, [held, seed], SIZE, world=1)[0]
        seen["new" if found == seed else "old"] += 1
        held = found
    print(f"outcomes: {seen}")
