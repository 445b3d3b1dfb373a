"""Faults at random moments. After each: no load gives bytes of two generations or of a step that is not complete,
replicated steps survive, `latest` loads, and nothing hangs beyond its bound."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import BOUND_S, Cluster, Node
from rig.cluster_steps import (
    latest,
    level,
    on_each,
    soon,
    wait_latest,
    wait_replicated,
    write_shards,
)
from rig.plain_steps import check_step, write_marker
from rig.ranks import Job, RankFailed, run_ranks

pytestmark = [pytest.mark.alone, pytest.mark.slow]
SIZE = 8 * MIB
SIZES = [2 * MIB, MIB + 1000, 400_000, MIB]
COLLECTIVE_S = 20.0


@dataclass
class Trouble:
    """A fault that was begun: who died of it, and who can't be reached."""

    name: str
    dead: list[Node] = field(default_factory=list)
    away: list[Node] = field(default_factory=list)


def kill(nodes: Cluster, dice: random.Random) -> Trouble:
    node = dice.choice(nodes.nodes)
    node.kill(wipe=True)
    return Trouble(f"{node.node_id} is lost", dead=[node])


def kill_daemon(nodes: Cluster, dice: random.Random) -> Trouble:
    node = dice.choice(nodes.nodes)
    node.kill_daemon()
    return Trouble(f"the daemon of {node.node_id} was killed")


def cut_off(nodes: Cluster, dice: random.Random) -> Trouble:
    node = dice.choice(nodes.nodes)
    node.partition()
    return Trouble(f"{node.node_id} is cut off", away=[node])


def cut_pair(nodes: Cluster, dice: random.Random) -> Trouble:
    one, other = dice.sample(nodes.nodes, 2)
    one.drop_from(other)
    return Trouble(f"{one.node_id} and {other.node_id} don't reach each other")


def lose_etcd(nodes: Cluster, dice: random.Random) -> Trouble:
    nodes.etcd.host.unplug()
    return Trouble("etcd is cut off")


def lose_etcd_alone(nodes: Cluster, dice: random.Random) -> Trouble:
    node = dice.choice(nodes.nodes)
    node.lose_etcd()
    return Trouble(f"{node.node_id} does not reach etcd")


def restart_etcd(nodes: Cluster, dice: random.Random) -> Trouble:
    nodes.etcd.restart()
    return Trouble("etcd was restarted")


def stall(nodes: Cluster, dice: random.Random) -> Trouble:
    node = dice.choice(nodes.nodes)
    node.stall()
    return Trouble(f"{node.node_id} stalls")


Fault = Callable[[Cluster, random.Random], Trouble]
FAULTS: list[Fault] = [
    kill,
    kill_daemon,
    cut_off,
    cut_pair,
    lose_etcd,
    lose_etcd_alone,
    restart_etcd,
    stall,
]
#: What takes no part of a gloo job away, nor the network between its ranks: a save must succeed.
HARMLESS = [kill_daemon, lose_etcd, lose_etcd_alone, restart_etcd, stall]


#: The two tests of random moments have these at least, so that `make test` has each fault once.
OF_TRAINING = [kill, kill_daemon, cut_pair, lose_etcd]
OF_WRITERS = [kill, cut_off, lose_etcd_alone, restart_etcd, stall]


def order(dice: random.Random, least: list[Fault], rounds: int) -> list[Fault]:
    """These in random order, and then each fault equally often for as many rounds as were asked for."""
    chosen = dice.sample(least, len(least))
    while len(chosen) < rounds:
        chosen += dice.sample(FAULTS, len(FAULTS))
    return chosen[: max(rounds, len(least))]


@pytest.mark.timeout(3600)
def test_training_under_faults_loads_every_step_whole_or_not_at_all(
    nodes: Cluster, run: str, dice: random.Random, rounds: int
) -> None:
    """Odd rounds write a new step, even ones write the last step again."""
    run_ranks(jobs.save_step, f"{run}/step_1", 1, SIZE, table=jobs.seats(nodes.nodes))
    held, number, save_s = {f"{run}/step_1": 1}, 1, 0.3
    wait_replicated(nodes.nodes, *held)
    for turn, fault in enumerate(order(dice, OF_TRAINING, rounds), 2):
        number += turn % 2
        step, before = f"{run}/step_{number}", dict(held)
        job = Job(jobs.save_step, step, turn, SIZE, table=jobs.seats(nodes.nodes, collective_timeout_s=COLLECTIVE_S))
        job.next_event()
        time.sleep(dice.uniform(0, 1.5 * save_s))
        trouble = fault(nodes, dice)
        heal = threading.Timer(dice.uniform(0.5, 5), nodes.heal)
        heal.start()
        begin = time.monotonic()
        try:
            save_s = max(job.wait(COLLECTIVE_S + BOUND_S))
            held[step] = turn
        except RankFailed as error:
            assert fault not in HARMLESS, f"{trouble.name}: the save failed\n{error}"
        finally:
            heal.join()
        took = time.monotonic() - begin
        print(f"round {turn}: {trouble.name}; {step} {'saved' if held.get(step) == turn else 'failed'} in {took:.1f} s")
        left = nodes.others(*trouble.dead)
        nodes.heal()
        # before anybody is replaced: what was replicated loads on those that are left
        others = {name: seed for name, seed in before.items() if name != step}
        run_ranks(jobs.check_steps, others, SIZE, table=jobs.seats(left))
        nodes.restore()
        settle(nodes, step, trouble)
        found = run_ranks(jobs.try_step, step, [before.get(step, turn), turn], SIZE, table=jobs.seats(nodes.nodes))
        assert len({each if isinstance(each, int) else "error" for each in found}) == 1, f"{trouble.name}: {found}"
        if isinstance(found[0], int):
            held[step] = found[0]
        else:
            assert step not in before, f"{trouble.name}: {step} was whole before: {found}"
            assert held.pop(step, None) is None or trouble.dead, f"{trouble.name}: {step} was saved: {found}"
        wait_replicated(nodes.nodes, *held)
        newest = max(held, key=lambda name: int(name.rpartition("_")[2]))
        wait_latest(nodes.nodes, newest.rpartition("/")[2], run, within_s=BOUND_S)


def settle(nodes: Cluster, step: str, trouble: Trouble) -> None:
    """Until every node says the same of the step: complete in one generation, or not complete."""

    def agree() -> bool:
        found = {
            (each.get("state"), each.get("generation"), each.get("overwriting"))
            for each in (node.step(step.rpartition("/")[2], step.rpartition("/")[0]) for node in nodes)
        }
        return len(found) == 1 and not next(iter(found))[2]

    soon(agree, f"after {trouble.name} all nodes say the same of {step}", within_s=2 * BOUND_S)


@pytest.mark.timeout(3600)
def test_writers_that_need_nobody_never_fail_for_what_happens_elsewhere(
    nodes: Cluster, run: str, dice: random.Random, rounds: int
) -> None:
    """Each node writes steps of its own, without a collective: only those of a node that is lost may fail, and a step
    that was replicated is read everywhere whatever happens."""
    held: dict[str, int] = {}
    #: Written by a node that was lost just then: there whole, or not at all.
    undecided: dict[str, int] = {}
    for turn, fault in enumerate(order(dice, OF_WRITERS, rounds), 1):
        troubles: list[Trouble] = []
        failed: dict[str, OSError] = {}
        written: dict[str, int] = {}

        def write(node: Node, turn: int = turn, failed: dict = failed, written: dict = written) -> None:  # type: ignore[type-arg]
            step = f"{run}/{node.number}/step_{turn}"
            try:
                write_shards(node.mountpoint / step, turn * 10 + node.number, SIZES, range(len(SIZES)))
                write_marker(node.mountpoint / step, len(SIZES))
                check_step(node.mountpoint / step, turn * 10 + node.number, SIZES)
                written[step] = turn * 10 + node.number
            except OSError as error:
                failed[node.node_id] = error

        def strike(fault=fault, troubles: list[Trouble] = troubles) -> None:  # type: ignore[no-untyped-def]
            time.sleep(dice.uniform(0, 0.6))
            troubles.append(fault(nodes, dice))

        striking = threading.Thread(target=strike)
        striking.start()
        begin = time.monotonic()
        on_each(nodes.nodes, write)
        striking.join()
        took = time.monotonic() - begin
        (trouble,) = troubles
        print(f"round {turn}: {trouble.name}; written in {took:.1f} s, failed {failed}")
        assert failed.keys() <= {node.node_id for node in trouble.dead}, f"{trouble.name}: {failed}"
        assert took < BOUND_S
        left = nodes.others(*trouble.dead)
        reachable = [node for node in left if node not in trouble.away]
        for step, seed in held.items():
            on_each(reachable, lambda node, step=step, seed=seed: check_step(node.mountpoint / step, seed, SIZES))
        nodes.restore()
        for node in trouble.dead:  # also where the error came to the writer when all was done
            undecided[f"{run}/{node.number}/step_{turn}"] = turn * 10 + node.number
        for step, seed in written.items():
            if step not in undecided or level(nodes[0], step) == "replica":
                held[step] = seed
        wait_replicated(nodes.nodes, *held)
        for step, seed in held.items():
            on_each(nodes.nodes, lambda node, step=step, seed=seed: check_step(node.mountpoint / step, seed, SIZES))
        for namespace in {step.rpartition("/")[0] for step in held}:
            newest = max((step for step in held if step.startswith(f"{namespace}/")), key=number_of)
            may_be = {newest: held[newest]}
            for step, seed in undecided.items():
                if step.startswith(f"{namespace}/") and number_of(step) > number_of(newest):
                    may_be[step] = seed
            soon(
                lambda namespace=namespace, may_be=may_be: latest_loads(nodes, namespace, may_be),
                f"latest of {namespace} is the same of {may_be} everywhere, and loads",
                within_s=BOUND_S,
            )
        while len(held) > 8:
            held.pop(next(iter(held)))


def number_of(step: str) -> int:
    return int(step.rpartition("_")[2])


def latest_loads(nodes: Cluster, namespace: str, may_be: dict[str, int]) -> bool:
    """Every node's `latest` names the same of these steps, and all its bytes are right. OSError where it does not load
    (yet): it may be about to walk back."""
    named = {f"{namespace}/{latest(node, namespace)}" for node in nodes}
    if len(named) > 1 or not named <= may_be.keys():
        return False
    (step,) = named
    on_each(nodes.nodes, lambda node: check_step(node.mountpoint / step, may_be[step], SIZES))
    return True


@pytest.mark.timeout(600)
def test_all_nodes_but_one_lost_at_once_leave_steps_that_load_or_fail_and_no_mixture(
    nodes: Cluster, run: str, dice: random.Random
) -> None:
    run_ranks(jobs.save_steps, run, [1, 2], SIZE, table=jobs.seats(nodes.nodes))
    own = dice.choice(nodes.nodes)
    write_shards(own.mountpoint / run / "step_0", 7, SIZES, range(len(SIZES)))
    write_marker(own.mountpoint / run / "step_0", len(SIZES))
    wait_replicated(nodes.nodes, f"{run}/step_0", f"{run}/step_1", f"{run}/step_2")
    for node in nodes.others(own):
        node.kill(wipe=True)
    soon(lambda: nodes.members() == {own.node_id}, "one member is left", within_s=BOUND_S)
    begin = time.monotonic()
    tries = [Job(jobs.try_step, f"{run}/step_{seed}", [seed], SIZE, table=jobs.seats([own])) for seed in (1, 2)]
    for seed, each in enumerate(tries, 1):
        print(f"step_{seed}: {str(each.wait()[0])[:100]}")
    assert time.monotonic() - begin < 3 * BOUND_S
    check_step(own.mountpoint / run / "step_0", 7, SIZES)
    soon(lambda: latest(own, run) == "step_0", "latest names what is whole", within_s=BOUND_S)
    nodes.restore()
    wait_latest(nodes.nodes, "step_0", run, within_s=BOUND_S)
    on_each(nodes.nodes, lambda node: check_step(node.mountpoint / run / "step_0", 7, SIZES))
