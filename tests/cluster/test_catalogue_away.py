"""With etcd away each node goes on alone, and when it is back all agree again; what was deleted stays deleted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time

import pytest

from rig.cluster import BOUND_S, MIB, Cluster, Node
from rig.cluster_steps import check_everywhere, on_each, soon, wait_latest, wait_replicated, write_together
from rig.instance import wait_until
from rig.plain_steps import check_step, write_step

pytestmark = [pytest.mark.alone, pytest.mark.slow]
NODES = 3
SIZES = [2 * MIB, 100_000, 700]
#: A save that needs nobody else may wait for the catalogue's answer once or twice (`etcd.timeout_s`), no more.
ALONE_S = 20.0


def test_with_etcd_away_local_steps_are_saved_and_loaded_and_published_later(nodes: Cluster, run: str) -> None:
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    nodes.etcd.kill()
    begin = time.monotonic()

    def go_on_alone(node: Node) -> None:
        own = node.mountpoint / f"{run}-{node.number}"
        write_step(own / "step_1", node.number, SIZES)
        check_step(own / "step_1", node.number, SIZES)
        write_step(own / "step_2", node.number + 10, SIZES)
        wait_latest([node], "step_2", own.name, within_s=ALONE_S)
        assert os.getxattr(own / "step_2", "user.tierfs.state") == b"complete"

    on_each(nodes.nodes, go_on_alone)
    check_everywhere(nodes.nodes, f"{run}/step_1", 1, SIZES)
    assert time.monotonic() - begin < 2 * ALONE_S
    assert nodes[0].status()["cluster"]["connected"] is False
    shutil.rmtree(nodes[0].mountpoint / f"{run}-1" / "step_1")
    nodes.etcd.start()
    nodes.wait_members()
    for node in nodes:
        namespace = f"{run}-{node.number}"
        wait_latest(nodes.nodes, "step_2", namespace, within_s=BOUND_S)
        check_everywhere(nodes.nodes, f"{namespace}/step_2", node.number + 10, SIZES)
    for node in nodes:
        soon(
            lambda node=node: not (node.mountpoint / f"{run}-1" / "step_1").exists(), "what was removed alone stays so"
        )
    wait_replicated(nodes.nodes, *(f"{run}-{node.number}/step_2" for node in nodes))


def test_a_node_that_was_cut_off_does_not_bring_back_what_was_deleted(nodes: Cluster, run: str) -> None:
    one, cut, _ = nodes
    for seed in (1, 2, 3):
        write_together(nodes.nodes, f"{run}/step_{seed}", seed, SIZES)
    (one.mountpoint / run / "plain").mkdir()
    (one.mountpoint / run / "plain/file").write_text("plain")
    wait_replicated(nodes.nodes, *(f"{run}/step_{seed}" for seed in (1, 2, 3)))
    cut.partition()
    soon(lambda: cut.node_id not in nodes.members(), "it lost its lease", within_s=BOUND_S)
    shutil.rmtree(one.mountpoint / run / "step_3")
    shutil.rmtree(one.mountpoint / run / "plain")
    write_step(one.mountpoint / run / "step_2", 22, SIZES)
    write_step(cut.mountpoint / f"{run}-cut" / "step_5", 5, SIZES)
    cut.heal()
    soon(lambda: cut.node_id in nodes.members(), "it is a member again", within_s=BOUND_S)
    wait_latest(nodes.nodes, "step_2", run, within_s=BOUND_S)
    wait_latest(nodes.nodes, "step_5", f"{run}-cut", within_s=BOUND_S)
    for node in nodes:
        soon(
            lambda node=node: sorted(os.listdir(node.mountpoint / run)) == ["latest", "step_1", "step_2"],
            "what was deleted is gone",
            within_s=BOUND_S,
        )
        soon(
            lambda node=node: os.getxattr(node.mountpoint / run / "step_2", "user.tierfs.generation") == b"2",
            "the new generation is there",
            within_s=BOUND_S,
        )
    check_everywhere(nodes.nodes, f"{run}/step_1", 1, SIZES)
    check_everywhere(nodes.nodes, f"{run}/step_2", 22, SIZES)
    check_everywhere(nodes.nodes, f"{run}-cut/step_5", 5, SIZES)


@pytest.mark.parametrize("how", ["frozen", "restarted", "lease-expired"])
def test_etcd_may_freeze_restart_or_forget_the_lease_at_any_time(nodes: Cluster, run: str, how: str) -> None:
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    if how == "frozen":
        nodes.etcd.freeze()
        write_step(nodes[1].mountpoint / f"{run}-own" / "step_1", 7, SIZES)
        nodes.etcd.thaw()
    elif how == "restarted":
        nodes.etcd.restart()
    else:
        nodes[1].host.signal(signal.SIGSTOP, named="mount.daemon")
        soon(lambda: nodes[1].node_id not in nodes.members(), "the lease is gone", within_s=BOUND_S)
        nodes[1].host.signal(signal.SIGCONT, named="mount.daemon")
    nodes.wait_members()
    write_together(nodes[::-1], f"{run}/step_2", 2, SIZES)
    wait_latest(nodes.nodes, "step_2", run, within_s=BOUND_S)
    wait_replicated(nodes.nodes, f"{run}/step_1", f"{run}/step_2")
    for seed in (1, 2):
        check_everywhere(nodes.nodes, f"{run}/step_{seed}", seed, SIZES)


def test_a_catalogue_that_was_lost_is_filled_again_from_the_nodes(nodes: Cluster, run: str) -> None:
    for seed in (1, 2):
        write_together(nodes.nodes, f"{run}/step_{seed}", seed, SIZES)
    (nodes[2].mountpoint / run / "note").write_text("kept")
    wait_replicated(nodes.nodes, f"{run}/step_1", f"{run}/step_2")
    nodes.etcd.restart(lose_data=True)
    nodes.wait_members()
    soon(lambda: any("step_2" in key for key in nodes.etcd.keys("/c/")), "the steps are published", within_s=BOUND_S)
    wait_latest(nodes.nodes, "step_2", run)
    for seed in (1, 2):
        check_everywhere(nodes.nodes, f"{run}/step_{seed}", seed, SIZES)
    nodes[0].kill(wipe=True)
    nodes[0].start(node_id="n1-after-loss")
    wait_latest(nodes.nodes, "step_2", run, within_s=BOUND_S)
    check_everywhere(nodes.nodes, f"{run}/step_2", 2, SIZES)
    soon(lambda: (nodes[0].mountpoint / run / "note").read_text() == "kept", "the plain file is there")


def test_a_mount_without_its_catalogue_serves_what_it_has_and_joins_later(nodes: Cluster, run: str) -> None:
    late = nodes[2]
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    check_step(late.mountpoint / run / "step_1", 1, SIZES)
    late.kill(wipe=False)
    nodes.etcd.kill()
    begin = time.monotonic()
    late.start()
    assert time.monotonic() - begin < ALONE_S
    write_step(late.mountpoint / f"{run}-late" / "step_1", 3, SIZES)
    nodes.etcd.start()
    nodes.wait_members()
    wait_latest(nodes.nodes, "step_1", f"{run}-late", within_s=BOUND_S)
    check_everywhere(nodes.nodes, f"{run}-late/step_1", 3, SIZES)
    check_everywhere(nodes.nodes, f"{run}/step_1", 1, SIZES)


def test_etcd_may_die_while_a_step_is_written_again(nodes: Cluster, run: str, dice: random.Random) -> None:
    write_together(nodes.nodes, f"{run}/step_1", 1, SIZES)
    wait_replicated(nodes.nodes, f"{run}/step_1")
    for seed in (2, 3):
        writers = dice.sample(list(nodes.nodes), 2)

        def die_and_come_back() -> None:
            time.sleep(dice.uniform(0.0, 0.25))  # a random moment of the save
            nodes.etcd.kill()
            time.sleep(dice.uniform(0.5, 1.5))
            nodes.etcd.start()

        killer = threading.Thread(target=die_and_come_back)
        killer.start()
        try:
            write_together(writers, f"{run}/step_1", seed, SIZES)
        finally:
            killer.join()
        for node in nodes.nodes:
            step = node.mountpoint / run / "step_1"
            wanted = [b"complete", str(seed).encode()]
            wait_until(
                lambda step=step, wanted=wanted: (  # type: ignore[misc]
                    [os.getxattr(step, f"user.tierfs.{name}") for name in ("state", "generation")] == wanted
                ),
                f"generation {seed} is complete on {node.node_id}",
                BOUND_S,
            )
            check_step(step, seed, SIZES)
