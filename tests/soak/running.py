"""A whole soak: who saves, loads, watches and breaks things side by side, then calm, then a look at all."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soak.faults import FAULTS
from soak.field import Field, field_of, levels
from soak.loading import Reader
from soak.object_faults import OBJECT_FAULTS
from soak.report import Report
from soak.saving import Trainer, trainers
from soak.watching import BucketWatcher, LatestWatcher, wait_durable, watch_levels

#: From one fault's end to the next one's begin, at most.
PAUSE_S, OBJECT_PAUSE_S = 6.0, 15.0
CALM_S = 120.0
ENDS_WITHIN_S = 240.0
TELLS_EVERY_S = 30.0


def soak(*, minutes: float, seed: int, kinds: Sequence[str], out: Path, nodes: int, size: str, pace_s: float) -> Report:
    print(f"soak of {minutes:g} minutes, seed {seed}: again with --seed {seed}", flush=True)
    with field_of(nodes, size, seed, minutes, out) as field:
        savers = trainers(field, pace_s)
        readers = [Reader(field, node, pace_s / 3) for node in field.nodes]
        traffic: list[tuple[str, Callable[[], None]]] = [(saver.name, saver.run) for saver in savers]
        traffic += [(f"reader {reader.node.number}", reader.run) for reader in readers]
        traffic += [(f"latest {node.number}", LatestWatcher(field, node).run) for node in field.nodes]
        traffic += [("levels", lambda: watch_levels(field)), ("bucket", BucketWatcher(field).run)]
        traffic += [("telling", lambda: _tell(field))]
        lanes: list[tuple[str, Callable[[], None]]] = []
        if mine := [kind for kind in kinds if kind in FAULTS]:
            lanes.append(("faults", lambda: _strike(field, mine, savers)))
        if theirs := [kind for kind in kinds if kind in OBJECT_FAULTS]:
            lanes.append(("object faults", lambda: _strike_objects(field, theirs)))
        running = [_start(field, *each) for each in traffic]
        breaking = [_start(field, *each) for each in lanes]
        field.calm.wait(minutes * 60)
        field.calm.set()
        _join(field, breaking)
        field.over.set()
        _join(field, running)
        _look_at_all(field, readers)
        return field.report


def _start(field: Field, name: str, function: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        try:
            function()
        except BaseException as error:
            field.violate("the soak itself works", node=name, evidence=f"{error!r}\n{traceback.format_exc()}")

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _join(field: Field, threads: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            field.violate("nothing hangs", node=thread.name, evidence=f"still runs {ENDS_WITHIN_S:g} s after the end")


def _order(dice: random.Random, kinds: Sequence[str]) -> list[str]:
    """Each as often as the others, in random order."""
    return dice.sample(list(kinds), len(kinds))


def _strike(field: Field, kinds: Sequence[str], savers: Sequence[Trainer]) -> None:
    turn, waiting = 0, list[str]()
    field.calm.wait(10)  # something is saved by then
    while not field.calm.is_set():
        turn += 1
        dice = field.dice("fault", turn)
        waiting = waiting or _order(dice, kinds)
        FAULTS[waiting.pop()](field, dice, savers)
        field.calm.wait(dice.uniform(0, PAUSE_S))


def _strike_objects(field: Field, kinds: Sequence[str]) -> None:
    turn, waiting = 0, list[str]()
    while not field.calm.wait(field.dice("object pause", turn).uniform(2, OBJECT_PAUSE_S)):
        turn += 1
        dice = field.dice("object fault", turn)
        waiting = waiting or _order(dice, kinds)
        OBJECT_FAULTS[waiting.pop()](field, dice)


def _tell(field: Field) -> None:
    while field.pause(TELLS_EVERY_S):
        counts = field.report.counts
        held = sum(entry.must for entry in field.ledger.all())
        used = [node.status()["ram"]["used_bytes"] >> 20 if node.is_started else -1 for node in field.nodes]
        field.report.say(
            f"{counts['steps saved']} saved, {counts['loads checked bit by bit']} loads, {held} steps held, "
            f"{sum(field.report.faults.values())} faults, {len(field.report.violations)} violations; MiB used {used}"
        )
        field.proxy.log.clear()


def _look_at_all(field: Field, readers: Sequence[Reader]) -> None:
    """After the faults: every step that must load does so on every node, `latest` is the newest everywhere, and all of
    them are in the bucket."""
    report, ledger = field.report, field.ledger
    report.say("all faults are over: looking at everything")
    field.nodes.heal()
    field.proxy.clear()
    must = sorted((entry for entry in ledger.all() if entry.must and not entry.changing), key=lambda each: each.path)

    def look(reader: Reader) -> None:
        if reader.hire():
            for entry in must:
                reader.load(entry, is_final=True)
            reader.fire()

    with ThreadPoolExecutor(len(readers)) as pool:
        for done in [pool.submit(look, reader) for reader in readers]:
            try:
                done.result()
            except Exception as error:
                field.violate("the soak itself works", evidence=f"{error!r}\n{traceback.format_exc()}")
    _latest_is_newest(field)
    field.over.clear()
    if left := wait_durable(field, {entry.path for entry in must}, CALM_S):
        field.violate("all is durable at the end", evidence=f"not within {CALM_S:g} s: {left}")
    field.over.set()
    _all_is_in_the_bucket(field)
    report.count("steps held at the end", len(must))


def _latest_is_newest(field: Field) -> None:
    deadline = time.monotonic() + 30
    namespaces = sorted({entry.namespace for entry in field.ledger.all() if entry.must})
    wrong: dict[str, dict[str, str]] = {"?": {}}
    while wrong and time.monotonic() < deadline:
        wrong = {}
        for namespace in namespaces:
            entries = [entry for entry in field.ledger.all(namespace) if not entry.removed]
            newest = max(entry.number for entry in entries if entry.must)
            may_be = {f"step_{entry.number}" for entry in entries if entry.number >= newest}
            named = {}
            for node in field.nodes:
                try:
                    named[node.node_id] = os.readlink(node.mountpoint / namespace / "latest")
                except OSError as error:
                    named[node.node_id] = str(error)
            if len(set(named.values())) > 1 or not set(named.values()) <= may_be:
                wrong[namespace] = {**named, "newest": f"step_{newest}"}
        time.sleep(0.5)
    if wrong:
        field.violate("latest is the newest everywhere at the end", evidence=f"{wrong}")


def _all_is_in_the_bucket(field: Field) -> None:
    deadline = time.monotonic() + CALM_S
    paths = {entry.path for entry in field.ledger.all() if entry.must and not entry.changing}
    left, told = set(paths), dict[str, str]()
    while left and time.monotonic() < deadline:
        for node in field.nodes:
            told = levels(node)
            left -= {path for path, level in told.items() if level == "object"}
        time.sleep(0.5)
    if left:
        field.violate(
            "all is persisted at the end",
            evidence=f"not within {CALM_S:g} s: { {path: told.get(path) for path in left} }",
        )
    watcher = BucketWatcher(field)
    for path in sorted(paths - left):
        watcher.check(path, field.nodes[0])
