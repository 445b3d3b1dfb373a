"""What a job does before its process group is up, and when it is told to end: on a real mount with an object tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_compat import prefetch
from rig.checkpoints import MIB
from rig.instance import Instance, mounted, tierfs, wait_until


@pytest.fixture(scope="module")
def instance(scratch: Path) -> Iterator[Instance]:
    (scratch / "store").mkdir()
    options = {"object": f"file://{scratch}/store", "persist.policy": "demand", "persist.settle_s": "0.1"}
    with mounted(scratch / "with-objects", f"restarts-{os.getpid()}", size="500M", options=options) as made:
        yield made


def make_step(step: Path) -> None:
    step.mkdir(parents=True)
    for rank in range(3):
        (step / f"__{rank}_0.distcp").write_bytes(os.urandom(2 * MIB))
    (step / "commit_success.txt").touch()
    wait_until(lambda: os.getxattr(step, "user.tierfs.state") == b"complete", "the step is complete")


SCRIPT = """
import os, sys, time
marker, root = sys.argv[1:]
deadline = time.monotonic() + 60
while os.getxattr(f"{root}/pre/step_1/__2_0.distcp", "user.tierfs.tier") != b"ram":
    assert time.monotonic() < deadline
    time.sleep(0.02)
open(marker, "w").write(os.environ["RANK"])
"""


def test_torchrun_prefetches_each_ranks_shard_before_the_script_asks(instance: Instance, tmp_path: Path) -> None:
    step = instance.mountpoint / "pre" / "step_1"
    make_step(step)
    tierfs("flush", "--wait", step)
    tierfs("evict", step)
    tiers = [os.getxattr(path, "user.tierfs.tier") for path in sorted(step.glob("*.distcp"))]
    assert tiers == [b"object"] * 3
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "dcp_compat.launch",
            "pre",
            tmp_path / "train.py",
            tmp_path / "marker",
            step.parents[1],
        ],
        env={**os.environ, "RANK": "2", "TIERFS_ROOT": str(instance.mountpoint)},
        cwd=Path(__file__).parents[2],
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "marker").read_text() == "2"
    assert os.getxattr(step / "__1_0.distcp", "user.tierfs.tier") == b"object", "another rank's shard is left"
    brought = prefetch(step.parent, rank=1)
    assert brought.wait(60) and brought.problem is None and brought.files[0].name == "__1_0.distcp"


TRAINING = """
import pathlib, sys, time
from dcp_compat import persist_on_sigterm
namespace, stop = sys.argv[1], sys.argv[2] == "stop"
with persist_on_sigterm(namespace, stop=stop) as termination:
    print("training", flush=True)
    deadline = time.monotonic() + 60
    while not termination.requested and time.monotonic() < deadline:
        time.sleep(0.02)
    if termination.requested:
        step = pathlib.Path(namespace, "step_2")
        step.mkdir()
        (step / "model.pt").write_bytes(b"the last one")
        (step / "commit_success.txt").touch()
        while step.name not in str(pathlib.Path(namespace, "latest").resolve()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
"""


@pytest.mark.parametrize(("how", "code", "persisted"), [("stop", 143, "step_1"), ("go on", 0, "step_2")])
def test_the_newest_step_is_persisted_on_sigterm(instance: Instance, how: str, code: int, persisted: str) -> None:
    namespace = instance.mountpoint / f"term-{code}"
    make_step(namespace / "step_1")
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(namespace), how],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert training.stdout is not None and training.stdout.readline() == "training\n"
    training.send_signal(signal.SIGTERM)
    assert training.wait(60) == code
    levels = {step.name: os.getxattr(step, "user.tierfs.level") for step in namespace.glob("step_*")}
    assert levels.pop(persisted) == b"object"
    assert set(levels.values()) <= {b"ram"}, "nothing else went there"
