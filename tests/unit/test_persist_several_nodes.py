"""Several nodes persist one step of theirs: each what it owns, one manifest of all, whoever is lost on the way."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from persist_driver import Node, check_listed, left_over, listed, manifest_of, quickly, settings
from step_driver import MARKER, content, until

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.errors import ObjectUnavailable
from tierfs.hydrate.stubs import StubMark, make_stub, read_mark
from tierfs.persist import joint_commit
from tierfs.settings import Settings
from tierfs.steps.cluster import Alone
from tierfs.steps.manifest import FileEntry, Manifest
from tierfs.steps.record import StepRecord

NAMES = ("n1", "n2", "n3")
STEP = "run/step_1"
#: Who wrote what, and how large it is. n2 wrote two files, one of them in parts.
WRITTEN = {MARKER: ("n1", 900), "__0_0.distcp": ("n1", 1500), "__1_0.distcp": ("n2", 5000), "__1_1.distcp": ("n2", 10)}
WRITTEN |= {"__2_0.distcp": ("n3", 1200)}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)
    monkeypatch.setattr(joint_commit, "LEAST_PAUSE_S", 0.005)
    monkeypatch.setattr(joint_commit, "LONGEST_PAUSE_S", 0.02)


class Cluster(Alone):
    """What the nodes agree on: who is live, and who holds what."""

    shares = True

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group

    def owns(self, record: StepRecord, inner: str) -> bool:
        holders = [self.group.written[inner][0], self.group.replica]
        return next((each for each in holders if each in self.group.live), "") == self.name


class Group:
    """Three nodes that have completed one step: each has what it wrote, `replica` has all, the rest are stubs."""

    def __init__(self, base: Path, replica: str = "", config: Settings | None = None) -> None:
        self.store = MemoryStore()
        self.store.watch = lambda: check_listed(self.store)
        self.live = set(NAMES)
        self.replica = replica
        self.written = dict(WRITTEN)
        self.nodes = {name: Node(base / name, MemoryClient(self.store), name, config or settings()) for name in NAMES}
        for node in self.nodes.values():
            self.attach(node)
            self.complete(node, generation=1, seed=1, completed_at=100.0)

    def attach(self, node: Node) -> None:
        node.registry.cluster = Cluster(node.name, self)
        node.persister._is_stub = self._is_stub_of(node)

    def _is_stub_of(self, node: Node) -> Callable[[int], bool]:
        def is_stub(ino: int) -> bool:
            for record in node.registry.records.values():
                for inner, entry in record.manifest.files.items():
                    if entry.ino == ino:
                        return read_mark(record.directory / inner) is not None
            return False

        return is_stub

    def complete(self, node: Node, *, generation: int, seed: int, completed_at: float) -> None:
        """As the cluster does it once the commit is agreed: the step is complete on the node, all of it shown."""
        directory = node.registry.root / STEP
        directory.mkdir(parents=True, exist_ok=True)
        manifest = Manifest("run", "step_1", 1, state="complete", completed_at=completed_at, generation=generation)
        manifest.joined, manifest.marker = 7, MARKER
        for inner, (author, size) in self.written.items():
            path = directory / inner
            path.unlink(missing_ok=True)
            if node.name in (author, self.replica):
                path.write_bytes(content(seed, inner, size))
                os.utime(path, ns=(generation, generation))
            else:
                mark = StubMark("run", "step_1", inner, size, None, generation, f"{author}/01")
                make_stub(path, mark, mode=0o644, uid=os.geteuid(), gid=os.getegid())
            info = path.lstat()
            manifest.files[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, None, True)
        manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
        record = StepRecord(manifest, directory)
        node.registry.records[record.key] = record
        node.persister.completed(record)
        node.registry.save(record)

    def lose(self, name: str) -> None:
        self.live.discard(name)

    def record(self, name: str) -> StepRecord:
        return self.nodes[name].record(STEP)

    def sent(self) -> Counter[str]:
        """By key: how often a whole file, or its first part, was sent by anybody."""
        found: Counter[str] = Counter()
        for node in self.nodes.values():
            assert isinstance(node.client, MemoryClient)
            for (key, number), count in node.client.sent.items():
                found[key.removeprefix(STEP + "/")] += count if number < 2 else 0
        return found

    @asynccontextmanager
    async def running(self, *names: str) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for name in names or NAMES:
                await stack.enter_async_context(self.nodes[name].running())
            yield

    async def until_persisted(self, *names: str) -> None:
        await until(lambda: all(self.record(name).is_persisted for name in names or NAMES), "all know it persisted")


async def test_each_sends_what_it_owns_and_one_manifest_is_made_of_it(tmp_path: Path) -> None:
    group = Group(tmp_path)
    order: list[str] = []
    group.store.watch = lambda: order.extend(key for key in group.store.keys("") if key not in order)
    async with group.running():
        await group.until_persisted()
    assert group.sent() == dict.fromkeys(WRITTEN, 1)
    assert sorted(manifest_of(group.store, STEP)["files"]) == sorted(WRITTEN)
    assert manifest_of(group.store, STEP)["marker"] == MARKER
    check_listed(group.store)
    assert left_over(group.store) == []
    marker_at = order.index(f"{STEP}/{MARKER}")
    assert all(order.index(f"{STEP}/{inner}") < marker_at for inner in WRITTEN if inner != MARKER)
    assert order.index(f"{STEP}/.tierfs/manifest.json") > marker_at
    for name in ("n2", "n3"):
        client = group.nodes[name].client
        assert isinstance(client, MemoryClient)
        assert client.requests["put"] <= 2, "one says that it began, and one what it has sent"


async def test_a_node_waits_quietly_for_the_others_and_holds_up_nobody(tmp_path: Path) -> None:
    group = Group(tmp_path)
    async with group.running("n1", "n2"):
        await until(lambda: f"{STEP}/.tierfs/nodes/n2.json" in group.store.objects, "n2 has begun")
        await until(lambda: group.sent()["__1_1.distcp"], "n2 has sent its part")
        alone = group.nodes["n2"]
        await alone.driver.save("other/step_5", 5)
        await until(lambda: listed(group.store) == ["other/step_5"], "another step goes meanwhile")
        assert alone.persister.problems() == []
        with trio.fail_after(5):
            await alone.persister.drain()  # it has nothing left to send
        assert f"{STEP}/{MARKER}" not in group.store.objects, "no marker before all data"
        async with group.running("n3"):
            await group.until_persisted()
    assert all(group.sent()[inner] == 1 for inner in WRITTEN)


@pytest.mark.parametrize("lost", ["n1", "n2"])
async def test_what_a_lost_node_owed_is_sent_by_another_holder(tmp_path: Path, lost: str) -> None:
    group = Group(tmp_path, replica="n3")
    client = group.nodes[lost].client
    assert isinstance(client, MemoryClient)

    def fault(when: str, what: str, key: str) -> None:
        # It gets half of its data out, and is never heard of again.
        if group.sent()[{"n1": "__0_0.distcp", "n2": "__1_0.distcp"}[lost]]:
            raise ObjectUnavailable("the test took the node down")

    client.fault = fault
    left = [name for name in NAMES if name != lost]
    async with group.running(*left):
        async with group.running(lost):
            await until(lambda: group.nodes[lost].persister.problems(), "the node fails")
        group.lose(lost)
        await group.until_persisted(*left)
    check_listed(group.store)
    assert sorted(manifest_of(group.store, STEP)["files"]) == sorted(WRITTEN)
    by_others = [inner for inner, (author, _) in WRITTEN.items() if author != lost]
    assert all(group.sent()[inner] == 1 for inner in by_others)
    # The node comes back and finds it done.
    client.fault = lambda when, what, key: None
    group.live.add(lost)
    async with group.running(lost):
        group.nodes[lost].persister.put_off.forget(("run", "step_1"))
        group.nodes[lost].persister._look_again()
        await group.until_persisted(lost)
    check_listed(group.store)


async def test_what_a_lost_node_has_listed_is_not_sent_again(tmp_path: Path) -> None:
    group = Group(tmp_path, replica="n3")
    async with group.running("n2"):
        await until(lambda: group.nodes["n2"].persister._memories and not group.nodes["n2"].persister._own_work(), "")
    group.lose("n2")
    async with group.running("n1", "n3"):
        await group.until_persisted("n1", "n3")
    assert group.sent() == dict.fromkeys(WRITTEN, 1)
    assert sorted(manifest_of(group.store, STEP)["files"]) == sorted(WRITTEN)


@pytest.mark.parametrize("shown", [(), (MARKER,)], ids=["nothing", "a-name-that-was-looked-for"])
async def test_a_node_that_has_nothing_of_the_step_waits_without_looking_into_it(
    tmp_path: Path, shown: tuple[str, ...]
) -> None:
    group = Group(tmp_path)
    idle = group.nodes["n3"]
    group.written = {inner: (author if author != "n3" else "n2", size) for inner, (author, size) in WRITTEN.items()}
    for node in group.nodes.values():
        group.complete(node, generation=2, seed=2, completed_at=200.0)
    for inner in list(group.record("n3").manifest.files):
        if inner not in shown:
            (idle.registry.root / STEP / inner).unlink()
            del group.record("n3").manifest.files[inner]
    group.record("n3").manifest.populated = False
    async with group.running():
        await group.until_persisted()
    assert isinstance(idle.client, MemoryClient)
    assert not idle.client.sent and idle.client.requests["put"] <= 1, "at most the object tier's own name"
    assert idle.client.requests["get"] < 50, "what is committed is looked at once"
    assert not group.record("n3").manifest.populated


async def test_a_new_generation_and_then_an_added_file(tmp_path: Path) -> None:
    group = Group(tmp_path)
    async with group.running():
        await group.until_persisted()
        for node in group.nodes.values():
            group.complete(node, generation=2, seed=2, completed_at=200.0)
        await group.until_persisted()
        assert manifest_of(group.store, STEP)["generation"] == 2
        assert group.store.objects[f"{STEP}/__2_0.distcp"].data == content(2, "__2_0.distcp", 1200)
        assert left_over(group.store) == []
        # n2 adds a file, which shows on the others a moment later.
        gone: list[bool] = []
        group.store.watch = lambda: gone.append(listed(group.store) == [])
        before = group.sent()
        group.written["meta.pt"] = ("n2", 77)
        for node in reversed(list(group.nodes.values())):
            record = node.record(STEP)
            path = record.directory / "meta.pt"
            if node.name == "n2":
                path.write_bytes(content(2, "meta.pt", 77))
            else:
                mark = StubMark("run", "step_1", "meta.pt", 77, None, 9, "n2/02")
                make_stub(path, mark, mode=0o644, uid=os.geteuid(), gid=os.getegid())
            info = path.lstat()
            record.manifest.files["meta.pt"] = FileEntry(77, info.st_mtime_ns, info.st_ino, None, True)
            node.persister.changed(record)
        await group.until_persisted()
    assert group.sent() - before == {"meta.pt": 1}
    assert not any(gone), "the step was committed all the time"
    assert "meta.pt" in manifest_of(group.store, STEP)["files"]


async def test_a_node_that_does_not_owe_the_step_learns_of_it_by_the_index(tmp_path: Path) -> None:
    group = Group(tmp_path)
    for name in ("n1", "n3"):
        group.record(name).manifest.owed = ""
    async with group.running():
        await until(lambda: group.sent()["__1_1.distcp"], "n2 sends")
        for name in ("n1", "n3"):
            assert not group.record(name).manifest.owed
            await group.nodes[name].index.refresh()
        await group.until_persisted()
    assert group.sent() == dict.fromkeys(WRITTEN, 1)


async def test_the_index_leaves_alone_what_the_catalogue_tells_of(tmp_path: Path) -> None:
    group = Group(tmp_path)
    async with group.running():
        await group.until_persisted()
    one = group.nodes["n2"]
    record = one.record(STEP)
    record.manifest.persisted = None
    await one.index.refresh()
    assert record.is_persisted, "by its look alone"
    # Something else lies there now: the record stays, it is only not what the object tier holds.
    record.manifest.generation = 3
    record.manifest.persisted = None
    await one.index.refresh()
    assert one.record(STEP) is record and not record.is_persisted
    assert (record.directory / "__1_0.distcp").stat().st_size == 5000
    # It is gone from there: who has the marker sends it again, nobody takes the step away.
    record.manifest.generation = 1
    await one.index.refresh()
    group.store.watch = lambda: None
    group.store.delete(group.store.keys())
    for node in group.nodes.values():
        await node.index.refresh()
        assert node.record(STEP).is_complete
    assert [name for name in NAMES if group.record(name).manifest.owed] == ["n1"]


async def test_a_removal_that_comes_late_spares_what_was_saved_since(tmp_path: Path) -> None:
    group = Group(tmp_path)
    async with group.running():
        await group.until_persisted()
    one = group.nodes["n1"]
    one.deletions.owe(("run", "step_1"), "removed", marker=MARKER)
    for node in group.nodes.values():
        group.complete(node, generation=1, seed=3, completed_at=9e9)
    async with group.running("n2"):
        await until(lambda: not group.nodes["n2"].persister._own_work(), "n2 has sent its part of the new save")
        async with group.running("n1", "n3"):
            await group.until_persisted()
    assert not one.deletions.owed()
    check_listed(group.store)
    assert manifest_of(group.store, STEP)["completed_at"] == 9e9


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_fails_a_commit_is_always_whole_and_comes_at_last(tmp_path: Path, seed: int) -> None:
    """Requests fail before or after their effect, nodes are lost and come back, the step is saved anew meanwhile."""
    chance = random.Random(seed)
    group = Group(tmp_path, replica="n3")
    failing = True

    def fault(when: str, what: str, key: str) -> None:
        if failing and chance.random() < 0.15:
            raise ObjectUnavailable("the test says no")

    for node in group.nodes.values():
        assert isinstance(node.client, MemoryClient)
        node.client.fault = fault
    async with group.running():
        for generation in range(2, 2 + chance.randrange(3)):
            await trio.sleep(chance.uniform(0.0, 0.06))
            if chance.random() < 0.5:
                group.lose(chance.choice(["n1", "n2"]))
            for node in group.nodes.values():
                group.complete(node, generation=generation, seed=generation, completed_at=100.0 * generation)
        await trio.sleep(chance.uniform(0.0, 0.06))
        failing = False
        group.live = set(NAMES) if chance.random() < 0.5 else group.live
        await group.until_persisted()
        wanted = group.record("n1").manifest.generation
    check_listed(group.store)
    assert manifest_of(group.store, STEP)["generation"] == wanted
    assert sorted(manifest_of(group.store, STEP)["files"]) == sorted(WRITTEN)
    for inner, (_, size) in WRITTEN.items():
        assert group.store.objects[f"{STEP}/{inner}"].data == content(wanted, inner, size)
