"""The object tier as the daemon uses it: real worker processes, and a directory as the store that fails by script."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from scripted_store import SCRIPT, Script
from upload_driver import FileJournal

from tests.conftest import wait_until
from tierfs.checksum import CHUNK_BYTES, checksum_fd
from tierfs.errors import (
    ObjectCorrupt,
    ObjectDenied,
    ObjectExists,
    ObjectMissing,
    ObjectUnavailable,
    SettingsError,
    StepBusy,
)
from tierfs.objects import worker_process
from tierfs.objects.pool import WorkerPool
from tierfs.objects.store import GIB, LEAST_PART_BYTES, MIB, SINGLE_PUT_BYTES, USUAL_PART_BYTES, part_bytes
from tierfs.settings import Settings

KEY = "run/step_1/shard"
BOUND_S = 60


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    directory = tmp_path / "script"
    monkeypatch.setenv(SCRIPT, str(directory))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return Script(directory).begin()


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def settings(tier: Path) -> Settings:
    made = Settings()
    made.object = f"file://{tier}"
    made.transfer.retry_for_s = 30.0
    return made


@pytest.fixture
def journal(tmp_path: Path) -> FileJournal:
    return FileJournal(tmp_path / "journal")


@pytest.fixture
def shard() -> Iterator[int]:
    """Two whole parts and a bit, each MiB different."""
    yield from shard_of(2 * LEAST_PART_BYTES + 5 * MIB + 17)


@pytest.fixture
def large_shard() -> Iterator[int]:
    """Nine parts."""
    yield from shard_of(8 * LEAST_PART_BYTES + 5 * MIB + 17)


@pytest.fixture
def small() -> Iterator[int]:
    yield from shard_of(CHUNK_BYTES + 3)


def shard_of(size_bytes: int) -> Iterator[int]:
    fd = os.memfd_create("shard")
    block = random.Random(7).randbytes(MIB)
    for start in range(0, size_bytes, MIB):
        os.pwrite(fd, (start.to_bytes(8, "big") + block)[: min(MIB, size_bytes - start)], start)
    yield fd
    os.close(fd)


def target_for(fd: int) -> int:
    """An empty file of the same size."""
    target = os.memfd_create("target")
    os.ftruncate(target, os.fstat(fd).st_size)
    return target


def contents(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@asynccontextmanager
async def running(
    settings: Settings, store_module: str = "scripted_store", **seconds: float
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(settings, store_module=store_module, **seconds)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            yield pool
            nursery.cancel_scope.cancel()


async def wait_for(condition: Callable[[], object], what: str) -> None:
    with trio.move_on_after(20):
        while not condition():  # noqa: ASYNC110  (of other processes)
            await trio.sleep(0.01)
        return
    raise AssertionError(f"not within 20 s: {what}")


#: Servers that other tests of this session started, before the test that runs.
others: set[int] = set()


@pytest.fixture(autouse=True)
def _know_others() -> None:
    others.clear()
    others.update(children_of(os.getpid()))


def worker_pids() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if pid not in others]


def children_of(pid: int) -> list[int]:
    """Zombies too."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def anonymous_bytes(pid: int) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


async def upload(pool: WorkerPool, fd: int, journal: FileJournal, key: str = KEY) -> bytes:
    """Uploads and returns what the object then holds; its checksums must be the file's."""
    sent: list[int] = []
    done = await pool.upload(key, fd, os.fstat(fd).st_size, journal=journal, on_sent=sent.append)
    assert done.checksum == checksum_fd(fd)
    assert sum(sent) == os.fstat(fd).st_size
    listed = {each.key: each for each in (await pool.list_all("run/")).objects}
    assert listed[key].etag == done.etag
    return await trio.to_thread.run_sync(Path(pool.url.removeprefix("file://"), key).read_bytes)


# --- objects


async def test_small_objects_are_put_listed_read_and_deleted(settings: Settings) -> None:
    async with running(settings, "tierfs.objects.opening") as pool:
        assert (await pool.probe()).conditional_put
        large = os.urandom(3 * MIB)
        etag = await pool.put("run/a\udcff", large)
        await pool.put("run/b", b"", only_if_absent=True)
        with pytest.raises(ObjectExists):
            await pool.put("run/b", b"other", only_if_absent=True)
        assert await pool.get("run/a\udcff", most_bytes=4 * MIB) == (large, etag)
        assert (await pool.get("run/b", most_bytes=0))[0] == b""
        with pytest.raises(ObjectMissing):
            await pool.get("run/c", most_bytes=1)
        assert [each.key for each in (await pool.list_all("run/")).objects] == ["run/a\udcff", "run/b"]
        assert (await pool.list_all("", delimiter="/")).prefixes == ("run/",)
        await pool.delete(["run/b", "run/a\udcff", "run/c"])
        assert (await pool.list_all("run/")).objects == ()
        assert pool.stats.last_error == ""
        assert pool.stats.errors_by_kind == {}
        assert pool.stats.bytes_sent == pool.stats.bytes_received == len(large)


async def test_a_listing_and_a_deletion_longer_than_a_page_are_whole(settings: Settings, tier: Path) -> None:
    async with running(settings) as pool:
        await pool.put("run/0", b"")
        for number in range(1, 2300):
            (tier / f"run/{number}").touch()
        listing = await pool.list_all("run/")
        assert len(listing.objects) == 2300
        await pool.delete([each.key for each in listing.objects])
        assert (await pool.list_all("")).objects == ()


async def test_settings_that_no_store_can_be_opened_with_are_said_by_each_request(
    settings: Settings, script: Script
) -> None:
    settings.object = "ftp://elsewhere"
    async with running(settings) as pool:
        with pytest.raises(SettingsError, match="ftp://elsewhere"):
            await pool.list_all("")


async def test_a_request_to_a_pool_that_does_not_run_fails(settings: Settings) -> None:
    settings.transfer.retry_for_s = 0
    with pytest.raises(ObjectUnavailable, match="not running"):
        await WorkerPool(settings).list_all("")


# --- uploads


@pytest.mark.parametrize(
    ("size_bytes", "wanted"),
    [
        (0, 16 * MIB),
        (SINGLE_PUT_BYTES, 16 * MIB),
        (300 * MIB, 32 * MIB),
        (GIB, 64 * MIB),
        (500 * GIB, 64 * MIB),
        (40 * 1024 * GIB, 4672 * MIB),
    ],
)
def test_parts_are_few_enough_and_small_enough(size_bytes: int, wanted: int) -> None:
    """Amazon S3 takes 10,000 parts of up to 5 GiB; its largest objects need the one, files of some 64 MiB the other."""
    assert part_bytes(size_bytes) == wanted
    assert -(-size_bytes // wanted) <= 9_000


@pytest.mark.parametrize(
    "size_bytes", [0, 1, CHUNK_BYTES, SINGLE_PUT_BYTES - 1, SINGLE_PUT_BYTES, SINGLE_PUT_BYTES + 1]
)
async def test_an_object_is_its_file_whatever_the_size(
    settings: Settings, script: Script, journal: FileJournal, size_bytes: int
) -> None:
    for fd in shard_of(size_bytes):
        async with running(settings) as pool:
            assert await upload(pool, fd, journal) == contents(fd)
            assert len(script.calls("put_part")) == (
                0 if size_bytes < SINGLE_PUT_BYTES else -(-size_bytes // LEAST_PART_BYTES)
            )


async def test_a_worker_killed_in_an_upload_is_replaced_and_parts_that_arrived_are_not_sent_again(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    script.hold()
    script.fault("put_part", "hold", times=2)
    async with running(settings) as pool, trio.open_nursery() as nursery:
        nursery.start_soon(kill_when, script, journal)
        assert await upload(pool, shard, journal) == contents(shard)
        assert pool.stats.retries == 2
        assert pool.stats.last_error == ""
    calls = script.calls("put_part")
    assert sorted(calls.count(call) for call in set(calls)) == [1, 2, 2]


async def kill_when(script: Script, journal: FileJournal) -> None:
    """Kills the worker once two parts are held and the third has been noted."""
    await wait_for(lambda: len(journal.parts) == 1 and len(script.calls("put_part")) == 3, "the last part")
    os.kill(worker_pids()[0], signal.SIGKILL)
    script.let_go()


def test_a_daemon_killed_at_random_points_of_an_upload_sends_no_part_that_was_noted_again(
    settings: Settings, script: Script, tmp_path: Path, large_shard: int
) -> None:
    source = tmp_path / "source"
    source.write_bytes(contents(large_shard))
    driver = [sys.executable, str(Path(__file__).parent / "upload_driver.py"), settings.object, str(source)]
    seed = int(os.environ.get("TIERFS_SEED", random.randrange(1 << 32)))
    print(f"TIERFS_SEED={seed} replays this")
    dice = random.Random(seed)
    kills_within = 0
    for attempt in range(30):
        noted = set(FileJournal(tmp_path / "journal").parts)
        before = len(script.calls("put_part"))
        within_s = 0.02 if attempt == 0 else dice.uniform(0, 0.6)
        status = run_and_kill([*driver, str(tmp_path / "journal")], script, dice, within_s if attempt < 29 else BOUND_S)
        sent = [int(call.rpartition("#")[2]) for call in script.calls("put_part")[before:]]
        kills_within += status != 0 and bool(sent)
        assert not noted.intersection(sent), "sent again though noted"
        if status == 0:
            break
    assert kills_within
    assert status == 0
    assert Path(settings.object.removeprefix("file://"), KEY).read_bytes() == source.read_bytes()


def run_and_kill(driver: list[str], script: Script, dice: random.Random, within_s: float) -> int:
    """Kills the driver, or its worker and soon after the driver, `within_s` after it began to send a part."""
    before = len(script.calls("put_part"))
    process = subprocess.Popen(driver, env=driver_environment())
    try:
        wait_until(lambda: len(script.calls("put_part")) > before or process.poll() is not None, "a part")
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        if dice.random() < 0.4:
            for pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.1, 0.5))
    finally:
        process.kill()
    return process.wait()


def driver_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent}"}


@pytest.mark.parametrize("md5_etags", [False, True])
async def test_a_part_that_arrived_without_an_answer_is_taken_over(
    settings: Settings, script: Script, journal: FileJournal, shard: int, md5_etags: bool
) -> None:
    if md5_etags:
        script.md5_etags.mkdir()
    script.fault("put_part", "lost")
    settings.transfer.connections = 1
    settings.transfer.retry_for_s = 0
    async with running(settings) as pool:
        with pytest.raises(ObjectUnavailable):
            await upload(pool, shard, journal)
        assert script.calls("put_part") == [f"{KEY}#1"]
        assert journal.parts == {}
        settings.transfer.retry_for_s = 30
        assert await upload(pool, shard, journal) == contents(shard)
    assert script.calls("put_part") == [f"{KEY}#1", f"{KEY}#2", f"{KEY}#3"]


async def test_a_part_of_other_bytes_is_not_taken_over(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    script.fault("put_part", "lost")
    settings.transfer.connections = 1
    settings.transfer.retry_for_s = 0
    async with running(settings) as pool:
        with pytest.raises(ObjectUnavailable):
            await upload(pool, shard, journal)
        os.pwrite(shard, b"others", 100)
        settings.transfer.retry_for_s = 30
        assert await upload(pool, shard, journal) == contents(shard)
    assert script.calls("put_part").count(f"{KEY}#1") == 2


@pytest.mark.parametrize("md5_etags", [False, True])
async def test_an_upload_that_was_finished_though_the_answer_was_lost_is_not_sent_again(
    settings: Settings, script: Script, journal: FileJournal, shard: int, md5_etags: bool
) -> None:
    if md5_etags:
        script.md5_etags.mkdir()
    script.fault("finish_upload", "lost")
    async with running(settings) as pool:
        assert await upload(pool, shard, journal) == contents(shard)
        assert await upload(pool, shard, journal) == contents(shard), "as after a crash before it was noted"
    assert len(script.calls("put_part")) == 3


async def test_another_object_of_the_same_size_is_not_taken_for_the_upload(
    settings: Settings, script: Script, journal: FileJournal, shard: int, tier: Path
) -> None:
    async with running(settings) as pool:
        await upload(pool, shard, journal)
        other = bytearray(contents(shard))
        other[-1] ^= 1
        await trio.to_thread.run_sync((tier / KEY).write_bytes, other)
        assert await upload(pool, shard, journal) == contents(shard)
    assert len(script.calls("put_part")) == 6


async def test_an_upload_that_the_store_forgot_is_begun_anew_once(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    script.fault("put_part", "error UploadMissing")
    async with running(settings) as pool:
        assert await upload(pool, shard, journal) == contents(shard)
    assert len(script.calls("start_upload")) == 2


async def test_what_will_never_work_is_given_up_and_its_parts_removed(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    script.fault("put_part", "error ObjectCorrupt", times=12)
    async with running(settings) as pool:
        with pytest.raises(ObjectCorrupt):
            await upload(pool, shard, journal)
        assert await pool.list_uploads("run/") == []
        assert journal.upload_id == ""


async def test_a_cancelled_upload_ends_within_a_second_and_can_be_gone_on_with(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    script.hold()
    script.fault("put_part", "hold", times=2)
    async with running(settings) as pool:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(upload, pool, shard, journal)
                await wait_for(lambda: len(journal.parts) == 1, "one part")
                cancelled = time.monotonic()
                scope.cancel()
        assert time.monotonic() - cancelled < 1.0
        assert pool.idle
        script.let_go()
        assert await upload(pool, shard, journal) == contents(shard)
    assert len(script.calls("start_upload")) == 1


async def test_a_file_cut_while_it_is_sent_costs_a_worker_and_says_what_changed(
    settings: Settings, script: Script, journal: FileJournal, small: int
) -> None:
    script.hold()
    script.fault("put", "hold")
    async with running(settings) as pool:

        async def cut() -> None:
            await wait_for(lambda: script.calls("put"), "the request")
            os.ftruncate(small, 10)
            script.let_go()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            with pytest.raises(StepBusy, match="changed its size"):
                await upload(pool, small, journal)
        assert (await pool.list_all("")).objects == ()
        assert pool.stats.errors_by_kind == {"ObjectUnavailable": 1}


async def test_holes_of_a_file_stay_holes_when_it_is_sent(
    settings: Settings, script: Script, journal: FileJournal, small: int
) -> None:
    os.ftruncate(small, CHUNK_BYTES + 3 * MIB)
    before = os.fstat(small).st_blocks
    async with running(settings) as pool:
        assert await upload(pool, small, journal) == contents(small)
    assert os.fstat(small).st_blocks == before


# --- ranges


async def test_a_range_lands_at_its_offset_and_its_checksum_tells_a_flipped_byte(
    settings: Settings, script: Script, journal: FileJournal, shard: int
) -> None:
    target = target_for(shard)
    async with running(settings) as pool:
        await upload(pool, shard, journal)
        chunks = checksum_fd(shard).chunks
        assert await pool.read_range(KEY, CHUNK_BYTES, CHUNK_BYTES, target) == chunks[1]
        assert os.pread(target, CHUNK_BYTES, CHUNK_BYTES) == os.pread(shard, CHUNK_BYTES, CHUNK_BYTES)
        assert not any(os.pread(target, CHUNK_BYTES, 0))
        rest = os.fstat(shard).st_size - 2 * CHUNK_BYTES
        assert await pool.read_range(KEY, 2 * CHUNK_BYTES, rest, target) == chunks[2]
        script.fault("read_range", "flip")
        assert await pool.read_range(KEY, CHUNK_BYTES, CHUNK_BYTES, target) != chunks[1]
    os.close(target)


async def test_a_worker_killed_in_a_read_leaves_the_right_bytes_in_the_end(
    settings: Settings, script: Script, journal: FileJournal, small: int
) -> None:
    target = target_for(small)
    async with running(settings) as pool:
        await upload(pool, small, journal)
        script.fault("read_range", "kill", times=2)
        assert await pool.read_range(KEY, 0, CHUNK_BYTES, target) == checksum_fd(small).chunks[0]
        assert os.pread(target, CHUNK_BYTES, 0) == os.pread(small, CHUNK_BYTES, 0)
    os.close(target)


@pytest.mark.parametrize("does", ["hold", "wedge"])
async def test_a_cancelled_read_never_touches_the_range_afterwards(
    settings: Settings, script: Script, journal: FileJournal, small: int, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    monkeypatch.setattr(worker_process, "LET_GO_WITHIN_S", 0.5)
    target = target_for(small)
    async with running(settings) as pool:
        await upload(pool, small, journal)
        script.hold()
        script.fault("read_range", does)
        before = worker_pids()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pool.read_range, KEY, 0, CHUNK_BYTES, target)
                await wait_for(lambda: script.calls("read_range"), "the request")
                scope.cancel()
        script.let_go()
        assert (worker_pids() == before) == (does == "hold"), "one that can't be stopped is ended"
        assert await pool.get(KEY, most_bytes=20 * MIB)
        assert not any(contents(target))
    os.close(target)


async def test_a_read_beyond_the_end_of_the_file_it_is_for_is_refused(
    settings: Settings, script: Script, journal: FileJournal, small: int
) -> None:
    target = os.memfd_create("short")
    async with running(settings) as pool:
        await upload(pool, small, journal)
        with pytest.raises(Exception, match="beyond the end"):
            await pool.read_range(KEY, 0, CHUNK_BYTES, target)
        assert os.fstat(target).st_size == 0
    os.close(target)


async def test_a_descriptor_that_is_closed_harms_nobody_else(settings: Settings) -> None:
    fd = 1 << 30  # closed numbers are used again at once
    async with running(settings) as pool:
        await pool.put("run/a", b"x")
        before = worker_pids()
        with pytest.raises(OSError, match="Bad file descriptor"):
            await pool.read_range("run/a", 0, 1, fd)
        await pool.put("run/a", b"x")
        assert worker_pids() == before


# --- trouble


async def test_what_passes_is_tried_again_and_shown_until_it_has_passed(settings: Settings, script: Script) -> None:
    script.hold()
    script.fault("get", "error ObjectUnavailable")
    script.fault("get", "wedge")
    async with running(settings) as pool:
        await pool.put("run/a", b"x")
        async with trio.open_nursery() as nursery:

            async def get() -> None:
                assert (await pool.get("run/a", most_bytes=1))[0] == b"x"

            nursery.start_soon(get)
            await wait_for(lambda: len(script.calls("get")) == 2, "the second attempt")
            assert pool.stats.last_error == "get was scripted to fail"
            assert pool.stats.last_error_at > 0
            script.let_go()
        assert pool.stats.last_error == ""
        assert pool.stats.errors_by_kind == {"ObjectUnavailable": 1}
        assert pool.stats.retries == 1


async def test_a_budget_bounds_how_long_a_request_is_tried(settings: Settings, script: Script) -> None:
    script.fault("list_page", "error ObjectUnavailable", times=60)
    settings.transfer.retry_for_s = 1.0
    async with running(settings) as pool:
        began = time.monotonic()
        with pytest.raises(ObjectUnavailable):
            await pool.list_all("")
        assert time.monotonic() - began < 10
        assert 1 < len(script.calls("list_page")) < 50
        script.fault("get", "error ObjectDenied", times=2)
        with pytest.raises(ObjectDenied):
            await pool.get("run/a", most_bytes=1, retry_for_s=1.0)
        assert len(script.calls("get")) == 1, "denied is asked again seldom"


async def test_throttling_halves_the_requests_at_a_time(settings: Settings, script: Script) -> None:
    script.fault("list_page", "error ObjectThrottled", times=2)
    async with running(settings) as pool:
        await pool.list_all("")
        assert pool.stats.throttled == 2
        assert pool.stats.concurrency == 4


async def test_a_reader_is_not_behind_uploads(
    settings: Settings, script: Script, journal: FileJournal, small: int, tmp_path: Path
) -> None:
    settings.transfer.connections = 2
    target = target_for(small)
    async with running(settings) as pool:
        await upload(pool, small, journal)
        script.hold()
        script.fault("put", "hold", times=4)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(upload, pool, small, FileJournal(tmp_path / f"j{number}"), f"run/step_2/{number}")
            await wait_for(lambda: len(script.calls("put")) == 3, "two uploads under way")
            assert await pool.read_range(KEY, 0, 100, target, urgent=True)
            assert len(script.calls("put")) == 3, "the other two uploads wait"
            script.let_go()
    os.close(target)


async def test_a_request_in_which_nothing_moves_is_given_up(settings: Settings, script: Script) -> None:
    script.hold()
    script.fault("list_page", "wedge")
    async with running(settings, stalled_after_s=0.5) as pool:
        assert (await pool.list_all("")).objects == ()
        assert pool.stats.errors_by_kind == {"ObjectUnavailable": 1}
        script.let_go()


async def test_a_worker_that_is_stopped_is_replaced_and_one_that_is_busy_is_not(
    settings: Settings, script: Script
) -> None:
    async with running(settings, silent_after_s=1.0) as pool:
        await pool.list_all("")
        (pid,) = worker_pids()
        script.hold()
        script.fault("list_page", "hold")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.list_all, "")
            await trio.sleep(1.5)
            assert worker_pids() == [pid], "its thread waits for the store, and it says so"
            script.let_go()
        os.kill(pid, signal.SIGSTOP)
        await pool.list_all("")
        assert pid not in worker_pids()


# --- resources


async def test_workers_end_with_the_pool_and_leave_nothing(
    settings: Settings, script: Script, journal: FileJournal, small: int
) -> None:
    settings.transfer.workers = 3
    target = target_for(small)
    script.hold()

    async def wedged() -> None:
        await pool.delete(["run/none"])

    before = len(os.listdir("/proc/self/fd"))
    async with running(settings) as pool, trio.open_nursery() as nursery:
        await upload(pool, small, journal)
        for number in range(10):
            async with trio.open_nursery() as some:
                for _ in range(20):
                    some.start_soon(pool.read_range, KEY, number * MIB, 1000, target)
        workers = worker_pids()
        assert len(workers) == 3
        for pid in workers:
            assert len(os.listdir(f"/proc/{pid}/fd")) <= 6
        script.fault("delete", "wedge")
        nursery.start_soon(wedged)
        await wait_for(lambda: script.calls("delete"), "a request that hangs")
        ending = time.monotonic()
        nursery.cancel_scope.cancel()
    assert time.monotonic() - ending < 2.0
    assert worker_pids() == []
    os.close(target)
    await wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors given back")


async def test_a_worker_needs_little_memory_for_sixteen_parts_at_a_time(
    settings: Settings, script: Script, tmp_path: Path
) -> None:
    script.hold()
    script.fault("put_part", "hold", times=16)
    assert part_bytes(GIB) == USUAL_PART_BYTES
    for fd in shard_of(GIB):
        async with running(settings) as pool, trio.open_nursery() as nursery:
            nursery.start_soon(upload, pool, fd, FileJournal(tmp_path / "journal"))
            await wait_for(lambda: len(script.calls("put_part")) == 16, "all under way")
            (worker,) = worker_pids()
            assert anonymous_bytes(worker) < 120 * MIB
            nursery.cancel_scope.cancel()


async def test_bandwidth_is_bounded(settings: Settings, script: Script, journal: FileJournal, small: int) -> None:
    settings.transfer.upload_bytes_s = 8 * MIB
    settings.transfer.workers = 1
    async with running(settings) as pool:
        await pool.list_all("")
        began = time.monotonic()
        await upload(pool, small, journal)
        assert 1.5 < time.monotonic() - began < 8


def test_a_worker_ends_when_its_daemon_is_killed(
    settings: Settings, script: Script, tmp_path: Path, shard: int
) -> None:
    script.hold()
    script.fault("put_part", "wedge", times=3)
    source = tmp_path / "source"
    source.write_bytes(contents(shard))
    driver = [sys.executable, str(Path(__file__).parent / "upload_driver.py"), settings.object, str(source)]
    process = subprocess.Popen([*driver, str(tmp_path / "journal")], env=driver_environment())
    try:
        wait_until(lambda: script.calls("put_part"), "parts under way", timeout_s=20)
        (worker,) = children_of(process.pid)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not _lives(worker), "the worker's end", timeout_s=1)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
