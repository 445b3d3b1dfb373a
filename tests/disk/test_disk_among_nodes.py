"""Nodes with a disk each: the loss of all memory at once costs no step, and a node serves others from its disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import BOUND_S, Cluster, Node, cluster
from rig.cluster_steps import check_everywhere, latest, on_each, soon, wait_latest, wait_replicated, write_together
from rig.fixtures import pytest_runtest_makereport
from rig.instance import tierfs
from rig.plain_steps import check_step, shard_names
from rig.ranks import run_ranks
from tests.conftest import needs_fuse

__all__ = ["pytest_runtest_makereport"]

pytestmark = [pytest.mark.alone, pytest.mark.slow]
SIZES = [9 * MIB, 7 * MIB, 3 * MIB, 2 * MIB, 700, 300_000]


def disk_of(node: Node) -> Path:
    return node.directory / f"disk-{node.number}"


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    needs_fuse()
    with cluster(nodes=3, size="160M", start=False, retention_ram_steps="1") as made:
        for node in made:
            node.options["disk.path"] = str(disk_of(node))
        made.start()
        made.wait_members()
        (made[0].mountpoint / "run").mkdir()
        with made.at_most(150):
            yield made


def is_stored(node: Node, step: str) -> bool:
    return bool((node.step(step).get("disk") or {}).get("state") == "stored")


def wait_stored(nodes: list[Node], *steps: str) -> None:
    for step in steps:
        soon(
            lambda step=step: all(is_stored(node, step) for node in nodes),  # type: ignore[misc]
            f"{step} is on all disks: {[node.step(step).get('disk') for node in nodes]}",
            within_s=BOUND_S,
        )


def reboot(nodes: Cluster, *which: Node) -> None:
    """The memory of these nodes is lost at once; disks and etcd stay."""
    lost = which or tuple(nodes)
    on_each(lost, lambda node: node.kill(wipe=True))
    nodes.start(*lost)
    nodes.wait_members()


def test_all_memory_is_lost_at_once_and_the_newest_step_is_there(nodes: Cluster) -> None:
    run_ranks(jobs.save_steps, "run", [1, 2], 12 * MIB, table=jobs.seats(nodes.nodes))
    write_together(nodes.nodes, "run/step_3", 3, SIZES)
    wait_stored(nodes.nodes, "step_1", "step_2", "step_3")
    reboot(nodes)
    wait_latest(nodes.nodes, "step_3", "run", within_s=BOUND_S)
    check_everywhere(nodes.nodes, "run/step_3", 3, SIZES)
    run_ranks(jobs.check_steps, {"run/step_1": 1, "run/step_2": 2}, 12 * MIB, table=jobs.seats(nodes.nodes))
    wait_replicated(nodes.nodes, "run/step_1", "run/step_2", "run/step_3")
    assert all(node.status()["disk"]["bytes_written"] < 40 * MIB for node in nodes), "what is there is not copied again"
    write_together(nodes.nodes, "run/step_4", 4, SIZES)  # and it goes on
    wait_stored(nodes.nodes, "step_4")
    shutil.rmtree(nodes[1].mountpoint / "run" / "step_1")
    soon(
        lambda: not any((disk_of(node) / "steps" / "run" / "step_1").exists() for node in nodes),
        "what is removed leaves all disks",
        within_s=BOUND_S,
    )


def test_what_ram_lets_go_of_is_served_to_others_from_the_disk(nodes: Cluster) -> None:
    for number in range(1, 8):  # more than three nodes' RAM holds with its copies
        write_together(nodes.nodes, f"run/step_{number}", number, [n * 3 for n in SIZES])
        wait_stored(nodes.nodes, f"step_{number}")
    assert all(node.step("step_1")["stubs"] for node in nodes), "the oldest leaves RAM"
    assert {latest(node, "run") for node in nodes} == {"step_7"}
    check_everywhere(nodes.nodes, "run/step_1", 1, [n * 3 for n in SIZES])
    first, second, third = nodes
    lost = disk_of(first)
    first.kill(wipe=True)
    shutil.rmtree(lost)  # this machine is gone for good
    check_everywhere([second, third], "run/step_2", 2, [n * 3 for n in SIZES])
    first.start(node_id="n1-new")
    check_step(first.mountpoint / "run" / "step_2", 2, [n * 3 for n in SIZES])


def test_a_damaged_file_on_one_disk_comes_from_another_node(nodes: Cluster) -> None:
    write_together(nodes.nodes, "run/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, "run/step_1")
    wait_stored(nodes.nodes, "step_1")
    shard = shard_names(1)[0]
    on_each(nodes.nodes, lambda node: node.kill(wipe=True))
    with (disk_of(nodes[0]) / "steps" / "run" / "step_1" / shard).open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"other bytes")
    nodes.start()
    nodes.wait_members()
    wait_latest(nodes.nodes, "step_1", "run", within_s=BOUND_S)
    check_everywhere(nodes.nodes, "run/step_1", 1, SIZES)
    assert os.path.exists(nodes[0].mountpoint / "run" / "step_1" / shard)
    tierfs("wait", nodes[0].mountpoint / "run" / "step_1", "--level", "disk", "--timeout", "30")
