"""Each fault test has an instance of its own: what one leaves behind must not help or harm the next."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.fixtures import PLAIN_DIRECTORY, dice, pytest_runtest_makereport, scratch
from rig.instance import Instance, mounted
from rig.object_fixtures import bucket, mount, proxy
from rig.s3_servers import seaweedfs_server

__all__ = ["bucket", "dice", "mount", "proxy", "pytest_runtest_makereport", "scratch", "seaweedfs_server"]


@pytest.fixture
def instance(scratch: Path) -> Iterator[Instance]:
    if PLAIN_DIRECTORY:
        pytest.skip("a plain directory (TIERFS_TEST_DIR) has no daemon to kill")
    name = f"fault-{uuid.uuid4().hex[:8]}"
    with mounted(scratch / name, name, size="1G") as instance:
        yield instance


@pytest.fixture
def moments() -> int:
    """How many random moments to kill at. `make soak-kills` asks for 100."""
    return int(os.environ.get("TIERFS_KILLS", "6"))
