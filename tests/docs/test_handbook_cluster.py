"""The handbook's sections on several nodes, followed on two nodes and a real etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rig.cluster import Cluster, Node, cluster
from rig.documents import Block, below
from rig.instance import wait_until
from rig.reader import Reader
from tests.conftest import needs_fuse, repository

pytestmark = pytest.mark.alone


def section(heading: str) -> list[Block]:
    return below(repository() / "docs" / "failures.md", f"{heading} ✓")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    needs_fuse()
    with cluster(nodes=2) as nodes:
        step = nodes[0].mountpoint / "run1" / "step_1"
        step.mkdir(parents=True)
        (step / "shard-0.pt").write_bytes(b"w" * (1 << 20))
        (step / "commit_success.txt").touch()
        wait_until(lambda: nodes[1].step("step_1", "run1").get("level") == "replica", "the step is replicated", 30)
        yield nodes


def operator(node: Node) -> Reader:
    """Somebody at this node. It is taken down by the cluster."""
    environment = {"TIERFS_RUNTIME_DIR": node.options["runtime_dir"]}
    return Reader(node.directory / f"n{node.number}", node.name, environment=environment, replaced={})


def test_etcd_is_away(nodes: Cluster) -> None:
    nodes.etcd.kill()
    try:
        wait_until(lambda: not nodes[0].status()["cluster"]["connected"], "etcd's loss is noticed", 30)
        for block in section("etcd is away"):
            operator(nodes[0]).follow(block)
    finally:
        nodes.etcd.restart()
    nodes.wait_members()


def test_a_lost_node(nodes: Cluster) -> None:
    nodes[1].kill(wipe=True)
    wait_until(lambda: nodes[0].status()["cluster"]["lost"], "the node is taken for lost", 30)
    for block in section("A lost node"):
        operator(nodes[0]).follow(block)
    assert (nodes[0].mountpoint / "run1" / "step_1" / "shard-0.pt").read_bytes() == b"w" * (1 << 20)
