"""What a person asks of the object tier, on a plain directory as RAM tier and a real `file://` store behind workers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import step_driver
import trio
from step_driver import FILES, MARKER, Driver, content, marker, until

from mount.copying import DirectorySource, StoreSource
from tierfs.checksum import CHUNK_BYTES, FileChecksum, checksum_fd
from tierfs.errors import (
    CommitRefused,
    NoRoom,
    NotAStep,
    NotFound,
    ObjectMissing,
    PathRefused,
    StepBusy,
    TierfsError,
)
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import ObjectSource
from tierfs.objects.file_store import FileStore
from tierfs.objects.pool import WorkerPool
from tierfs.persist import index, putting_off
from tierfs.persist.deletions import Deletions
from tierfs.persist.importing import Importing
from tierfs.persist.index import ObjectIndex
from tierfs.persist.layout import manifest_key
from tierfs.persist.object_manifest import read_manifest
from tierfs.persist.operations import ObjectOperations
from tierfs.persist.persister import Persister
from tierfs.persist.reading_back import CHUNKS_AT_ONCE, ReadBack
from tierfs.persist.repairing import decide
from tierfs.persist.reporting import all_of, reporting
from tierfs.settings import Settings
from tierfs.steps.object_tier import NoObjectTier
from tierfs.steps.record import StepRecord

STEP = "run/step_1"


class Told(list[dict[str, Any]]):
    """What an operation told while it went on."""

    async def __call__(self, values: dict[str, Any]) -> None:
        self.append(values)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@asynccontextmanager
async def client_of(store: Path) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(Settings(object=f"file://{store}"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            yield pool
            nursery.cancel_scope.cancel()


def lay_out(store: Path, files: dict[str, bytes], step: str = STEP) -> None:
    """A checkpoint that other means put into the store."""
    for name, data in files.items():
        path = store / step / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def checkpoint(seed: int = 1) -> dict[str, bytes]:
    return {name: content(seed, name, size) for name, size in FILES.items()} | {MARKER: marker(seed, FILES)}


# --- reading back


def summed(path: Path) -> FileChecksum:
    with open(path, "rb") as file:
        return checksum_fd(file.fileno())


async def most_scratch_bytes(found: list[int]) -> None:
    """Notes the room that scratch files of this process take, again and again."""
    while True:
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "tierfs-scratch" in os.readlink(f"/proc/self/fd/{fd}"):
                    found.append(os.stat(f"/proc/self/fd/{fd}").st_blocks * 512)
        await trio.sleep(0.001)


async def test_an_object_is_summed_up_chunk_by_chunk_in_bounded_memory(store: Path) -> None:
    data = os.urandom(1 << 20) * 200 + b"the end"
    lay_out(store, {"large": data})
    room: list[int] = []
    async with client_of(store) as client, trio.open_nursery() as nursery:
        nursery.start_soon(most_scratch_bytes, room)
        reader = ReadBack(client)
        assert await reader.checksum(f"{STEP}/large", len(data)) == summed(store / STEP / "large")
        assert reader.passed_bytes == len(data)
        assert await reader.checksum(f"{STEP}/large", 0) == FileChecksum(0, 0, ())
        with pytest.raises(ObjectMissing):
            await reader.checksum(f"{STEP}/none", CHUNK_BYTES * 3)
        nursery.cancel_scope.cancel()
    assert 0 < max(room) <= CHUNKS_AT_ONCE * CHUNK_BYTES


async def test_the_first_failure_ends_the_others_and_is_raised_as_it_is() -> None:
    ended: list[str] = []

    async def goes_on() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise NotFound("this one")

    told = Told()
    with trio.fail_after(5), pytest.raises(NotFound, match="this one"):
        await reporting(lambda: all_of([goes_on, fails], at_once=2), lambda: {"at": 1}, told)
    assert ended == ["cancelled"]
    assert told[0] == {"at": 1}


# --- import in place


async def read_import(
    driver: Driver, client: WorkerPool, step: str = STEP, *, force: bool = False, told: Told | None = None
) -> Any:
    return await Importing(driver.registry, client).read(step, force=force, progress=Told() if told is None else told)


async def test_a_plain_checkpoint_is_read_for_what_its_commit_says(tmp_path: Path, store: Path) -> None:
    driver = Driver(tmp_path / "ram")
    files = checkpoint()
    lay_out(store, files)
    told = Told()
    async with client_of(store) as client:
        node_file = await read_import(driver, client, told=told)
    assert (node_file.namespace, node_file.step, node_file.number, node_file.marker) == ("run", "step_1", 1, MARKER)
    assert {name: sent.file.size_bytes for name, sent in node_file.objects.items()} == {
        name: len(data) for name, data in files.items()
    }
    for name, sent in node_file.objects.items():
        found = summed(store / STEP / name)
        assert (sent.file.checksum, sent.file.chunks) == (found.full, found.chunks)
    size = sum(map(len, files.values()))
    assert told[-1] == {"files": 3, "files_total": 3, "bytes": size, "bytes_total": size, "path": STEP}
    assert driver.old_generations() == []  # nothing is left of the tree in which it was judged


async def test_an_import_is_a_commit_beside_objects_that_stay_as_they_are(tmp_path: Path, store: Path) -> None:
    driver = Driver(tmp_path / "ram")
    files = checkpoint()
    lay_out(store, files)
    async with client_of(store) as client:
        manifest, etag = await Importing(driver.registry, client).run(STEP, force=False, progress=Told())
        data, found_etag = await client.get(manifest_key("run", "step_1"), most_bytes=1 << 20)
        assert (read_manifest(data, "run", "step_1"), found_etag) == (manifest, etag)
        with pytest.raises(StepBusy, match="committed in the object tier already"):
            await read_import(driver, client)
    assert {name: (store / STEP / name).read_bytes() for name in files} == files


async def test_files_that_a_node_sent_without_the_rest_are_no_step_to_import(tmp_path: Path, store: Path) -> None:
    """Its last file says to HF Trainer that a step is whole, and it may well be all that went."""
    driver = Driver(tmp_path / "ram")
    step = "run/checkpoint-5"
    part = store / step / ".tierfs" / "parts" / "n1.json"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"{}")
    (store / step / "trainer_state.json").write_bytes(b"{}")
    async with client_of(store) as client:
        with pytest.raises(CommitRefused, match="only some of its files"):
            await read_import(driver, client, step)
        assert (await read_import(driver, client, step, force=True)).marker == "trainer_state.json"
    sources = DirectorySource(store / step), StoreSource(FileStore("file://", store / step))
    for source in sources:
        with pytest.raises(TierfsError, match="only some files"):
            source.files()
    (part.parent.parent / "manifest.json").write_bytes(b"{}")
    assert [[file.inner for file in source.files()] for source in sources] == [["trainer_state.json"]] * 2


def lacks_a_file(files: dict[str, bytes]) -> None:
    del files["__1_0.distcp"]


def has_a_short_file(files: dict[str, bytes]) -> None:
    files["__0_0.distcp"] = files["__0_0.distcp"][:-1]


def lacks_the_marker(files: dict[str, bytes]) -> None:
    del files[MARKER]


def has_a_marker_that_is_none(files: dict[str, bytes]) -> None:
    files[MARKER] = b"cos\nsystem\n(S'true'\ntR."


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lacks_a_file, "__1_0.distcp is missing"),
        (has_a_short_file, "__0_0.distcp has 2999 bytes of at least 3000"),
        (lacks_the_marker, "no marker yet"),
        (has_a_marker_that_is_none, "can't be read"),
    ],
)
async def test_what_is_not_whole_is_not_imported_and_says_why(
    tmp_path: Path, store: Path, damage: Callable[[dict[str, bytes]], None], why: str
) -> None:
    driver = Driver(tmp_path / "ram")
    files = checkpoint()
    damage(files)
    lay_out(store, files)
    async with client_of(store) as client:
        with pytest.raises(CommitRefused, match=why):
            await read_import(driver, client)
        forced = await read_import(driver, client, force=True)
    assert forced.marker is None
    assert forced.objects.keys() == files.keys()


async def test_an_import_never_covers_a_step_that_is_there(tmp_path: Path, store: Path) -> None:
    driver = Driver(tmp_path / "ram")
    lay_out(store, checkpoint())
    await driver.save(STEP, 2)
    async with client_of(store) as client:
        with pytest.raises(StepBusy, match="exists in this mount"):
            await read_import(driver, client)
        with pytest.raises(NotFound, match="no object"):
            await read_import(driver, client, "run/step_2")
        with pytest.raises(NotAStep, match="no step's directory"):
            await read_import(driver, client, "run")
        with pytest.raises(NotAStep, match="no step's directory"):
            await read_import(driver, client, f"{STEP}/{MARKER}")


# --- repair


@pytest.mark.parametrize(
    ("ram", "object_reason", "in_ram", "action"),
    [
        ("", "", True, None),
        (None, "", False, None),
        ("differs", "", True, "fetched again"),
        ("", "is missing", True, "sent again"),
        ("differs", "is missing", True, "lost"),
        (None, "is missing", False, "lost"),
    ],
)
def test_a_good_copy_mends_a_bad_one(ram: str | None, object_reason: str, in_ram: bool, action: str | None) -> None:
    decided = decide(ram=ram, object_reason=object_reason, in_ram=in_ram)
    assert (decided[0] if decided is not None else None) == action


# --- with all parts of the tier, on one node

LARGE = {"__0_0.distcp": 3 << 20, "__1_0.distcp": (2 << 20) + 5, "small.json": 700}


class Boundary(NoObjectTier):
    """What steps tell and ask, passed on to the parts."""

    def __init__(self, persister: Persister, hydration: Hydration) -> None:
        self._persister, self._hydration = persister, hydration
        self.completed = persister.completed  # type: ignore[method-assign]
        self.changed = persister.changed  # type: ignore[method-assign]
        self.removed = persister.removed  # type: ignore[method-assign]
        self.moved = persister.moved  # type: ignore[method-assign]
        self.is_stub = hydration.is_stub  # type: ignore[method-assign]
        self.ram_bytes = hydration.ram_bytes  # type: ignore[method-assign]
        self.populate = hydration.populate  # type: ignore[method-assign]
        self.hydrate = hydration.hydrate  # type: ignore[method-assign]

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        return not record.manifest.owed

    def evict(self, record: StepRecord) -> bool:
        return record.is_persisted and self._hydration.evict(record)


@dataclass
class Node:
    """A node with an object tier: real steps, real parts, real workers."""

    driver: Driver
    store: Path
    client: WorkerPool = field(init=False)
    index: ObjectIndex = field(init=False)
    persister: Persister = field(init=False)
    hydration: Hydration = field(init=False)
    work: ObjectOperations = field(init=False)

    def __post_init__(self) -> None:
        registry = self.driver.registry
        self.client = WorkerPool(registry.settings)
        deletions = Deletions(registry, self.client)
        self.index = ObjectIndex(registry, self.client, deletions)
        self.hydration = Hydration(registry, ObjectSource(self.client, self.index.manifest))
        self.hydration.serve_objects(self.index.manifest)
        self.persister = Persister(
            registry,
            self.client,
            self.index,
            deletions,
            node="node-1",
            hydrate=self.hydration.hydrate,
            is_stub=self.hydration.is_stub,
        )
        registry.object_tier = Boundary(self.persister, self.hydration)
        self.hydration.scan()
        self.work = ObjectOperations(registry, self.client, self.index, self.persister, self.hydration, deletions)

    def object(self, inner: str, step: str = STEP) -> Path:
        return self.store / step / inner

    @property
    def is_committed(self) -> bool:
        return self.object(".tierfs/manifest.json").exists()

    async def read(self, inner: str, step: str = STEP) -> bytes:
        """As a program would."""
        path = self.driver.root / step / inner
        found = await self.hydration.read(path.lstat().st_ino, 0, path.lstat().st_size)
        return path.read_bytes() if found is None else found


@asynccontextmanager
async def node(tmp_path: Path, store: Path, *, name: str = "ram", **persist: Any) -> AsyncIterator[Node]:
    settings = Settings(object=f"file://{store}")
    for key, value in persist.items():
        setattr(settings.persist, key, value)
    made = Node(Driver(tmp_path / name, settings), store)
    with trio.fail_after(100):
        async with made.driver.running(), trio.open_nursery() as nursery:
            await nursery.start(made.client.run)
            await nursery.start(made.hydration.run)
            await nursery.start(made.index.run)
            await nursery.start(made.persister.run)
            yield made
            nursery.cancel_scope.cancel()


def spoil(path: Path, at: int = 100) -> None:
    """Turn one bit without a trace in size or times, as memory and disks do."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def all_summed(of: Node, step: str = STEP) -> None:
    record = of.driver.record(step)
    await until(lambda: all(entry.checksum for entry in record.manifest.files.values()), "checksums")


async def test_flush_sends_what_policy_does_not_and_says_how_far_it_is(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store, policy="demand") as here:
        await here.driver.save(STEP, 1, LARGE)
        with pytest.raises(TierfsError, match="`tierfs flush`"):
            await here.work.wait(STEP, level="object", timeout_s=5, progress=Told())
        told = Told()
        size = here.driver.record(STEP).manifest.bytes
        answer = await here.work.flush([STEP], wait=True, progress=told)
        assert answer == {"steps": 1, "bytes": size, "already": 0, "failed": []}
        assert here.is_committed
        assert told[-1] == {
            "steps_done": 1,
            "steps_total": 1,
            "bytes": size,
            "bytes_total": size,
            "path": "",
            "waiting_for": "",
        }
        again = await here.work.flush([], wait=True, progress=Told())
        assert again == {"steps": 0, "bytes": 0, "already": 1, "failed": []}
        waited = await here.work.wait(STEP, level="object", timeout_s=5, progress=Told())
        assert waited == {"path": STEP, "level": "object", "reached": True}
        status = await here.work.status()
        json.dumps(status)
        assert (status["steps_owed"], status["bytes_owed"], status["deletions_owed"], status["sending"]) == (
            0,
            0,
            0,
            [],
        )
        assert (status["reachable"], status["problem"], status["conditional_put"]) == (True, "", True)
        assert status["bytes_sent"] >= size
        assert status["namespaces"]["run"]["newest_persisted"] == "step_1"
        assert 0 <= status["namespaces"]["run"]["newest_persisted_age_s"] < 100


async def test_what_can_not_be_flushed_is_named_with_the_reason(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store, policy="none") as here:
        nothing = await here.work.flush([], wait=True, progress=Told())
        assert nothing == {"steps": 0, "bytes": 0, "already": 0, "failed": []}
        assert await here.work.repair("", dry_run=False, progress=Told()) == {"checked": 0, "actions": []}
        await here.driver.save(STEP, 1)
        here.driver.mkdirs("run/step_2")
        await here.driver.write("run/step_2/__0_0.distcp", b"x")
        refused = await here.work.flush([STEP, "run/step_2"], wait=True, progress=Told())
        assert (refused["steps"], [each["path"] for each in refused["failed"]]) == (0, [STEP, "run/step_2"])
        assert "persist.policy none" in refused["failed"][0]["reason"]
        assert "only complete steps" in refused["failed"][1]["reason"]
        everything = await here.work.flush([], wait=True, progress=Told())
        assert everything == {"steps": 0, "bytes": 0, "already": 0, "failed": []}
        with pytest.raises(NotFound, match="run/step_9"):
            await here.work.flush(["run/step_9"], wait=False, progress=Told())
        with pytest.raises(PathRefused):
            await here.work.flush(["../run"], wait=False, progress=Told())


async def test_drain_ends_with_what_is_left_when_the_store_is_away(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting_off, "FIRST_PAUSE_S", 1.5)
    monkeypatch.setattr(index, "INDEX_WITHIN_S", 0.5)
    away = tmp_path / "away" / "store"
    async with node(tmp_path, away) as here:
        here.driver.registry.settings.transfer.retry_for_s = 0.1
        await here.driver.save(STEP, 1)
        answer = await here.work.drain(Told(), timeout_s=1)
        assert (answer["steps"], answer["left"]) == (0, [STEP])
        await until(lambda: here.persister.progress(here.driver.record(STEP)).state == "waiting", "it failed", 60)  # type: ignore[union-attr]
        status = await here.work.status()
        assert (status["steps_owed"], status["reachable"]) == (1, False)
        assert str(away) in status["sending"][0]["error"]
        assert status["sending"][0]["next_try_in_s"] > 0
        away.parent.mkdir()
        here.persister.owe(here.driver.record(STEP), "demand")
        answer = await here.work.drain(Told(), timeout_s=60)
        assert (answer["steps"], answer["left"]) == (1, [])


async def test_prefetch_brings_all_of_a_step_and_says_early_where_it_can_not(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, store) as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.work.drain(Told())
    async with node(tmp_path, store, name="other") as there:
        record = there.driver.record(STEP)
        assert not record.manifest.populated
        told = Told()
        answer = await there.work.prefetch([f"{STEP}/__0_0.distcp"], progress=told)
        assert (answer["files"], answer["bytes"]) == (1, 3 << 20)
        assert told[-1]["bytes"] == told[-1]["bytes_total"] == 3 << 20
        await there.work.prefetch([], progress=Told())
        assert not any(there.hydration.is_stub(entry.ino) for entry in record.manifest.files.values())
        assert there.driver.loaded(STEP) == 1
        again = await there.work.prefetch([STEP], progress=Told())
        assert again == {"files": 0, "bytes": 0, "already": 4}
    monkeypatch.setattr(step_driver, "SIZE", 4 << 20)
    async with node(tmp_path, store, name="small") as small:
        with pytest.raises(NoRoom, match="can't hold"):
            await small.work.prefetch([STEP], progress=Told())
        assert small.client.stats.bytes_received < 1 << 20
        assert (await small.work.prefetch([f"{STEP}/__1_0.distcp"], progress=Told()))["files"] == 1


async def test_verify_finds_a_flipped_bit_a_short_file_and_a_missing_one(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store, policy="demand") as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.driver.save("run/step_2", 2)
        with pytest.raises(NotFound, match="nothing to verify"):
            await here.work.verify("run", Told())
        await here.work.flush([STEP], wait=True, progress=Told())
        good = await here.work.verify("", Told())
        assert good == {"files": 4, "bytes": here.driver.record(STEP).manifest.bytes, "bad": [], "unsealed": 1}
        spoil(here.object("__0_0.distcp"))
        os.truncate(here.object("__1_0.distcp"), 5)
        here.object("small.json").unlink()
        bad = (await here.work.verify(STEP, Told()))["bad"]
        assert {each["path"]: each["reason"].split(" in ")[0] for each in bad} == {
            f"{STEP}/__0_0.distcp": "has other bytes",
            f"{STEP}/__1_0.distcp": "has 5 bytes",
            f"{STEP}/small.json": "is missing",
        }
        assert any(problem["path"] == STEP for problem in here.driver.registry.problems)


async def test_repair_sends_again_what_is_damaged_there(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store) as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.work.drain(Told())
        assert await here.work.repair("", dry_run=False, progress=Told()) == {"checked": 1, "actions": []}
        spoil(here.object("__0_0.distcp"))
        here.object("small.json").unlink()
        planned = await here.work.repair(STEP, dry_run=True, progress=Told())
        assert [(each["path"], each["action"]) for each in planned["actions"]] == [
            (f"{STEP}/__0_0.distcp", "sent again"),
            (f"{STEP}/small.json", "sent again"),
        ]
        assert not here.object("small.json").exists()
        assert (await here.work.repair(STEP, dry_run=False, progress=Told()))["actions"] == planned["actions"]
        assert (await here.work.verify(STEP, Told()))["bad"] == []
        assert here.driver.record(STEP).is_persisted
        assert here.driver.registry.problems == []


async def test_repair_fetches_again_what_is_damaged_in_ram(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store) as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.work.drain(Told())
        await all_summed(here)
        path = here.driver.root / STEP / "__0_0.distcp"
        path.chmod(0o640)
        before = path.stat()
        spoil(path)
        with path.open("rb") as still_open:
            done = await here.work.repair(STEP, dry_run=False, progress=Told())
            assert [(each["path"], each["action"]) for each in done["actions"]] == [
                (f"{STEP}/__0_0.distcp", "fetched again")
            ]
            assert still_open.read() != path.read_bytes() == content(1, "__0_0.distcp", 3 << 20)
        after = path.stat()
        assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
        assert here.driver.loaded(STEP) == 1
        assert here.driver.record(STEP).is_persisted
        assert await here.work.repair("", dry_run=False, progress=Told()) == {"checked": 1, "actions": []}


async def test_a_commit_that_is_damaged_is_put_right_from_this_nodes_copy(tmp_path: Path, store: Path) -> None:
    async with node(tmp_path, store) as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.work.drain(Told())
        good = here.object(".tierfs/manifest.json").read_bytes()
        spoil(here.object(".tierfs/manifest.json"), 3)
        done = await here.work.repair(STEP, dry_run=False, progress=Told())
        assert [(each["path"], each["action"]) for each in done["actions"]] == [(STEP, "sent again")]
        assert here.object(".tierfs/manifest.json").read_bytes() == good


async def test_a_step_that_is_whole_nowhere_is_withdrawn_and_not_taken_for_whole_again(
    tmp_path: Path, store: Path
) -> None:
    async with node(tmp_path, store) as here:
        await here.driver.save(STEP, 1, LARGE)
        await here.driver.save("run/step_2", 2, LARGE)
        await here.work.drain(Told())
        await all_summed(here, "run/step_2")
        spoil(here.driver.root / "run/step_2/__0_0.distcp")
        spoil(here.object("__0_0.distcp", "run/step_2"), 200)
        done = await here.work.repair("run", dry_run=False, progress=Told())
        assert [(each["path"], each["action"]) for each in done["actions"]] == [
            ("run/step_2/__0_0.distcp", "lost"),
            ("run/step_2", "withdrawn"),
        ]
        await here.driver.settle(seconds=10)
        assert here.driver.state("run/step_2") == "writing"
        assert here.driver.latest() == "step_1"
        assert here.driver.loaded("run/step_2") is None
        assert not here.object(".tierfs/manifest.json", "run/step_2").exists()
        await here.index.refresh()
        here.driver.restart()
        await here.driver.settle(seconds=10)
        assert here.driver.state("run/step_2") == "writing"
        assert here.driver.latest() == "step_1"


async def test_an_imported_checkpoint_is_a_step_at_once_and_loads(tmp_path: Path, store: Path) -> None:
    lay_out(store, checkpoint(7))
    async with node(tmp_path, store) as here:
        assert here.driver.registry.records == {}
        answer = await here.work.adopt(STEP, Told())
        size = sum(map(len, checkpoint(7).values()))
        assert answer == {"path": STEP, "files": 3, "bytes": size, "marker": MARKER}
        assert here.driver.latest() == "step_1"
        assert here.driver.record(STEP).is_persisted
        await here.work.prefetch([STEP], progress=Told())
        assert here.driver.loaded(STEP) == 7
        assert (await here.work.verify("", Told()))["bad"] == []
        with pytest.raises(StepBusy, match="already"):
            await here.work.adopt(STEP, Told())
