"""The tree shows the steps of the object tier, and nothing is concluded from what could not be seen."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from persist_driver import Node, check_listed, listed, memory_node, quickly, settings
from step_driver import FILES, until

from rig.memory_client import MemoryClient, MemoryStore, Upload
from tierfs.errors import ObjectMissing, ObjectUnavailable
from tierfs.persist.sweeping import ABANDONED_AFTER_S
from tierfs.persist.upload_journal import StepJournal
from tierfs.steps.manifest import FileEntry
from tierfs.steps.names import StepPath


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def writer(tmp_path: Path, store: MemoryStore) -> Node:
    """Has persisted three steps, in nested namespaces."""
    node = memory_node(tmp_path, store, "writer")
    for step in ("run/step_1", "run/step_2", "team/x/5"):
        await node.driver.save(step, 1)
    node.driver.root.joinpath("run/step_2").chmod(0o750)
    os.utime(node.driver.root / "run/step_2", (1000, 1000))
    await node.drain()
    return node


async def test_a_node_without_its_ram_tier_finds_every_committed_step(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    record = node.record("run/step_2")
    assert record.is_persisted and not record.manifest.populated
    assert record.manifest.bytes == writer.record("run/step_2").manifest.bytes
    found = (node.driver.root / "run/step_2").stat()
    assert (found.st_mode & 0o777, found.st_mtime) == (0o750, 1000)
    assert os.listdir(node.driver.root / "run/step_2") == []
    assert node.driver.latest("run") == "step_2" and node.driver.latest("team/x") == "5"
    assert ("run", "step_2") in node.driver.told and ("", "run") in node.driver.told
    manifest = await node.index.manifest("run", "step_2")
    assert manifest.size_bytes == record.manifest.bytes and ".metadata" in manifest.files
    node.restart()
    assert not node.record("run/step_2").manifest.populated and node.record("run/step_2").is_persisted
    assert node.driver.latest("run") == "step_2"
    await node.drain()
    assert len(listed(store)) == 3, "what it did not have itself it neither sends nor deletes"


async def test_a_step_that_others_removed_goes_from_the_tree(writer: Node, tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    await writer.driver.rmtree("run/step_2")
    await writer.drain()
    await node.index.refresh()
    assert not (node.driver.root / "run/step_2").exists()
    assert node.driver.latest("run") == "step_1"
    with pytest.raises(ObjectMissing):
        await node.index.manifest("run", "step_2")


async def test_a_step_that_is_whole_in_ram_stays_and_is_owed_again_by_policy_all(
    writer: Node, store: MemoryStore
) -> None:
    store.delete(store.keys("run/step_2/"))
    await writer.index.refresh()
    assert writer.record("run/step_2").manifest.owed == "policy"
    await writer.drain()
    assert "run/step_2" in listed(store)


async def test_a_commit_that_somebody_damaged_is_made_anew_from_ram(writer: Node, store: MemoryStore) -> None:
    store.put("run/step_2/.tierfs/manifest.json", b"{")
    await writer.index.refresh()
    assert not writer.record("run/step_2").is_persisted
    await writer.drain()
    assert writer.record("run/step_2").is_persisted
    check_listed(store)
    await writer.index.refresh()
    assert writer.index.problems() == []


async def test_a_listing_that_fails_changes_nothing_and_is_told(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    store.delete(store.keys("run/step_1/"))
    assert isinstance(node.client, MemoryClient)
    for after in range(1, 6):
        left = [after]

        def fail(when: str, what: str, key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise ObjectUnavailable("connection reset")

        node.client.fault = fail
        with pytest.raises(ObjectUnavailable):
            await node.index.refresh()
        assert "connection reset" in node.index.problem
        assert (node.driver.root / "run/step_1").exists()
    node.client.fault = lambda when, what, key: None
    await node.index.refresh()
    assert node.index.problem == ""
    assert not (node.driver.root / "run/step_1").exists()


async def test_what_can_not_be_a_step_of_ours_is_not_shown(writer: Node, tmp_path: Path, store: MemoryStore) -> None:
    good = store.objects["run/step_1/.tierfs/manifest.json"].data
    store.put("run/step_3/.tierfs/manifest.json", good)  # of another step
    store.put("run/step_4/.tierfs/manifest.json", b"{")
    store.put("run/../step_9/.tierfs/manifest.json", good)
    store.put("run/step_7/__0_0.distcp", b"a plain directory")
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    assert sorted(node.registry.records) == [("run", "step_1"), ("run", "step_2"), ("team/x", "5")]
    assert sorted(problem["path"] for problem in node.index.problems()) == ["run/step_3", "run/step_4"]
    assert sorted(os.listdir(node.driver.root)) == ["run", "team"]


async def test_a_step_that_is_written_here_is_left_alone(writer: Node, tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store)
    node.driver.mkdirs("run/step_1")
    await node.driver.write("run/step_1/x", b"x")
    await node.index.refresh()
    assert node.driver.state("run/step_1") == "writing"
    assert (node.driver.root / "run/step_1/x").read_bytes() == b"x"


async def test_the_same_step_in_ram_is_known_to_be_persisted(writer: Node, tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store, config=settings("demand"))
    await node.driver.save("run/step_1", 1)
    await node.driver.save("run/step_2", 9)
    async with node.driver.running():
        records = list(node.registry.records.values())
        await until(
            lambda: all(entry.checksum for record in records for entry in record.manifest.files.values()), "summed up"
        )
    await node.index.refresh()
    assert node.record("run/step_1").is_persisted, "equal bytes"
    assert not node.record("run/step_2").is_persisted, "other bytes"


async def test_another_save_of_a_step_that_is_only_there_takes_its_place(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    await writer.driver.save("run/step_1", 2, {"__0_0.distcp": 10})
    await writer.drain()
    await node.index.refresh()
    record = node.record("run/step_1")
    assert record.manifest.generation == 2
    assert set((await node.index.manifest("run", "step_1")).files) == {".metadata", "__0_0.distcp"}


async def test_a_copy_of_a_step_that_another_node_saved_again_is_let_go(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    node = memory_node(tmp_path, store)
    await node.index.refresh()
    record = node.record("run/step_1")
    for name in FILES:  # as if it had been looked into, and all of it read
        (record.directory / name).write_bytes(store.objects[f"run/step_1/{name}"].data)
    record.manifest.populated, record.manifest.files = True, record.scan()
    await writer.driver.save("run/step_1", 2)
    await writer.drain()
    await node.index.refresh()
    assert node.record("run/step_1").manifest.generation == 2
    assert os.listdir(record.directory) == [], "to be fetched from what is there now"
    assert node.registry.problems == []


async def test_a_save_of_its_own_that_another_node_replaced_stays_and_is_told(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    node = memory_node(tmp_path, store, name="n2")
    await node.driver.save("run/step_9", 9)
    await node.drain()
    await writer.index.refresh()
    await writer.driver.rmtree("run/step_9")
    await writer.driver.save("run/step_9", 10)
    await writer.drain()
    await node.index.refresh()
    assert node.driver.loaded("run/step_9") == 9
    assert not node.record("run/step_9").is_persisted
    assert "another node committed" in node.registry.problems[0]["message"]


async def test_a_step_whose_deletion_is_owed_is_not_shown_again(
    writer: Node, tmp_path: Path, store: MemoryStore
) -> None:
    await writer.driver.rmtree("run/step_1")
    await writer.index.refresh()
    assert not (writer.driver.root / "run/step_1").exists()
    writer.restart()
    await writer.index.refresh()
    assert not (writer.driver.root / "run/step_1").exists()
    assert writer.registry.at(StepPath("run", "step_1", 1, "")) is None


async def test_what_nobody_finished_is_swept_and_what_a_person_put_there_stays(
    writer: Node, store: MemoryStore
) -> None:
    long_ago = time.time() - 2 * ABANDONED_AFTER_S
    left = ["run/step_0/.tierfs/nodes/other.json", "run/step_0/__0_0.distcp", "plain/step_0/x", "run/step_9/y"]
    for key in left:
        store.put(key, b"x")
        store.objects[key].modified = long_ago
    store.put("run/step_8/.tierfs/nodes/other.json", b"just begun")
    client = writer.client
    assert isinstance(client, MemoryClient)
    store.uploads |= {
        "old": Upload("run/step_1/x", started=long_ago),
        "new": Upload("run/step_8/x"),
        "ours": Upload("run/step_3/x", started=long_ago),
        "gone": Upload("run/step_2/x"),
    }
    await writer.driver.save("run/step_3", 3)
    meta = writer.registry.tier.meta
    StepJournal.open(meta, "run", "step_3").of_file("x", FileEntry(1, 1, 1)).started("ours")
    StepJournal.open(meta, "run", "step_2").of_file("x", FileEntry(1, 1, 1)).started("gone")
    await writer.persister.sweeper.sweep()
    assert sorted(store.uploads) == ["new", "ours"]
    async with writer.running():
        await until(lambda: not writer.deletions.owed(), "the leftovers are deleted")
    assert sorted(key for key in left if key in store.objects) == ["plain/step_0/x", "run/step_9/y"]
    assert "run/step_8/.tierfs/nodes/other.json" in store.objects
