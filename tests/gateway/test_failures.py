"""Three ways in which the library loses a step that was whole, each beside the same script with `TieredStorageWriter`
and `TieredStorageReader`, which loses none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_compat import TieredStorageReader, TieredStorageWriter
from rig import checkpoints
from rig.buckets import Bucket
from rig.cluster import cluster
from rig.cluster_steps import wait_latest, wait_replicated
from rig.fault_proxy import FaultProxy, Rule
from rig.instance import Instance
from rig.object_fixtures import Mount, wait_persisted
from rig.ranks import Rank, Seat, Table, run_ranks
from rig.s3_servers import S3Server
from rig.sagemaker import Job, address, free_port

pytestmark = pytest.mark.slow

pytest.importorskip("amzn_sagemaker_checkpointing", reason="amzn-sagemaker-checkpointing is not installed")

SIZE = 2 << 20
NAMESPACE = "run"


def save_tiered(root: str, step: int) -> None:
    """Its seed is its number; every step is to go to the object tier."""
    writer = TieredStorageWriter(namespace=NAMESPACE, step=step, root=root, tiers=("ram", "replica", "object"))
    dcp.async_save(checkpoints.state(step, SIZE), storage_writer=writer).result()


def check_tiered(root: str, step: int) -> None:
    """The newest that can be loaded is this one."""
    target = checkpoints.empty_state(SIZE)
    reader = TieredStorageReader(namespace=NAMESPACE, root=root)
    dcp.load(target, storage_reader=reader)
    wrong = checkpoints.differences(target, step, SIZE)
    assert not wrong, f"{reader.path} was loaded, wanted step {step}: {wrong}; {reader.skipped}"


@contextlib.contextmanager
def fails(what: str) -> Iterator[None]:
    """DCP raises an error of its own, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return
    raise AssertionError(f"it did not fail: {what}")


def save_with_both(rank: Rank, job: Job, root: str) -> None:
    job.enter()
    for step in (10, 20):
        job.save(step, step, save_to_s3=True)
        save_tiered(root, step)


def after_the_loss(rank: Rank, without_ram: Job, job: Job, root: str) -> None:
    without_ram.enter()
    with fails("the newest step in S3 lacks its metadata, and hides the one before it"):
        without_ram.load()
    without_ram.check(10, step=10)
    check_tiered(root, 10)
    rank.report("loaded")


def with_a_bucket_that_takes_nothing(rank: Rank, job: Job, root: str) -> None:
    job.enter()
    job.save(30, 30)
    with fails("S3 takes nothing, and the step that is whole in RAM is void"):
        job.save(40, 40, save_to_s3=True)
    job.check(30)
    save_tiered(root, 40)
    check_tiered(root, 40)


def test_s3_that_fails_and_metadata_that_is_missing(
    mount: Mount, bucket: Bucket, proxy: FaultProxy, seaweedfs_server: S3Server
) -> None:
    gateway = ("127.0.0.1", free_port())
    environment: dict[str, Any] = {**seaweedfs_server.environment(), "AWS_ENDPOINT_URL": proxy.url}
    prefix = f"{bucket.prefix}-of-the-library"
    job = Job("job", gateway=gateway, s3=f"s3://{bucket.name}/{prefix}", environment=environment, size_bytes=SIZE)
    options = {"gateway_listen": f"{gateway[0]}:{gateway[1]}", "transfer_retry_for_s": "1"}
    with mount(**options) as instance:
        run_ranks(save_with_both, job, str(instance.mountpoint))
        wait_persisted(instance, "step_10", "step_20")
    # What a save that broke off before its last object leaves.
    bucket.client.delete_object(Bucket=bucket.name, Key=f"{prefix}/job/rank_0/step_20/metadata.metadata")
    for last in (".metadata", ".tierfs/manifest.json"):
        bucket.client.delete_object(Bucket=bucket.name, Key=f"{bucket.prefix}/{NAMESPACE}/step_20/{last}")
    with mount(name="b", **options) as instance:
        root = str(instance.mountpoint)
        run_ranks(after_the_loss, replace(job, gateway=("127.0.0.1", 1)), job, root)
        proxy.add(Rule("answer", method="PUT|POST", times=None, status=403, code="AccessDenied"))
        run_ranks(with_a_bucket_that_takes_nothing, replace(job, namespace="job2"), root)
        proxy.rules.clear()
        wait_persisted(instance, "step_40")


def save_and_lose_a_shard(rank: Rank, job: Job, root: str, backing: str) -> None:
    job.enter()
    for step in (10, 40):
        job.save(step, step)
        save_tiered(root, step)
    if rank.rank == 0:
        for lost in (f"{job.namespace}/step_40/rank_1/checkpoint.pt", f"{NAMESPACE}/step_40/__1_0.distcp"):
            os.truncate(Path(backing) / lost, 1000)
    dist.barrier()
    with fails("a shard of the newest step can't be read, and the step before it is not tried"):
        job.load()
    job.check(10, step=10)
    check_tiered(root, 10)


def test_a_shard_that_is_lost_in_ram(instance: Instance) -> None:
    """Behind the daemon's back, so that nobody knows of it before it is read."""
    job = Job("job", gateway=address(instance), size_bytes=SIZE)
    run_ranks(save_and_lose_a_shard, job, str(instance.mountpoint), str(instance.ram_path / "root"))


def save_on_nodes(rank: Rank, job: Job) -> None:
    job.enter()
    for step in (1, 2):
        job.save(step, step)
        save_tiered(str(rank.root), step)


def check_on_nodes(rank: Rank, job: Job) -> None:
    job.enter()
    job.check(2)
    job.check(1, step=1)
    check_tiered(str(rank.root), 2)


@pytest.mark.alone
def test_a_node_whose_ram_is_lost_loses_no_shard() -> None:
    """Neither for the library, whose shards are copied to other nodes as all files, nor for `TieredStorageWriter`."""
    with cluster(nodes=2, gateway_listen="127.0.0.1:9200") as nodes:
        table = Table([Seat(node.host.namespace, node.mountpoint) for node in nodes])
        job = Job("job", size_bytes=SIZE)
        run_ranks(save_on_nodes, job, table=table)
        wait_replicated(nodes, "job/step_1", "job/step_2", f"{NAMESPACE}/step_2")
        nodes[1].kill(wipe=True)
        nodes[1].start(node_id="replacement")
        nodes.wait_members()
        wait_latest(nodes, "step_2", "job")
        wait_latest(nodes, "step_2", NAMESPACE)
        run_ranks(check_on_nodes, job, table=table)
