"""What a program asks of one step by extended attributes, from wherever it sees the mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.checkpoints import MIB
from rig.instance import Instance, mounted, wait_until


@pytest.fixture(scope="module")
def instance(scratch: Path) -> Iterator[Instance]:
    (scratch / "store").mkdir()
    options = {"object": f"file://{scratch}/store", "persist.policy": "all", "persist.settle_s": "0.1"}
    with mounted(scratch / "with-objects", f"wishes-{os.getpid()}", size="1G", options=options) as made:
        yield made


def save(step: Path, wishes: dict[str, str]) -> None:
    step.mkdir(parents=True)
    for name, value in wishes.items():
        os.setxattr(step, f"user.tierfs.{name}", value.encode())
    (step / "model.pt").write_bytes(b"x" * MIB)
    (step / "commit_success.txt").touch()
    wait_until(lambda: os.getxattr(step, "user.tierfs.state") == b"complete", "the step is complete")


def told(instance: Instance, step: Path) -> dict[str, Any]:
    return instance.steps(step.parent.name)[step.name]


def test_tiers_of_one_step_go_ahead_of_the_policy_and_outlive_the_daemon(instance: Instance) -> None:
    run = instance.mountpoint / "run"
    save(run / "step_1", {"tiers": "ram,replica"})
    save(run / "step_2", {"tiers": "ram,replica,object"})
    wait_until(lambda: os.getxattr(run / "step_2", "user.tierfs.level") == b"object", "the wished one is persisted")
    assert told(instance, run / "step_1")["object"]["state"] == "none"
    old = instance.daemon_pid()
    os.kill(old, 9)
    instance.wait_for_new_daemon(old)
    assert os.getxattr(run / "step_1", "user.tierfs.tiers") == b"ram,replica"
    assert os.getxattr(run / "step_1", "user.tierfs.level") == b"ram"
    assert told(instance, run / "step_1")["object"]["state"] == "none"
    os.setxattr(run / "step_1", "user.tierfs.tiers", b"ram,object")  # asked for later: now
    wait_until(lambda: os.getxattr(run / "step_1", "user.tierfs.level") == b"object", "it went there")


def test_a_size_told_ahead_makes_the_room_that_the_writer_needs(instance: Instance) -> None:
    step = instance.mountpoint / "sizes" / "step_1"
    step.mkdir(parents=True)
    ram = instance.ram_path / "root" / "sizes" / "step_1" / "other"
    with open(step / "other", "wb") as file:
        os.setxattr(file.fileno(), "user.tierfs.size", str(200 * MIB).encode())
        wait_until(lambda: ram.stat().st_blocks * 512 >= 200 * MIB, "all of the room is there")
        assert os.fstat(file.fileno()).st_size == 0
        file.write(b"short")
    wait_until(lambda: ram.stat().st_blocks * 512 < 4 * MIB, "what was not used is given back")
    assert (step / "other").read_bytes() == b"short"


def test_what_is_no_wish_is_refused(instance: Instance, ckpt_root: Path) -> None:
    step = instance.mountpoint / "refused" / "step_1"
    save(step, {})
    without_object_tier = ckpt_root / "step_1"
    without_object_tier.mkdir()
    for target, name, value, refused in (
        (step.parent, "tiers", "ram", errno.EINVAL),  # no step
        (step, "tiers", "tape", errno.EINVAL),
        (step, "tiers", "object", errno.EINVAL),  # without ram
        (step, "durability", "ram,object", errno.EINVAL),
        (step, "state", "complete", errno.EPERM),
        (step / "model.pt", "size", "1", errno.EBADF),  # nobody writes it
        (without_object_tier, "tiers", "ram,object", errno.EOPNOTSUPP),
    ):
        with pytest.raises(OSError) as raised:
            os.setxattr(target, f"user.tierfs.{name}", value.encode())
        assert raised.value.errno == refused, (target, name, value)
