"""For tests with an object tier: a bucket, a fault proxy before it, and a way to mount with it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rig.buckets import Bucket
from rig.fault_proxy import FaultProxy
from rig.instance import Instance, wait_until
from rig.s3_servers import S3Server

BUCKET = "checkpoints"

Mount = Callable[..., AbstractContextManager[Instance]]


@pytest.fixture
def bucket(seaweedfs_server: S3Server) -> Bucket:
    """A prefix of its own in a bucket that all tests share."""
    bucket = Bucket(seaweedfs_server, BUCKET, f"test-{uuid.uuid4().hex[:8]}")
    if BUCKET not in {entry["Name"] for entry in bucket.client.list_buckets()["Buckets"]}:
        seaweedfs_server.make_bucket(BUCKET)
    return bucket


@pytest.fixture
def proxy(seaweedfs_server: S3Server) -> Iterator[FaultProxy]:
    host, _, port = seaweedfs_server.endpoint_url.removeprefix("http://").partition(":")
    with FaultProxy((host, int(port))) as proxy:
        yield proxy


@pytest.fixture
def mount(
    scratch: Path, bucket: Bucket, proxy: FaultProxy, seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mount]:
    """`mount(size="1G", name="a", **options)`: a context with an instance whose object tier is the bucket, through the
    proxy. Options replace those here; `_` in their names stands for the first `.`: `persist_policy="every"`.

    After a failure the instances stay until its report has their logs.
    """
    for name, value in seaweedfs_server.environment().items():
        monkeypatch.setenv(name, value)
    instances: list[Instance] = []

    @contextmanager
    def mount(*, size: str = "1G", name: str = "a", **options: str) -> Iterator[Instance]:
        given = {key.replace("_", ".", 1) if key != "object" else key: value for key, value in options.items()}
        unique = f"object-{uuid.uuid4().hex[:8]}-{name}"
        defaults = {
            "object": bucket.url,
            "node": f"node-{name}",
            "s3.endpoint_url": proxy.url,
            "s3.read_timeout_s": "3",
            "persist.settle_s": "0.2",
            "persist.flush_timeout_s": "20",
        }
        instance = Instance(scratch / unique / "ckpt", unique, size=size, options={**defaults, **given})
        instances.append(instance)
        instance.mount()
        yield instance
        instance.discard()
        instances.remove(instance)

    yield mount
    for instance in instances:
        instance.discard()


def levels(instance: Instance, namespace: str = "run") -> dict[str, str]:
    """The level of each complete step."""
    found = instance.steps(namespace).items()
    return {name: step["level"] for name, step in found if step["state"] == "complete"}


def wait_persisted(instance: Instance, *steps: str, namespace: str = "run", timeout_s: float = 60) -> None:
    def are_there() -> bool:
        found = levels(instance, namespace)
        return all(found.get(step) == "object" for step in steps)

    def what() -> Any:
        return {"levels": levels(instance, namespace), "object": instance.status().get("object")}

    try:
        wait_until(are_there, f"{steps} are persisted", timeout_s, every_s=0.1)
    except AssertionError as error:
        raise AssertionError(f"{error}: {what()}") from None
