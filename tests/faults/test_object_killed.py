"""The daemon, its keeper or a worker dies by SIGKILL at random moments of an upload; the bucket never lies, and in the
end everything is there, hardly anything of it sent twice."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from rig import checkpoints
from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_jobs import save_steps
from rig.fault_proxy import FaultProxy
from rig.instance import wait_until
from rig.kills import kill_daemon, kill_keeper_and_daemon, kill_worker
from rig.object_fixtures import Mount, levels, wait_persisted
from rig.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZE = 40 * MIB  # one shard of three parts


@pytest.fixture
def kills() -> int:
    """How many random moments to kill at, for each kind of victim. `make soak-kills` asks for 50."""
    return int(os.environ.get("TIERFS_KILLS", "4")) // 2


VICTIMS = {"daemon and keeper": kill_keeper_and_daemon, "daemon": kill_daemon, "worker": kill_worker}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_killed_at_random_moments_of_an_upload(
    mount: Mount, bucket: Bucket, proxy: FaultProxy, dice: random.Random, kills: int, victim: str, tmp_path: Path
) -> None:
    with mount(retention_ram_steps="1") as instance:
        root = instance.mountpoint / "run"
        root.mkdir()
        run_ranks(save_steps, root, [1], SIZE, world=1)
        begin = time.monotonic()
        wait_persisted(instance, "step_1")
        upload_s = time.monotonic() - begin
        newest, hits = 1, Counter({1: 0})  # kills during the upload of each step
        while hits.total() < kills:
            if levels(instance).get(f"step_{newest}") == "object":
                newest += 1
                run_ranks(save_steps, root, [newest], SIZE, world=1)
            time.sleep(dice.uniform(0, 1.2 * upload_s))
            VICTIMS[victim](instance)
            hits[newest] += 1
            bucket.check_whole()
            if victim == "daemon and keeper":
                instance.mount()
        steps = [f"step_{number}" for number in range(1, newest + 1)]
        wait_persisted(instance, *steps, timeout_s=120)
        assert bucket.check_whole() == {f"run/{step}" for step in steps}
        wait_until(lambda: not bucket.leftovers(), f"nothing is left over: {bucket.leftovers()}", 30)
        # Who starts anew asks the store what it has. While the daemon lives, each kill may cost what was on its way.
        most = 1 + max(1, *hits.values()) if victim == "worker" else 2
        sent = proxy.whole_bodies("distcp$")
        assert max(sent.values()) <= most, {key: count for key, count in sent.items() if count > most}
        bucket.download(f"run/step_{newest}", tmp_path / "plain")
        checkpoints.check(tmp_path / "plain", newest, SIZE)
