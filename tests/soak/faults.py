"""Faults of nodes, of their network, of etcd and of the trainers: each is begun, held for a moment and healed again.

`FAULTS` has them by name. Each gets the field, its dice and the trainers, tells the weather what it does for as long as
it does it, and leaves everything whole.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence

from rig.cluster import BOUND_S, Node
from rig.instance import MOUNT_S, TIERFS, CommandFailed
from rig.network import run
from soak.field import Field, levels
from soak.saving import Trainer
from soak.tending import TENDING
from soak.watching import wait_durable

DURABLE_WITHIN_S = 120.0
Fault = Callable[[Field, random.Random, Sequence[Trainer]], None]


def kill_daemon(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    node = dice.choice(field.nodes.nodes)
    with _fault(field, "kill-daemon", node):
        _mid_save(dice, trainers, node)
        node.kill_daemon()


def lose_node(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """With all that was in its RAM. Another one, or the same with an empty RAM, comes in its place."""
    node = dice.choice(field.nodes.nodes)
    with _fault(field, "lose-node", node):
        _mid_save(dice, trainers, node)
        _lose(field, node, wipe=True)
        time.sleep(dice.uniform(0, 8))
        new = f"{node.node_id.partition('-')[0]}-{int(time.monotonic())}" if dice.random() < 0.5 else None
        _start(field, node, new)
    _all_is_durable_again(field, node)


def crash_node(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """All its processes die; its RAM is found again."""
    node = dice.choice(field.nodes.nodes)
    with _fault(field, "crash-node", node):
        _mid_save(dice, trainers, node)
        node.kill(wipe=False)
        time.sleep(dice.uniform(0, 5))
        _start(field, node, None)


def kill_trainer(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    trainer = dice.choice(list(trainers))
    with _fault(field, "kill-trainer", *trainer.nodes, what=f"kill-trainer {trainer.name}"):
        trainer.is_saving.wait(10)
        time.sleep(dice.uniform(0, 0.3))
        trainer.strike(dice.randrange(4))


def cut_node(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    node = dice.choice(field.nodes.nodes)
    _held(field, dice, "cut-node", node.partition, node)


def cut_pair(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    one, other = dice.sample(field.nodes.nodes, 2)
    _held(field, dice, "cut-pair", lambda: one.drop_from(other), one, other)


def cut_node_etcd(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    node = dice.choice(field.nodes.nodes)
    _held(field, dice, "cut-node-etcd", node.lose_etcd, node)


def stall_node(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    node = dice.choice(field.nodes.nodes)
    _held(field, dice, "stall-node", node.stall, node)


def slow_node(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    node = dice.choice(field.nodes.nodes)
    _held(field, dice, "slow-node", lambda: node.host.slow(dice.randrange(300_000, 3_000_000)), node)


def cut_etcd(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    _held(field, dice, "cut-etcd", field.nodes.etcd.host.unplug)


def freeze_etcd(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    _held(field, dice, "freeze-etcd", field.nodes.etcd.freeze)


def kill_etcd(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    with _fault(field, "kill-etcd"):
        field.nodes.etcd.kill()
        time.sleep(dice.uniform(0, 8))
        field.nodes.etcd.start()
    _settle(field)


def replace(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """New processes for a mount in use, as an update makes them."""
    node = dice.choice(field.nodes.nodes)
    with _fault(field, "replace", node):
        _mid_save(dice, trainers, node)
        old = node.daemon_pid()
        options = ",".join(f"{key}={value}" for key, value in node.options.items())
        arguments = ("mount", "--replace", node.mountpoint, "-o", options, "--timeout", str(MOUNT_S))
        command = node.host.command(TIERFS, *arguments)
        run(*command, timeout_s=MOUNT_S + 30)
        node.wait_for_new_daemon(old)


FAULTS: dict[str, Fault] = {
    function.__name__.replace("_", "-"): function
    for function in (
        kill_daemon, lose_node, crash_node, kill_trainer, cut_node, cut_pair, cut_node_etcd, stall_node, slow_node,
        cut_etcd, freeze_etcd, kill_etcd, replace,
    )
} | TENDING  # fmt: skip


@contextlib.contextmanager
def _fault(field: Field, kind: str, *nodes: Node, what: str = "") -> Iterator[None]:
    what = what or " ".join((kind, *(node.node_id for node in nodes)))
    with field.weather.spell(kind, *(node.number for node in nodes), what=what):
        field.report.fault(kind, what)
        yield


def _held(field: Field, dice: random.Random, kind: str, begin: Callable[[], None], *nodes: Node) -> None:
    with _fault(field, kind, *nodes):
        begin()
        time.sleep(dice.uniform(0.5, 9))
        field.nodes.heal()
    _settle(field)


def _settle(field: Field) -> None:
    """Who was taken for lost is a member again."""
    try:
        field.nodes.wait_members(within_s=2 * BOUND_S)
    except AssertionError as error:
        field.violate("nodes come back", evidence=str(error))


def _mid_save(dice: random.Random, trainers: Sequence[Trainer], node: Node) -> None:
    """Waits for a save on that node to be under way, mostly."""
    mine = [trainer for trainer in trainers if node in trainer.nodes]
    if dice.random() < 0.7:
        dice.choice(mine).is_saving.wait(5)
        time.sleep(dice.uniform(0, 0.4))


def _lose(field: Field, node: Node, *, wipe: bool) -> None:
    """What was told to be durable just before must survive; of the rest nobody knows."""
    witness = next(other for other in field.nodes if other is not node)
    versions = field.ledger.versions()
    field.ledger.told(levels(witness), versions)
    node.kill(wipe=wipe)
    durable = {path for path in versions if field.ledger.is_durable(path)}
    # what is being written again now: the old generation was durable, and lies on other nodes
    lost = field.ledger.lose_what_is_not_durable(durable)
    field.report.count("steps not durable when a node was lost", len(lost))


def _start(field: Field, node: Node, node_id: str | None) -> None:
    try:
        node.start(node_id=node_id)
    except CommandFailed as error:
        field.violate("a node comes back", node=node.node_id, evidence=str(error)[-3000:])
        node.kill(wipe=True)
        node.start()
    _settle(field)


def _all_is_durable_again(field: Field, node: Node) -> None:
    """Before another node may be lost: one may, not two at once."""
    must = {entry.path for entry in field.ledger.all() if entry.must}
    if left := wait_durable(field, must, DURABLE_WITHIN_S):
        is_slow = field.weather.felt("s3-down", "s3-kill", since=time.monotonic() - DURABLE_WITHIN_S)
        evidence = f"not within {DURABLE_WITHIN_S:g} s of the loss of {node.node_id}: {left} ({is_slow})"
        field.violate("copies are made again", evidence=evidence)
