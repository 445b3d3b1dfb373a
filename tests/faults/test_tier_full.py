"""A save that fills the RAM tier fails with a clear word and harms no complete step."""

from __future__ import annotations

import errno
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import check_steps, save_steps
from rig.fixtures import PLAIN_DIRECTORY
from rig.instance import Instance, mounted
from rig.ranks import RankFailed, run_ranks

SIZE = 100 * MIB
TOO_MUCH = 350 * MIB


@pytest.fixture
def instance(scratch: Path) -> Iterator[Instance]:
    name = f"full-{uuid.uuid4().hex[:8]}"
    with mounted(scratch / name, name, size="512M") as instance:
        yield instance


@pytest.mark.skipif(
    bool(PLAIN_DIRECTORY), reason="a plain directory (TIERFS_TEST_DIR) is not full when the tier would be"
)
def test_filling_the_tier_fails_that_save_alone(instance: Instance) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    run_ranks(save_steps, root, [1, 2], SIZE)
    with pytest.raises(RankFailed) as failure:
        run_ranks(save_steps, root, [3], TOO_MUCH)
    # torch's zip writer meets ENOSPC as a short write, and then says "unexpected pos" of the rank that met it.
    assert re.search("No space left on device|unexpected pos", str(failure.value))
    problems = instance.status()["problems"]
    assert any("step_3" in (problem["path"] or "") for problem in problems), problems
    with pytest.raises(OSError) as refused:
        (root / "more").write_bytes(bytes(TOO_MUCH))
    assert refused.value.errno == errno.ENOSPC
    (root / "more").unlink()
    # Which of the two it says depends on how much the last look at the growing shard found left.
    assert re.search(r"(is full|runs full \(.* left\)) while run/step_3/", instance.log())
    run_ranks(check_steps, root, [1, 2], SIZE)
    assert not (root / "step_3" / ".metadata").exists()
    shutil.rmtree(root / "step_3")
    run_ranks(save_steps, root, [4], SIZE)
    run_ranks(check_steps, root, [1, 2, 4], SIZE)


@pytest.mark.skipif(bool(PLAIN_DIRECTORY), reason="a plain directory (TIERFS_TEST_DIR) gives no room ahead")
def test_files_that_begin_together_leave_each_other_room(instance: Instance) -> None:
    """What one is given ahead and does not write is not what another one's first write lacks."""
    root = instance.mountpoint / "many"
    root.mkdir()
    block = bytes(MIB)
    count = instance.status()["ram"]["size_bytes"] // 2 // (2 * MIB)
    with ExitStack() as stack:
        files = [
            stack.enter_context((root / f"__{number}_0.distcp").open("wb", buffering=0)) for number in range(count)
        ]
        for _ in range(2):
            for file in files:
                file.write(block)
    assert sum(path.stat().st_size for path in root.iterdir()) == 2 * MIB * count
