"""Showing and taking: a node sees what others wrote, whole generations only, and keeps what is its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.unit.cluster_nodes import Node, names_in
from tests.unit.step_driver import MARKER, content
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer
from tierfs.catalog.records import Part, StepState, TreeRecord, from_bytes, to_bytes
from tierfs.cluster.making import version_at
from tierfs.cluster.versions import write_version
from tierfs.errors import PathRefused

STEP = "run/step_1"
KEY = ("run", "step_1")
A, B = "__0_0.distcp", "__1_0.distcp"
BOTH = {A: 100_000, B: 200_000}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, Node]]:
    server, nodes = MemoryServer(), {}
    for name in ("a", "b", "c"):
        nodes[name] = Node(name, tmp_path / name, server, nodes)
    yield nodes


async def saved(cluster: dict[str, Node], seed: int = 1, generation: int = 1) -> None:
    """a and b wrote a shard each, and a committed; c saw nothing of it yet."""
    a, b = cluster["a"], cluster["b"]
    for node in cluster.values():
        await node.join()
    if generation == 1:
        revision = await a.publish_directory(STEP)
    await a.write(STEP, {A: BOTH[A]}, seed)
    await b.write(STEP, {B: BOTH[B]}, seed)
    if generation == 1:
        for node in (a, b):
            node.driver.record(STEP).manifest.joined = revision
    await b.publish_part(STEP, [B], generation)
    await a.commit(STEP, BOTH, [A], seed, generation)


async def test_a_step_that_is_written_shows_without_its_marker(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    await a.publish_directory(STEP)
    await a.write(STEP, {A: BOTH[A], "config.json": 50}, 1)
    (a.root / STEP / MARKER).write_bytes(b"not yet")
    await a.publish_part(STEP, [A, "config.json", MARKER])
    async with c.running():
        assert c.showing.may_have(f"{STEP}/{A}")
        await c.showing.show(f"{STEP}/{A}")
        assert names_in(c.root / STEP) == {A}
        mark = version_at(c.root / STEP / A)[1]
        assert mark is not None and (mark.namespace, mark.step, mark.file, mark.size_bytes) == (*KEY, A, BOTH[A])
        assert (c.root / STEP / A).lstat().st_ino in c.table
        await c.showing.show_listing(STEP)
        assert names_in(c.root / STEP) == {A, "config.json"}
        assert (c.root / STEP / "config.json").read_bytes() == content(1, "config.json", 50)
        record = c.driver.record(STEP)
        assert record.manifest.state == "writing" and record.manifest.files[A].sealed and record.manifest.joined > 0
        # Given up again by its node: it goes here too, at the next look.
        await a.publish_part(STEP, [A])
        await c.showing.show_listing(STEP)
        assert names_in(c.root / STEP) == {A}
        assert c.following.problems() == []


async def test_a_step_that_another_node_committed_is_complete_at_once(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    async with c.running():
        await c.caught_up()
        record = c.driver.record(STEP)
        assert record.is_complete and not record.manifest.populated and record.manifest.bytes == 8000
        assert names_in(c.root / STEP) == {MARKER} and c.driver.latest() == "step_1"
        await c.showing.show_listing(STEP)
        assert record.manifest.populated and set(record.manifest.files) == {A, B, MARKER}
        assert record.manifest.bytes == sum(BOTH.values()) + record.manifest.files[MARKER].size_bytes
        assert (c.root / STEP / MARKER).read_bytes() == (cluster["a"].root / STEP / MARKER).read_bytes()
        assert version_at(c.root / STEP / B)[0].startswith("b/")
    c.restart()
    assert c.driver.record(STEP).is_complete
    async with c.running():
        await c.caught_up()
        assert c.driver.record(STEP).is_complete and c.driver.latest() == "step_1"


async def test_a_replica_on_the_shelf_gets_its_name(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    b, c = cluster["b"], cluster["c"]
    file = b.file(f"{STEP}/{B}")
    place = c.copies.place(KEY, file.version)
    place.write_bytes((b.root / STEP / B).read_bytes())
    write_version(place, file.version)
    c.copies.shelved(KEY, file.version, place)
    async with c.running():
        await c.caught_up()
        await c.showing.show_listing(STEP)
        shown = c.root / STEP / B
        assert shown.read_bytes() == content(1, B, BOTH[B]) and not place.exists()
        assert c.copies.path(file.version) == shown and shown.lstat().st_ino not in c.table
        assert shown.stat().st_mtime_ns == file.mtime_ns and shown.stat().st_mode & 0o777 == 0o640


async def test_the_bytes_of_small_files_are_verified_and_had_from_another_holder(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    c.peers.lying.add("a")
    a = cluster["a"]
    path = a.root / STEP / MARKER
    version = a.copies.seal(path, path.lstat().st_ino)
    copy = cluster["b"].copies.place(KEY, version)
    copy.write_bytes(path.read_bytes())
    write_version(copy, version)
    cluster["b"].copies.shelved(KEY, version, copy)
    await _with_checksum(a, version)
    async with c.running():
        await c.caught_up()
        assert (c.root / STEP / MARKER).read_bytes() == path.read_bytes()
        assert {node for node, _ in c.peers.fetched} == {"a", "b"}


async def _with_checksum(a: Node, version: str) -> None:
    """The state again, with the marker's checksum."""
    found = await a.store.get(keys.state_key(*KEY))
    assert found is not None
    state = from_bytes(StepState, found.value)
    assert state.marker_file is not None
    summed = await a.copies.checksum(version)
    state = replace(state, marker_file=replace(state.marker_file, checksum=summed.text))
    await a.store.put(keys.state_key(*KEY), to_bytes(state))


async def test_a_small_file_that_nobody_sends_becomes_a_stub(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    c.peers.down |= {"a", "b"}
    async with c.running():
        await c.caught_up()
        assert version_at(c.root / STEP / MARKER)[1] is not None


async def test_another_nodes_new_generation_takes_the_old_ones_place(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    async with c.running():
        await c.caught_up()
        await c.showing.show_listing(STEP)
        old_marker = (c.root / STEP / MARKER).read_bytes()
        with (c.root / STEP / MARKER).open("rb") as opened:
            inode = (c.root / STEP / A).lstat().st_ino
            await saved(cluster, seed=2, generation=2)
            await c.caught_up()
            record = c.driver.record(STEP)
            assert record.is_complete and record.manifest.generation == 2
            assert opened.read() == old_marker  # who has the old one open keeps it
        assert (c.root / STEP / MARKER).read_bytes() == (cluster["a"].root / STEP / MARKER).read_bytes() != old_marker
        assert inode in c.replaced and ("run", "step_1") in c.driver.told
        assert names_in(c.root / STEP) == {A, B, MARKER} and set(record.manifest.files) == {A, B, MARKER}
        assert not c.driver.old_generations()
    c.restart()
    assert c.driver.record(STEP).is_complete


async def test_a_new_generation_of_a_step_that_nobody_looked_into(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    async with c.running():
        await c.caught_up()
        await saved(cluster, seed=2, generation=2)
        await c.caught_up()
        record = c.driver.record(STEP)
        assert record.is_complete and record.manifest.generation == 2 and not record.manifest.populated
        assert names_in(c.root / STEP) == {MARKER}
        assert (c.root / STEP / MARKER).read_bytes() == (cluster["a"].root / STEP / MARKER).read_bytes()
        await c.showing.show(f"{STEP}/{B}")
        assert version_at(c.root / STEP / B)[0] == version_at(cluster["b"].root / STEP / B)[0]


async def test_additions_show_and_take_the_place_of_earlier_ones(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    a, c = cluster["a"], cluster["c"]
    async with c.running():
        await c.caught_up()
        await c.showing.show_listing(STEP)
        for text in (b"one", b"another"):
            path = a.root / STEP / "meta.pt"
            path.unlink(missing_ok=True)
            path.write_bytes(text)
            await a.publish_part(STEP, ["meta.pt"], added=True)
            await c.showing.show_listing(STEP)
            assert (c.root / STEP / "meta.pt").read_bytes() == text
        assert c.driver.record(STEP).is_complete


async def test_a_node_that_writes_too_keeps_its_own_files_and_gets_the_others(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    b = cluster["b"]
    inode = (b.root / STEP / B).lstat().st_ino
    (b.root / STEP / "left over.pt").write_bytes(b"x")
    b.driver.record(STEP).manifest.files = b.driver.record(STEP).scan()
    async with b.running():
        await b.caught_up()
        record = b.driver.record(STEP)
        assert record.is_complete and (b.root / STEP / B).lstat().st_ino == inode
        assert names_in(b.root / STEP) == {A, B, MARKER, "left over.pt"}
        assert record.manifest.added == {"left over.pt"} and record.manifest.marker == MARKER
        # b takes part in the next generation, and writes its shard again.
        await b.driver.write(f"{STEP}/{B}", content(2, B, BOTH[B]))
        assert b.driver.state(STEP) == "writing" and b.driver.latest() is not None
        await saved(cluster, seed=2, generation=2)
        await b.caught_up()
        record = b.driver.record(STEP)
        assert record.is_complete and record.manifest.generation == 2 and not b.driver.old_generations()
        assert (b.root / STEP / B).read_bytes() == content(2, B, BOTH[B])
        assert version_at(b.root / STEP / A)[0] == version_at(cluster["a"].root / STEP / A)[0]
        assert (b.root / STEP / MARKER).read_bytes() == (cluster["a"].root / STEP / MARKER).read_bytes()


async def test_of_two_commits_of_one_generation_the_catalogues_counts(cluster: dict[str, Node]) -> None:
    """This node completed the step while the catalogue was away, and others did so too."""
    await saved(cluster)
    c = cluster["c"]
    own = {A: 70_000, "__2_0.distcp": 80_000}
    await c.write(STEP, own, 9)
    await c.driver.finish(STEP, 9, own)
    record = c.driver.record(STEP)
    assert record.is_complete and record.manifest.generation == 1
    record.manifest.joined = (cluster["a"].driver.record(STEP)).manifest.joined
    async with c.running():
        await c.caught_up()
        assert c.driver.loaded(STEP) == 9  # until who compares both says so
        c.following.step_committed(KEY)
        await c.caught_up()
        assert record.is_complete and names_in(c.root / STEP) == {A, B, MARKER}
        for inner in (A, B, MARKER):
            author = cluster["b" if inner == B else "a"]
            assert version_at(c.root / STEP / inner)[0] == version_at(author.root / STEP / inner)[0]
        inodes = {path.name: path.lstat().st_ino for path in (c.root / STEP).iterdir()}
        c.following.step_committed(KEY)
        await c.caught_up()
        assert inodes == {path.name: path.lstat().st_ino for path in (c.root / STEP).iterdir()}


@pytest.mark.parametrize("point", ["take:recorded", "take:removed", "show:made", "take:in-place", "take:saved"])
async def test_a_daemon_that_dies_on_the_way_begins_again(cluster: dict[str, Node], point: str) -> None:
    await _crash_at(cluster["b"] if point not in ("take:recorded",) else cluster["c"], cluster, point, generation=1)


@pytest.mark.parametrize("point", ["swap:built", "swap:exchanged", "take:saved"])
async def test_a_daemon_that_dies_during_a_swap_begins_again(cluster: dict[str, Node], point: str) -> None:
    await _crash_at(cluster["c"], cluster, point, generation=2)


async def _crash_at(node: Node, cluster: dict[str, Node], point: str, generation: int) -> None:
    died: list[str] = []

    def crash(name: str) -> None:
        if name == point:
            died.append(name)
            raise KeyboardInterrupt

    await saved(cluster)
    if generation == 2:
        async with node.running():
            await node.caught_up()
            await node.showing.show_listing(STEP)
        await saved(cluster, seed=2, generation=2)
    node.registry.crash = crash  # type: ignore[assignment]
    with pytest.raises(BaseException):  # noqa: B017 - alone or in a group
        async with node.running():
            await node.caught_up()
    assert died == [point]
    node.restart()
    async with node.running():
        await node.caught_up()
        await node.showing.show_listing(STEP)
        record = node.driver.record(STEP)
        assert record.is_complete and record.manifest.generation == generation
        assert names_in(node.root / STEP) == {A, B, MARKER}
        for inner in (A, B, MARKER):
            author = cluster["b" if inner == B else "a"]
            assert version_at(node.root / STEP / inner)[0] == version_at(author.root / STEP / inner)[0]


class _NoMixture(trio.abc.Instrument):
    """After each step of any task: where a marker is, all files are of its generation."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.generation_of: dict[str, int] = {}
        self.seen: set[tuple[str, int]] = set()
        self.mixed: list[str] = []

    def after_task_step(self, task: object) -> None:
        for node in self._nodes:
            top = node.root / STEP
            if not (top / MARKER).exists():
                continue
            found = {
                inner: self.generation_of.get(version_at(top / inner)[0], 0)
                for inner in (MARKER, A, B)
                if (top / inner).exists()
            }
            self.seen.add((node.name, found[MARKER]))
            if len(set(found.values())) > 1:
                self.mixed.append(f"{node.name}: {found}")


async def test_at_no_moment_a_marker_stands_beside_files_of_another_generation(cluster: dict[str, Node]) -> None:
    a, b, c = cluster.values()
    watch = _NoMixture([b, c])
    async with b.running(), c.running():
        trio.lowlevel.add_instrument(watch)
        for generation in (1, 2, 3, 4):
            if generation == 3:
                c.peers.down |= {"a", "b"}  # from now on c gets stubs
            await saved(cluster, seed=generation, generation=generation)
            for node, inner in ((a, A), (b, B), (a, MARKER)):
                watch.generation_of[version_at(node.root / STEP / inner)[0]] = generation
            for _ in range(3):
                await c.showing.show(f"{STEP}/{A}")
                await c.showing.show_listing(STEP)
            await b.caught_up()
            await c.caught_up()
        trio.lowlevel.remove_instrument(watch)
    assert watch.mixed == []
    assert {("c", 1), ("c", 2), ("c", 3), ("c", 4), ("b", 4)} <= watch.seen


async def test_a_withdrawn_commit_leaves_the_files_and_takes_the_marker(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    async with c.running():
        await c.caught_up()
        await c.showing.show_listing(STEP)
        await cluster["a"].store.delete(keys.state_key(*KEY))
        await c.caught_up()
        assert c.driver.state(STEP) == "writing" and names_in(c.root / STEP) == {A, B}


async def test_a_part_with_names_that_can_not_be_is_shown_as_far_as_it_can(cluster: dict[str, Node]) -> None:
    a, c = cluster["a"], cluster["c"]
    await a.join()
    await a.publish_directory(STEP)
    await a.write(STEP, {A: 100_000}, 1)
    file = a.file(f"{STEP}/{A}")
    bad = {name: replace(file, version=f"a/{at}") for at, name in enumerate(["both", "both/below", "ok/x"])}
    bad["huge"] = replace(file, version="a/abc", size_bytes=(1 << 63) - 1, mtime_ns=(1 << 64) - 1)
    bad["old"] = replace(file, version="a/abcd", mtime_ns=-(1 << 63), uid=(1 << 32) - 2)
    await a.store.put(keys.part_key(*KEY, 1, "a", 0), to_bytes(Part("a", 1, {A: file, **bad})))
    # No node can have written such a name: the whole of it is left out.
    await a.store.put(keys.part_key(*KEY, 1, "b", 0), to_bytes(Part("b", 1, {"fine": file, "\ud800": file})))
    await a.store.put(keys.tree_key("run/link"), to_bytes(TreeRecord("link", "a", target="nul\0")))
    await a.store.put(keys.tree_key("run/other"), to_bytes(TreeRecord("link", "a", target="\ud800")))
    async with c.running():
        await c.showing.show_listing(STEP)
        assert {A, "ok/x", "both", "old"} <= names_in(c.root / STEP) <= {A, "ok/x", "both", "old", "huge"}
        with pytest.raises(NotADirectoryError):
            await c.showing.show(f"{STEP}/both/below")
        with pytest.raises(PathRefused):
            await c.showing.show("run/link")
        await c.showing.show_listing("run")
        await c.caught_up()
        assert names_in(c.root / "run") == {f"step_1/{inner}" for inner in names_in(c.root / STEP)}


async def test_with_the_catalogue_away_what_was_known_shows(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    async with c.running():
        await c.caught_up()
        await c.view.files(KEY, 1)
        c.server.down = True
        await c.showing.show(f"{STEP}/{A}")
        assert (c.root / STEP / A).exists()
        await c.showing.show(f"{STEP}/nothing")
        await c.showing.show_listing("run")


async def test_what_a_program_removed_here_does_not_come_back(cluster: dict[str, Node]) -> None:
    await saved(cluster)
    c = cluster["c"]
    c.showing.removed_here = lambda rel: rel == f"{STEP}/{A}"
    async with c.running():
        await c.caught_up()
        await c.showing.show(f"{STEP}/{A}")
        await c.showing.show_listing(STEP)
        assert names_in(c.root / STEP) == {B, MARKER}


async def test_a_nodes_own_file_whose_bytes_are_gone_does_not_come_back_while_the_step_is_written(
    cluster: dict[str, Node],
) -> None:
    """Another node removed it, and what the catalogue has of this one is not told anew yet: a stub of it would be taken
    for this node's file, published again, and nobody could give its bytes."""
    a, b = cluster["a"], cluster["b"]
    await a.join()
    await a.publish_directory(STEP)
    await a.write(STEP, BOTH, 1)
    files = await a.publish_part(STEP, [A, B])
    (a.root / STEP / A).unlink()
    a.copies.forget(KEY, files[A].version)
    a.driver.record(STEP).manifest.files.pop(A)
    async with a.running(), b.running():
        await a.caught_up()
        await a.showing.show(f"{STEP}/{A}")
        await a.showing.show_listing(STEP)
        assert names_in(a.root / STEP) == {B}
        await b.showing.show_listing(STEP)
        assert names_in(b.root / STEP) == {A, B}  # b can't know


def test_names_that_no_node_can_have_are_not_asked_for(cluster: dict[str, Node]) -> None:
    showing = cluster["c"].showing
    assert showing.may_have("anything")  # at the top a program may make what it likes
    assert not showing.may_have("no/directory") and not showing.may_have("../outside") and not showing.may_have("")
    cluster["c"].driver.mkdirs(STEP)
    assert showing.may_have("run/step_2") and not showing.may_have("run/latest")
