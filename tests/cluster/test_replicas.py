"""Every complete step is held twice soon, so that the loss of any node costs nothing."""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import BOUND_S, Cluster, Node
from rig.cluster_steps import (
    check_everywhere,
    latest,
    level,
    on_each,
    soon,
    sums,
    wait_latest,
    wait_replicated,
    write_shards,
    write_together,
)
from rig.instance import tierfs
from rig.plain_steps import MARKER, check_step, content, shard_names, write_marker, write_step
from rig.ranks import run_ranks

pytestmark = pytest.mark.alone
SIZE = 12 * MIB
SIZES = [5 * MIB, 3 * MIB, 300_000, 2 * MIB, 700]


def partners(nodes: Cluster, node: Node) -> list[Node]:
    """Who holds copies of what the node writes, as it says itself."""
    told = json.loads(tierfs("nodes", node.mountpoint, "--json", may_be_degraded=True))["nodes"]
    names = next(each["partners"] for each in told if each["this"])
    return [other for other in nodes if other.node_id in names]


def test_a_lost_node_costs_no_step_and_the_one_in_its_place_has_all(
    nodes: Cluster, run: str, dice: random.Random
) -> None:
    run_ranks(jobs.save_steps, run, [1, 2, 3], SIZE, table=jobs.seats(nodes.nodes))
    steps = {f"{run}/step_{seed}": seed for seed in (1, 2, 3)}
    wait_replicated(nodes.nodes, *steps)
    lost = dice.choice(nodes.nodes)
    lost.kill(wipe=True)
    left = nodes.others(lost)
    begin = time.monotonic()
    run_ranks(jobs.check_steps, steps, SIZE, table=jobs.seats(left))
    assert time.monotonic() - begin < BOUND_S
    assert {latest(node, run) for node in left} == {"step_3"}
    lost.start(node_id=f"n{lost.number}-new")
    for step in steps:
        assert sums(lost.mountpoint / step) == sums(left[0].mountpoint / step)
    wait_replicated(nodes.nodes, *steps)
    wait_latest(nodes.nodes, "step_3", run)
    tierfs("wait", lost.mountpoint / run / "step_3", "--level", "replica", "--timeout", "20")


@pytest.mark.slow
def test_one_node_after_the_other_may_be_lost_until_one_is_left(nodes: Cluster, run: str, dice: random.Random) -> None:
    for seed in (1, 2):
        write_together(nodes.nodes, f"{run}/step_{seed}", seed, SIZES)
    steps = [f"{run}/step_{seed}" for seed in (1, 2)]
    left = nodes.nodes
    while len(left) > 1:
        wait_replicated(left, *steps)
        lost = dice.choice(left)
        lost.kill(wipe=True)
        left = [node for node in left if node is not lost]
        for seed, step in enumerate(steps, 1):
            check_everywhere(left, step, seed, SIZES)
        assert {latest(node, run) for node in left} == {"step_2"}
        soon(lambda lost=lost: lost.node_id not in nodes.members(), "the lost node is no member", within_s=BOUND_S)


@pytest.mark.slow
def test_one_node_of_each_group_may_be_lost_at_once(nodes: Cluster, run: str, dice: random.Random) -> None:
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    first = dice.choice(nodes.nodes)
    group = [first, *partners(nodes, first)]
    assert len(group) == 2
    second = dice.choice(nodes.others(*group))
    first.kill(wipe=True)
    second.kill(wipe=True)
    left = nodes.others(first, second)
    check_everywhere(left, f"{run}/step_1", 1, SIZES)
    wait_replicated(left, f"{run}/step_1")
    assert {latest(node, run) for node in left} == {"step_1"}


def test_copies_go_to_other_failure_domains_and_come_while_a_shard_is_written(nodes: Cluster, run: str) -> None:
    """Most of a large shard is on the other node before its writer closes it."""
    step = nodes[0].mountpoint / run / "step_1"
    step.mkdir()
    name = shard_names(1)[0]
    data = content(1, 0, 64 * MIB)
    (other,) = partners(nodes, nodes[0])
    before = other.status()["ram"]["used_bytes"]
    with (step / name).open("wb") as file:
        file.write(data)
        file.flush()
        soon(
            lambda: other.status()["ram"]["used_bytes"] - before > 32 * MIB,
            "half of it is copied before it is closed",
            within_s=BOUND_S,
        )
    begin = time.monotonic()
    write_marker(step, 1)
    wait_replicated([nodes[0]], f"{run}/step_1")
    print(f"replicated {time.monotonic() - begin:.2f} s after the marker")
    check_everywhere(nodes.nodes, f"{run}/step_1", 1, [64 * MIB])


@pytest.mark.slow
def test_a_step_that_lost_its_last_copy_is_not_latest_and_fails_to_load(nodes: Cluster, run: str) -> None:
    """A copy is never made of what was lost before it could be: latest steps back to what every node can read."""
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    lost, (partner,) = nodes[3], partners(nodes, nodes[3])
    lost.drop_from(*nodes.others(lost))
    write_shards(lost.mountpoint / run / "step_2", 2, SIZES, range(5))
    write_marker(lost.mountpoint / run / "step_2", 5)
    left = nodes.others(lost)
    wait_latest(left, "step_2", run)
    lost.kill(wipe=True)
    wait_latest(left, "step_1", run, within_s=BOUND_S)

    def read(node: Node) -> None:
        with pytest.raises(OSError):
            (node.mountpoint / run / "step_2" / shard_names(5)[0]).read_bytes()

    begin = time.monotonic()
    on_each(left, read)
    assert time.monotonic() - begin < BOUND_S
    check_everywhere(left, f"{run}/step_1", 1, SIZES)
    assert partner in left


def test_a_damaged_copy_is_never_given_out(nodes: Cluster, run: str) -> None:
    """The one that was written is damaged after it was copied: whoever reads from others gets the whole one."""
    step = f"{run}/step_1"
    write_step(nodes[0].mountpoint / step, 1, SIZES)
    wait_replicated(nodes.nodes, step)
    (partner,) = partners(nodes, nodes[0])
    reader, other = nodes.others(nodes[0], partner)
    name = shard_names(5)[0]
    soon(lambda: os.getxattr(nodes[0].mountpoint / step / name, "user.tierfs.checksum"), "it is summed up")
    with nodes[0].backing(nodes[0].mountpoint / step / name).open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"damage")
    check_step(reader.mountpoint / step, 1, SIZES)
    partner.kill(wipe=True)
    reader.kill(wipe=True)
    try:
        assert (other.mountpoint / step / name).read_bytes() == content(1, 0, SIZES[0])
    except OSError as error:
        print(f"no whole copy was left: {error}")


@pytest.mark.slow
def test_a_reader_is_served_while_the_holder_it_asks_stalls(nodes: Cluster, run: str) -> None:
    step = f"{run}/step_1"
    write_step(nodes[0].mountpoint / step, 1, SIZES)
    wait_replicated(nodes.nodes, step)
    (partner,) = partners(nodes, nodes[0])
    for stalling in (nodes[0], partner):
        reader = nodes.others(nodes[0], partner)[0 if stalling is partner else 1]
        stalling.stall()
        begin = time.monotonic()
        check_step(reader.mountpoint / step, 1, SIZES)
        assert time.monotonic() - begin < BOUND_S
        assert stalling.node_id in nodes.members()
        stalling.heal()


def test_a_node_that_drains_takes_nothing_with_it(nodes: Cluster, run: str) -> None:
    """Also what is not replicated yet, since its partner could not be reached."""
    going = nodes[1]
    going.drop_from(*partners(nodes, going))
    write_step(going.mountpoint / run / "step_1", 1, SIZES)
    going.heal()
    tierfs("drain", going.mountpoint, timeout_s=90)
    going.kill(wipe=True)
    left = nodes.others(going)
    check_everywhere(left, f"{run}/step_1", 1, SIZES)
    assert all(found == {MARKER, *shard_names(5)} for found in on_each(left, lambda node: names(node, run)))
    assert all(level(node, f"{run}/step_1") for node in left)


def names(node: Node, run: str) -> set[str]:
    return set(os.listdir(node.mountpoint / run / "step_1"))
