"""The unmodified library saves and loads at the gateway on two gloo ranks: its own published tests' ways, and more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from dcp_compat import TieredStorageReader
from rig import checkpoints
from rig.buckets import Bucket
from rig.instance import Instance, tierfs
from rig.object_fixtures import Mount, wait_persisted
from rig.ranks import Rank, run_ranks
from rig.s3_servers import S3Server
from rig.sagemaker import Job, address, free_port

pytestmark = pytest.mark.slow

pytest.importorskip("amzn_sagemaker_checkpointing", reason="amzn-sagemaker-checkpointing is not installed")

OPTIONS = {"gateway.allow_reset": "on"}
STEPS = (0, 10, 20, 30)
RETAINED = STEPS[1:]
"""The library has its three newest steps kept."""


def seed_of(step: int) -> int:
    return step + 1


def save(rank: Rank, job: Job, steps: tuple[int, ...], save_to_s3: bool = False) -> None:
    job.enter()
    for step in steps:
        job.save(step, seed_of(step), save_to_s3=save_to_s3)


def check(rank: Rank, job: Job, latest: int, *others: int) -> None:
    job.enter()
    job.check(seed_of(latest))
    for step in others:
        job.check(seed_of(step), step=step)


def check_with_stock_reader(rank: Rank, step: Path, seed: int, size_bytes: int) -> None:
    checkpoints.check(step, seed, size_bytes)


def check_latest_with_tierfs_reader(rank: Rank, namespace: Path, seed: int, size_bytes: int) -> None:
    target = checkpoints.empty_state(size_bytes)
    dcp.load(target, storage_reader=TieredStorageReader(namespace=namespace))
    assert not checkpoints.differences(target, seed, size_bytes)


def test_what_the_library_saves_it_loads_and_so_does_dcp(instance: Instance, job: Job) -> None:
    run_ranks(save, job, STEPS)
    run_ranks(check, job, 30, *RETAINED)
    steps = instance.steps(job.namespace)
    assert {name: step["state"] for name, step in steps.items()} == {
        f"step_{number}": "complete" for number in RETAINED
    }
    namespace = instance.mountpoint / job.namespace
    assert os.readlink(namespace / "latest") == "step_30"
    shards = {str(path.relative_to(namespace / "step_30")) for path in (namespace / "step_30").rglob("*.pt")}
    assert shards == {"rank_0/checkpoint.pt", "rank_1/checkpoint.pt"}
    for world in (1, 2):
        run_ranks(check_with_stock_reader, namespace / "step_20", seed_of(20), job.size_bytes, world=world)
    run_ranks(check_latest_with_tierfs_reader, namespace, seed_of(30), job.size_bytes)


def save_twice(rank: Rank, job: Job) -> None:
    job.enter()
    for seed in (1, 2):
        job.save(5, seed)
    job.check(2)


def test_a_step_that_is_saved_again_is_the_new_one(instance: Instance, job: Job) -> None:
    run_ranks(save_twice, job)
    assert instance.steps(job.namespace)["step_5"]["generation"] == 2


# --- with the library's own copies in S3


@pytest.mark.parametrize("is_ray", [False, True], ids=["default-layout", "ray-layout"])
def test_its_own_copies_in_s3_are_loaded_after_a_reset_and_imported(
    instance: Instance, bucket: Bucket, seaweedfs_server: S3Server, is_ray: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    job = Job(
        f"job-s3-{is_ray}",
        gateway=address(instance),
        s3=bucket.url,
        is_ray=is_ray,
        environment=seaweedfs_server.environment(),
    )
    run_ranks(save, job, (10, 20), True)
    host, port = job.gateway
    assert requests.post(f"http://{host}:{port}/v1/cp/cluster/reset", timeout=60).status_code == 200
    assert not (instance.mountpoint / job.namespace).exists()
    run_ranks(check, job, 20, 10)

    for name, value in seaweedfs_server.environment().items():
        monkeypatch.setenv(name, value)
    namespace = instance.mountpoint / job.namespace
    source = f"{bucket.url}/{job.namespace}"
    with pytest.raises(AssertionError, match="there is step_20, step_10"):
        tierfs("import", source, namespace / "step_30")
    tierfs("import", source, namespace / "step_10")
    tierfs("import", f"{source}/step_20" if is_ray else source, namespace / "step_20")
    run_ranks(check_with_stock_reader, namespace / "step_10", seed_of(10), job.size_bytes)
    run_ranks(check, Job(job.namespace, gateway=job.gateway), 20, 10)


def test_its_layout_for_ray_is_imported_in_place(mount: Mount, bucket: Bucket, seaweedfs_server: S3Server) -> None:
    job = Job("run", gateway=("127.0.0.1", 1), s3=bucket.url, is_ray=True, environment=seaweedfs_server.environment())
    run_ranks(save, job, (3,), True)  # nobody is at the gateway: S3 alone has it
    with mount() as instance:
        tierfs("import", instance.mountpoint / "run" / "step_3")
        assert bucket.check_whole() == {"run/step_3"}
        run_ranks(check_with_stock_reader, instance.mountpoint / "run" / "latest", seed_of(3), job.size_bytes)


def test_a_bucket_that_the_mount_persisted_to_serves_both(
    mount: Mount, bucket: Bucket, seaweedfs_server: S3Server
) -> None:
    """The library reads its shards from the bucket by itself, and a gateway whose node's RAM was lost serves stubs."""
    gateway = ("127.0.0.1", free_port())
    job = Job("run", gateway=gateway)
    options = {"gateway_listen": f"{gateway[0]}:{gateway[1]}"}
    with mount(**options) as instance:
        run_ranks(save, job, (1, 2))
        wait_persisted(instance, "step_1", "step_2")
    with mount(name="b", **options) as instance:
        run_ranks(check, job, 2, 1)
        # What lies there is a plain DCP directory, too.
        tierfs("import", f"{bucket.url}/run/step_2", instance.mountpoint / "other" / "step_2")
        other = instance.mountpoint / "other" / "latest"
        run_ranks(check_with_stock_reader, other, seed_of(2), job.size_bytes)
    nobody = ("127.0.0.1", 1)
    environment = seaweedfs_server.environment()
    run_ranks(check, Job("run", gateway=nobody, s3=bucket.url, is_ray=True, environment=environment), 2, 1)
