"""A save that fills the RAM tier fails with a clear word and harms no complete step."""

from __future__ import annotations

import shutil

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import check_steps, save_steps
from rig.instance import Instance
from rig.ranks import RankFailed, run_ranks

SIZE = 200 * MIB
TOO_MUCH = 800 * MIB


@pytest.mark.timeout(300)
def test_filling_the_tier_fails_that_save_alone(instance: Instance) -> None:
    root = instance.mountpoint / "run"
    root.mkdir()
    run_ranks(save_steps, root, [1, 2], SIZE)
    with pytest.raises(RankFailed) as failure:
        run_ranks(save_steps, root, [3], TOO_MUCH)
    assert "No space left on device" in str(failure.value)
    assert "No space" in instance.log() or "full" in instance.log()
    problems = instance.status()["problems"]
    assert any("step_3" in (problem["path"] or "") for problem in problems), problems
    run_ranks(check_steps, root, [1, 2], SIZE)
    assert not (root / "step_3" / ".metadata").exists()
    shutil.rmtree(root / "step_3")
    run_ranks(save_steps, root, [4], SIZE)
    run_ranks(check_steps, root, [1, 2, 4], SIZE)
