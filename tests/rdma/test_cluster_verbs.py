"""A cluster whose nodes READ from each other by RDMA: real daemons in network namespaces, a real etcd, one device.

It runs in the virtual machine of scripts/test-verbs.sh, whose processor is emulated: a daemon takes 10 to 30 s to
start on a quiet machine, and RDMA carries 5 to 35 MB/s. It takes longer than `make test-verbs` gives, so it is asked
for by name. The other tests of clusters (tests/cluster) are for TCP alone; the virtual machine can't carry these of
them:

- all that start four daemons or start many anew (test_replicas, test_faults, test_operations, test_names_together):
  four starts take longer than one run may last. What they say of copies is said below with two nodes.
- those with trainers (test_training): importing torch takes 45 s.
- those with leases of 3 s and stalls of 2 s: the processor makes healthy nodes late by that much.
- those with an object tier (test_repair_with_objects): its server is one more program that starts.

Kernels from 6.9 on give the daemon passthrough and takeover; the virtual machine's has neither, so a killed daemon's
mount is made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Cluster, Node, cluster
from rig.cluster_steps import latest, soon, wait_replicated
from rig.fixtures import pytest_runtest_makereport
from rig.instance import wait_until
from rig.plain_steps import MARKER, check_step, content, shard_names, write_marker, write_step
from tests.conftest import needs_fuse
from tierfs.transport.verbs_port import Capabilities

__all__ = ["pytest_runtest_makereport"]

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

MIB = 1 << 20
SIZES = [6 * MIB, 300_000, 700]
#: Of one shard that is written while it is copied.
LARGE = 32 * MIB
WITHIN_S = 90.0
#: Below the soft device (scripts/rdma-vm.sh).
INTERFACE = "dummy0"
PATIENT = {
    "cluster_lease_s": "15",
    "cluster_wait_s": "30",
    "etcd_timeout_s": "15",
    "peer_stall_s": "10",
    "transfer_read_retry_for_s": "60",
    "namespaces_alone.replication.replicas": "1",
}
#: Its steps are not copied.
ALONE = "alone"


@pytest.fixture(scope="module")
def nodes(device: Capabilities) -> Iterator[Cluster]:
    """Two, each with the device. A lost one is another machine afterwards."""
    needs_fuse()
    with cluster(nodes=2, size="192M", peer_transport="verbs", peer_verbs_devices=device.device, **PATIENT) as made:
        yield made


@pytest.fixture
def run(nodes: Cluster, request: pytest.FixtureRequest) -> str:
    """A namespace of its own, once both nodes are there and can READ."""
    for node in nodes:
        if not node.is_started:
            node.start(node_id=f"{node.node_id}-new")
    nodes.wait_members(within_s=WITHIN_S)
    wait_devices(nodes)
    name = f"run-{abs(hash(request.node.name)) % 10**6}"
    (nodes[0].mountpoint / name).mkdir()
    return name


def wait_devices(nodes: Cluster) -> None:
    """What is asked for before comes by TCP."""
    wait_until(lambda: all(transport(node)["devices"] for node in nodes), "both nodes have the device", WITHIN_S)


def transport(node: Node) -> dict[str, Any]:
    told: dict[str, Any] = node.status()["cluster"]["transport"]
    return told


def read_from(node: Node, other: Node) -> dict[str, Any]:
    """What the node says of its pulls from the other one."""
    told: dict[str, Any] = transport(node)["peers"].get(other.node_id, {})
    return told


def bytes_read(node: Node, other: Node) -> int:
    return int(read_from(node, other).get("bytes", 0))


def lose(node: Node) -> None:
    node.kill(wipe=True)


def write_until_read(nodes: Cluster, step: Path, seed: int) -> tuple[int, bytes]:
    """Begins a large shard on the first node, until the second has READ a part of it; how much of what is written."""
    data = content(seed, 0, LARGE)
    step.mkdir()
    before = bytes_read(nodes[1], nodes[0])
    written = 0
    with (step / shard_names(1)[0]).open("wb") as file:
        while bytes_read(nodes[1], nodes[0]) - before < MIB:
            assert written < LARGE - MIB, f"none of {written} bytes was READ: {read_from(nodes[1], nodes[0])}"
            written += file.write(data[written : written + MIB])
            file.flush()
            os.fsync(file.fileno())
    return written, data


def test_copies_come_by_rdma_and_a_lost_node_costs_nothing(nodes: Cluster, run: str) -> None:
    first, second = nodes
    write_step(first.mountpoint / run / "step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1", within_s=WITHIN_S)
    told = read_from(second, first)
    assert told["transport"] == "verbs" and told["bytes"] >= SIZES[0] and told["fallbacks"] == {}, told
    assert transport(first)["given"] >= 1
    write_step(first.mountpoint / run / "step_2", 2, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_2", within_s=WITHIN_S)
    lose(first)
    check_step(second.mountpoint / run / "step_1", 1, SIZES)
    assert latest(second, run) == "step_2"
    first.start(node_id="n1-other")
    nodes.wait_members(within_s=WITHIN_S)
    wait_devices(nodes)
    check_step(first.mountpoint / run / "step_1", 1, SIZES)
    check_step(first.mountpoint / run / "step_2", 2, SIZES)
    # One pull tried it, and what was asked for meanwhile came by TCP. What nobody copies comes when it is read.
    wait_until(lambda: read_from(first, second).get("transport") == "verbs", "a pull came by RDMA", WITHIN_S)
    before = bytes_read(first, second)
    (second.mountpoint / ALONE).mkdir()
    write_step(second.mountpoint / ALONE / "step_1", 3, SIZES)
    soon((first.mountpoint / ALONE / "step_1" / MARKER).exists, "the other node sees it", within_s=WITHIN_S)
    check_step(first.mountpoint / ALONE / "step_1", 3, SIZES)
    assert bytes_read(first, second) - before >= SIZES[0]
    assert read_from(first, second)["fallbacks"] == {}, transport(first)


def test_tools_work_on_a_mount_whose_daemon_was_killed(nodes: Cluster, run: str) -> None:
    root = nodes[1].mountpoint / run
    write_step(root / "step_1", 3, SIZES)
    pid = nodes[1].daemon_pid()
    os.kill(pid, 9)
    nodes[1].wait_for_new_daemon(pid, WITHIN_S)
    soon(lambda: os.listdir(root), "the mount answers again", within_s=WITHIN_S)
    check_step(root / "step_1", 3, SIZES)
    subprocess.run(["cp", "-a", "step_1", "copy"], cwd=root, check=True, timeout=WITHIN_S)
    assert sorted(os.listdir(root / "copy")) == sorted([MARKER, *shard_names(len(SIZES))])
    os.rename(root / "copy", root / "step_2")
    check_step(root / "step_2", 3, SIZES)
    shutil.rmtree(root / "step_2")
    assert "step_2" not in os.listdir(root)


def test_a_peer_that_dies_in_the_middle_of_a_pull_leaves_nothing_half(nodes: Cluster, run: str) -> None:
    first, second = nodes
    write_step(first.mountpoint / run / "step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1", within_s=WITHIN_S)
    write_until_read(nodes, first.mountpoint / run / "step_2", 2)
    lose(first)
    wait_until(lambda: not second.status()["cluster"]["pulling"], "the pull has ended", WITHIN_S)
    check_step(second.mountpoint / run / "step_1", 1, SIZES)
    assert latest(second, run) == "step_1"
    assert second.step("step_2", run).get("state") != "complete"
    wait_until(lambda: not transport(second)["links"], "the links to the dead one are given back", WITHIN_S)


def test_a_device_that_fails_in_the_middle_of_a_pull_is_made_up_for_by_tcp(nodes: Cluster, run: str) -> None:
    """Its network interface goes. (`rdma link delete` waits until no daemon has the soft device open.)"""
    first, second = nodes
    step = first.mountpoint / run / "step_1"
    written, data = write_until_read(nodes, step, 4)
    subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True, timeout=WITHIN_S)
    try:
        with (step / shard_names(1)[0]).open("ab") as file:
            file.write(data[written:])
        write_marker(step, 1)
        wait_replicated(nodes.nodes, f"{run}/step_1", within_s=WITHIN_S)
        lose(first)
        check_step(second.mountpoint / run / "step_1", 4, [LARGE])
        assert read_from(second, first)["fallbacks"], transport(second)
    finally:
        subprocess.run(["ip", "link", "set", INTERFACE, "up"], check=True, timeout=WITHIN_S)
