"""The RAM tier on a real tmpfs: room is there in time, the limit is the tier's size, and nothing outlives its use."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from tierfs.cluster.journal import Journal
from tierfs.errors import MountError
from tierfs.ram import syscalls, tmpfs
from tierfs.ram.ballast import Ballast
from tierfs.ram.tier import RamTier
from tierfs.ram.tmpfs import HUGE_PAGE, TmpfsGrant
from tierfs.settings import RamSettings
from tierfs.whole_files import write_whole

MIB = 1 << 20
SIZE = 256 * MIB
BLOCK = memoryview(os.urandom(4 * MIB))

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty directory for a tmpfs. Whatever was mounted on it goes when the test ends, however it ends."""
    directory = tmp_path / "ram"
    directory.mkdir()
    yield directory
    while tmpfs.is_tmpfs_mount(directory):
        syscalls.umount(str(directory), syscalls.MNT_DETACH)


@pytest.fixture(params=["auto", "always", "never"])
def grant(request: pytest.FixtureRequest, place: Path) -> TmpfsGrant:
    return tmpfs.mount_tmpfs(place, SIZE, huge_pages=request.param, noswap=True)


@asynccontextmanager
async def running(tier: RamTier) -> AsyncIterator[RamTier]:
    async with trio.open_nursery() as nursery:
        await nursery.start(tier.run)
        yield tier
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    with trio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 - the kernel has no event for these
            await trio.sleep(0.005)
    assert condition(), what


async def ballast_is_full(tier: RamTier) -> None:
    def full() -> bool:
        usage = tier.usage()
        return usage.ballast_bytes == usage.ballast_target_bytes >= usage.free_bytes - 2 * HUGE_PAGE

    try:
        await until(full, "the ballast was not filled")
    except AssertionError as error:
        raise AssertionError(f"the ballast was not filled: {tier.usage()}, {tier.problems()}") from error


def limit_bytes(place: Path) -> int:
    statistics = os.statvfs(place)
    return statistics.f_blocks * statistics.f_frsize


def open_descriptors(file: os.stat_result) -> list[int]:
    """The descriptors of this process that are open on a file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that reads the directory
            if os.path.samestat(os.fstat(int(name)), file):
                found.append(int(name))
    return found


def write_until_full(fd: int, wanted_bytes: int = 1 << 40) -> int:
    """Writes to the end of the file as fast as it goes. Returns what was written before ENOSPC, or all of it."""
    written = 0
    while written < wanted_bytes:
        try:
            written += os.write(fd, BLOCK[: wanted_bytes - written])
        except OSError as error:
            assert error.errno == errno.ENOSPC
            break
    return written


def make(tier: RamTier, name: str) -> tuple[int, int]:
    fd = os.open(tier.root / name, os.O_CREAT | os.O_RDWR)
    return fd, os.fstat(fd).st_ino


@needs_root
class TestTmpfs:
    def test_options_are_granted_and_read_back(self, place: Path) -> None:
        grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="always", noswap=True)
        assert grant.size_bytes == SIZE
        assert grant.huge_pages in ("always", "never")
        again = tmpfs.read_grant(place)
        assert (again.huge_pages, again.noswap, again.inode64) == (grant.huge_pages, grant.noswap, grant.inode64)
        assert grant.noswap or any("noswap" in note for note in grant.notes)
        assert place.stat().st_mode & 0o7777 == 0o700

    def test_a_refused_option_is_left_out_and_said(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = syscalls.mount

        def older_kernel(source: str, target: str, kind: str, flags: int, data: str) -> None:
            if "noswap" in data:
                raise OSError(errno.EINVAL, "Invalid argument", target)
            real(source, target, kind, flags, data)

        monkeypatch.setattr(syscalls, "mount", older_kernel)
        grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="never", noswap=True)
        assert not grant.noswap
        assert grant.inode64
        assert any("noswap was refused" in note for note in grant.notes)
        assert tmpfs.resize_tmpfs(place, 2 * SIZE) == 2 * SIZE == limit_bytes(place)

    def test_the_limit_never_goes_below_what_is_used(self, place: Path) -> None:
        tmpfs.mount_tmpfs(place, SIZE, huge_pages="never", noswap=True)
        (place / "data").write_bytes(bytes(8 * MIB))
        assert 8 * MIB <= tmpfs.resize_tmpfs(place, 4 * MIB) <= 9 * MIB
        assert tmpfs.read_grant(place).noswap

    def test_a_busy_tier_is_not_unmounted_and_the_error_says_what_to_do(self, place: Path) -> None:
        tmpfs.mount_tmpfs(place, SIZE, huge_pages="never", noswap=False)
        with (place / "open").open("w"), pytest.raises(MountError, match="close what is open in it"):
            tmpfs.unmount_tmpfs(place)
        tmpfs.unmount_tmpfs(place)
        assert not tmpfs.is_tmpfs_mount(place)
        with pytest.raises(MountError, match="not a tmpfs mount point"):
            tmpfs.read_grant(place)


@needs_root
async def test_a_full_speed_writer_finds_room_up_to_the_tiers_size_though_the_ballast_held_it_all(
    place: Path, grant: TmpfsGrant
) -> None:
    """Nobody knows the size and the writer does not wait: ENOSPC comes at the tier's size, to the page."""
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        already = tier.usage().used_bytes
        fd, node = make(tier, "shard")
        tier.begin_shard(node, fd, None)
        written = await trio.to_thread.run_sync(write_until_full, fd)
        assert SIZE - already - 64 * 1024 <= written <= SIZE - already
        await until(lambda: bool(tier.problems()), "nobody said that the tier is full")
        assert any(p.path == "shard" and "ENOSPC" in p.message for p in tier.problems())
        small, small_node = make(tier, "small")
        tier.begin_shard(small_node, small, None)
        tier.end_shard(small_node)
        os.close(small)
        assert [p.path for p in tier.problems()] == ["shard"], "a file of no size did not fill the tier"
        tier.end_shard(node)
        os.close(fd)
        assert tier.usage().free_bytes <= 64 * 1024
        (tier.root / "shard").unlink()
        tier.released_room()
        await ballast_is_full(tier)
        assert tier.problems() == []
        assert limit_bytes(place) == SIZE + tier.usage().ballast_bytes


@needs_root
async def test_an_expected_shard_gets_its_room_at_once_and_the_rest_comes_back(place: Path, grant: TmpfsGrant) -> None:
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        full = tier.usage().ballast_bytes
        fd, node = make(tier, "shard")
        began = time.perf_counter()
        tier.begin_shard(node, fd, 100 * MIB)
        took = time.perf_counter() - began
        assert os.fstat(fd).st_blocks * 512 >= HUGE_PAGE
        await until(lambda: os.fstat(fd).st_blocks * 512 >= 100 * MIB, "the expected room was not given")
        assert tier.usage().used_bytes < MIB  # given is not used
        assert tier.growing[node].size_bytes == 0
        assert write_until_full(fd, 30 * MIB + 5) == 30 * MIB + 5
        await tier.before_times_are_set(node)
        os.utime(fd, ns=(1, 2))
        tier.end_shard(node)
        # A thread that was just giving it room is waited for.
        await until(lambda: os.fstat(fd).st_blocks * 512 <= 30 * MIB + 8192, "the room was not taken back")
        assert os.fstat(fd).st_mtime_ns == 2
        assert os.fstat(fd).st_size == 30 * MIB + 5
        assert os.fstat(fd).st_blocks * 512 >= 30 * MIB
        assert os.pread(fd, 4 * MIB, 28 * MIB)[: 2 * MIB + 5] == bytes(BLOCK[: 2 * MIB + 5])
        os.close(fd)
        assert not tier.growing
        await ballast_is_full(tier)
        assert full - 34 * MIB <= tier.usage().ballast_bytes < full
        assert took < 0.1  # 2 ms when the machine is quiet


@pytest.fixture
def slow_giving(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Set once a thread is about to give room to a shard, and to be set for it to go on."""
    giving, may_go_on = threading.Event(), threading.Event()
    fallocate = syscalls.fallocate

    def slow_fallocate(fd: int, *arguments: int) -> None:
        if "/root/" in os.readlink(f"/proc/self/fd/{fd}"):  # not the ballast
            giving.set()
            assert may_go_on.wait(10)
        fallocate(fd, *arguments)

    monkeypatch.setattr(syscalls, "fallocate", slow_fallocate)
    monkeypatch.setattr(RamTier, "_give_at_once", lambda tier, shard, end: None)  # all by the thread
    return giving, may_go_on


@needs_root
async def test_times_that_a_program_sets_are_never_moved_by_giving_room(
    place: Path, slow_giving: tuple[threading.Event, threading.Event]
) -> None:
    """Seen as a file that rsync copied again: a thread gave it room while its times were set and then looked at."""
    giving, may_go_on = slow_giving
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        fd, node = make(tier, "shard")
        tier.begin_shard(node, fd, 100 * MIB)
        await until(giving.is_set, "no thread gave room")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tier.before_times_are_set, node)
            await until(lambda: tier._gave.statistics().tasks_waiting > 0, "nobody waits for the thread")
            may_go_on.set()
        os.utime(fd, ns=(1, 2))
        assert os.fstat(fd).st_blocks > 0
        tier.end_shard(node)
        assert os.fstat(fd).st_mtime_ns == 2
        os.close(fd)


@needs_root
async def test_a_file_that_was_closed_keeps_its_time_though_a_thread_still_gives_it_room(
    place: Path, slow_giving: tuple[threading.Event, threading.Event]
) -> None:
    giving, may_go_on = slow_giving
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        fd, node = make(tier, "shard")
        tier.begin_shard(node, fd, 100 * MIB)
        await until(giving.is_set, "no thread gave room")
        os.write(fd, b"all of it")
        tier.end_shard(node)
        sealed = os.fstat(fd).st_mtime_ns
        may_go_on.set()
        await until(lambda: tier._busy is None, "the thread does not end")
        assert os.fstat(fd).st_mtime_ns == sealed
        assert os.fstat(fd).st_blocks * 512 <= 8192
        os.close(fd)


@needs_root
async def test_a_likely_large_file_gets_room_before_its_first_byte(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        fd, node = make(tier, "shard")
        tier.begin_shard(node, fd, None, likely_large=True)
        assert os.fstat(fd).st_blocks * 512 >= 60 * MIB
        tier.end_shard(node)
        assert os.fstat(fd).st_blocks == 0
        os.close(fd)


@needs_root
async def test_room_given_by_a_daemon_that_died_comes_back_but_not_from_under_a_writer(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    died = RamTier(place, RamSettings(ballast="off"), SIZE, grant)
    (closed, _), (written, node) = make(died, "closed"), make(died, "written")
    for fd in (closed, written):
        os.write(fd, b"x" * 10000)
        syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, 0, 64 * MIB)
    died.close()
    os.close(closed)
    async with running(RamTier(place, RamSettings(ballast="off"), SIZE, grant)) as tier:
        tier.begin_shard(node, written, None)
        assert await tier.trim_leftovers() >= 60 * MIB
        assert os.fstat(written).st_blocks * 512 == 64 * MIB
        assert tier.usage().used_bytes < MIB
        tier.end_shard(node)
        assert os.fstat(written).st_blocks * 512 == 12288
        os.close(written)


@needs_root
async def test_a_shard_that_ends_while_another_is_given_room_is_left_alone(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=False)
    tier = RamTier(place, RamSettings(ballast="off"), SIZE, grant)
    first, ending, last = (os.open(tier.root / name, os.O_RDWR | os.O_CREAT) for name in ("first", "ending", "last"))
    for fd, expected_bytes in ((first, 192 * MIB), (ending, 32 * MIB)):
        tier.begin_shard(os.fstat(fd).st_ino, fd, expected_bytes)
    async with running(tier):
        with trio.fail_after(20):
            while os.fstat(first).st_blocks == 0:  # a thread is about to give it the rest
                await trio.lowlevel.checkpoint()
        (closed,) = (fd for fd in open_descriptors(os.fstat(ending)) if fd != ending)
        tier.end_shard(os.fstat(ending).st_ino)
        os.dup2(last, closed)  # the number is given to another file at once
        tier.begin_shard(os.fstat(last).st_ino, last, 16 * MIB)
        await until(lambda: os.fstat(last).st_blocks * 512 >= 16 * MIB, "the last shard got no room")
        assert os.fstat(closed).st_ino == os.fstat(last).st_ino, "somebody else's descriptor was closed"
        assert os.fstat(ending).st_blocks == 0
    for fd in (first, ending, last, closed):
        os.close(fd)


@needs_root
async def test_a_small_file_holds_only_its_pages_once_closed(place: Path, grant: TmpfsGrant) -> None:
    async with running(RamTier(place, RamSettings(ballast="off"), SIZE, grant)) as tier:
        before = tier.usage().used_bytes
        for number in range(64):
            fd, node = make(tier, f"small{number}")
            tier.begin_shard(node, fd, None)
            os.write(fd, b"x" * 10240)
            tier.end_shard(node)
            os.close(fd)
        assert tier.usage().used_bytes - before <= 64 * 12288 + 65536
        assert tier.usage().ballast_target_bytes == tier.usage().ballast_bytes == 0
        assert limit_bytes(place) == SIZE


@needs_root
async def test_room_is_asked_for_before_it_is_out(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    tier = RamTier(place, RamSettings(), SIZE, grant)
    asked: list[int] = []

    def evict(wanted: int) -> bool:
        asked.append(wanted)
        old = tier.root / "old"
        if not old.exists():
            return False
        old.unlink()
        return True

    tier.on_pressure = evict
    with (tier.root / "old").open("wb", buffering=0) as old:
        assert write_until_full(old.fileno(), 200 * MIB) == 200 * MIB
    async with running(tier):
        fd, node = make(tier, "new")
        tier.begin_shard(node, fd, 150 * MIB)
        await until(lambda: bool(asked), "on_pressure was not called")
        assert write_until_full(fd, 150 * MIB) == 150 * MIB
        tier.end_shard(node)
        os.close(fd)
        assert 80 * MIB < asked[0] <= 150 * MIB
        assert tier.problems() == []


@needs_root
async def test_the_tiers_own_books_are_written_though_data_has_filled_it(place: Path) -> None:
    """Also while a program goes on to take whatever is free; and the limit is the tier's size again soon."""
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="always", noswap=False)
    tier = RamTier(place, RamSettings(ballast="off"), SIZE, grant)
    async with running(tier):
        data, over = os.open(tier.root / "data", os.O_RDWR | os.O_CREAT), threading.Event()

        def take_all() -> None:
            while not over.is_set():
                with suppress(OSError):
                    os.write(data, BLOCK)

        taking = threading.Thread(target=take_all)
        taking.start()
        try:
            await until(lambda: os.statvfs(place).f_bfree == 0, "the tier is full")
            with pytest.raises(OSError, match="No space left"):
                (tier.meta / "plain").write_bytes(b"x" * 5000)
            for number in range(200):
                write_whole(tier.meta / "deeper" / f"{number}.json", b"%d" % number * 3000)
        finally:
            over.set()
            taking.join()
        journal = Journal(tier.meta)
        for _ in range(100):
            journal.add("path", "some/where")
        assert (tier.meta / "deeper" / "199.json").read_bytes() == b"199" * 3000
        assert len(Journal(tier.meta)) == 100
        used = tier.usage().used_bytes
        assert used < SIZE + 64 * MIB
        os.ftruncate(data, 0)
        os.close(data)
        await until(lambda: tmpfs.read_grant(place).size_bytes == SIZE, "the limit is the size again")


@needs_root
async def test_a_tier_without_inodes_says_so_until_there_are_some(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="never", noswap=False)
    async with running(RamTier(place, RamSettings(ballast="off"), SIZE, grant)) as tier:
        assert tier.problems() == []
        files = tier.usage().files
        syscalls.mount("tierfs", str(place), "tmpfs", syscalls.MS_REMOUNT, f"nr_inodes={files + 1}")
        (tier.root / "last").touch()
        with pytest.raises(OSError, match="No space left"):
            (tier.root / "one_more").touch()
        (problem,) = tier.problems()
        assert problem.severity == "error" and "no inode left" in problem.message
        (tier.root / "last").unlink()
        assert tier.problems() == []


@needs_root
async def test_the_ballast_comes_back_when_deleted_or_cut_by_hand(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    async with running(RamTier(place, RamSettings(), SIZE, grant)) as tier:
        await ballast_is_full(tier)
        (place / "ballast").unlink()
        await until(
            lambda: (place / "ballast").exists() and tier.usage().ballast_bytes > SIZE // 2, "no new ballast was made"
        )
        await ballast_is_full(tier)
        os.truncate(place / "ballast", 5 * MIB)
        await until(lambda: tier.usage().ballast_bytes > SIZE // 2, "the ballast was not filled again")
        await ballast_is_full(tier)
        assert limit_bytes(place) == SIZE + tier.usage().ballast_bytes
        assert (place / "ballast").stat().st_size == tier.usage().ballast_bytes


@needs_root
async def test_a_set_ballast_size_is_kept_and_a_smaller_tier_lets_go_of_what_is_too_much(place: Path) -> None:
    grant = tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    async with running(RamTier(place, RamSettings(ballast=str(100 * MIB)), SIZE, grant)) as tier:
        await until(lambda: tier.usage().ballast_bytes == 100 * MIB, "the ballast was not filled to its setting")
    smaller = RamTier(place, RamSettings(), 64 * MIB, grant)
    assert smaller.usage().ballast_bytes <= 64 * MIB
    assert limit_bytes(place) == 64 * MIB + smaller.usage().ballast_bytes
    smaller.close()


_REBALANCE = """
import random, sys
from pathlib import Path
from tierfs.ram.ballast import Ballast
ballast = Ballast(Path(sys.argv[1]), int(sys.argv[2]))
print("ready", flush=True)
while True:
    if ballast.held_bytes() < int(sys.argv[2]) // 2:
        ballast.grow(random.choice([2, 16, 64]) << 20, probably_warm=random.random() < 0.5)
    else:
        ballast.take(random.randrange(100 << 20))
"""


@needs_root
def test_killed_while_it_moves_room_the_next_one_makes_it_right(place: Path) -> None:
    tmpfs.mount_tmpfs(place, SIZE, huge_pages="auto", noswap=True)
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    for _ in range(15):
        mover = subprocess.Popen(
            [sys.executable, "-c", _REBALANCE, str(place), str(SIZE)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        assert mover.stdout is not None
        with mover.stdout:
            assert mover.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.05))
            mover.send_signal(signal.SIGKILL)
            mover.wait()
        # Dead, the limit leaves at least the tier's size to data.
        left = (place / "ballast").stat()
        assert limit_bytes(place) >= SIZE + left.st_blocks * 512, f"seed {seed}"
        ballast = Ballast(place, SIZE)
        held = ballast.held_bytes()
        assert held == (place / "ballast").stat().st_size
        assert held % HUGE_PAGE == 0
        assert limit_bytes(place) == SIZE + held
        ballast.close()
    with (place / "data").open("wb", buffering=0) as data:
        assert write_until_full(data.fileno()) == SIZE, f"seed {seed}"


async def test_a_plain_directory_counts_what_is_in_it_and_reserves_nothing(tmp_path: Path) -> None:
    tier = RamTier(tmp_path, RamSettings(), SIZE, None)
    async with running(tier):
        fd, node = make(tier, "shard")
        tier.begin_shard(node, fd, 100 * MIB)
        assert write_until_full(fd, 8 * MIB) == 8 * MIB
        tier.end_shard(node)
        os.close(fd)
        await until(lambda: tier.usage().used_bytes >= 8 * MIB, "the file was not counted")
        assert tier.usage().used_bytes < 9 * MIB
        assert tier.usage().free_bytes <= SIZE - 8 * MIB
        assert tier.usage().ballast_bytes == tier.usage().ballast_target_bytes == 0
        assert not (tmp_path / "ballast").exists()


def test_the_directories_are_private_and_an_existing_root_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o750)
    tier = RamTier(tmp_path, RamSettings(), SIZE, None)
    assert tier.root.stat().st_mode & 0o777 == 0o750
    for private in (tier.meta, tier.generations, tier.trash):
        assert private.stat().st_mode & 0o777 == 0o700
