"""A node whose RAM tier a program has filled to the last page: what frees room works, and nothing of tierfs fails."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from rig.checkpoints import MIB
from rig.cluster import Cluster
from rig.cluster_steps import check_everywhere, soon, wait_latest, wait_replicated
from rig.plain_steps import write_step

pytestmark = pytest.mark.alone
NODES = 2
OPTIONS = {"size": "64M", "retention_ram_steps": "4"}
SIZES = [2 * MIB, 300_000]


def test_in_a_full_tier_everything_can_be_removed_and_other_nodes_go_on(nodes: Cluster, run: str) -> None:
    full, other = nodes[0], nodes[1]
    for seed in (1, 2, 3):
        write_step(full.mountpoint / run / f"step_{seed}", seed, SIZES)
    wait_replicated(nodes.nodes, *(f"{run}/step_{seed}" for seed in (1, 2, 3)))
    daemon = full.daemon_pid()
    filler = full.mountpoint / run / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError) as refused:
        while True:
            file.write(bytes(256 << 10))
    assert refused.value.errno == errno.ENOSPC
    tail = os.open(filler, os.O_WRONLY | os.O_APPEND)  # to the last page
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(tail, bytes(4096))
    os.close(tail)

    write_step(other.mountpoint / run / "step_4", 4, SIZES)
    wait_latest([other], "step_4", run)
    shutil.rmtree(full.mountpoint / run / "step_2")
    (full.mountpoint / run / "step_1").rename(full.mountpoint / run / "step_10")
    soon(lambda: not (other.mountpoint / run / "step_2").exists(), "the removal is known everywhere")
    filler.unlink()
    assert full.daemon_pid() == daemon, full.log()
    for step, seed in (("step_3", 3), ("step_10", 1), ("step_4", 4)):
        soon(lambda step=step: (full.mountpoint / run / step).is_dir(), f"{step} is there")  # type: ignore[misc]
        check_everywhere(nodes.nodes, f"{run}/{step}", seed, SIZES)
