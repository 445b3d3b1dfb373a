"""Four torch ranks, one a node, save and load by stock DCP through the mounts of their own nodes."""

from __future__ import annotations

import os
import shutil

import pytest

from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import Cluster
from rig.cluster_steps import latest, on_each, soon, sums, wait_latest
from rig.ranks import run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.slow]
SIZE = 12 * MIB


def test_four_nodes_save_as_one_and_any_number_of_them_load(nodes: Cluster, run: str) -> None:
    everyone = jobs.seats(nodes.nodes)
    run_ranks(jobs.save_steps, run, [1, 2, 3], SIZE, table=everyone)
    wait_latest(nodes.nodes, "step_3", run)
    found = on_each(nodes.nodes, lambda node: sums(node.mountpoint / run))
    assert all(each == found[0] for each in found)
    assert {f"step_3/__{rank}_0.distcp" for rank in range(4)} | {"step_3/.metadata"} <= found[0].keys()
    steps = {f"{run}/step_{seed}": seed for seed in (1, 2, 3)}
    run_ranks(jobs.check_steps, steps, SIZE, table=everyone)
    run_ranks(jobs.check_steps, steps, SIZE, table=jobs.seats(nodes[2:]))
    run_ranks(jobs.check_steps, steps, SIZE, table=jobs.seats(nodes[:3]))


def test_training_that_goes_back_writes_a_step_again(nodes: Cluster, run: str) -> None:
    everyone = jobs.seats(nodes.nodes)
    step = f"{run}/step_1"
    run_ranks(jobs.save_steps, run, [1, 2], SIZE, table=everyone)
    for seed, size in ((3, SIZE), (4, SIZE // 2), (5, SIZE)):
        run_ranks(jobs.save_step, step, seed, size, table=everyone)
        run_ranks(jobs.check_steps, {step: seed}, size, table=jobs.seats(nodes[::-1]))
    assert all(os.getxattr(node.mountpoint / step, "user.tierfs.generation") == b"4" for node in nodes)
    run_ranks(jobs.check_steps, {f"{run}/step_2": 2}, SIZE, table=everyone)
    assert {latest(node, run) for node in nodes} == {"step_2"}


def test_fewer_ranks_on_other_nodes_write_a_step_again_whole(nodes: Cluster, run: str) -> None:
    """Files that only the larger world wrote are not among those that the new generation names."""
    step = f"{run}/step_1"
    run_ranks(jobs.save_step, step, 1, SIZE, table=jobs.seats(nodes.nodes))
    run_ranks(jobs.save_step, step, 2, SIZE, table=jobs.seats(nodes[1:3]))
    run_ranks(jobs.check_steps, {step: 2}, SIZE, table=jobs.seats(nodes.nodes))
    run_ranks(jobs.save_step, step, 3, SIZE, table=jobs.seats(nodes[:3]))
    run_ranks(jobs.check_steps, {step: 3}, SIZE, table=jobs.seats([nodes[3]]))


def test_one_rank_removes_old_steps_while_training_goes_on(nodes: Cluster, run: str) -> None:
    everyone = jobs.seats(nodes.nodes)
    run_ranks(jobs.save_and_rotate, run, [1, 2, 3, 4, 5], SIZE, table=everyone)
    expected = ["latest", "latest_checkpointed_iteration.txt", "step_4", "step_5"]
    for node in nodes:
        soon(lambda node=node: sorted(os.listdir(node.mountpoint / run)) == expected, "two steps are left")
        assert (node.mountpoint / run / "latest_checkpointed_iteration.txt").read_text() == "5"
    (nodes[2].mountpoint / run / "step_4").rename(nodes[2].mountpoint / run / "step_40")
    wait_latest(nodes.nodes, "step_40", run)
    run_ranks(jobs.check_steps, {f"{run}/step_40": 4, f"{run}/step_5": 5}, SIZE, table=everyone)
    shutil.rmtree(nodes[3].mountpoint / run / "step_40")
    wait_latest(nodes.nodes, "step_5", run)
