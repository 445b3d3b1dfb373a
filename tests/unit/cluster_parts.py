"""Parts, nodes and states for tests of what a node knows of the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

import trio

from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryStore
from tierfs.catalog.records import FileRecord, Holding, NodeRecord, Part, StepState, TreeRecord, to_bytes
from tierfs.cluster.view import View

KEY = ("team/run", "step_5")


def file(version: str, size_bytes: int = 100, opened_at: int = 1) -> FileRecord:
    return FileRecord(size_bytes, 1, 0o644, 0, 0, version, opened_at=opened_at)


def state(counts: Mapping[str, int], generation: int = 1, marker: str = ".metadata") -> StepState:
    return StepState(5, generation, 9.0, "n1", marker, None, dict(counts), sum(counts.values()), 1)


async def put_node(store: MemoryStore, name: str, state: str = "serving", lease: int = 0) -> None:
    await store.put(keys.node_key(name), to_bytes(NodeRecord(name, ("h:1",), f"t-{name}", state=state)), lease=lease)


async def put_directory(store: MemoryStore, path: str) -> int:
    return await store.put(keys.tree_key(path), to_bytes(TreeRecord("dir", "n1")))


async def put_part(
    store: MemoryStore, node: str, files: Mapping[str, FileRecord], *, page: int = 0, added: bool = False
) -> None:
    key = keys.part_key(*KEY, 1, node, page, added=added)
    await store.put(key, to_bytes(Part(node, 1, dict(files))))


async def put_state(store: MemoryStore, record: StepState) -> None:
    await store.put(keys.state_key(*KEY), to_bytes(record))


async def put_holding(
    store: MemoryStore, node: str, parts: tuple[str, ...] = (), versions: tuple[str, ...] = ()
) -> None:
    await store.put(keys.holding_key(*KEY, node), to_bytes(Holding(1, parts, versions)))


@contextlib.asynccontextmanager
async def watching(view: View) -> AsyncIterator[View]:
    async with trio.open_nursery() as nursery:
        await nursery.start(view.run)
        yield view
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 (some conditions are the catalogue's own)
            await trio.sleep(0.02)
