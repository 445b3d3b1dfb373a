"""Two members and their views on a real catalogue that is restarted and compacted under them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import trio

from catalog.targets import MemoryTarget, Target
from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, NodeRecord, Part, TreeRecord, to_bytes
from tierfs.catalog.store import KeyStore
from tierfs.cluster.membership import Membership
from tierfs.cluster.view import Change, View

KEY = ("run", "step_1")


@dataclass
class Node:
    store: KeyStore
    view: View
    membership: Membership
    told: list[Change]


@contextlib.asynccontextmanager
async def member(target: Target, name: str) -> AsyncIterator[Node]:
    store = target.open()
    view = View(store)
    record = NodeRecord(name, ("h:1",), f"tier of {name}")
    node = Node(store, view, Membership(store, view, lambda: record, lease_s=3.0), [])
    view.listen(node.told.append)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(view.run)
            await nursery.start(node.membership.run)
            yield node
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 (two views)
            await trio.sleep(0.01)


async def done(target: Target, work: Callable[[], None]) -> None:
    """A real one takes its time, in which leases want to be renewed."""
    if isinstance(target, MemoryTarget):
        work()
    else:
        await trio.to_thread.run_sync(work)


async def test_members_see_the_same_after_a_restart_and_a_compaction_of_the_catalogue(target: Target) -> None:
    async with member(target, "n1") as one, member(target, "n2") as two:
        await until(lambda: set(one.view.nodes) == set(two.view.nodes) == {"n1", "n2"})
        assert one.view.cluster_id == two.view.cluster_id != ""
        for at in range(20):
            path = f"d{at}"
            await one.store.put(keys.tree_key(path), to_bytes(TreeRecord("dir", "n1")))
            assert await two.view.caught_up([keys.tree_key(path)]) and path in two.view.tree
        files = {"a": FileRecord(1, 1, 0o644, 0, 0, "n1/aa")}
        await one.store.put(keys.part_key(*KEY, 1, "n1", 0), to_bytes(Part("n1", 1, files)))
        assert (await two.view.files(KEY, 1)).files == files

        two.told.clear()
        await done(target, target.restart)
        await until(lambda: any(change.kind == "reset" for change in two.told) and two.view.connected)
        await until(lambda: one.view.connected and one.membership.member)
        await one.store.delete(keys.tree_key("d0"))
        await one.store.put(keys.tree_key("e"), to_bytes(TreeRecord("dir", "n1")))
        await done(target, target.compact)
        await until(lambda: "e" in two.view.tree and "d0" not in two.view.tree)
        await until(lambda: set(one.view.nodes) == set(two.view.nodes) == {"n1", "n2"})
        await one.store.put(keys.part_key(*KEY, 1, "n1", 0), to_bytes(Part("n1", 1)))
        assert (await two.view.files(KEY, 1)).files == {}

        # A view that is just reading all again can't tell who left from who was lost.
        await one.store.put(keys.tree_key("f"), to_bytes(TreeRecord("dir", "n1")))
        await until(lambda: "f" in one.view.tree and one.view.connected)
        await two.membership.leave()
        await until(lambda: set(one.view.nodes) == {"n1"}, within_s=2)
        assert not one.membership.lost
