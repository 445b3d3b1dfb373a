"""Those who save: a trainer on each node, by plain system calls and by stock DCP in turns, and a gloo job of all nodes.

Each saves new steps, writes older ones again, and removes; what it was answered goes into the ledger, and no call may
fail but for what the documents say.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rig.cluster import Node
from rig.cluster_jobs import seats
from soak.crews import Crew, CrewDied, CrewHangs
from soak.field import Field
from soak.ledger import Entry
from soak.report import Stall

DCP_BYTES, JOB_BYTES = 2 << 20, 8 << 20
KEPT = 5
HANGS_S = 150.0
#: A save that takes longer than what its rename waits for, and what a takeover, a lease and an etcd may add to it.
LONGEST_SAVE_S = 75.0
#: What takes processes of a node away, or its mount.
ENDS = ("lose-node", "crash-node")
#: What a gloo job can't do without: its ranks, and the network between them.
BREAKS_JOBS = (*ENDS, "kill-trainer", "cut-node", "cut-pair", "slow-node")


@dataclass
class Trainer:
    """One thread: `run` until the soak is over. `nodes` are those of its seats."""

    field: Field
    name: str
    nodes: list[Node]
    namespaces: dict[str, str]
    """Kind of the steps in each: plain, or dcp."""
    pace_s: float
    size_bytes: int
    crew: Crew | None = None
    number: int = 0
    is_saving: threading.Event = field(default_factory=threading.Event)

    @property
    def is_job(self) -> bool:
        return len(self.nodes) > 1

    def run(self) -> None:
        dice = self.field.dice(self.name)
        while self.field.pause(self.pace_s * dice.uniform(0.5, 1.5)):
            if self.crew is None and not self._hire():
                continue
            self._act(dice)
        if self.crew is not None:
            self.crew.kill()
            self.crew = None

    def strike(self, rank: int) -> bool:
        """SIGKILLs one of its processes; False where there are none now."""
        crew = self.crew
        if crew is not None:
            crew.strike(rank % len(self.nodes))
        return crew is not None

    def _hire(self) -> bool:
        if not all(node.is_started for node in self.nodes):
            return False
        begin = time.monotonic()
        try:
            self.crew = Crew(seats(self.nodes).seats, is_job=self.is_job)
        except (CrewDied, CrewHangs) as error:
            if not self.field.weather.felt(*BREAKS_JOBS, since=begin):
                self.field.violate("a trainer starts", node=self.name, evidence=str(error))
            return False
        return True

    def _act(self, dice: random.Random) -> None:
        namespace = dice.choice(list(self.namespaces))
        entries = sorted(self.field.ledger.all(namespace), key=lambda each: each.number)
        mine = [each for each in entries if not each.removed and not each.held]
        chance = dice.random()
        if len(mine) > KEPT:
            self._remove(mine[0])
        elif len(mine) > 2 and chance < 0.15:
            self._save(dice.choice(mine[:-1]).path, namespace)
        elif len(mine) > 2 and chance < 0.25:
            self._remove(dice.choice(mine[:-1]))
        elif chance < 0.32:
            # just written: its copies are under way
            path = self._save_next(namespace)
            entry = self.field.ledger.get(path)
            if entry is not None and not entry.changing and self.crew is not None:
                self._remove(entry)
        else:
            self._save_next(namespace)

    def _save_next(self, namespace: str) -> str:
        self.number += 1
        path = f"{namespace}/step_{self.number}"
        self._save(path, namespace)
        return path

    def _save(self, path: str, namespace: str) -> None:
        ledger, kind, seed = self.field.ledger, self.namespaces[namespace], self.field.next_seed()
        is_again = ledger.get(path) is not None
        ledger.begin(path, kind, seed)
        words: tuple[Any, ...] = ("save_plain", path, seed)
        if kind == "dcp":
            words = ("save_dcp", path, seed, self.size_bytes)
        self.is_saving.set()
        answers = self._order(*words, path=path)
        self.is_saving.clear()
        if answers is None:
            ledger.failed(path)
            return
        ledger.saved(path, seed)
        self.field.report.count("steps saved")
        self.field.report.count(f"steps saved by {'4 ranks of stock DCP' if self.is_job else kind}")
        if is_again:
            self.field.report.count("steps saved over an older generation")

    def _remove(self, entry: Entry) -> None:
        if self.field.ledger.get(entry.path) != entry:
            return  # a fault holds it since
        self.field.ledger.remove(entry.path)
        if self._order("remove", entry.path, path=entry.path) is not None:
            self.field.report.count("steps removed")
        self.field.ledger.was_removed(entry.path)

    def _order(self, *words: Any, path: str) -> list[dict[str, Any]] | None:
        """None where it failed; whether it may is judged here."""
        assert self.crew is not None
        begin = time.monotonic()
        try:
            answers = self.crew.order(*words, timeout_s=HANGS_S)
        except CrewDied as died:
            self._fire()
            node = self.nodes[died.rank]
            ended = self.field.weather.felt(*ENDS, node=node.number, since=begin)
            if not ended and not self.field.weather.felt("kill-trainer", since=begin):
                self.field.violate("a trainer lives", node=node.node_id, path=path, evidence=str(died))
            return None
        except CrewHangs as hangs:
            self.field.violate("nothing hangs", node=self.name, path=path, evidence=f"{words[0]}: {hangs}")
            self._fire()
            return None
        if failures := [(rank, each) for rank, each in enumerate(answers) if "failure" in each]:
            self._judge(failures, begin, words[0], path)
            return None
        self._time(answers, words[0], path)
        return answers

    def _fire(self) -> None:
        crew, self.crew = self.crew, None
        if crew is not None:
            crew.kill()

    def _judge(self, failures: list[tuple[int, dict[str, Any]]], begin: float, work: str, path: str) -> None:
        weather = self.field.weather
        if self.is_job:
            self._fire()  # the ranks no longer agree on what comes next
        for rank, failed in failures:
            node = self.nodes[rank]
            allowed = bool(weather.felt(*ENDS, node=node.number, since=begin))
            allowed |= failed["name"] == "ENOSPC" and bool(weather.felt("fill-tier", node=node.number, since=begin))
            if self.is_job:
                allowed |= bool(weather.felt(*BREAKS_JOBS, "fill-tier", since=begin))
            if allowed:
                self.field.report.allow(f"{work}: {failed['name'] or failed['failure'][:60]}")
            else:
                evidence = f"{work}: {failed['failure']}\n{failed['traceback']}"
                self.field.violate("no call fails", node=node.node_id, path=path, evidence=evidence)

    def _time(self, answers: list[dict[str, Any]], work: str, path: str) -> None:
        rank, slowest = max(enumerate(answers), key=lambda each: each[1]["longest_s"])
        faults = self.field.weather.now()
        node = self.nodes[rank].node_id
        kind = "of a job" if self.is_job and work != "remove" else work
        self.field.report.stalled(kind, Stall(slowest["longest_s"], slowest["what"], node, path, faults))
        if slowest["longest_s"] > LONGEST_SAVE_S:
            self.field.violate("no call stalls", node=node, path=path, evidence=f"{slowest}")


def trainers(field: Field, pace_s: float) -> list[Trainer]:
    """One on each node, and a job of all."""
    own = [
        Trainer(
            field, f"trainer {node.number}", [node],
            {f"plain-{node.number}": "plain", f"dcp-{node.number}": "dcp"}, pace_s, DCP_BYTES,
        )
        for node in field.nodes
    ]  # fmt: skip
    return [*own, Trainer(field, "job", list(field.nodes), {"train": "dcp"}, pace_s, JOB_BYTES)]
