"""Metrics and events of several nodes: all figures are there, and of what all nodes see one of them tells."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mount.metrics_catalogue import all_metrics
from rig.cluster import BOUND_S, Cluster, Node, cluster
from rig.instance import tierfs, wait_until
from rig.plain_steps import write_step
from tests.conftest import needs_fuse
from tests.watch.watched import samples

pytestmark = [pytest.mark.alone, pytest.mark.slow]
MIB = 1 << 20
SIZES = [5 * MIB, MIB]
PAGES_PORT = 7118


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two groups of two, so that each step has just two copies. Events go into files named after the nodes."""
    needs_fuse()
    command = tmp_path_factory.mktemp("events") / "on-event"
    command.write_text('#!/bin/sh\ncat >> "$(dirname "$0")/$TIERFS_EVENT_NODE"\n')
    command.chmod(0o755)
    options = {
        "metrics_listen": f":{PAGES_PORT}",
        "events_command": str(command),
        "durability_replica_timeout_s": "20",
    }
    with cluster(nodes=4, **options) as made:
        yield made


@pytest.fixture
def run(nodes: Cluster) -> str:
    nodes.restore()
    name = f"run-{uuid.uuid4().hex[:6]}"
    (nodes[0].mountpoint / name).mkdir()
    return name


def metrics(node: Node) -> dict[str, float]:
    connection = http.client.HTTPConnection(node.host.address, PAGES_PORT, timeout=20)
    connection.sock = node.host.socket()
    connection.sock.settimeout(20)
    connection.sock.connect(("127.0.0.1", PAGES_PORT))
    try:
        connection.request("GET", "/metrics")
        return samples(connection.getresponse().read().decode())
    finally:
        connection.close()


def told(nodes: Cluster, run: str, event: str, **facts: Any) -> list[dict[str, Any]]:
    """What all nodes together passed on."""
    directory = Path(nodes[0].options["events.command"]).parent
    found = [
        json.loads(line)
        for path in directory.iterdir()
        if path.name != "on-event"
        for line in path.read_text().splitlines()
    ]
    return [
        each
        for each in found
        if (each["event"], each["namespace"]) == (event, run) and all(each[name] == facts[name] for name in facts)
    ]


def wait_told(nodes: Cluster, run: str, event: str, **facts: Any) -> dict[str, Any]:
    return wait_until(lambda: told(nodes, run, event, **facts), f"{event} of {run} with {facts}", BOUND_S)[0]


def test_one_node_tells_of_each_level_and_all_figures_are_there(nodes: Cluster, run: str) -> None:
    write_step(nodes[1].mountpoint / run / "step_1", 1, SIZES)
    copied = wait_told(nodes, run, "level", level="replica")
    assert copied["node"] == nodes[1].node_id and copied["step"] == "step_1"
    assert copied["seconds"] < BOUND_S
    state = f'tierfs_steps{{namespace="{run}",state="replicated"}}'
    for node in nodes:
        wait_until(lambda node=node: metrics(node).get(state) == 1, f"{node.node_id} counts it as replicated", BOUND_S)
        found = metrics(node)
        names = {sample.partition("{")[0] for sample in found}
        wanted = {metric.name for metric in all_metrics() if metric.needs == "cluster"}
        assert wanted <= names
        assert found['tierfs_cluster_nodes{state="serving"}'] == 4
        assert found["tierfs_cluster_connected"] == found["tierfs_cluster_member"] == 1
        ages = [
            found[f'tierfs_recovery_point_age_seconds{{namespace="{run}",tier="{tier}"}}']
            for tier in ("ram", "replica")
        ]
        assert ages[0] == pytest.approx(ages[1], abs=0.01)
        assert found[f'tierfs_replication_lag_seconds{{namespace="{run}"}}'] == 0
    shown = tierfs("top", nodes[0].mountpoint)
    assert all(f"\n{node.node_id} " in shown for node in nodes) and f"{run}/step_1" in shown and "2 of 2" in shown
    received = sum(metrics(node)['tierfs_peer_received_bytes_total{transport="tcp"}'] for node in nodes)
    assert received >= sum(SIZES)
    assert len(told(nodes, run, "level", level="ram")) == len(told(nodes, run, "level", level="replica")) == 1
    counts = [
        metrics(node).get(f'tierfs_step_level_seconds_count{{level="replica",namespace="{run}"}}', 0) for node in nodes
    ]
    assert counts == [0, 1, 0, 0]


def test_a_lost_node_leaves_steps_under_replicated_until_they_are_copied_again(nodes: Cluster, run: str) -> None:
    write_step(nodes[0].mountpoint / run / "step_1", 1, SIZES)
    wait_told(nodes, run, "level", level="replica")
    partner = next(each for each in nodes_of(nodes[0]) if each["this"])["partners"][0]
    lost = next(node for node in nodes if node.node_id == partner)
    lost.kill(wipe=True)
    missing = wait_told(nodes, run, "under-replicated")
    assert (missing["step"], missing["wanted"]) == ("step_1", 2)
    assert "a node that held a copy is gone" in missing["message"]
    wait_until(lambda: len(told(nodes, run, "level", level="replica")) == 2, "it was copied again", BOUND_S)
    assert metrics(nodes[0])['tierfs_cluster_nodes{state="lost"}'] == 1
    assert len(told(nodes, run, "under-replicated")) == 1


def test_a_step_that_is_lost_is_told_of_and_so_is_the_walk_back(nodes: Cluster, run: str) -> None:
    write_step(nodes[0].mountpoint / run / "step_1", 1, SIZES)
    wait_told(nodes, run, "level", level="replica")
    for node in nodes:
        node.stall()  # nothing is copied
    write_step(nodes[2].mountpoint / run / "step_2", 2, [3 * MIB])
    wait_told(nodes, run, "level", level="ram", step="step_2")
    wait_until(lambda: nodes[0].step("step_2", run).get("state") == "complete", "others see it", BOUND_S)
    nodes[2].kill(wipe=True)
    for node in nodes.others(nodes[2]):
        node.heal()
    assert wait_told(nodes, run, "lost")["step"] == "step_2"
    back = wait_told(nodes, run, "walk-back")
    assert (back["from"], back["to"], back["reason"]) == ("step_2", "step_1", "lost")
    assert len(told(nodes, run, "walk-back")) == 1
    wait_until(
        lambda: metrics(nodes[0])[f'tierfs_steps{{namespace="{run}",state="lost"}}'] == 1, "it is counted", BOUND_S
    )


def test_a_drain_is_told_from_its_begin_to_its_end(nodes: Cluster, run: str) -> None:
    write_step(nodes[0].mountpoint / run / "step_1", 1, SIZES)
    wait_told(nodes, run, "level", level="replica")
    tierfs("drain", nodes[0].mountpoint)
    assert metrics(nodes[0])["tierfs_cluster_draining"] == 1
    phases = ["begun", "done"]
    wait_until(lambda: [each["phase"] for each in told(nodes, "", "drain")] == phases, "both were told", BOUND_S)
    assert {each["node"] for each in told(nodes, "", "drain")} == {nodes[0].node_id}
    tierfs("drain", nodes[0].mountpoint, "--stop")


def nodes_of(node: Node) -> list[dict[str, Any]]:
    answer = tierfs("nodes", node.mountpoint, "--json", may_be_degraded=True)
    return json.loads(answer)["nodes"]
