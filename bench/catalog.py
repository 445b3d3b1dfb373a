"""What a step costs a real etcd, for 50 to 2,000 nodes: seconds from the last part to the commit seen by all, requests,
bytes, etcd's own CPU time, and how they grow.

All nodes are simulated in this program, and etcd runs beside it: their CPUs are shared, and so many clients in one
process are slower than on machines of their own. The time of the parts says more about that than about etcd, so what
counts begins when the last part was answered. Each node has a watch of its own at etcd, many on one connection. etcd's
data lies in memory: on a disk each change waits for an fsync, which etcd shares among changes that come together.

Run by run.py, or alone: `PYTHONPATH=tests python bench/catalog.py [--json] [--nodes 50 --nodes 200]`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import grpc
import trio

from measure import Row, as_json, single, table
from process_trees import cpu_s
from rig.etcd_server import Etcd, running_etcd
from tierfs.catalog import etcd_messages as messages
from tierfs.catalog import keys
from tierfs.catalog.etcd import EtcdStore
from tierfs.catalog.records import FileRecord, Holding, Part, StepState, TreeRecord, from_bytes, to_bytes
from tierfs.catalog.store import Compare, Put

NODES = (50, 200, 1000, 2000)
STEPS = 3
#: One shard a rank, 8 ranks a node.
FILES_A_NODE = 8
#: Nodes that share a connection here.
NODES_A_CHANNEL = 100
NAMESPACE = "run-1"
PATIENCE_S = 120.0
GOAL = "<= 2"


@dataclass
class Figures:
    """One step. Seconds, but for the names that say otherwise; bytes are of messages, without gRPC's own."""

    parts_s: float
    read_s: float
    decided_s: float
    committed_s: float
    seen_s: float
    replicated_s: float
    requests: float
    sent_bytes: float
    received_bytes: float
    watched_bytes: float
    etcd_cpu_s: float

    @property
    def to_all_s(self) -> float:
        """From the last part's answer to the commit seen by all."""
        return self.read_s + self.decided_s + self.committed_s + self.seen_s

    @property
    def mib(self) -> float:
        return (self.sent_bytes + self.received_bytes + self.watched_bytes) / (1 << 20)


class Watches:
    """Many nodes' watches on one connection, each as a node has it."""

    def __init__(self, etcd: Etcd, base: bytes, count: int, from_revision: int) -> None:
        self.received_bytes = 0
        self._revisions = [0] * count
        self._created = 0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(etcd.members[0].endpoint, options=options)
        start = self._channel.stream_stream(
            messages.WATCH.path, lambda request: request.SerializeToString(), self._parse
        )
        create = messages.WatchCreateRequest(
            key=base + keys.STATES.encode(), range_end=base + b"t0", start_revision=from_revision, fragment=True
        )
        self._call = start(self._requests(create, count))
        threading.Thread(target=self._read, daemon=True).start()

    def wait_created(self) -> None:
        self._wait(lambda: self._created == len(self._revisions))

    def wait_seen(self, revision: int) -> None:
        self._wait(lambda: min(self._revisions) >= revision)

    def close(self) -> None:
        self._ended.set()
        self._channel.close()

    def _requests(self, create: Any, count: int) -> Iterator[Any]:
        for _ in range(count):
            yield messages.WatchRequest(create_request=create)
        self._ended.wait()

    def _parse(self, data: bytes) -> Any:
        self.received_bytes += len(data)
        return messages.WatchResponse.FromString(data)

    def _read(self) -> None:
        try:
            for response in self._call:
                with self._changed:
                    if response.created:
                        self._created += 1
                    elif response.events and not response.fragment:
                        self._revisions[response.watch_id] = response.events[-1].kv.mod_revision
                    self._changed.notify_all()
        except grpc.RpcError:
            if not self._ended.is_set():
                raise

    def _wait(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), "the watches were not told in time"


class Cluster:
    def __init__(self, etcd: Etcd, count: int) -> None:
        self.etcd = etcd
        self.names = [f"node-{number:04d}.example.net" for number in range(count)]
        channels = -(-count // NODES_A_CHANNEL)
        settings = etcd.settings(f"bench{count}", timeout_s=PATIENCE_S)
        self.stores = [EtcdStore(settings) for _ in range(channels)]
        self.watches: list[Watches] = []

    def store(self, number: int) -> EtcdStore:
        return self.stores[number // NODES_A_CHANNEL]

    async def watch(self) -> None:
        revision = await self.stores[0].put(keys.CLUSTER, b"bench")
        base = f"tierfs/bench{len(self.names)}/".encode()
        for first in range(0, len(self.names), NODES_A_CHANNEL):
            count = min(NODES_A_CHANNEL, len(self.names) - first)
            self.watches.append(Watches(self.etcd, base, count, revision + 1))
        for watches in self.watches:
            await trio.to_thread.run_sync(watches.wait_created)

    async def seen_by_all(self, revision: int) -> None:
        for watches in self.watches:
            await trio.to_thread.run_sync(watches.wait_seen, revision)

    def counted(self) -> tuple[float, float, float, float, float]:
        traffic = [store.traffic for store in self.stores]
        return (
            sum(each.requests for each in traffic),
            sum(each.sent_bytes for each in traffic),
            sum(each.received_bytes for each in traffic),
            sum(each.received_bytes for each in self.watches),
            sum(cpu_s(member.pid) for member in self.etcd.members),
        )

    async def close(self) -> None:
        for watches in self.watches:
            watches.close()
        for store in self.stores:
            await store.aclose()


async def one_step(cluster: Cluster, number: int) -> Figures:
    step, before = f"step-{number}", cluster.counted()
    first = cluster.stores[0]
    state, tree = keys.state_key(NAMESPACE, step), keys.tree_key(f"{NAMESPACE}/{step}")
    directory = to_bytes(TreeRecord(kind="dir", node=cluster.names[0]))
    joined = (await first.txn((Compare(tree, "create", "equal", 0),), (Put(tree, directory),))).revision
    is_ours = (Compare(state, "mod", "equal", 0), Compare(tree, "create", "equal", joined))
    parts = [to_bytes(Part(name, 1, files_of(name, at))) for at, name in enumerate(cluster.names)]

    async def put_part(at: int) -> None:
        key = keys.part_key(NAMESPACE, step, 1, cluster.names[at], 0)
        assert (await cluster.store(at).txn(is_ours, (Put(key, parts[at]),))).succeeded

    times = [time.monotonic()]
    await for_each(cluster, put_part)
    times.append(time.monotonic())
    prefix = keys.parts_prefix(NAMESPACE, step, 1)
    found, revision = await first.range(prefix)
    times.append(time.monotonic())
    read = [from_bytes(Part, value.value) for value in found]
    complete = state_of(number, read)
    times.append(time.monotonic())
    unchanged = Compare(prefix, "mod", "less", revision + 1, is_prefix=True)
    marker = Put(keys.part_key(NAMESPACE, step, 1, cluster.names[0], 0), parts[0])
    committed = await first.txn((*is_ours, unchanged), (marker, Put(state, to_bytes(complete))))
    assert committed.succeeded
    times.append(time.monotonic())
    await cluster.seen_by_all(committed.revision)
    times.append(time.monotonic())

    async def put_holding(at: int) -> None:
        neighbour = cluster.names[at ^ 1 if (at ^ 1) < len(cluster.names) else 0]
        key = keys.holding_key(NAMESPACE, step, cluster.names[at])
        await cluster.store(at).put(key, to_bytes(Holding(1, (neighbour,))))

    await for_each(cluster, put_holding)
    await first.range(keys.holdings_prefix(NAMESPACE, step))
    known = Compare(state, "mod", "equal", committed.revision)
    replicated = await first.txn((known,), (Put(state, to_bytes(complete)),))
    await cluster.seen_by_all(replicated.revision)
    times.append(time.monotonic())
    spent = [after - each for after, each in zip(cluster.counted(), before, strict=True)]
    return Figures(*(after - each for each, after in itertools.pairwise(times)), *spent)


async def for_each(cluster: Cluster, act: Any) -> None:
    async with trio.open_nursery() as nursery:
        for at in range(len(cluster.names)):
            nursery.start_soon(act, at)


def files_of(name: str, at: int) -> dict[str, FileRecord]:
    return {
        f"__{at * FILES_A_NODE + rank}_0.distcp": FileRecord(
            8 << 30, time.time_ns(), 0o644, 0, 0, f"{name}/{at:08x}{rank:024x}", opened_at=7
        )
        for rank in range(FILES_A_NODE)
    }


def state_of(number: int, parts: list[Part]) -> StepState:
    files = [file for part in parts for file in part.files.values()]
    return StepState(
        number=number,
        generation=1,
        completed_at=time.time(),
        node=parts[0].node,
        marker=".metadata",
        marker_file=files[0],
        parts={part.node: len(part.files) for part in parts},
        files=len(files),
        bytes=sum(file.size_bytes for file in files),
    )


async def measure(etcd: Etcd, count: int) -> Figures:
    """Medians of STEPS steps, after one that is not counted."""
    cluster = Cluster(etcd, count)
    try:
        await cluster.watch()
        steps = [await one_step(cluster, number) for number in range(STEPS + 1)][1:]
    finally:
        await cluster.close()
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: statistics.median(getattr(step, name) for step in steps) for name in names})


def rows_of(count: int, figures: Figures, least: Figures, least_count: int) -> list[Row]:
    rows = [single(f"{count} nodes: last part to commit seen by all", "s", [figures.to_all_s], GOAL)]
    for what, unit, value, base in (
        ("requests a step", "", figures.requests, least.requests),
        ("to and from etcd a step", "MiB", figures.mib, least.mib),
        ("etcd's CPU a step", "s", figures.etcd_cpu_s, least.etcd_cpu_s),
    ):
        ratio = value / base if base else None
        rows.append(Row(f"{count} nodes: {what}", unit, value, f"{least_count} nodes", base, ratio))
    return rows


def print_parts(all_figures: dict[int, Figures]) -> None:
    """How each step's time and bytes were spent."""
    columns = [field.name for field in fields(Figures)]
    print("| nodes | to all s | " + " | ".join(columns) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for count, figures in all_figures.items():
        shown = [figures.to_all_s, *(getattr(figures, name) for name in columns)]
        print(
            f"| {count} | " + " | ".join(f"{value:.3f}" if value < 100 else f"{value:,.0f}" for value in shown) + " |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the tables")
    parser.add_argument("--nodes", type=int, action="append", help="only so many (may be repeated)")
    arguments = parser.parse_args()
    counts = arguments.nodes or NODES
    all_figures: dict[int, Figures] = {}
    with ExitStack() as stack:
        for count in counts:
            # A fresh one each time: what the one before left must not weigh on this one.
            etcd = stack.enter_context(running_etcd())
            all_figures[count] = trio.run(measure, etcd, count)
            etcd.kill()
    least = all_figures[counts[0]]
    rows = [row for count, each in all_figures.items() for row in rows_of(count, each, least, counts[0])]
    if arguments.json:
        print(json.dumps(as_json(rows)))
    else:
        print_parts(all_figures)
        print(table(as_json(rows)))
    return 0 if all(row.is_met is not False for row in rows) else 3


if __name__ == "__main__":
    raise SystemExit(main())
