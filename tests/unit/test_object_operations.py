"""What a person asks of the object tier, on a plain directory as RAM tier and a real `file://` store behind workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from step_driver import FILES, MARKER, Driver, content, marker

from tierfs.checksum import CHUNK_BYTES, FileChecksum, checksum_fd
from tierfs.errors import CommitRefused, NotAStep, NotFound, ObjectMissing, StepBusy
from tierfs.objects.pool import WorkerPool
from tierfs.persist.importing import Importing
from tierfs.persist.layout import manifest_key
from tierfs.persist.object_manifest import read_manifest
from tierfs.persist.reading_back import CHUNKS_AT_ONCE, ReadBack
from tierfs.persist.repairing import decide
from tierfs.persist.reporting import all_of, reporting
from tierfs.settings import Settings

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
