"""A save that fills the RAM tier fails with a clear word and harms no complete step."""

from __future__ import annotations

import errno
import re
import shutil

import pytest

from rig.checkpoints import MIB
from rig.fault_jobs import check_steps, save_steps
from rig.instance import Instance
from rig.ranks import RankFailed, run_ranks

SIZE = 200 * MIB
TOO_MUCH = 700 * MIB


@pytest.mark.timeout(300)
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
    assert "is full while run/step_3/" in instance.log()
    run_ranks(check_steps, root, [1, 2], SIZE)
    assert not (root / "step_3" / ".metadata").exists()
    shutil.rmtree(root / "step_3")
    run_ranks(save_steps, root, [4], SIZE)
    run_ranks(check_steps, root, [1, 2, 4], SIZE)
