"""Some files of a step go to the object tier more often than the whole, and never look as if the whole were there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from persist_driver import WITHIN_S, Node, check_listed, left_over, listed, memory_node, quickly, settings
from step_driver import MARKER, content, until
from test_persist_machine import OneDeath, Trouble, check_markers, has_died

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.crash_points import PART_POINTS
from tierfs.errors import SettingsError
from tierfs.persist.part_commit import PartCommit
from tierfs.persist.part_file import PartFile, read_part_file
from tierfs.persist.sweeping import ABANDONED_AFTER_S
from tierfs.settings import RetentionSettings, Settings
from tierfs.settings_sources import load_settings

FILES = {"model_0.distcp": 3000, "model_1.distcp": 900, "optim_0.distcp": 5000, "optim_1.distcp": 700}
PART = "run/step_{}/.tierfs/parts/n1.json"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.watch = lambda: (check_listed(store), check_markers(store))[0]
    return store


def weights_often(**retention: int) -> Settings:
    """Weights with each second step, all of it with each fifth."""
    config = settings("every", every_steps=5, files={"model*": "2"})
    config.retention = RetentionSettings(**retention)
    return config


@pytest.fixture
def node(tmp_path: Path, store: MemoryStore) -> Node:
    return memory_node(tmp_path, store, config=weights_often())


def client_of(node: Node) -> MemoryClient:
    assert isinstance(node.client, MemoryClient)
    return node.client


async def save(node: Node, *numbers: int) -> None:
    for number in numbers:
        await node.driver.save(f"run/step_{number}", number, FILES)
    await node.drain()


def data_of(store: MemoryStore, step: str) -> list[str]:
    return [key.removeprefix(f"{step}/") for key in store.keys(f"{step}/") if "/.tierfs/" not in key]


def part_of(node: Node, step: str) -> Any:
    return node.persister.parts.describe(node.record(step))


async def test_weights_go_with_each_second_step_and_all_with_each_fifth(node: Node, store: MemoryStore) -> None:
    await save(node, 1, 2, 3)
    node.restart()  # the counts go on
    await save(node, 4, 5, 6, 7)
    assert listed(store) == ["run/step_5"]
    weights = ["model_0.distcp", "model_1.distcp"]
    assert {number: data_of(store, f"run/step_{number}") for number in (1, 2, 3, 4, 6, 7)} == {
        **{number: [] for number in (1, 3, 6)},
        **dict.fromkeys((2, 4, 7), weights),
    }
    found = read_part_file(store.objects[PART.format(2)].data, "run", "step_2")
    assert sorted(found.sent.objects) == weights
    assert found.left_out == {".metadata", "optim_0.distcp", "optim_1.distcp"}
    assert store.objects["run/step_2/model_0.distcp"].data == content(2, "model_0.distcp", 3000)
    told = part_of(node, "run/step_2")
    assert (told["state"], told["files"], told["of"], told["bytes"]) == ("sent", 2, 5, 3900)
    assert part_of(node, "run/step_1") is None and part_of(node, "run/step_5") is None
    node.restart()
    assert part_of(node, "run/step_2") == told


async def test_a_step_that_is_there_in_part_is_none_of_the_tier(node: Node, store: MemoryStore, tmp_path: Path) -> None:
    await save(node, 1, 2)
    record = node.record("run/step_2")
    assert not record.is_persisted and record.manifest.persisted is None and not record.manifest.owed
    other = memory_node(tmp_path, store, "n2")
    await other.index.refresh()
    assert not other.registry.records and other.driver.latest() is None
    assert list(other.index.parts) == [("run", "step_2")]
    await node.index.refresh()
    assert node.driver.state("run/step_2") == "complete" and not node.record("run/step_2").is_persisted


async def test_files_of_a_part_are_not_sent_again_with_the_whole_step(node: Node, store: MemoryStore) -> None:
    await save(node, 1, 2)
    node.persister.owe(node.record("run/step_2"), "demand")
    await node.drain()
    assert listed(store) == ["run/step_2"] and left_over(store) == []
    assert PART.format(2) not in store.objects
    assert set(client_of(node).sent.values()) == {1}


async def test_nor_by_a_node_that_lost_its_journal(node: Node, store: MemoryStore) -> None:
    await save(node, 1, 2)
    for journal in (node.registry.tier.meta / "%object" / "journal").rglob("*.jsonl"):
        journal.unlink()
    node.restart()
    node.persister.owe(node.record("run/step_2"), "demand")
    await node.drain()
    assert listed(store) == ["run/step_2"]
    assert set(client_of(node).sent.values()) == {1}


async def test_a_step_whose_part_is_owed_stays_in_ram_until_it_is_sent(node: Node) -> None:
    await node.driver.save("run/step_1", 1, FILES)
    await node.driver.save("run/step_2", 2, FILES)
    tier = node.registry.object_tier
    assert tier.may_leave_ram(node.record("run/step_1")) and not tier.may_leave_ram(node.record("run/step_2"))
    assert tier.may_leave_ram(node.record("run/step_2"), in_need=True), "a save that finds no room is worse"
    await node.drain()
    assert tier.may_leave_ram(node.record("run/step_2"))


async def test_removing_a_step_removes_its_part_unless_it_is_protected(tmp_path: Path, store: MemoryStore) -> None:
    for protected in (False, True):
        config = weights_often()
        config.persist.protected = protected
        node = memory_node(tmp_path, store, f"n{protected:d}", config=config)
        await save(node, 1, 2)
        await node.driver.rmtree("run/step_2")
        await node.drain()
        assert (data_of(store, "run/step_2") != []) == protected


async def test_a_part_goes_with_the_name_of_its_step(node: Node, store: MemoryStore) -> None:
    await save(node, 1, 2)
    await node.driver.rename("run/step_2", "run/step_20")
    await node.drain()
    assert store.keys("run/step_2/") == []
    assert data_of(store, "run/step_20") == ["model_0.distcp", "model_1.distcp"]


async def test_retention_takes_old_parts_with_old_steps(tmp_path: Path, store: MemoryStore) -> None:
    config = weights_often(object_steps=2, object_every=4)
    node = memory_node(tmp_path, store, config=config)
    await save(node, *range(1, 16))
    assert listed(store) == ["run/step_10", "run/step_15"]
    parts = [number for number in range(1, 16) if PART.format(number) in store.objects]
    assert parts == [4, 12, 14], "2, 7 and 9 are older than the oldest step that stays; 4 is a multiple"
    assert part_of(node, "run/step_9") is None and part_of(node, "run/step_12")["state"] == "sent"
    other = memory_node(tmp_path, store, "n2", config=weights_often(object_steps=1))
    await other.index.refresh()
    other.persister.surplus.delete("run")
    await other.drain()
    assert listed(store) == ["run/step_15"] and not any("/parts/" in key for key in store.objects)


async def test_sweeping_leaves_parts_and_takes_what_a_dead_node_left_of_one(
    node: Node, store: MemoryStore, tmp_path: Path
) -> None:
    await save(node, 1, 2)
    await node.driver.save("run/step_3", 3, FILES)
    await node.driver.save("run/step_4", 4, FILES)
    node.registry.crash = OneDeath("part:sent", 1)  # type: ignore[assignment]
    with pytest.raises(BaseException) as died:
        await node.drain()
    assert has_died(died.value)
    for found in store.objects.values():
        found.modified -= 2 * ABANDONED_AFTER_S
    other = memory_node(tmp_path, store, "n2")
    await other.driver.save("run/step_9", 9, FILES)
    await other.drain()
    await other.index.refresh()
    await other.persister.sweeper.sweep()
    await other.drain()
    assert data_of(store, "run/step_2") == ["model_0.distcp", "model_1.distcp"]
    assert store.keys("run/step_4/") == []


async def test_a_marker_of_a_directory_goes_along_where_all_of_it_does(tmp_path: Path, store: MemoryStore) -> None:
    config = settings("demand", files={"model/*": "all"})
    node = memory_node(tmp_path, store, config=config)
    for part in ("optim", "model"):
        await node.driver.save(f"run/step_1/{part}", 1, {"__0_0.distcp": 900})
    await node.driver.finish("run/step_1", 1, {})
    assert node.driver.state("run/step_1") == "complete"
    order: list[str] = []
    client_of(node).fault = lambda when, what, key: order.append(key) if (when, what) == ("after", "upload") else None
    await node.drain()
    assert order == [f"run/step_1/model/{name}" for name in ("__0_0.distcp", MARKER)]


async def test_a_marker_of_a_directory_is_not_there_while_its_files_change(tmp_path: Path, store: MemoryStore) -> None:
    """At each moment, as the store's watch looks: else old and new files would load as one."""
    node = memory_node(tmp_path, store, config=settings("demand", files={"*": "all"}))
    for seed, files in ((1, {"__0_0.distcp": 900, "__1_0.distcp": 50}), (2, {"__0_0.distcp": 900})):
        await node.driver.save("run/step_1/model", seed, files)
        await node.driver.finish("run/step_1", seed, {})
        await node.drain()
        assert store.objects["run/step_1/model/__0_0.distcp"].data == content(seed, "__0_0.distcp", 900)
        assert f"run/step_1/model/{MARKER}" in store.objects
        assert f"run/step_1/{MARKER}" not in store.objects, "the marker of the whole step goes with the whole step only"


async def test_what_comes_while_a_part_is_noted_is_sent_too(
    node: Node, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = 0

    async def put(commit: PartCommit, part: PartFile) -> None:
        nonlocal noted
        await put_part(commit, part)
        noted += bool(part.sent.objects)
        if noted == 1:
            await node.driver.write("run/step_2/model_late", b"late")

    put_part = PartCommit._put
    monkeypatch.setattr(PartCommit, "_put", put)
    await save(node, 1, 2)
    assert noted == 2 and store.objects["run/step_2/model_late"].data == b"late"


async def test_a_part_does_not_go_where_its_step_was_moved_and_none_may(tmp_path: Path, store: MemoryStore) -> None:
    config = settings("demand", files={"model*": "all"})
    config.namespaces = {"private*": {"persist": {"policy": "none"}}}
    node = memory_node(tmp_path, store, config=config)
    await save(node, 1)
    (node.driver.root / "private").mkdir()
    await node.driver.rename("run/step_1", "private/step_1")
    await node.drain()
    assert store.keys() == []


@pytest.mark.parametrize("policy", ["none", "all"])
async def test_no_part_goes_where_nothing_may_or_all_does(tmp_path: Path, store: MemoryStore, policy: str) -> None:
    node = memory_node(tmp_path, store, config=settings(policy, files={"model*": "all"}))
    await save(node, 1)
    assert listed(store) == (["run/step_1"] if policy == "all" else [])
    assert not any("/parts/" in key for key in store.objects)
    assert bool(store.keys()) == (policy == "all")


async def test_a_step_saved_anew_replaces_its_part(node: Node, store: MemoryStore) -> None:
    await save(node, 1, 2)
    await node.driver.save("run/step_3", 3, FILES)
    await node.driver.save("run/step_2", 22, {**FILES, "model_0.distcp": 3100})
    await node.driver.write("run/step_2/model_2.json", b"{}")
    await node.drain()
    assert store.objects["run/step_2/model_0.distcp"].data == content(22, "model_0.distcp", 3100)
    found = read_part_file(store.objects[PART.format(2)].data, "run", "step_2")
    assert found.sent.generation == 2 and len(found.sent.objects) == 3
    await node.driver.unlink("run/step_2/model_2.json")
    await node.drain()
    assert data_of(store, "run/step_2") == ["model_0.distcp", "model_1.distcp"]
    told = part_of(node, "run/step_2")
    assert (told["state"], told["files"], told["of"]) == ("sent", 2, 5)


async def test_a_whole_step_waits_for_the_end_of_its_part(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1, FILES)
    await node.driver.save("run/step_2", 2, FILES)
    client, began = client_of(node), trio.Event()

    def fault(when: str, what: str, key: str) -> None:
        if what in ("upload", "part") and "model" in key and not began.is_set():
            began.set()

    client.fault = fault
    with trio.fail_after(WITHIN_S):
        async with node.running():
            await began.wait()
            node.persister.owe(node.record("run/step_2"), "demand")
            await until(lambda: node.record("run/step_2").is_persisted, "all of it is there")
    assert listed(store) == ["run/step_2"] and left_over(store) == []


async def test_whatever_request_a_daemon_dies_at_a_part_is_sent(tmp_path: Path) -> None:
    deaths = 0
    for at in range(1, 100):
        store = MemoryStore()
        node = memory_node(tmp_path, store, f"n{at}", config=settings("demand", files={"model*": "all"}))
        client, trouble = client_of(node), Trouble()
        client.fault = trouble
        await node.driver.save("run/step_1", 1, FILES)
        trouble.die_in = at
        try:
            await node.drain()
            died = False
        except BaseException as error:
            if not has_died(error):
                raise
            died = True
            node.restart()
            await node.drain()
        deaths += died
        assert data_of(store, "run/step_1") == ["model_0.distcp", "model_1.distcp"]
        found = read_part_file(store.objects[f"run/step_1/.tierfs/parts/n{at}.json"].data, "run", "step_1")
        assert len(found.sent.objects) == 2 and max(client.sent.values()) <= 2
        if not died:
            break
    else:
        raise AssertionError("the requests have no end")
    assert deaths > 8


@pytest.mark.parametrize("point", PART_POINTS)
async def test_a_daemon_that_dies_at_a_named_point_sends_nothing_again(
    tmp_path: Path, store: MemoryStore, point: str
) -> None:
    node = memory_node(tmp_path, store, config=settings("demand", files={"model*": "all"}))
    node.registry.crash = OneDeath(point, 1)  # type: ignore[assignment]
    await node.driver.save("run/step_1", 1, FILES)
    with pytest.raises(BaseException) as died:
        await node.drain()
    assert has_died(died.value)
    node.restart()
    await node.drain()
    assert part_of(node, "run/step_1")["state"] == "sent"
    assert set(client_of(node).sent.values()) == {1}


@pytest.mark.parametrize("turn", ["0", "often", "-1", "every 2"])
def test_a_turn_that_is_none_is_refused(tmp_path: Path, turn: str) -> None:
    path = tmp_path / "tierfs.toml"
    path.write_text(f'[namespaces."run*".persist.files]\n"model*" = "{turn}"\n')
    with pytest.raises(SettingsError, match="not a turn; write all"):
        load_settings(path, {}, (), {}, memory_bytes=lambda: 1 << 30)
    for pattern in ("/model*", "./model*", "model/"):
        path.write_text(f'[persist.files]\n"{pattern}" = 2\n')
        with pytest.raises(SettingsError, match="matches no file"):
            load_settings(path, {}, (), {}, memory_bytes=lambda: 1 << 30)
    path.write_text('[persist.files]\n"model*" = 2\n"*.json" = "all"\n"big" = "1h30min"\n')
    read = load_settings(path, {}, ['persist.files={ big = "off" }'], {}, memory_bytes=lambda: 1 << 30)
    assert read.persist.files == {"model*": "2", "*.json": "all"}
