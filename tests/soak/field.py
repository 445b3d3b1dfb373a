"""Where a soak takes place: nodes with an etcd, a real S3 server that they reach through a proxy with faults, and what
all parts of the soak share."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig.buckets import Bucket
from rig.cluster import BOUND_S, Cluster, Node, cluster
from rig.fault_proxy import FaultProxy
from rig.instance import CommandFailed
from rig.s3_servers import seaweedfs
from soak.ledger import Ledger
from soak.report import Report
from soak.weather import Weather

BUCKET = "soak"
#: What a rename waits for copies at most, so that a node without room holds up nobody for long.
REPLICA_TIMEOUT_S = 15
OPTIONS = {
    "durability_replica_timeout_s": str(REPLICA_TIMEOUT_S),
    "persist_policy": "all",
    "persist_settle_s": "0.5",
    "s3_read_timeout_s": "3",
    "transfer_index_every_s": "20",
    "steps_sweep_after_s": "1min",
}


@dataclass
class Field:
    """`over` ends all traffic and all faults; `calm` ends the faults alone."""

    nodes: Cluster
    bucket: Bucket
    proxy: FaultProxy
    report: Report
    seed: int
    ledger: Ledger = field(default_factory=Ledger)
    weather: Weather = field(default_factory=Weather)
    over: threading.Event = field(default_factory=threading.Event)
    calm: threading.Event = field(default_factory=threading.Event)
    damaged: set[tuple[int, str]] = field(default_factory=set)
    """(node, step) of copies that a fault damaged and nobody mended yet."""

    def __post_init__(self) -> None:
        self._seeds = 0
        self._lock = threading.Lock()

    def dice(self, *names: object) -> random.Random:
        """Random moments and choices of one part of the soak: those of others don't shift them."""
        return random.Random("-".join(map(str, (self.seed, *names))))

    def next_seed(self) -> int:
        """Of which no other save's bytes are made."""
        with self._lock:
            self._seeds += 1
            return self._seeds

    def violate(self, rule: str, *, node: str = "", path: str = "", evidence: str) -> None:
        self.report.violate(rule, node=node, path=path, evidence=evidence, faults=self.weather.now())

    def pause(self, seconds: float) -> bool:
        """False when the soak is over."""
        return not self.over.wait(seconds)


def steps_of(node: Node) -> list[dict[str, Any]]:
    """What it says of its complete steps now; nothing where it does not answer."""
    with contextlib.suppress(CommandFailed, OSError):
        return [step for step in node.status()["steps"] if step["state"] == "complete"]
    return []


def levels(node: Node) -> dict[str, str]:
    """Level of each step by its path, as `cluster_steps.level` reads it: one without enough copies has none."""
    found = {}
    for step in steps_of(node):
        replica = step.get("replica") or {"copies": 1, "wanted": 2}
        is_short = step["level"] == "replica" and replica["copies"] < replica["wanted"]
        found[f"{step['namespace']}/{step['step']}"] = "" if is_short or step["overwriting"] else step["level"]
    return found


@contextlib.contextmanager
def field_of(count: int, size: str, seed: int, minutes: float, out: Path) -> Iterator[Field]:
    with contextlib.ExitStack() as stack, seaweedfs() as server:
        server.make_bucket(BUCKET)
        stack.enter_context(_environment(server.environment()))
        host, _, port = server.endpoint_url.removeprefix("http://").partition(":")
        with cluster(count, size=size, start=False, **OPTIONS) as nodes:
            s3 = nodes.network.join("s3")
            with FaultProxy((host, int(port)), seed=seed, host=s3.address, make_socket=s3.socket) as proxy:
                bucket = Bucket(server, BUCKET, "checkpoints")
                for node in nodes:
                    node.options |= {"object": bucket.url, "s3.endpoint_url": proxy.url}
                nodes.start()
                nodes.wait_members(within_s=BOUND_S)
                yield Field(nodes, bucket, proxy, Report(seed, minutes, out, nodes.directory / "log"), seed)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For what is started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
