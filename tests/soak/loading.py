"""Those who load: a process on each node that reads any step of any node, `latest` above all, and compares each bit.

What it may find is in the ledger. A load that fails is tried again for `LOADS_WITHIN_S`: what must load does by then,
unless a fault keeps its bytes away.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from rig.cluster import Node
from rig.cluster_jobs import seats
from soak import work
from soak.crews import Crew, CrewDied, CrewHangs
from soak.field import Field
from soak.ledger import Entry
from soak.report import Stall
from soak.saving import DCP_BYTES, ENDS, HANGS_S, JOB_BYTES

LOADS_WITHIN_S = 45.0
GIVEN_UP_AFTER_S = 180.0
#: While one of these is there a step that is not on this very node may be out of reach.
KEEPS_AWAY = (*ENDS, "cut-node", "cut-pair", "cut-node-etcd", "stall-node", "slow-node", "fill-tier")
OF_ETCD = ("cut-etcd", "kill-etcd", "freeze-etcd")
OF_OBJECTS = ("s3-down", "s3-kill", "s3-slow", "s3-errors", "s3-cut", "s3-flip", "s3-stall")


def size_of(entry: Entry) -> int:
    return JOB_BYTES if entry.namespace == "train" else DCP_BYTES


@dataclass
class Reader:
    """One thread on one node: `run` until the soak is over."""

    field: Field
    node: Node
    pace_s: float
    crew: Crew | None = None

    def run(self) -> None:
        dice = self.field.dice("reader", self.node.number)
        while self.field.pause(self.pace_s * dice.uniform(0.5, 1.5)):
            if not self.node.is_started or (self.crew is None and not self.hire()):
                continue
            entry, is_latest = self._choose(dice)
            if entry is not None:
                self.load(entry, is_latest=is_latest)
        self.fire()

    def hire(self) -> bool:
        begin = time.monotonic()
        try:
            self.crew = Crew(seats([self.node]).seats)
        except (CrewDied, CrewHangs) as error:
            if not self._is_excused(begin, ENDS):
                self.field.violate("a reader starts", node=self.node.node_id, evidence=str(error))
            return False
        return True

    def fire(self) -> None:
        crew, self.crew = self.crew, None
        if crew is not None:
            crew.kill()

    def _choose(self, dice: random.Random) -> tuple[Entry | None, bool]:
        entries = [each for each in self.field.ledger.all() if not each.removed]
        if not entries:
            return None, False
        if dice.random() < 0.4:
            namespace = dice.choice(sorted({each.namespace for each in entries}))
            named = self._latest(namespace)
            return (self.field.ledger.get(f"{namespace}/{named}") if named else None), True
        return dice.choice(entries), False

    def _latest(self, namespace: str) -> str:
        try:
            return os.readlink(self.node.mountpoint / namespace / "latest")
        except OSError:
            return ""

    def load(self, entry: Entry, *, is_latest: bool = False, is_final: bool = False) -> bool:
        """Until it loads, or need not; False where it had to and did not."""
        first, calm_since, path = time.monotonic(), time.monotonic(), entry.path
        last: dict[str, Any] = {}
        while not self.field.over.is_set() or is_final:
            now = self.field.ledger.get(path)
            if now is None or now.removed or (self.node.number, path) in self.field.damaged:
                return True
            begin = time.monotonic()
            answer = self._try(now)
            if answer is None:
                if is_final and self.crew is None and not self.hire():
                    return False
                if not is_final:
                    return True
                continue
            after = self.field.ledger.get(path)
            if after is None or after.version != now.version:
                self.field.report.count("loads that met a change, not judged")
                return True
            if (self.node.number, path) in self.field.damaged:
                return True
            if "failure" not in answer:
                if answer["seed"] is not None:
                    return self._held(now, answer)
                if work.same(answer["before"], answer["after"]):
                    evidence = f"must be whole of one of {sorted(now.may_hold(begin))}: {answer}"
                    self.field.violate("a load is one generation", node=self.node.node_id, path=path, evidence=evidence)
                    return False
                continue
            last = answer
            if not (now.must or (is_latest and self._latest(now.namespace) == path.rpartition("/")[2])) or now.changing:
                self.field.report.count("loads that failed, of steps that need not load")
                return True
            moment = time.monotonic()
            if self._is_excused(begin, KEEPS_AWAY) or self.field.weather.felt(*OF_ETCD, *OF_OBJECTS, since=begin):
                calm_since = moment
                self.field.report.allow(f"load, tried again: {answer['name'] or answer['failure'][:60]}")
            if moment - calm_since > LOADS_WITHIN_S:
                evidence = f"not within {LOADS_WITHIN_S:g} s ({'latest' if is_latest else now.must}): {last}"
                self.field.violate("what was saved loads", node=self.node.node_id, path=path, evidence=evidence)
                return False
            if moment - first > GIVEN_UP_AFTER_S and not is_final:
                self.field.report.count("loads given up under faults")
                return True
            if not is_final and not self.field.pause(1):
                return True
            if is_final:
                time.sleep(1)
        return True

    def _held(self, entry: Entry, answer: dict[str, Any]) -> bool:
        self.field.report.count("loads checked bit by bit")
        self.field.report.count("bytes compared", answer["bytes"])
        stall = Stall(answer["took_s"], "load", self.node.node_id, entry.path, self.field.weather.now())
        self.field.report.stalled("load", stall)
        is_old = answer["seed"] not in entry.may_hold(time.monotonic() - answer["took_s"])
        cut_off = self._is_excused(entry.at, KEEPS_AWAY) or self.field.weather.felt(*OF_ETCD, since=entry.at)
        if is_old and not cut_off:
            self.field.violate(
                "a load gives the newest", node=self.node.node_id, path=entry.path, evidence=f"{entry}: {answer}"
            )
        return True

    def _try(self, entry: Entry) -> dict[str, Any] | None:
        """None where there is nobody to do it any more."""
        if self.crew is None:
            return None
        begin = time.monotonic()
        seeds = sorted({*entry.seeds, *entry.former})
        try:
            (answer,) = self.crew.order("load", entry.path, entry.kind, seeds, size_of(entry), timeout_s=HANGS_S)
        except CrewDied as died:
            self.fire()
            if not self._is_excused(begin, ENDS):
                self.field.violate("a reader lives", node=self.node.node_id, path=entry.path, evidence=str(died))
            return None
        except CrewHangs as hangs:
            self.field.violate("nothing hangs", node=self.node.node_id, path=entry.path, evidence=f"load: {hangs}")
            self.fire()
            return None
        return answer

    def _is_excused(self, since: float, kinds: tuple[str, ...]) -> bool:
        return bool(self.field.weather.felt(*kinds, node=self.node.number, since=since))
