from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.fixtures import pytest_runtest_makereport, scratch
from rig.instance import Instance, mounted
from rig.object_fixtures import bucket, mount, proxy
from rig.s3_servers import seaweedfs_server
from rig.sagemaker import Job, address, free_port, without_logs_left
from tests.conftest import needs_fuse

__all__ = ["bucket", "mount", "proxy", "pytest_runtest_makereport", "scratch", "seaweedfs_server"]


@pytest.fixture(scope="session", autouse=True)
def library_logs() -> Iterator[None]:
    with without_logs_left():
        yield


@pytest.fixture(scope="module")
def instance(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Instance]:
    """One with a gateway for all tests of a module, which asks for a size by INSTANCE_SIZE, settings by OPTIONS."""
    needs_fuse()
    options = {"gateway.listen": f"127.0.0.1:{free_port()}", **getattr(request.module, "OPTIONS", {})}
    size = getattr(request.module, "INSTANCE_SIZE", "1G")
    with mounted(scratch, f"gateway-{uuid.uuid4().hex[:8]}", size=size, options=options) as made:
        yield made


@pytest.fixture
def job(instance: Instance) -> Job:
    """A namespace of its own at the gateway of `instance`."""
    return Job(f"job-{uuid.uuid4().hex[:8]}", gateway=address(instance))
