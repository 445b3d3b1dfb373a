"""Counting copies, and what a step's steward makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio
from cluster_parts import KEY, file, put_holding, put_node, put_part, put_state, state, until, watching
from trio.testing import MockClock

from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.records import FileRecord, Holding, StepState, from_bytes, to_bytes
from tierfs.cluster import placement
from tierfs.cluster.counting import Holders, missing_copies
from tierfs.cluster.step_files import merge
from tierfs.cluster.stewardship import Stewardship
from tierfs.cluster.view import View

NODES = ("n1", "n2", "n3")


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


class Cluster:
    """Three nodes' stewards over one catalogue, and which steps are in the object tier."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.views = {node: View(MemoryStore(self.server)) for node in NODES}
        self.persisted = False
        self.stewards = {
            node: Stewardship(view.store, view, node, lambda namespace: 2, lambda key: self.persisted, after_s=15.0)
            for node, view in self.views.items()
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        async with contextlib.AsyncExitStack() as stack:
            for view in self.views.values():
                await stack.enter_async_context(watching(view))
            nursery = await stack.enter_async_context(trio.open_nursery())
            for stewardship in self.stewards.values():
                await nursery.start(stewardship.run)
            yield self
            nursery.cancel_scope.cancel()

    @property
    def level(self) -> str:
        return from_bytes(StepState, self.server.keys[keys.state_key(*KEY)].value).level

    @property
    def steward(self) -> Stewardship:
        return next(each for each in self.stewards.values() if each.is_steward(KEY))


async def committed(cluster: Cluster) -> None:
    for node in NODES:
        await put_node(cluster.store, node)
    await put_part(cluster.store, "n1", {"a": file("n1/a1"), ".metadata": file("n1/a2")})
    await put_part(cluster.store, "n2", {"b": file("n2/b1")})
    await put_state(cluster.store, state({"n1": 2, "n2": 1}))


async def test_a_step_is_replicated_once_each_part_is_on_two_nodes_and_then_nobody_asks(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        await until(lambda: any(each.wanted(KEY) == {"n1": 1, "n2": 1} for each in cluster.stewards.values()))
        assert cluster.level == "complete"
        await put_holding(cluster.store, "n3", ("n1",))
        await until(lambda: cluster.steward.wanted(KEY) == {"n2": 1}, within_s=4)
        assert [await each.missing(KEY) for each in cluster.stewards.values()] == [{"n2": 1}] * 3
        await put_holding(cluster.store, "n1", ("n1", "n2"))
        cluster.steward.poke(KEY)
        await until(lambda: cluster.level == "replicated", within_s=0.5)
        await trio.sleep(10)
        requests = cluster.server.requests
        await trio.sleep(600)
        # The views ask whether their watches live, twice to four times a minute.
        assert cluster.server.requests - requests <= 3 * 45
        await put_holding(cluster.store, "n3", ())
        await cluster.stewards["n3"].recount(KEY)
        await until(lambda: cluster.steward.wanted(KEY) == {"n1": 1} and cluster.level == "complete")


async def test_losing_nodes_takes_the_level_down_and_their_return_brings_it_back(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        await put_holding(cluster.store, "n3", ("n1", "n2"))
        await until(lambda: cluster.level == "replicated")
        await cluster.store.delete(keys.node_key("n1"))
        await until(lambda: cluster.level == "complete", within_s=5)
        await until(lambda: cluster.steward.wanted(KEY) == {"n1": 1})
        await cluster.store.delete(keys.node_key("n3"))
        await until(lambda: cluster.level == "lost", within_s=5)
        cluster.persisted = True
        await until(lambda: cluster.level == "complete", within_s=5)
        cluster.persisted = False
        await put_node(cluster.store, "n3")
        await put_node(cluster.store, "n1")
        await until(lambda: cluster.level == "replicated", within_s=5)
        await cluster.store.delete(keys.node_key("n2"))
        await cluster.store.delete(keys.node_key("n1"))
        await trio.sleep(5)
        assert cluster.level == "complete", "one more failure would take it"
        assert not any(each.wanted(KEY) for each in cluster.stewards.values()), "there is nobody to copy to"


async def test_a_level_from_before_a_loss_is_not_believed_until_it_was_counted(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        await put_holding(cluster.store, "n3", ("n1", "n2"))
        await until(lambda: cluster.level == "replicated")
        await until(lambda: all(view.states[KEY].record.level == "replicated" for view in cluster.views.values()))
        assert all(each.is_believed(KEY) for each in cluster.stewards.values())
        await put_node(cluster.store, "n4")
        await trio.sleep(1)
        began = trio.current_time()
        await cluster.store.delete(keys.node_key("n4"))
        told: list[bool] = []
        for view, each in zip(cluster.views.values(), cluster.stewards.values(), strict=True):
            await until(lambda view=view: "n4" not in view.nodes)
            told.append(each.is_believed(KEY))
        assert told == [False] * 3, "nobody knows what it held"
        await until(lambda: all(each.is_believed(KEY) for each in cluster.stewards.values()), within_s=1)
        await cluster.store.delete(keys.node_key("n3"))
        await until(lambda: cluster.level == "complete")
        assert trio.current_time() - began < 0.5, "the steward counts at once"
        assert not any(each.is_believed(KEY) for each in cluster.stewards.values())
        await trio.sleep(1)
        assert not any(each.is_believed(KEY) for each in cluster.stewards.values())
        for name in ("n1", "n2"):
            await put_holding(cluster.store, name, ("n1", "n2"))
        cluster.stewards["n1"].recount_soon(KEY)
        await until(lambda: cluster.level == "replicated")
        await until(lambda: all(each.is_believed(KEY) for each in cluster.stewards.values()), within_s=1)


async def test_copies_on_a_node_that_drains_are_to_be_made_elsewhere(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        await put_holding(cluster.store, "n3", ("n1", "n2"))
        await until(lambda: cluster.level == "replicated")
        await put_node(cluster.store, "n3", state="draining")
        await until(lambda: cluster.steward.wanted(KEY) == {"n1": 1, "n2": 1})
        assert cluster.level == "replicated", "both copies are still there"


async def test_parts_that_nobody_published_are_waited_for_before_the_step_is_lost(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        for node in NODES:
            await put_node(cluster.store, node)
        await put_part(cluster.store, "n1", {"a": file("n1/a1"), ".metadata": file("n1/a2")})
        await put_state(cluster.store, state({"n1": 2, "n2": 1}))
        await put_holding(cluster.store, "n3", ("n1", "n2"))
        await trio.sleep(10)
        assert cluster.level == "complete", "what is not known is not replicated, and not lost at once"
        await until(lambda: cluster.level == "lost", within_s=15)
        await put_part(cluster.store, "n2", {"b": file("n2/b1")})
        await cluster.store.put(keys.state_key(*KEY), to_bytes(state({"n1": 2, "n2": 1})))
        await until(lambda: cluster.level == "replicated", within_s=10)


async def test_all_nodes_agree_on_the_steward_as_members_come_and_go(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        for name in ("n4", "n5", "n6"):
            await put_node(cluster.store, name)
        for gone in ("n5", "n2", "n6", "n3"):
            await cluster.store.delete(keys.node_key(gone))
            await trio.sleep(1)
            view = cluster.views["n1"]
            expected = placement.steward(KEY, [seen.record for seen in view.nodes.values()])
            assert {node for node, each in cluster.stewards.items() if each.is_steward(KEY)} == {expected} & {*NODES}


def test_who_holds_which_bytes() -> None:
    carried, own, other = file("n3/c0"), file("n1/a1"), file("n2/b1")
    parts: dict[str, dict[str, FileRecord]] = {"n1": {"c": carried, "a": own}, "n2": {"b": other}}
    files = merge(KEY, 2, 7, parts, {"n2": {"late": file("n2/d1")}})
    live = ("n1", "n2", "n3", "n4")

    def holders(**holdings: Holding) -> Holders:
        return Holders(files, holdings, live)

    assert holders().of(carried) == {"n3"}, "its author, not whose part carries it"
    assert holders().copies() == {"n1": set(), "n2": {"n2"}, "n2+": {"n2"}}
    assert holders(n4=Holding(2, ("n1",))).copies()["n1"] == {"n4"}
    assert holders(n4=Holding(1, ("n1",))).copies()["n1"] == set(), "that was another generation's part"
    assert holders(n4=Holding(1, (), ("n2/b1",))).of(other) == {"n2", "n4"}, "a version is the same in all"
    assert holders(n2=Holding(2)).has_lost_file(), "the author itself says that it lost it"
    assert holders(gone=Holding(2, ("n1", "n2"))).of(own) == {"n1"}
    assert not holders(n1=Holding(2, ("n1",))).has_lost_file()
    assert holders(n4=Holding(2, ("n2",))).copies()["n2+"] == {"n2"}, "additions may change: only versions count"
    assert holders(n2=Holding(2, ("n2",))).copies()["n2+"] == {"n2"}, "what it added since is its own, too"
    assert holders(n2=Holding(2, ())).copies()["n2+"] == set(), "its RAM was lost"
    several = holders(n1=Holding(2, ("n1", "n2"), ("n2/d1",)))
    assert missing_copies(several, serving=live, replicas=2) == {"n1": 1}
    assert missing_copies(several, serving=("n1",), replicas=2) == {}


async def test_whoever_makes_the_last_copy_says_so_and_the_steward_is_not_waited_for(clock: MockClock) -> None:
    async with Cluster().running() as cluster:
        await committed(cluster)
        other = next(node for node in NODES if not cluster.stewards[node].is_steward(KEY))
        await put_holding(cluster.store, "n3", ("n1",))
        cluster.stewards[other].poke(KEY)
        await trio.sleep(3)  # by now the steward looks seldom
        assert cluster.level == "complete"
        began = trio.current_time()
        await put_holding(cluster.store, "n1", ("n1", "n2"))
        cluster.stewards[other].poke(KEY)
        await until(lambda: cluster.level == "replicated")
        assert trio.current_time() - began < 0.05
