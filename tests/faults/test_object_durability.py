"""`durability.commit = object`: the completing rename returns when the bucket has the step, or fails in time."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from rig import checkpoints
from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_proxy import FaultProxy
from rig.object_fixtures import Mount, levels, wait_persisted

pytestmark = pytest.mark.slow

SIZE = 8 * MIB


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint in an ordinary directory."""
    path = tmp_path_factory.mktemp("saved") / "step_1"
    checkpoints.save(path, 1, SIZE)
    return path


def complete(saved: Path, step: Path) -> float:
    """Copies the shards, then makes the marker as DCP does, by a rename; returns how long the rename took."""
    step.mkdir(parents=True)
    for path in saved.glob("*.distcp"):
        shutil.copy(path, step)
    shutil.copy(saved / ".metadata", step / ".metadata.tmp")
    begin = time.monotonic()
    os.rename(step / ".metadata.tmp", step / ".metadata")
    return time.monotonic() - begin


def test_the_rename_returns_when_the_bucket_has_the_step(mount: Mount, bucket: Bucket) -> None:
    with mount(durability_commit="object") as instance:
        checkpoints.save(instance.mountpoint / "run" / "step_1", 1, SIZE)
        assert bucket.check_whole() == {"run/step_1"}
        assert levels(instance) == {"step_1": "object"}


@pytest.mark.parametrize("strict", [True, False])
def test_without_a_server_the_rename_fails_in_time_where_it_must(
    mount: Mount, bucket: Bucket, proxy: FaultProxy, saved: Path, strict: bool
) -> None:
    options = {
        "durability_commit": "object",
        "durability_timeout_s": "2",
        "durability_strict": "yes" if strict else "no",
    }
    with mount(**options) as instance:
        step = instance.mountpoint / "run" / "step_1"
        proxy.pause()
        if strict:
            begin = time.monotonic()
            with pytest.raises(OSError) as refused:
                complete(saved, step)
            assert refused.value.errno == errno.EIO
            assert 1.9 < time.monotonic() - begin < 10
        else:
            assert 1.9 < complete(saved, step) < 10
            checkpoints.check(step, 1, SIZE)
        assert not bucket.committed()
        proxy.resume()
        wait_persisted(instance, "step_1")
        assert bucket.check_whole() == {"run/step_1"}
        checkpoints.check(step, 1, SIZE)
