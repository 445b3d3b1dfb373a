"""Faults of the object store, one after the other, beside those of the nodes: each is held for a moment and healed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from rig.fault_proxy import Action, Rule
from soak.field import Field

Fault = Callable[[Field, random.Random], None]


def _rules(field: Field, dice: random.Random, kind: str, rules: Sequence[Rule]) -> None:
    with field.weather.spell(kind):
        field.report.fault(kind, f"{kind} {rules[0].action} {rules[0].status if rules[0].action == 'answer' else ''}")
        field.proxy.add(*rules)
        time.sleep(dice.uniform(2, 12))
        field.proxy.clear()
    for rule in rules:
        field.report.count(f"requests to S3 met by {kind}", rule.hits)


def s3_down(field: Field, dice: random.Random) -> None:
    with field.weather.spell("s3-down"):
        field.report.fault("s3-down", "s3-down")
        field.proxy.pause()
        time.sleep(dice.uniform(1, 12))
        field.proxy.resume()


def s3_kill(field: Field, dice: random.Random) -> None:
    """The server itself is killed, and comes back with what it answered for."""
    with field.weather.spell("s3-kill"):
        field.report.fault("s3-kill", "s3-kill")
        field.bucket.server.restart()


def s3_slow(field: Field, dice: random.Random) -> None:
    rate = dice.randrange(100_000, 2_000_000)
    _rules(
        field, dice, "s3-slow",
        [Rule("slow_request", "PUT", times=None, bytes_s=rate), Rule("slow_answer", "GET", times=None, bytes_s=rate)],
    )  # fmt: skip


def s3_errors(field: Field, dice: random.Random) -> None:
    status, code = dice.choice([(500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable")])
    action: Action = dice.choice(["answer", "refuse"])
    share = dice.uniform(0.1, 0.8)
    _rules(field, dice, "s3-errors", [Rule(action, times=None, probability=share, status=status, code=code)])


def s3_cut(field: Field, dice: random.Random) -> None:
    """Bodies that end early, both ways, and answers that never come back."""
    where, share = dice.randrange(0, 300_000), dice.uniform(0.1, 0.6)
    actions: list[tuple[Action, str]] = [
        ("cut_request", "PUT"), ("cut_answer", "GET"), ("truncate_answer", "GET"), ("lose_answer", "PUT|POST|DELETE"),
    ]  # fmt: skip
    dice.shuffle(actions)
    rules = [Rule(action, method, times=None, probability=share, after_bytes=where) for action, method in actions]
    _rules(field, dice, "s3-cut", rules)


def s3_flip(field: Field, dice: random.Random) -> None:
    """One bit is another on the way, both ways."""
    where, share = dice.randrange(0, 60_000), dice.uniform(0.1, 0.6)
    rules = [
        Rule("flip_answer", "GET", r"distcp|safetensors", times=None, probability=share, after_bytes=where),
        Rule("flip_request", "PUT", r"distcp|safetensors", times=None, probability=share, after_bytes=where),
    ]
    _rules(field, dice, "s3-flip", rules)


def s3_stall(field: Field, dice: random.Random) -> None:
    share = dice.uniform(0.1, 0.5)
    rules = [
        Rule("stall_answer", "GET", times=None, probability=share, seconds=20),
        Rule("stall_request", "PUT", times=None, probability=share, seconds=20),
    ]
    _rules(field, dice, "s3-stall", rules)


OBJECT_FAULTS: dict[str, Fault] = {
    function.__name__.replace("_", "-"): function
    for function in (s3_down, s3_kill, s3_slow, s3_errors, s3_cut, s3_flip, s3_stall)
}
