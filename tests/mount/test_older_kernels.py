"""Kernels before Linux 6.9, which pass nothing through and resend nothing: saves and loads, and the daemon's death.

On a newer kernel the settings make it like that one. `make test-verbs` runs this on Linux 6.1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.fixtures import pytest_runtest_makereport
from rig.instance import Instance, mounted, wait_until
from rig.plain_steps import MARKER, check_step, shard_names, write_step
from tests.conftest import needs_fuse

__all__ = ["pytest_runtest_makereport"]

SIZES = [3 << 20, 300_000, 700]
OPTIONS = {"passthrough": "off", "resend": "off", "ram.ballast": "off"}
#: An emulated processor starts a daemon in 10 to 30 s.
WITHIN_S = 90


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    needs_fuse()
    name = f"older-{uuid.uuid4().hex[:8]}"
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-test-") as scratch,
        mounted(Path(scratch), name, size="256M", options=OPTIONS) as made,
    ):
        yield made


def is_answering(mountpoint: Path) -> bool:
    try:
        mountpoint.stat()
    except OSError:
        return False
    return True


def test_a_killed_daemon_costs_open_files_and_no_step(instance: Instance) -> None:
    """The keeper makes the mount anew: what was open is gone, with the error that says so, and nobody hangs."""
    root = instance.mountpoint / "run"
    root.mkdir()
    write_step(root / "step_1", 1, SIZES)
    (root / "step_2").mkdir()
    half = (root / "step_2" / shard_names(1)[0]).open("wb")
    half.write(b"half a shard")
    half.flush()
    shown = (root / "step_1" / shard_names(len(SIZES))[0]).open("rb")
    assert len(shown.read(4096)) == 4096
    before = instance.daemon_pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: is_answering(instance.mountpoint), "the mount answers again", WITHIN_S)
    assert instance.wait_for_new_daemon(before, WITHIN_S) != before
    for use in (lambda: os.pread(shown.fileno(), 4096, 1 << 20), lambda: os.write(half.fileno(), b"more")):
        with pytest.raises(OSError) as failed:
            use()
        assert failed.value.errno == errno.ENOTCONN
    for file in (half, shown):
        with contextlib.suppress(OSError):
            file.close()
    check_step(root / "step_1", 1, SIZES)
    assert os.readlink(root / "latest") == "step_1"
    write_step(root / "step_2", 2, SIZES)
    check_step(root / "step_2", 2, SIZES)
    status = instance.status()
    assert (status["passthrough"], status["channel"]["resend"], status["takeovers"]) == (False, False, 0)
    assert {name: step["state"] for name, step in instance.steps("run").items()} == {
        "step_1": "complete",
        "step_2": "complete",
    }
    os.rename(root / "step_1", root / "step_9")
    check_step(root / "step_9", 1, SIZES)
    for path in (root / "step_9").iterdir():
        path.unlink()
    (root / "step_9").rmdir()
    assert sorted(os.listdir(root / "step_2")) == sorted([*shard_names(len(SIZES)), MARKER])
