"""The training of examples/train.py, which the README walks through: killed, and gone on with from where it was."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_compat import list_steps

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
LOSS = re.compile(r"step (\d+): loss (\S+)")


def kill(agent: subprocess.Popen[str]) -> None:
    """The ranks at once, then torchrun, which would start them again."""
    for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split() if agent.poll() is None else ():
        os.kill(int(pid), signal.SIGKILL)
    agent.kill()
    agent.wait(30)


@contextmanager
def training(root: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """Two ranks by torchrun; nothing of them is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dcp_compat.launch", "demo", "examples/train.py"]
    command += ["--namespace", "demo", "--steps", str(steps)]
    environment = {**os.environ, "TIERFS_ROOT": str(root), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        kill(process)


@pytest.mark.timeout(300)  # six processes import torch
def test_the_example_goes_on_after_it_was_killed_as_if_it_had_not_been(ckpt_root: Path) -> None:
    losses: dict[int, str] = {}
    with training(ckpt_root, 100_000) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := LOSS.match(line):
                losses[int(found[1])] = found[2]
            if len(losses) >= 3 and len(list_steps(ckpt_root / "demo")) >= 2:
                break
    newest = list_steps(ckpt_root / "demo")[-1]
    assert newest.number in losses and newest.number - 10 in losses
    shutil.rmtree(newest.path)  # so that what was computed before is computed once more
    with training(ckpt_root, newest.number) as process:
        told = process.communicate(timeout=120)[0]
        assert process.returncode == 0, told
    assert told.count(f"begins with step {newest.number - 9}") == 2
    again = {int(step): loss for step, loss in LOSS.findall(told)}
    assert again == {newest.number: losses[newest.number]}
    assert list_steps(ckpt_root / "demo")[-1].number == newest.number
    assert not list((ckpt_root / "demo").glob(".tierfs-stage-*"))
