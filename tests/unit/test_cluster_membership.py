"""A node among the members: joining, staying, leaving, being lost, and who may have which name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
import trio
from trio.testing import MockClock

from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.records import NodeRecord, from_bytes
from tierfs.cluster.membership import Membership
from tierfs.cluster.view import View
from tierfs.errors import TierfsError

LEASE_S = 9.0


@dataclass
class Node:
    """One daemon."""

    server: MemoryServer
    record: NodeRecord
    store: MemoryStore = field(init=False)
    view: View = field(init=False)
    membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.server)
        self.view = View(self.store)
        self.membership = Membership(self.store, self.view, lambda: self.record, lease_s=LEASE_S)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.view.run)
            await nursery.start(self.membership.run)
            yield self
            nursery.cancel_scope.cancel()

    def in_catalogue(self) -> NodeRecord | None:
        found = self.server.keys.get(keys.node_key(self.record.node))
        return from_bytes(NodeRecord, found.value) if found is not None else None


def node(server: MemoryServer, name: str = "n1", tier: str = "t1", started_at: float = 1.0) -> Node:
    return Node(server, NodeRecord(name, ("h:1",), tier, size_bytes=1 << 30, free_bytes=1 << 30, started_at=started_at))


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 (some conditions are the catalogue's own)
            await trio.sleep(0.05)


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


async def test_members_see_each_other_and_whether_one_left_or_was_lost(clock: MockClock) -> None:
    server = MemoryServer()
    async with node(server, "n1").running() as first:
        async with node(server, "n2", "t2").running() as second:
            await until(lambda: set(first.view.nodes) == set(second.view.nodes) == {"n1", "n2"})
            await trio.sleep(5 * LEASE_S)
            assert set(first.view.nodes) == {"n1", "n2"}, "the lease is renewed"
        assert second.membership.member is False
        await until(lambda: "n2" not in first.view.nodes)
        assert set(first.membership.lost) == {"n2"}, "it was killed"
        async with node(server, "n2", "t3").running() as again:
            await until(lambda: "n2" in first.view.nodes)
            assert not first.membership.lost
            with trio.fail_after(1):
                await again.membership.leave()
                await again.membership.leave()
            await until(lambda: "n2" not in first.view.nodes, within_s=1)
            assert not first.membership.lost, "it went by itself"


async def test_a_member_that_was_cut_off_longer_than_its_lease_joins_again(clock: MockClock) -> None:
    server = MemoryServer()
    async with node(server, "n1").running() as cut, node(server, "n2", "t2").running() as other:
        await until(lambda: set(other.view.nodes) == {"n1", "n2"})
        cut.store.cut_off = True
        await until(lambda: "n1" not in other.view.nodes, within_s=2 * LEASE_S)
        await until(lambda: not cut.membership.member and not cut.view.connected)
        cut.store.cut_off = False
        await until(lambda: "n1" in other.view.nodes and cut.membership.member, within_s=2 * LEASE_S)
        server.wipe()
        await until(lambda: cut.in_catalogue() is not None and other.in_catalogue() is not None)
        await until(lambda: set(other.view.nodes) == {"n1", "n2"})
        await other.store.delete(keys.node_key("n1"))
        await until(lambda: "n1" in other.view.nodes)  # somebody removed its key by hand


async def test_news_are_put_at_once_where_the_state_changed_and_else_once_a_second(clock: MockClock) -> None:
    server = MemoryServer()
    async with node(server).running() as one:
        await until(lambda: one.in_catalogue() is not None)
        await trio.sleep(5)
        began, requests = trio.current_time(), server.requests
        for free in range(100):
            one.record = replace(one.record, free_bytes=free << 20)
            one.membership.changed()
            await trio.sleep(0.02)
        await until(lambda: one.in_catalogue() == one.record or trio.current_time() > began + 4)
        assert server.requests - requests <= 6
        assert abs((one.in_catalogue() or one.record).free_bytes - one.record.free_bytes) < 64 << 20
        one.record = replace(one.record, state="draining")
        one.membership.changed()
        await until(lambda: one.in_catalogue() == one.record, within_s=0.2)


async def test_a_restarted_daemon_takes_its_name_over_and_another_node_of_that_name_is_refused(
    clock: MockClock,
) -> None:
    server = MemoryServer()
    async with node(server, "n1", "t1", 1.0).running() as old:
        await until(lambda: old.in_catalogue() is not None)
        stranger = node(server, "n1", "another tier", 2.0)
        with pytest.raises(TierfsError, match=r"another node called n1 .* h:1.*another name"):
            with trio.fail_after(4 * LEASE_S):
                await stranger.membership.run()
        assert old.in_catalogue() == old.record
    async with node(server, "n1", "t1", 3.0).running() as restarted:
        await until(lambda: restarted.in_catalogue() == restarted.record, within_s=0.5)
    async with node(server, "n1", "ram was lost", 4.0).running() as wiped:
        await until(lambda: wiped.in_catalogue() == wiped.record, within_s=LEASE_S + 2)
