"""Complete steps go to the object tier, all or nothing."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import trio
from persist_driver import Node, check_listed, left_over, listed, manifest_of, memory_node, quickly, settings
from step_driver import FILES, MARKER, content, until

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.errors import ObjectDenied, ObjectUnavailable
from tierfs.persist import putting_off
from tierfs.settings import DurabilitySettings, RetentionSettings


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    store.watch = lambda: check_listed(store)
    return store


@pytest.fixture
def node(tmp_path: Path, store: MemoryStore) -> Node:
    return memory_node(tmp_path, store)


async def test_a_complete_step_is_committed_under_the_names_of_the_mount(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    assert node.record("run/step_1").manifest.owed == "policy"
    await node.drain()
    assert store.keys() == [
        "run/step_1/.metadata",
        "run/step_1/.tierfs/manifest.json",
        "run/step_1/.tierfs/nodes/n1.json",
        "run/step_1/__0_0.distcp",
        "run/step_1/__1_0.distcp",
    ]
    assert store.objects["run/step_1/__0_0.distcp"].data == content(1, "__0_0.distcp", FILES["__0_0.distcp"])
    record = node.record("run/step_1")
    assert record.is_persisted
    assert record.manifest.persisted is not None and record.manifest.persisted.files == 3
    node.restart()
    assert node.record("run/step_1").is_persisted


async def test_nothing_is_sent_twice_and_a_marker_comes_after_all_data(node: Node, store: MemoryStore) -> None:
    order: list[str] = []
    client = node.client
    assert isinstance(client, MemoryClient)
    client.fault = lambda when, what, key: order.append(key) if (when, what) != ("before", "x") and key else None
    await node.driver.save("run/step_1", 1)
    await node.drain()
    assert max(client.sent.values()) == 1
    marker = max(at for at, key in enumerate(order) if key == f"run/step_1/{MARKER}")
    assert all(at < marker for at, key in enumerate(order) if key.endswith(".distcp"))
    sent = client.sent.copy()
    node.persister.changed(node.record("run/step_1"))
    await node.drain()
    assert client.sent == sent, "nothing changed, so nothing is sent"


async def test_of_five_steps_every_second_is_persisted(tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store, config=settings("every", every_steps=2))
    for number in range(1, 4):
        await node.driver.save(f"run/step_{number}", number)
    node.restart()  # the count goes on
    for number in range(4, 6):
        await node.driver.save(f"run/step_{number}", number)
    await node.drain()
    assert listed(store) == ["run/step_2", "run/step_4"]


@pytest.mark.parametrize("policy", ["demand", "none"])
async def test_nothing_goes_that_no_policy_owes(tmp_path: Path, store: MemoryStore, policy: str) -> None:
    node = memory_node(tmp_path, store, config=settings(policy))
    await node.driver.save("run/step_1", 1)
    await node.drain()
    assert store.keys() == []
    node.persister.owe(node.record("run/step_1"), "demand")
    await node.drain()
    assert listed(store) == ["run/step_1"]


async def test_a_step_that_a_program_waits_for_is_owed_whatever_the_policy(tmp_path: Path, store: MemoryStore) -> None:
    config = settings("demand")
    config.durability = DurabilitySettings(commit="object")
    node = memory_node(tmp_path, store, config=config)
    await node.driver.save("run/step_1", 1)
    async with node.running():
        with trio.fail_after(5):
            await node.persister.wait_persisted(node.record("run/step_1"))
    assert listed(store) == ["run/step_1"]


async def test_files_that_are_added_later_are_sent_alone(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    await node.drain()
    client = node.client
    assert isinstance(client, MemoryClient)
    client.sent.clear()
    gone: list[bool] = []
    store.watch = lambda: gone.append(listed(store) == [])
    await node.driver.write("run/step_1/meta.pt", b"later")
    await node.drain()
    assert list(client.sent) == [("run/step_1/meta.pt", 0)]
    assert not any(gone), "the step was committed all the time"
    check_listed(store)
    assert b"meta.pt" in store.objects["run/step_1/.tierfs/manifest.json"].data


async def test_a_small_file_that_is_removed_goes_from_the_commit_too(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    await node.driver.write("run/step_1/notes.txt", b"later")
    await node.drain()
    gone: list[bool] = []

    def watch() -> None:
        gone.append(listed(store) == [])
        check_listed(store)

    store.watch = watch
    await node.driver.unlink("run/step_1/notes.txt")
    assert node.driver.state("run/step_1") == "complete" and not node.record("run/step_1").is_persisted
    await node.drain()
    assert not any(gone), "the step was committed all the time"
    assert list(manifest_of(store, "run/step_1")["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert left_over(store) == []


async def test_what_a_commit_left_when_its_daemon_died_goes_with_the_next(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    await node.drain()
    store.put("run/step_1/notes.txt", b"left")
    node.persister.owe(node.record("run/step_1"), "demand")
    node.record("run/step_1").manifest.owed = "demand"
    await node.drain()
    assert left_over(store) == []


async def test_a_step_is_tried_again_once_what_was_wrong_with_it_is_gone(
    node: Node, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting_off, "LONGEST_PAUSE_S", 1e6)
    await node.driver.save("run/step_1", 1)
    await node.driver.write("run/step_1/\udcff", b"no name for an object")
    async with node.running():
        await until(node.persister.problems, "it says what is wrong")
        await node.driver.unlink("run/step_1/\udcff")
        with trio.fail_after(10):
            await node.persister.drain()
    assert listed(store) == ["run/step_1"]


async def test_a_new_generation_withdraws_the_old_one_first(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    await node.drain()
    await node.driver.save("run/step_1", 2, {"__0_0.distcp": 100})
    assert not node.record("run/step_1").is_persisted
    await node.drain()
    assert listed(store) == ["run/step_1"]
    assert left_over(store) == []
    assert store.objects["run/step_1/__0_0.distcp"].data == content(2, "__0_0.distcp", 100)


async def test_a_removed_step_goes_from_the_object_tier_and_its_name_is_free_again(
    node: Node, store: MemoryStore
) -> None:
    await node.driver.save("run/step_1", 1)
    await node.drain()
    await node.driver.rmtree("run/step_1")
    await node.driver.save("run/step_1", 2)
    node.restart()
    assert node.deletions.owed() == [("run", "step_1")]
    await node.drain()
    assert listed(store) == ["run/step_1"]
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[2 ")
    await node.driver.rmtree("run/step_1")
    await node.drain()
    assert store.keys() == [] and store.uploads == {}


async def test_a_protected_namespace_keeps_what_is_removed(tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store, config=settings(protected=True))
    await node.driver.save("run/step_1", 1)
    await node.drain()
    await node.driver.rmtree("run/step_1")
    await node.drain()
    assert listed(store) == ["run/step_1"]
    await node.driver.save("run/step_1", 2)  # newer than what is there, though it is the first of its name here
    await node.drain()
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[2 ")


async def test_a_renamed_step_is_persisted_under_its_new_name_only(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    await node.drain()
    node.driver.mkdirs("best")
    await node.driver.rename("run/step_1", "best/step_1")
    await node.drain()
    assert listed(store) == ["best/step_1"]
    assert left_over(store) == []


async def test_a_persisted_step_that_is_renamed_again_and_again_is_there_all_the_time(
    node: Node, store: MemoryStore
) -> None:
    for number in (1, 2):
        await node.driver.save(f"run/step_{number}", number)
    await node.drain()
    fewest: list[int] = []

    def watch() -> None:
        check_listed(store)
        seeds = {manifest_of(store, step)["files"]["__0_0.distcp"]["checksum"] for step in listed(store)}
        fewest.append(len(seeds))

    store.watch = watch
    await node.driver.rename("run/step_2", "run/step_3")
    await node.driver.rename("run/step_1", "run/step_2")  # whose old object has to go first
    await node.driver.rename("run/step_3", "run/step_4")
    node.restart()
    await node.index.refresh()
    assert sorted(node.registry.records) == [("run", "step_2"), ("run", "step_4")], "old names do not come back"
    await node.drain()
    assert listed(store) == ["run/step_2", "run/step_4"]
    assert left_over(store) == []
    assert min(fewest) == 2, "neither was without a copy at any moment"


async def test_persisted_steps_that_change_places_are_persisted_so(node: Node, store: MemoryStore) -> None:
    for number in (1, 2):
        await node.driver.save(f"run/step_{number}", number)
    await node.drain()
    await node.driver.rename("run/step_1", "run/step_2", exchange=True)
    await node.drain()
    assert listed(store) == ["run/step_1", "run/step_2"]
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[2 ")
    assert store.objects["run/step_2/__0_0.distcp"].data.startswith(b"[1 ")


async def test_retention_keeps_the_newest_and_every_so_many(tmp_path: Path, store: MemoryStore) -> None:
    config = settings()
    config.retention = RetentionSettings(object_steps=2, object_every=3)
    node = memory_node(tmp_path, store, config=config)
    for number in range(1, 8):
        await node.driver.save(f"run/step_{number}", number)
        if number == 2:
            node.record("run/step_2").manifest.pinned = True
        await node.drain()
    assert listed(store) == ["run/step_2", "run/step_3", "run/step_6", "run/step_7"]
    assert left_over(store) == []
    await node.index.refresh()
    await node.drain()
    assert listed(store) == ["run/step_2", "run/step_3", "run/step_6", "run/step_7"], "and they do not come back"


async def test_damage_in_ram_is_not_committed(node: Node, store: MemoryStore) -> None:
    await node.driver.save("run/step_1", 1)
    async with node.driver.running():
        record = node.record("run/step_1")
        await until(lambda: all(entry.checksum for entry in record.manifest.files.values()), "all are summed up")
    path = node.driver.root / "run/step_1/__0_0.distcp"
    before = path.stat()
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"X", 0)
    os.close(fd)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    async with node.running():
        await until(lambda: node.persister.problems(), "the damage is told")
    assert "damaged in RAM" in node.persister.problems()[0]["message"]
    assert node.persister.problems()[0]["severity"] == "error"
    assert listed(store) == []


async def test_what_fails_is_put_off_and_told_once(node: Node, store: MemoryStore) -> None:
    client = node.client
    assert isinstance(client, MemoryClient)

    def deny(when: str, what: str, key: str) -> None:
        raise ObjectDenied("access denied: s3:PutObject")

    client.fault = deny
    for number in (1, 2, 3):
        await node.driver.save(f"run/step_{number}", number)
    async with node.running():
        await until(lambda: len(node.persister.put_off) == 3, "all were tried")
        problems = node.persister.problems()
        assert len(problems) == 1 and "3 steps wait" in problems[0]["message"] and "s3:PutObject" in str(problems)
        progress = node.persister.progress(node.record("run/step_1"))
        assert progress is not None and (progress.state, progress.bytes_sent) in (("waiting", 0), ("sending", 0))
        assert node.persister.bytes_owed() == sum(
            node.record(f"run/step_{number}").manifest.bytes for number in (1, 2, 3)
        )
        client.fault = lambda when, what, key: None
        with trio.fail_after(5):
            await node.persister.drain()
    assert listed(store) == ["run/step_1", "run/step_2", "run/step_3"]
    assert node.persister.problems() == []


async def test_a_namespace_that_is_denied_does_not_hold_up_others(node: Node, store: MemoryStore) -> None:
    client = node.client
    assert isinstance(client, MemoryClient)

    def deny(when: str, what: str, key: str) -> None:
        if key.startswith("a/"):
            raise ObjectDenied("access denied")

    client.fault = deny
    for number in range(1, 6):
        await node.driver.save(f"a/step_{number}", number)
    await node.driver.save("b/step_1", 1)
    async with node.running():
        await until(lambda: node.record("b/step_1").is_persisted, "the other namespace goes on")


async def test_steps_are_committed_in_order_and_those_asked_for_first(tmp_path: Path, store: MemoryStore) -> None:
    node = memory_node(tmp_path, store)
    for number in range(1, 6):
        await node.driver.save(f"run/step_{number}", number)
    node.persister.owe(node.record("run/step_4"), "demand")
    order: list[str] = []

    def note(when: str, what: str, key: str) -> None:
        if (when, what) == ("after", "put") and key.endswith("manifest.json"):
            order.append(key.split("/")[1])

    client = node.client
    assert isinstance(client, MemoryClient)
    client.fault = note
    await node.drain()
    assert order == ["step_4", "step_1", "step_2", "step_3", "step_5"]


async def test_a_step_that_changes_while_it_is_sent_is_sent_as_it_is_then(node: Node, store: MemoryStore) -> None:
    client = node.client
    assert isinstance(client, MemoryClient)
    await node.driver.save("run/step_1", 1)
    async with node.running():
        began = trio.Event()
        client.fault = lambda when, what, key: began.set() if what == "upload" else None
        with trio.fail_after(5):
            await began.wait()
            await node.driver.save("run/step_1", 2)
            await node.persister.drain()
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[2 ")
    assert left_over(store) == []


async def test_a_step_removed_while_it_is_sent_leaves_nothing(node: Node, store: MemoryStore) -> None:
    client = node.client
    assert isinstance(client, MemoryClient)
    await node.driver.save("run/step_1", 1)
    async with node.running():
        began = trio.Event()
        client.fault = lambda when, what, key: began.set() if what in ("upload", "part") else None
        with trio.fail_after(5):
            await began.wait()
            await node.driver.rmtree("run/step_1")
            await node.persister.drain()
    assert store.keys() == [] and store.uploads == {}


async def test_two_nodes_with_the_same_step_make_one_commit_and_no_duplicates(
    tmp_path: Path, store: MemoryStore
) -> None:
    nodes = [memory_node(tmp_path, store, name) for name in ("n1", "n2")]
    for node in nodes:
        await node.driver.save("run/step_1", 1)
    commits: list[str] = []
    for node in nodes:
        assert isinstance(node.client, MemoryClient)
        node.client.fault = lambda when, what, key: (
            commits.append(key) if (when, what) == ("after", "put") and key.endswith("manifest.json") else None
        )
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(node.drain)
    assert all(node.record("run/step_1").is_persisted for node in nodes)
    assert len(commits) == 1
    check_listed(store)
    assert left_over(store) == []
    data = [key for node in nodes for key in node.client.sent]  # type: ignore[attr-defined]
    # Whoever comes when the other has just looked sends too; what is there already nobody sends.
    assert max(Counter(data).values()) <= len(nodes), "a node sent a part twice"


async def test_the_newer_of_two_saves_wins(tmp_path: Path, store: MemoryStore) -> None:
    older, newer = (memory_node(tmp_path, store, name) for name in ("n1", "n2"))
    await older.driver.save("run/step_1", 1)
    await newer.driver.save("run/step_1", 2)
    await newer.drain()
    await older.drain()
    assert store.objects["run/step_1/__0_0.distcp"].data.startswith(b"[2 ")
    assert not older.record("run/step_1").is_persisted
    assert "older than what another node committed" in older.registry.problems[0]["message"]


async def test_an_answer_that_was_lost_is_found_to_be_our_own_commit(node: Node, store: MemoryStore) -> None:
    client = node.client
    assert isinstance(client, MemoryClient)
    lost: list[str] = []

    def lose(when: str, what: str, key: str) -> None:
        if (when, what) == ("after", "put") and key.endswith("manifest.json") and not lost:
            lost.append(key)
            raise ObjectUnavailable("connection reset")

    client.fault = lose
    await node.driver.save("run/step_1", 1)
    await node.drain()
    assert lost and listed(store) == ["run/step_1"]
    assert max(client.sent.values()) == 1


async def test_a_file_in_the_bucket_that_is_no_part_of_the_step_goes_with_the_commit(
    node: Node, store: MemoryStore
) -> None:
    store.put("run/step_1/left/over", b"x")
    store.put("run/step_10/keep", b"x")
    await node.driver.save("run/step_1", 1)
    await node.drain()
    assert "run/step_1/left/over" not in store.objects
    assert "run/step_10/keep" in store.objects


async def test_an_endpoint_without_conditional_writes_is_said_once(tmp_path: Path) -> None:
    store = MemoryStore(honours_conditions=False)
    node = memory_node(tmp_path, store)
    await node.driver.save("run/step_1", 1)
    await node.drain()
    assert listed(store) == ["run/step_1"]
    assert ["only one node" in problem["message"] for problem in node.persister.problems()] == [True]


async def test_thousands_of_small_files_take_seconds(tmp_path: Path) -> None:
    node = memory_node(tmp_path, MemoryStore())
    files = {f"__{rank}_0.distcp": 1024 for rank in range(2000)}
    await node.driver.save("run/step_1", 1, files)
    with trio.fail_after(15):
        await node.drain()
    assert node.record("run/step_1").is_persisted
