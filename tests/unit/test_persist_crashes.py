"""A daemon dies at any request of an upload, or at any named point: its successor finishes, and sends little again."""

from __future__ import annotations

from pathlib import Path

import pytest
from persist_driver import Node, check_listed, left_over, listed, memory_node, quickly
from test_persist_machine import OneDeath, Trouble, check_markers, has_died

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.crash_points import OBJECT_POINTS

FILES = {"__0_0.distcp": 9000, "__1_0.distcp": 5000, "__2_0.distcp": 100}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.watch = lambda: (check_listed(store), check_markers(store))[0]
    return store


async def drain(node: Node) -> bool:
    """False when the daemon died of it; its successor is there then."""
    try:
        await node.drain()
    except BaseException as error:
        if not has_died(error):
            raise
        node.restart()
        return False
    return True


async def test_whatever_request_a_daemon_dies_at_nothing_is_sent_more_than_twice(tmp_path: Path) -> None:
    deaths = 0
    for at in range(1, 200):
        store = MemoryStore()
        store.watch = lambda store=store: (check_listed(store), check_markers(store))[0]  # type: ignore[misc]
        node = memory_node(tmp_path, store, f"n{at}")
        client, trouble = node.client, Trouble()
        assert isinstance(client, MemoryClient)
        client.fault = trouble
        await node.driver.save("run/step_1", 1, FILES)
        trouble.die_in = at
        died = not await drain(node)
        deaths += died
        assert await drain(node)
        assert max(client.sent.values()) <= 2
        assert sum(client.sent.values()) <= len(client.sent) + died * len(FILES), "what was in flight, and nothing else"
        assert listed(store) == ["run/step_1"] and left_over(store) == []
        if not died:
            break
    else:
        raise AssertionError("the requests have no end")
    assert deaths > 30


async def test_a_daemon_that_dies_again_and_again_still_gets_there(tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store)
    client, trouble = node.client, Trouble()
    assert isinstance(client, MemoryClient)
    client.fault = trouble
    for number in range(1, 4):
        await node.driver.save(f"run/step_{number}", number, FILES)
    deaths = 0
    while True:
        trouble.die_in = 30 + deaths % 7
        if await drain(node):
            break
        deaths += 1
        assert deaths < 100
    assert deaths >= 3
    assert max(count for (_, number), count in client.sent.items() if number) <= 2, "no part is sent more than twice"
    assert listed(store) == ["run/step_1", "run/step_2", "run/step_3"] and left_over(store) == []


@pytest.mark.parametrize("point", OBJECT_POINTS)
async def test_a_death_at_each_named_point(tmp_path: Path, store: MemoryStore, point: str) -> None:
    node = memory_node(tmp_path, store)
    await node.driver.save("run/step_1", 1, FILES)
    await node.driver.save("run/step_2", 2, FILES)
    assert await drain(node)
    await node.driver.save("run/step_1", 3, FILES)
    await node.driver.rmtree("run/step_2")
    node.registry.crash = OneDeath(point, 1)  # type: ignore[assignment]
    assert not await drain(node), "the point is passed"
    assert await drain(node)
    assert listed(store) == ["run/step_1"] and left_over(store) == []
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[3 ")
    assert node.record("run/step_1").is_persisted
