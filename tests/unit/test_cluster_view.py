"""What a node knows of the catalogue: after lost watches, with damaged records, and parts read on demand."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from cluster_parts import KEY, file, put_directory, put_node, put_part, put_state, state, until, watching
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.records import FileRecord, NodeRecord, Operation, Part, TreeRecord, to_bytes
from tierfs.catalog.store import Batch, Delete, KeyValue, Put
from tierfs.cluster.step_files import StepFiles, is_shard, merge
from tierfs.cluster.view import Change, Seen, View
from tierfs.cluster.watched import Reader
from tierfs.errors import CatalogUnavailable

DIRECTORY = "/".join(KEY)


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


class Mirror:
    """What somebody knows who only listens."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.told: list[Change] = []
        self.tables: dict[tuple[str, object], Seen[Any]] = {}
        self.newest: dict[tuple[str, object], int] = {}
        self.went_back: list[Change] = []
        view.listen(self.hear)

    def hear(self, change: Change) -> None:
        self.told.append(change)
        name = (change.kind, change.step if change.step is not None else change.key)
        if change.kind == "reset":
            return
        assert self.tables.get(name) == change.old
        if change.new is None:
            del self.tables[name]
        else:
            if change.new.mod_revision <= self.newest.get(name, 0):
                self.went_back.append(change)
            self.newest[name] = change.new.mod_revision
            self.tables[name] = change.new

    def agrees(self) -> bool:
        view = self.view
        tables: Mapping[str, Mapping[Any, Seen[Any]]] = {
            "node": view.nodes,
            "tree": view.tree,
            "state": view.states,
            "operation": view.operations,
        }
        here = {(kind, name): seen for kind, table in tables.items() for name, seen in table.items()}
        return self.tables == here and not self.went_back


def in_catalogue(server: MemoryServer) -> dict[str, tuple[int, int]]:
    return {
        key: (value.create_revision, value.mod_revision)
        for key, value in server.keys.items()
        if key.startswith((keys.NODES, keys.TREE, keys.STATES, keys.OPERATIONS))
    }


def in_view(view: View) -> dict[str, tuple[int, int]]:
    found: dict[str, Seen[Any]] = {keys.tree_key(path): seen for path, seen in view.tree.items()}
    found.update({keys.node_key(node): seen for node, seen in view.nodes.items()})
    found.update({keys.state_key(*key): seen for key, seen in view.states.items()})
    found.update({keys.operation_key(name): seen for name, seen in view.operations.items()})
    return {key: (seen.create_revision, seen.mod_revision) for key, seen in found.items()}


class OneByOne(MemoryStore):
    """Tells each revision in a batch of its own, as etcd may."""

    def watch(self, prefixes: Sequence[str], *, from_revision: int) -> Any:
        return self._one_by_one(tuple(prefixes), from_revision)

    @contextlib.asynccontextmanager
    async def _one_by_one(self, prefixes: tuple[str, ...], revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        breaks = self.breaks

        async def batches() -> AsyncIterator[Batch]:
            at = revision
            while True:
                self.check_reachable("watch")
                if self.breaks != breaks:
                    raise CatalogUnavailable("broken")
                self.server.events_from(at)
                if at <= self.server.revision:
                    events = tuple(each for each in self.server._history[at] if each.key.startswith(prefixes))
                    if events:
                        yield Batch(at, events)
                    at += 1
                else:
                    await self.server.wait()

        await trio.lowlevel.checkpoint()
        async with contextlib.aclosing(batches()) as told:
            yield told


# --- following


@pytest.mark.parametrize("seed", range(20))
async def test_the_view_is_what_the_catalogue_has_whatever_happens_to_its_watch(seed: int, clock: MockClock) -> None:
    luck = random.Random(seed)
    server = MemoryServer()
    reading = OneByOne(server) if seed % 2 else MemoryStore(server)

    async def late(when: str, call: str) -> None:
        if luck.random() < 0.5:
            await trio.sleep(luck.random() / 10)

    reading.hook = late
    writing, view = MemoryStore(server), View(reading)
    mirror = Mirror(view)
    # The name of such a namespace is cut in keys, so that only its directory tells it: that comes first.
    long = "/".join(["y" * 100] * 3)
    await put_directory(writing, long)
    paths = ["a", "a/b", "team", "team/run", DIRECTORY, "x" * 200]
    everything = [keys.tree_key(path) for path in paths] + [keys.state_key(*KEY), keys.state_key(long, "step_1")]
    async with watching(view):
        for _ in range(120):
            key = luck.choice(everything)
            value = (
                state({"n1": 1}) if key.startswith(keys.STATES) else TreeRecord("dir", "n1", mode=luck.choice((1, 2)))
            )
            await writing.txn((), [luck.choice([Put(key, to_bytes(value)), Put(key, to_bytes(value)), Delete(key)])])
            if luck.random() < 0.3:
                await trio.sleep(luck.random() / 20)  # also while everything is being read
            match luck.randrange(12):
                case 0:
                    reading.break_connections()
                case 1:
                    server.compact()
                case 2:
                    reading.cut_off = not reading.cut_off
                case 3:
                    await put_node(writing, luck.choice(("n1", "n2")))
                case 4:
                    await writing.delete(keys.NODES, is_prefix=True)
                case 5:
                    await trio.sleep(luck.random())
        reading.cut_off = False
        await until(lambda: view.connected)
        await until(lambda: in_view(view) == in_catalogue(server))
        assert in_view(view) == in_catalogue(server)
        assert mirror.agrees()
        assert list(view.path_below("team")) == (["run"] if "team/run" in view.tree else [])


async def test_what_was_read_already_is_not_told_again_by_the_watch(clock: MockClock) -> None:
    server = MemoryServer()
    store, reading = MemoryStore(server), OneByOne(server)
    await put_directory(store, "a")
    await put_directory(store, "b")
    ranges = 0

    async def hook(when: str, call: str) -> None:
        nonlocal ranges
        ranges += (when, call) == ("ask", "range")
        if (when, call, ranges) == ("ask", "range", 3):  # states and nodes were read, the tree was not
            await put_directory(store, "a")
            await put_directory(store, "a")
            await store.delete(keys.tree_key("b"))
            await put_directory(store, "b")

    reading.hook = hook
    view = View(reading)
    mirror = Mirror(view)
    async with watching(view):
        await put_directory(store, "c")
        assert await view.caught_up(["t/c"])
        assert [change.key for change in mirror.told] == ["a", "b", "", "c"]
        assert in_view(view) == in_catalogue(server) and mirror.agrees()


async def test_what_happened_while_the_watch_was_lost_is_told_in_an_order_that_can_be_followed(
    clock: MockClock,
) -> None:
    server = MemoryServer()
    store, view = MemoryStore(server), View(MemoryStore(server))
    mirror = Mirror(view)
    for path in ("old", "old/step_1", "old/step_1/inner"):
        await put_directory(store, path)
    async with watching(view):
        assert view.connected and len(view.tree) == 3
        server.down = True
        await until(lambda: not view.connected)
        with trio.fail_after(0.1):
            assert not await view.caught_up(prefixes=["t/"]), "away: at once"
        server.down = False
        # Before the view is back: a rename, and a step that was made anew.
        await store.put(keys.operation_key("1"), to_bytes(Operation("rename", "n2", "old", "new")))
        await store.delete(keys.tree_key("old"), is_prefix=True)
        for path in ("new", "new/step_1"):
            await put_directory(store, path)
        await put_state(store, state({"n1": 1}))
        mirror.told.clear()
        await until(lambda: view.connected, within_s=2.5)
        assert [(change.kind, change.key) for change in mirror.told] == [
            ("operation", "1"),
            ("tree", "old/step_1/inner"),
            ("tree", "old/step_1"),
            ("tree", "old"),
            ("tree", "new"),
            ("tree", "new/step_1"),
            ("state", "team%2Frun/step_5"),
            ("reset", ""),
        ]


async def test_what_another_catalogue_lacks_was_not_deleted(clock: MockClock) -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    views = [View(MemoryStore(server)) for _ in range(3)]
    mirrors = [Mirror(view) for view in views]
    async with watching(views[0]), watching(views[1]), watching(views[2]):
        await put_directory(store, "kept")
        assert all([await view.caught_up(prefixes=["t/"]) for view in views])
        backup = copy.deepcopy((server.keys, server.revision))
        first = views[0].cluster_id
        await put_directory(store, "later")
        assert all([await view.caught_up(prefixes=["t/"]) for view in views])

        server.wipe()
        await until(lambda: all(view.connected and view.cluster_id != first for view in views))
        assert len({view.cluster_id for view in views}) == 1
        assert not any(view.tree for view in views)

        server.wipe()
        server.keys, server.revision = copy.deepcopy(backup)
        await until(lambda: all(view.connected and view.cluster_id == first for view in views))
        for at in range(9):
            await put_directory(store, f"later{at}")
        assert all([await view.caught_up(prefixes=["t/"]) for view in views])

        # Put back to an earlier state of itself, which has the same name: it gets another.
        server.wipe()
        server.keys, server.revision = copy.deepcopy(backup)
        server.compact()
        await until(lambda: all(view.connected and view.cluster_id != first for view in views))
        assert len({view.cluster_id for view in views}) == 1
        assert all(set(view.tree) == {"kept"} for view in views)
        assert not [change for mirror in mirrors for change in mirror.told if change.kind == "tree" and not change.new]

        # All of it removed by hand.
        before = views[0].cluster_id
        await store.delete("", is_prefix=True)
        await until(lambda: all(view.connected and view.cluster_id != before for view in views))
        assert not [change for mirror in mirrors for change in mirror.told if change.kind == "tree" and not change.new]


async def test_what_is_damaged_is_told_once_and_changes_nothing(
    clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = MemoryServer()
    store, view = MemoryStore(server), View(MemoryStore(server))

    def fails(change: Change) -> None:
        raise RuntimeError("a listener's mistake")

    view.listen(fails)
    mirror = Mirror(view)
    await put_directory(store, "good")
    await store.put("t/../../etc/passwd", to_bytes(TreeRecord("dir", "n1")))
    await store.put("nodes/n1", b"\xff\x00")
    await store.put("c/no-step", to_bytes(state({"n1": 1})))
    async with watching(view):
        assert set(view.tree) == {"good"} and not view.nodes and not view.states
        await store.put("t/good", b"zzzz")
        await store.put("c/%zz/step_1", to_bytes(state({"n1": 1})))
        assert await view.caught_up(prefixes=["t/", "c/"])
        assert set(view.tree) == {"good"}, "what it was before stays in force"
        assert view.damaged == {"t/good", "nodes/n1"}
        mirror.told.clear()
        server.break_connections()
        await until(lambda: [change.kind for change in mirror.told] == ["reset"])
        assert sum("passwd" in record.getMessage() for record in caplog.records) == 1
        await put_directory(store, "good")
        await store.delete("nodes/n1")
        assert await view.caught_up(prefixes=["t/", "nodes/"])
        await until(lambda: not view.damaged)
        assert mirror.agrees()


async def test_caught_up_waits_for_the_watch_and_a_dead_watch_is_found_out(clock: MockClock) -> None:
    server = MemoryServer()
    store, reading = MemoryStore(server), MemoryStore(server)
    late = {"batch": 0.5, "newest": 0.0}
    asked = 0

    async def hook(when: str, call: str) -> None:
        nonlocal asked
        asked += when == "ask" and call == "newest"
        if when == "batch":
            await trio.sleep(late["batch"])
        elif when == "ask" and call == "newest":
            await trio.sleep(late["newest"])

    reading.hook = hook
    view = View(reading)
    async with watching(view):
        await put_directory(store, "a")
        assert "a" not in view.tree
        assert await view.caught_up(keys=["t/a"]) and "a" in view.tree
        assert await view.caught_up(prefixes=[keys.parts_prefix(*KEY)]), "never waits for what is not watched"

        # Many who look for one name at one time: one request that began before they came, and one for them all.
        late["newest"], asked = 0.2, 0
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(view.caught_up, ["t/b"])
            await trio.sleep(0.1)
            await put_directory(store, "b")

            async def sees_it() -> None:
                assert await view.caught_up(["t/b"]) and "b" in view.tree

            for _ in range(20):
                nursery.start_soon(sees_it)
        assert asked == 2

        late.update(batch=10_000.0, newest=0.0)
        await put_directory(store, "c")
        with trio.fail_after(2.1):
            assert not await view.caught_up(["t/c"])
        assert not view.connected
        late["batch"] = 0.0
        await until(lambda: view.connected and "c" in view.tree, within_s=10)


# --- parts


async def test_parts_are_read_on_from_where_they_were_read_last(clock: MockClock) -> None:
    server = MemoryServer()
    store, reading = MemoryStore(server), MemoryStore(server)
    view = View(reading)
    newer_than: list[int] = []
    read_range = reading.range

    async def noting(prefix: str, *, newer_than: int = 0, noted: list[int] = newer_than) -> Any:
        noted.append(newer_than)
        return await read_range(prefix, newer_than=newer_than)

    async with watching(view):
        reading.range = noting  # type: ignore[method-assign]
        with pytest.raises(CatalogUnavailable):
            await View(reading).files(KEY, 1)
        assert view.known_files(KEY, 1) is None
        await put_directory(store, DIRECTORY)
        await put_part(store, "n1", {"a": file("n1/1"), "both": file("n1/2", opened_at=3)})
        await put_part(store, "n1", {"c": file("n1/3")}, page=1)
        await put_part(store, "n2", {"both": file("n2/1", opened_at=5)})
        await store.put(keys.part_key(*KEY, 1, "n3", 0), b"damaged")
        found = await view.files(KEY, 1)
        assert {inner: each.version for inner, each in found.files.items()} == {
            "a": "n1/1", "both": "n2/1", "c": "n1/3",
        }  # fmt: skip
        assert view.known_files(KEY, 1) is found
        await put_part(store, "n2", {})
        await put_part(store, "n1", {}, page=1)
        found = await view.files(KEY, 1)
        assert {inner: each.version for inner, each in found.files.items()} == {"a": "n1/1", "both": "n1/2"}
        assert set(found.parts) == {"n1"} and found.revision == server.revision
        assert newer_than == [0, server.revision - 2], "only what is new is sent"

        await put_state(store, state({"n1": 2}, marker="a"))
        assert await view.caught_up(prefixes=["c/"])
        await view.files(KEY, 1)
        requests = server.requests
        found = await view.files(KEY, 1)
        assert server.requests == requests, "complete: kept"
        late = {"late": file("n2/2"), "both": file("n2/3"), "a": file("n2/4", opened_at=9)}
        await put_part(store, "n2", late, added=True)
        assert "late" not in (await view.files(KEY, 1)).files
        found = await view.files(KEY, 1, fresh=True)
        assert {inner: each.version for inner, each in found.files.items()} == {
            "a": "n1/1", "both": "n2/3", "late": "n2/2",
        }, "the marker is never replaced by an addition"  # fmt: skip

        # Removed, and another step of that name made: nothing of the old one is left.
        gone = [Delete(keys.parts_prefix(*KEY), True), Delete(keys.state_key(*KEY)), Delete(keys.tree_key(DIRECTORY))]
        await store.txn((), gone)
        await put_directory(store, DIRECTORY)
        assert await view.caught_up(prefixes=["t/"])
        assert view.known_files(KEY, 1) is None
        assert (await view.files(KEY, 1)).files == {}
        reading.cut_off = True
        await until(lambda: not view.connected)
        with pytest.raises(CatalogUnavailable), trio.fail_after(0.1):
            await view.files(KEY, 1)


async def test_kept_parts_are_bounded(clock: MockClock) -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    view = View(store)
    view._parts._most_files = 50
    async with watching(view):
        for number in range(12):
            step = (KEY[0], f"step_{number}")
            for node in ("n1", "n2"):
                key = keys.part_key(*step, 1, node, 0)
                found = {f"f{at}": file(f"{node}/{at}") for at in range(5)}
                await store.put(key, to_bytes(Part(node, 1, found)))
            assert len((await view.files(step, 1)).files) == 5
        kept = [number for number in range(12) if view.known_files((KEY[0], f"step_{number}"), 1)]
        assert kept == [8, 9, 10, 11]


# --- merging

_FILES = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        lambda node, token, opened_at, size: file(f"{node}/{token}", size, opened_at),
        st.sampled_from(("n1", "n2", "n3")),
        st.sampled_from("12"),
        st.integers(0, 2),
        st.sampled_from((1, 1 << 20)),
    ),
)
_PARTS = st.dictionaries(st.sampled_from(("n1", "n2", "n3")), _FILES)


@given(parts=_PARTS, added=_PARTS, seed=st.integers(0, 50))
def test_merging_is_the_same_in_any_order_and_the_newest_wins(
    parts: dict[str, dict[str, FileRecord]], added: dict[str, dict[str, FileRecord]], seed: int
) -> None:
    luck = random.Random(seed)

    def shuffled(of: dict[str, dict[str, FileRecord]]) -> dict[str, dict[str, FileRecord]]:
        return {
            node: dict(luck.sample(list(of[node].items()), len(of[node]))) for node in luck.sample(list(of), len(of))
        }

    def merged(parts: Any, added: Any) -> StepFiles:
        return merge(KEY, 1, 1, parts, added, is_protected=is_shard)

    found = merged(parts, added)
    other = merged(shuffled(parts), shuffled(added))
    assert found == other and list(found.files) == list(other.files)
    for inner, winner in found.files.items():
        newest = [
            max(
                (part[inner] for part in of.values() if inner in part),
                key=lambda each: (each.opened_at, each.node, each.version, each.size_bytes),
                default=None,
            )
            for of in (parts, added)
        ]
        in_parts, in_added = newest
        is_kept = in_added is None or (in_parts is not None and is_shard(inner, in_parts))
        assert winner == (in_parts if is_kept else in_added)
    assert set(found.files) == {inner for each in (parts, added) for part in each.values() for inner in part}


@settings(max_examples=200)
@given(
    key=st.one_of(
        st.text(max_size=40), st.builds(lambda a, b: a + b, st.sampled_from(("t/", "c/", "nodes/", "o/")), st.text())
    ),
    value=st.one_of(st.binary(max_size=80), st.just(to_bytes(TreeRecord("dir", "n1"))), st.just(b"[" * 5000)),
)
def test_no_key_or_value_is_taken_that_could_leave_the_tree(key: str, value: bytes) -> None:
    reader = Reader()
    place = reader.place(key)
    if place is None:
        return
    assert not place.name.startswith("/") and ".." not in place.name.split("/") and "\0" not in place.name
    reader.watched(place, KeyValue(key, value, 1, 1))


def test_a_node_is_only_taken_under_its_own_name() -> None:
    reader = Reader()
    place = reader.place("nodes/n2")
    record = NodeRecord("n2", ("h:1",), "t")
    assert place is not None
    assert reader.watched(place, KeyValue("nodes/n2", to_bytes(record), 1, 1)) == record
    assert reader.watched(place, KeyValue("nodes/n2", to_bytes(replace(record, node="n1")), 1, 1)) is None
