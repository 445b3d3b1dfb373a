"""Staged saves on several nodes: what was mapped on one node is the step's file on all."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_compat import TieredStager, TieredStorageReader, TieredStorageWriter
from rig import checkpoints
from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import Cluster
from rig.cluster_steps import on_each, soon, wait_latest
from rig.ranks import Rank, run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.slow]
SIZE = 12 * MIB


def save_staged(rank: Rank, run: str) -> None:
    group = dist.new_group(backend="gloo")
    stager = TieredStager(run, root=rank.root)
    for seed in (1, 2, 3):
        writer = TieredStorageWriter(namespace=run, step=seed, root=rank.root, stager=stager)
        dcp.async_save(checkpoints.state(seed, SIZE), storage_writer=writer, process_group=group).result()
    writer.wait("replica", 60)
    stager.close()


def load_newest(rank: Rank, run: str) -> None:
    target = checkpoints.empty_state(SIZE)
    dcp.load(target, storage_reader=TieredStorageReader(namespace=run, root=rank.root))
    assert not checkpoints.differences(target, 3, SIZE)


def test_what_was_staged_on_one_node_loads_on_all(nodes: Cluster, run: str) -> None:
    run_ranks(save_staged, run, table=jobs.seats(nodes[:2]))
    wait_latest(nodes.nodes, "step_3", run)
    run_ranks(load_newest, run, table=jobs.seats(nodes.nodes))
    run_ranks(jobs.check_steps, {f"{run}/step_{seed}": seed for seed in (1, 2, 3)}, SIZE, table=jobs.seats(nodes[2:]))
    soon(
        lambda: not any(on_each(nodes.nodes, lambda node: list((node.mountpoint / run).glob(".tierfs-stage-*")))),
        "nothing of the staging is left on any node",
    )
