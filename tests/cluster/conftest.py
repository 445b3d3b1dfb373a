"""One cluster for the tests of a file, made whole again before each of them; a namespace of its own for each."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator

import pytest

from rig.cluster import Cluster, cluster
from rig.fixtures import dice, pytest_runtest_makereport
from tests.conftest import needs_fuse

__all__ = ["dice", "pytest_runtest_makereport"]
_ONE_TEST_S = 150


@pytest.fixture(scope="module", autouse=True)
def privileges() -> None:
    needs_fuse()


@pytest.fixture(scope="module")
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A file asks for another number of nodes than four by NODES, for other settings by OPTIONS."""
    nodes = getattr(request.module, "NODES", 4)
    with cluster(nodes=nodes, **getattr(request.module, "OPTIONS", {})) as made:
        yield made


@pytest.fixture
def nodes(shared_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """All nodes serve; a test that hangs is ended by killing them."""
    if shared_cluster.was_stopped:
        pytest.fail("an earlier test hung, and the cluster was killed for it")
    marker = request.node.get_closest_marker("timeout")
    limit = marker.args[0] - 20 if marker else _ONE_TEST_S
    shared_cluster.restore()
    with shared_cluster.at_most(limit):
        yield shared_cluster


@pytest.fixture
def run(nodes: Cluster) -> Iterator[str]:
    """A namespace of its own, which every node has."""
    name = f"run-{uuid.uuid4().hex[:6]}"
    (nodes[0].mountpoint / name).mkdir()
    yield name
    for node in nodes:
        if node.is_started:
            with contextlib.suppress(OSError):
                shutil.rmtree(node.mountpoint / name)
                break


@pytest.fixture
def rounds() -> int:
    """How many random faults a test does at least. `make soak-kills` asks for 50; else one of each kind is enough."""
    return int(os.environ.get("TIERFS_KILLS", "0")) // 2
