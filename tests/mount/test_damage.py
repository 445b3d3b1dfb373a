"""What somebody's hand left in an instance's private places must not keep it from being used, or ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.mount.keeper_rig import Rig, rig, tierfs


@pytest.fixture
def real() -> Iterator[Rig]:
    with rig("mount.daemon") as made:
        yield made


def test_strange_things_in_the_tier_keep_no_daemon_from_starting(real: Rig) -> None:
    real.mount()
    (real.place / "kept").write_bytes(b"x")
    tier = real.instance.ram
    for private in ("unlinked", "trash", "generations", "meta"):
        (tier / private / "no number").write_bytes(b"x")
        (tier / private / "directory" / "deeper").mkdir(parents=True)
        (tier / private / "link").symlink_to("/nowhere")
    real.kill_daemon()
    assert (real.place / "kept").read_bytes() == b"x"
    assert tierfs("umount", real.place).returncode == 0
    real.mount()
    assert [entry.name for entry in real.place.iterdir()] == ["kept"]


def test_an_instance_whose_record_is_damaged_can_be_ended(real: Rig) -> None:
    real.mount()
    (real.place / "kept").write_bytes(b"x")
    real.instance.mount_record.write_text("[]")
    for more in ((), ("--discard",)):
        done = tierfs("umount", real.name, *more)
        assert done.returncode == 4 and "unmount it by its mount point" in done.stderr, done.stderr
    assert tierfs("umount", real.place).returncode == 0
    wait_until(lambda: not real.instance.daemon_pid.exists(), "the instance has ended")
    real.wait_for_end()
    assert "freed the RAM tier" in tierfs("umount", "--discard", real.name).stdout
    assert not real.instance.directory.exists()


def test_a_channel_state_that_is_no_longer_right_ends_the_mount_and_says_why(real: Rig) -> None:
    real.mount()
    (real.place / "kept").write_bytes(b"x")
    daemon = real.daemon
    with open(real.instance.channel_state, "r+b") as state:
        state.write(b"nonsense")
    daemon.send_signal(signal.SIGKILL)
    real.wait_for_end()
    assert "not the state of a channel of this version; mount anew" in real.log()
    real.mount()
    assert (real.place / "kept").read_bytes() == b"x"
