"""An object tier that is not there must not pass for one whose steps were deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from persist_driver import listed, memory_node, quickly

from rig.memory_client import MemoryStore
from tierfs.errors import ObjectStoreMissing


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


async def test_a_share_that_is_not_mounted_takes_no_step_from_the_tree_and_gets_none(tmp_path: Path) -> None:
    store = MemoryStore()
    node = memory_node(tmp_path, store)
    await node.driver.save("run/step_1", 1)
    await node.drain()
    await node.index.refresh()
    away, store.objects = store.objects, {}
    node.restart()
    with pytest.raises(ObjectStoreMissing, match="not mounted"):
        await node.index.refresh()
    assert "not mounted" in node.index.problem
    assert node.record("run/step_1").is_persisted
    with pytest.raises(ObjectStoreMissing):
        await node.index.identity.establish()
    assert store.objects == {}, "nothing goes to what is not the tier"
    store.objects = away
    await node.index.refresh()
    assert node.index.problem == ""
    assert listed(store) == ["run/step_1"]


async def test_another_tier_under_the_same_url_is_told(tmp_path: Path) -> None:
    store = MemoryStore()
    node = memory_node(tmp_path, store)
    await node.index.identity.establish()
    store.objects = {}
    other = memory_node(tmp_path, store, "other")
    await other.index.identity.establish()
    with pytest.raises(ObjectStoreMissing, match="another one is there"):
        await node.index.refresh()


async def test_a_tier_that_was_emptied_step_by_step_is_believed(tmp_path: Path) -> None:
    store = MemoryStore()
    node, reader = memory_node(tmp_path, store), memory_node(tmp_path, store, "reader")
    await node.driver.save("run/step_1", 1)
    await node.drain()
    await reader.index.refresh()
    store.delete(store.keys("run/"))
    await reader.index.refresh()
    assert not (reader.driver.root / "run/step_1").exists()
