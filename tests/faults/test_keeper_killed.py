"""The keeper dies, alone or with the daemon: the RAM tier and its complete steps are found by the next mount."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import check_steps, save_steps
from rig.instance import Instance, wait_until
from rig.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZE = 24 * MIB


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("victims", [("keeper_pid",), ("keeper_pid", "daemon_pid"), ("daemon_pid", "keeper_pid")])
def test_the_next_mount_finds_every_complete_step(instance: Instance, victims: tuple[str, ...]) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    run_ranks(save_steps, root, [1, 2], SIZE)
    status = instance.status()
    for victim in victims:
        os.kill(status[victim], signal.SIGKILL)
    wait_until(lambda: all(is_gone(status[victim]) for victim in victims), "the killed processes are gone")
    instance.mount()
    adopts = "daemon_pid" not in victims  # a daemon that lives goes on under the new keeper
    assert (instance.daemon_pid() == status["daemon_pid"]) == adopts
    run_ranks(check_steps, root, [1, 2], SIZE)
    states = {name: step["state"] for name, step in instance.steps("run").items()}
    assert states == {"step_1": "complete", "step_2": "complete"}
    run_ranks(save_steps, root, [3], SIZE)
    run_ranks(check_steps, root, [3], SIZE)


def test_umount_and_mount_again_finds_every_complete_step(instance: Instance) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    run_ranks(save_steps, root, [1], SIZE)
    status = instance.status()
    subprocess.run(["umount", instance.mountpoint], check=True)
    wait_until(
        lambda: is_gone(status["daemon_pid"]) and is_gone(status["keeper_pid"]), "daemon and keeper end after umount"
    )
    instance.mount()
    run_ranks(check_steps, root, [1], SIZE)
