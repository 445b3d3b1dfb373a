"""Following: directories, plain files, links, removals and renames of other nodes are made here, and nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.unit.cluster_nodes import Node, names_in
from tests.unit.step_driver import MARKER, content, until
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer
from tierfs.catalog.records import FileRecord, Operation, TreeRecord, to_bytes
from tierfs.catalog.store import Delete
from tierfs.cluster.local_files import read_joined
from tierfs.cluster.making import version_at

STEP = "run/step_1"
SHARD = "__0_0.distcp"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, Node]]:
    server, nodes = MemoryServer(), {}
    for name in ("a", "c"):
        nodes[name] = Node(name, tmp_path / name, server, nodes)
    yield nodes


def write(node: Node, rel: str, data: bytes) -> None:
    """As a program does: the version goes when the file is opened for writing."""
    path = node.root / rel
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        node.copies.withdraw(path.lstat().st_ino, path)
    path.write_bytes(data)


async def test_directories_files_and_links_appear_change_and_go(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory("run/logs", mode=0o750, mtime_ns=10**18)
        write(a, "run/tracker.txt", b"1")
        write(a, "run/large.bin", b"x" * 100_000)
        await a.publish_plain("run/tracker.txt")
        large = await a.publish_plain("run/large.bin")
        await a.publish_link("run/best", "step_1")
        await c.caught_up()
        info = (c.root / "run/logs").stat()
        assert (info.st_mode & 0o777, info.st_mtime_ns) == (0o750, 10**18)
        assert (c.root / "run/tracker.txt").read_bytes() == b"1"
        mark = version_at(c.root / "run/large.bin")[1]
        assert mark is not None and (mark.version, mark.size_bytes) == (large.version, 100_000)
        assert (c.root / "run/best").readlink() == Path("step_1")

        with (c.root / "run/tracker.txt").open("rb") as opened:
            write(a, "run/tracker.txt", b"22")
            await a.publish_plain("run/tracker.txt")
            await a.publish_link("run/best", "step_2")
            await a.publish_directory("run/logs", mode=0o700)
            await c.caught_up()
            assert opened.read() == b"1" and (c.root / "run/tracker.txt").read_bytes() == b"22"
            assert os.fstat(opened.fileno()).st_ino in c.replaced and ("run", "tracker.txt") in c.driver.told
        assert (c.root / "run/best").readlink() == Path("step_2")
        assert (c.root / "run/logs").stat().st_mode & 0o777 == 0o700

        for rel in ("run/tracker.txt", "run/large.bin", "run/best", "run/logs", "run"):
            await a.store.delete(keys.tree_key(rel))
        await c.caught_up()
        assert os.listdir(c.root) == []


async def test_what_is_not_published_yet_is_left_alone(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory("run")
        write(a, "run/file", b"theirs")
        await a.publish_plain("run/file")
        await c.caught_up()
        write(c, "run/file", b"written here since")
        write(c, "run/new", b"made here")
        write(a, "run/file", b"theirs again")
        await a.publish_plain("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"written here since"
        for rel in ("run/file", "run"):
            await a.store.delete(keys.tree_key(rel))
        await c.caught_up()
        assert names_in(c.root) == {"run/file", "run/new"}
        await until(lambda: "not empty" in str(c.following.problems()), "what can't be done is told")
        # Once it is published, what others make of it counts.
        (c.root / "run/new").unlink()
        await c.publish_directory("run")
        await c.publish_plain("run/file")
        await c.caught_up()
        write(a, "run/file", b"the last word")
        await a.publish_plain("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"the last word"


async def test_no_earlier_version_of_a_removed_file_stays(
    cluster: dict[str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        write(a, "run/file", b"1")
        await a.publish_directory("run")
        await a.publish_plain("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"1"
        asked, fetch = trio.Event(), c.peers.fetch

        async def until_it_is_removed(node: str, version: str, *, most_bytes: int) -> bytes:
            asked.set()
            await c.view.until(lambda: "run/file" not in c.view.tree, within_s=5)
            return await fetch(node, version, most_bytes=most_bytes)

        monkeypatch.setattr(c.peers, "fetch", until_it_is_removed)
        write(a, "run/file", b"22")
        await a.publish_plain("run/file")
        with trio.fail_after(5):
            await asked.wait()
        await a.store.delete(keys.tree_key("run/file"))
        await c.caught_up()
        assert names_in(c.root) == set()


async def test_what_is_on_its_way_to_the_catalogue_is_not_replaced(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        for node, data in ((c, b"mine"), (a, b"theirs")):
            write(node, "run/file", data)
        await c.publish_directory("run")
        await c.publish_plain("run/file")
        await c.caught_up()
        c.showing.is_being_told = lambda rel: True
        await a.publish_plain("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"mine"
        c.showing.is_being_told = lambda rel: False
        c.showing.is_behind = lambda rel, revision: True  # published since, and the news of it are still to come
        c.following.path_overruled("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"mine"
        c.showing.is_behind = lambda rel, revision: False
        c.following.path_overruled("run/file")
        await c.caught_up()
        assert (c.root / "run/file").read_bytes() == b"theirs"


async def test_what_was_removed_while_this_node_was_away_goes_too(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        revision = await a.publish_directory("run")
        write(a, "run/file", b"theirs")
        await a.publish_plain("run/file")
        await a.publish_directory(STEP)
        await c.caught_up()
        assert read_joined(c.root / "run") == revision and read_joined(c.root / "run/file") > revision
        write(c, "run/own", b"made here")
        assert read_joined(c.root / "run/own") == 0
    c.restart()
    await a.store.delete(keys.TREE, is_prefix=True)
    async with c.running():
        await c.caught_up()
        for rel in ("run/file", "run"):
            c.following.path_deleted(rel)
        c.following.step_deleted(c.driver.record(STEP))
        await c.caught_up()
        assert names_in(c.root) == {"run/own"} and not (c.root / STEP).exists() and not c.registry.records


async def test_nothing_outside_of_the_tree_is_touched(cluster: dict[str, Node], tmp_path: Path) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    async with c.running():
        await a.publish_directory("run")
        await a.publish_link("run/way", str(outside))
        (c.root / "file").write_bytes(b"a program's")
        await c.caught_up()
        write(a, "elsewhere", b"bytes")
        file = a.file("elsewhere")
        record = to_bytes(TreeRecord("file", "a", file=file))
        for rel in ("run/way/made", "run/way/precious", "file/below"):
            await a.store.put(keys.tree_key(rel), record)
        await a.store.put(keys.tree_key("run/way/directory"), to_bytes(TreeRecord("dir", "a")))
        await a.operate(Operation("rename", "a", "run/way/precious", "run/stolen"))
        await a.operate(Operation("unlink", "a", "run/way/precious", version=file.version))
        await a.store.delete(keys.tree_key("run/way/precious"))
        await a.publish_directory("after")
        await c.caught_up()
        assert os.listdir(outside) == ["precious"] and (c.root / "file").read_bytes() == b"a program's"
        assert (c.root / "after").is_dir() and not (c.root / "run/stolen").exists()
        await until(c.following.problems, "what can't be done is told")


async def test_a_step_that_another_node_removed_goes_but_not_one_made_since(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        revision = await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000}, 1)
        a.driver.record(STEP).manifest.joined = revision
        await a.commit(STEP, {SHARD: 100_000}, [SHARD], 1, 1)
        await c.caught_up()
        await c.showing.show_listing(STEP)
        assert c.driver.record(STEP).manifest.joined == revision and c.driver.latest() == "step_1"
        shelved = c.copies.place(("run", "step_1"), "a/00")
        shelved.write_bytes(b"x")
        await a.delete_step(STEP)
        await c.caught_up()
        assert not (c.root / STEP).exists() and not c.registry.records and not shelved.exists()

        # A program of this node makes it again before the news of another removal arrives.
        again = await a.publish_directory(STEP)
        await c.caught_up()
        c.driver.record(STEP).manifest.joined = again + 1000
        await a.delete_step(STEP)
        await c.caught_up()
        assert (c.root / STEP).is_dir()


async def test_a_step_that_was_deleted_and_made_again_is_another_one(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    await a.publish_directory(STEP)
    await a.write(STEP, {SHARD: 100_000}, 1)
    await a.commit(STEP, {SHARD: 100_000}, [SHARD], 1, 1)
    async with c.running():
        await c.caught_up()
        await c.showing.show_listing(STEP)
    c.restart()
    await a.delete_step(STEP)
    revision = await a.publish_directory(STEP)
    async with c.running():
        await c.caught_up()
        record = c.driver.record(STEP)
        assert record.manifest.joined == revision and record.manifest.state == "writing"
        assert names_in(c.root / STEP) == set()


async def test_a_rename_is_made_here_too_with_what_is_here(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000, "config.json": 10}, 1)
        await a.commit(STEP, {SHARD: 100_000}, [SHARD, "config.json"], 1, 1)
        await c.caught_up()
        await c.showing.show_listing(STEP)
        inode = (c.root / STEP / SHARD).lstat().st_ino
        version = a.file(f"{STEP}/{SHARD}").version
        shelved = c.copies.place(("run", "step_1"), "a/00")
        shelved.write_bytes(b"x")

        await a.operate(Operation("rename", "a", "run/step_1", "kept/step_1"))
        a.driver.mkdirs("kept")
        (a.root / STEP).rename(a.root / "kept/step_1")
        await a.publish_directory("kept")
        made = await a.publish_directory("kept/step_1")
        await a.publish_part("kept/step_1", [SHARD, "config.json", MARKER])
        await a.publish_state("kept/step_1")
        await a.delete_step(STEP)
        await c.caught_up()
        assert not (c.root / STEP).exists() and (c.root / "kept/step_1" / SHARD).lstat().st_ino == inode
        record = c.driver.record("kept/step_1")
        assert record.is_complete and record.manifest.joined == made and c.driver.latest("kept") == "step_1"
        found, mark = version_at(c.root / "kept/step_1" / SHARD)
        assert found == version and mark is not None and (mark.namespace, mark.step) == ("kept", "step_1")
        part = c.table.get(inode)
        assert part is not None and part.mark == mark
        assert (c.path_of_shelf("kept", "step_1") / "a.00").exists()

        # Its old name is free for another one, which a new daemon does not take for the one that was renamed.
        await a.publish_directory(STEP)
        await c.caught_up()
    c.restart()
    async with c.running():
        await c.caught_up()
        assert (c.root / STEP).is_dir() and (c.root / "kept/step_1" / SHARD).exists()


async def test_a_file_is_unlinked_only_as_it_was(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000, "__1_0.distcp": 100}, 1)
        await a.publish_part(STEP, [SHARD, "__1_0.distcp"])
        await c.caught_up()
        await c.showing.show_listing(STEP)
        version = a.file(f"{STEP}/{SHARD}").version
        await a.operate(Operation("unlink", "a", f"{STEP}/{SHARD}", version=version))
        await a.operate(Operation("unlink", "a", f"{STEP}/__1_0.distcp", version="a/00"))
        await c.caught_up()
        assert names_in(c.root / STEP) == {"__1_0.distcp"}
        assert set(c.driver.record(STEP).manifest.files) == {"__1_0.distcp"}


async def test_a_directory_inside_of_a_step_goes_with_the_files_of_others(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(f"{STEP}/model")
        a.driver.mkdirs(f"{STEP}/model")
        await a.write(STEP, {"model/shard.pt": 100_000}, 1)
        await a.publish_part(STEP, ["model/shard.pt"])
        await c.caught_up()
        await c.showing.show_listing(f"{STEP}/model")
        assert names_in(c.root / STEP) == {"model/shard.pt"}
        await a.publish_part(STEP, [])
        await a.store.delete(keys.tree_key(f"{STEP}/model"))
        await c.caught_up()
        assert os.listdir(c.root / STEP) == [] and not c.driver.record(STEP).manifest.files


async def test_what_fails_is_logged_tried_again_and_holds_up_nothing(
    cluster: dict[str, Node], caplog: pytest.LogCaptureFixture
) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    (c.root / "run").write_bytes(b"a file in the way")
    async with c.running():
        with caplog.at_level(logging.ERROR, "tierfs.cluster"):
            await a.publish_directory(STEP)
            await a.publish_directory("other")
            await c.caught_up()
        assert (c.root / "other").is_dir() and not (c.root / STEP).exists()
        with caplog.at_level(logging.ERROR, "tierfs.cluster"):
            await until(c.following.problems, "what can't be done is told")
        assert any(getattr(entry, "file", "") == "run" for entry in caplog.records)
        (c.root / "run").unlink()
        await until(lambda: (c.root / STEP).is_dir(), "it was tried again")
        await until(lambda: not c.following.problems(), "nothing is left to do")


async def test_operations_of_before_are_not_made_again(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    await a.operate(Operation("rename", "a", "old", "new"))
    (c.root / "old").mkdir()
    async with c.running():
        await c.caught_up()
        assert (c.root / "old").is_dir()  # this node was no member then
        await a.operate(Operation("rename", "a", "old", "new"))
        await c.caught_up()
        assert (c.root / "new").is_dir()
        (c.root / "old").mkdir()
    c.restart()
    async with c.running():
        await c.caught_up()
        assert (c.root / "old").is_dir()


async def test_a_renamed_name_that_is_looked_for_waits_for_the_rename(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000}, 1)
        await c.caught_up()
        (c.root / STEP / "own.pt").write_bytes(b"mine")
        await a.operate(Operation("rename", "a", "run", "moved"))
        await a.publish_directory("moved/step_1")
        await c.showing.show("moved/step_1")
        assert names_in(c.root / "moved") == {"step_1/own.pt"}


async def test_a_rename_of_this_node_is_not_taken_for_a_removal(cluster: dict[str, Node]) -> None:
    """The catalogue has the new name before the tree does."""
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000}, 1)
        await a.commit(STEP, {SHARD: 100_000}, [SHARD], 1, 1)
        await c.caught_up()
        await c.showing.show_listing(STEP)
        inode = (c.root / STEP / SHARD).lstat().st_ino
        c.showing.is_moving_here = lambda rel: rel in (STEP, "run/step_9")
        (a.root / STEP).rename(a.root / "run/step_9")
        await c.operate(Operation("rename", "c", STEP, "run/step_9"))
        await a.publish_directory("run/step_9")
        await a.publish_state("run/step_9")
        await a.delete_step(STEP)
        await c.caught_up()
        await c.showing.show("run/step_9")
        assert (c.root / STEP / SHARD).lstat().st_ino == inode and not (c.root / "run/step_9").exists()
        await c.driver.rename(STEP, "run/step_9")
        c.showing.is_moving_here = lambda rel: False
        await until(lambda: not c.following.problems() and c.following.is_idle, "it is as the catalogue has it")
        assert (c.root / "run/step_9" / SHARD).lstat().st_ino == inode and not (c.root / STEP).exists()
        assert c.driver.record("run/step_9").is_complete


async def test_a_programs_own_latest_takes_the_place_of_ours(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    async with c.running():
        await a.publish_directory(STEP)
        await a.write(STEP, {SHARD: 100_000}, 1)
        await a.commit(STEP, {SHARD: 100_000}, [SHARD], 1, 1)
        await c.caught_up()
        assert c.driver.latest() == "step_1"
        write(a, "run/latest", content(1, "latest", 20))
        await a.publish_plain("run/latest")
        await c.caught_up()
        assert (c.root / "run/latest").read_bytes() == content(1, "latest", 20)
        await a.store.delete(keys.tree_key("run/latest"))
        await c.caught_up()
        assert c.driver.latest() == "step_1"


async def test_names_that_no_path_can_have_are_refused(cluster: dict[str, Node]) -> None:
    c = cluster["c"]
    file = FileRecord(5, 0, 0o644, 0, 0, "a/00")
    async with c.running():
        for path in ("../x", "a/../../x", "/x", "a//b", "./x", "x" * 300):
            await c.store.put(keys.TREE + path, to_bytes(TreeRecord("file", "a", file=file)))
        await c.store.put(keys.TREE + "fine", to_bytes(TreeRecord("dir", "a")))
        with trio.fail_after(5):
            await c.caught_up()
        assert os.listdir(c.root) == ["fine"]
        await c.store.txn([], [Delete(keys.TREE, is_prefix=True)])
        await c.caught_up()
        assert os.listdir(c.root) == []
