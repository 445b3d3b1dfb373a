"""Memory of files that others may READ: whatever happens to the files and when, nobody is given what is not the
version he asked for, a fence leaves nothing behind, and no page, descriptor or place in a device's table is lost.

Run it longer with TIERFS_SOAK=1.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.step_driver import until
from tests.unit.verbs_bench import Bench, mapped_inodes
from tests.unit.verbs_double import DoubleRegion
from tierfs.transport import verbs_exports, verbs_windows
from tierfs.transport.verbs_exports import Export, Exports, NotExported

SOAK = os.environ.get("TIERFS_SOAK") == "1"
PAGE = 4096
WINDOW = 4 * PAGE
FILE = 2 * WINDOW + 3 * PAGE + 77
LIMIT = 4 * WINDOW


@dataclass(eq=False)
class File:
    """One that the shelf gives out while it has a version; `changed` counts what no export may outlive."""

    path: Path
    content: bytes = b""
    version: str = ""
    changed: int = 0
    ino: int = 0

    def write(self, seed: int) -> None:
        self.content = random.Random(seed).randbytes(FILE)
        self.version = f"holder/{seed:08x}"
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(0)
            file.write(self.content)
            self.ino = os.fstat(file.fileno()).st_ino


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_exports, "WINDOW_BYTES", WINDOW)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@asynccontextmanager
async def exporting(bench: Bench) -> AsyncIterator[Exports]:
    """And nothing is left of it afterwards."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            exports = Exports(bench, most_registered_bytes=LIMIT)
            await nursery.start(exports.run)
            yield exports
            nursery.cancel_scope.cancel()
    assert bench.wrong == [] and bench.fabric.misuse == []
    assert bench.fabric.registered == 0 and not any(each.is_open for each in bench.fabric.regions.values())
    assert not +bench.kept and not +exports.registered
    assert len(os.listdir("/proc/self/fd")) <= descriptors + len(bench.all)
    bench.close()


@dataclass
class Driver:
    """Asks as connections do, and does to the files what their owners do."""

    bench: Bench
    exports: Exports
    files: list[File]
    #: What was given, with the file, its state then, the offset and the length.
    held: list[tuple[Export, File, int, int, int]] = field(default_factory=list)
    scopes: list[trio.CancelScope] = field(default_factory=list)
    seed: int = 100

    async def ask(self, file: File, offset: int, length: int, *, growing: bool) -> Export | None:
        if not file.version:
            return None
        changed, content, ports = file.changed, file.content, self.bench.ports
        fd = os.open(file.path, os.O_RDONLY)
        try:
            with trio.CancelScope() as scope:
                self.scopes.append(scope)
                try:
                    export = await self.exports.give(fd, file.version, offset, length, ports, growing=growing)
                except NotExported:
                    return None
                assert changed == file.changed, "it was given after the file had left"
                assert export.regions, "it was given with no device"
                length = min(length, export.start + export.length - offset)
                self.check(export, content, offset, length)
                self.held.append((export, file, changed, offset, length))
                return export
        finally:
            os.close(fd)
        return None

    def check(self, export: Export, content: bytes, offset: int, length: int) -> None:
        assert length > 0
        found = [export.remote(port, offset, length) for port in export.regions if not port.gone]
        for remote in found:
            assert remote is not None and remote.length == length
            region = self.bench.fabric.regions[remote.key]
            assert region.is_open and region.remote
            assert region.address <= remote.address and remote.address + length <= region.address + region.length
            assert ctypes.string_at(remote.address, length) == content[offset : offset + length]

    def give_back(self, index: int) -> None:
        if self.held:
            export, file, changed, offset, length = self.held.pop(index % len(self.held))
            # Else a thread may be about to unmap it.
            if changed == file.changed and not export.file.has_left:
                self.check(export, file.content, offset, length)
            self.exports.give_back(export)

    def withdraw(self, file: File) -> int:
        """The shelf gives it out no more; returns the inode."""
        file.version = ""
        file.changed += 1
        return file.ino

    async def rewrite(self, file: File) -> None:
        self.exports.leave(self.withdraw(file))
        await self.exports.fence(file.ino)
        assert file.ino not in mapped_inodes(), "the fence left a mapping"
        self._write(file)

    async def rewrite_impatiently(self, file: File) -> None:
        """The first who wants to write goes away while it waits; the next one has its promise all the same."""
        self.withdraw(file)
        with trio.CancelScope() as scope:
            self.scopes.append(scope)
            await self.exports.fence(file.ino)
        await self.rewrite(file)

    async def remove(self, file: File) -> None:
        """Whoever asked before may be given it until somebody looks: the bytes are still those of the version."""
        file.version = ""
        file.path.unlink()
        self.exports.look_soon()
        await until(
            lambda: file.ino not in mapped_inodes() and file.ino not in self.exports._files,
            "a removed file's memory is given back",
        )
        file.changed += 1
        self._write(file)

    async def discard(self, file: File) -> None:
        file.version = ""
        await self.exports.free_tree(file.path)
        assert file.ino not in mapped_inodes(), "what is freed is still mapped"
        file.changed += 1
        file.path.unlink()
        self._write(file)

    def _write(self, file: File) -> None:
        if not file.version:
            self.seed += 1
            file.write(self.seed)


numbers = st.integers(0, 1 << 30)
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "growing", "back", "pause", "cancel", "rewrite", "rewrite_impatiently",
                         "remove", "discard", "leave", "lose"]),
        numbers, numbers, numbers,
    ),
    min_size=5, max_size=60,
)  # fmt: skip


@settings(
    max_examples=2000 if SOAK else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=steps, seed=numbers, device_windows=st.integers(1, 5), slowest_s=st.sampled_from([0.0, 0.002]))
def test_whatever_is_done_to_files_their_exports_are_right(
    folder: Path, steps: list[tuple[str, int, int, int]], seed: int, device_windows: int, slowest_s: float
) -> None:
    async def main() -> None:
        bench = Bench(LIMIT, seed=seed, device_bytes=device_windows * WINDOW, slowest_s=slowest_s)
        async with exporting(bench) as exports:
            files = [File(folder / str(index)) for index in range(3)]
            for index, file in enumerate(files):
                file.write(index)
            driver = Driver(bench, exports, files)
            busy: set[File] = set()

            async def own(file: File, what: str) -> None:
                """One at a time, as the file system has it."""
                try:
                    await getattr(driver, what)(file)
                finally:
                    busy.discard(file)

            async with trio.open_nursery() as nursery:
                for what, first, second, third in steps:
                    file = files[first % len(files)]
                    offset = second % FILE
                    length = 1 + third % min(WINDOW, FILE - offset)
                    if what in ("ask", "growing"):

                        async def ask(file: File, offset: int, length: int, growing: bool) -> None:
                            await driver.ask(file, offset, length, growing=growing)

                        nursery.start_soon(ask, file, offset, length, what == "growing")
                    elif what == "back":
                        driver.give_back(first)
                    elif what == "pause":
                        for _ in range(first % 30):
                            await trio.lowlevel.checkpoint()
                        if second % 2:
                            await trio.to_thread.run_sync(time.sleep, 0.001)
                    elif what == "cancel" and driver.scopes:
                        driver.scopes.pop(first % len(driver.scopes)).cancel()
                    elif what == "lose" and second % 3 == 0:
                        bench.lose(first % len(bench.ports))
                    elif what == "leave" and file not in busy and file.version:
                        # The same bytes under the same name, in the same place: it may be asked for again.
                        file.changed += 1
                        exports.leave(file.ino)
                    elif what in ("rewrite", "rewrite_impatiently", "remove", "discard") and file not in busy:
                        busy.add(file)
                        nursery.start_soon(own, file, what)
            while len(driver.held) > 2:  # the rest is in use when all ends
                driver.give_back(0)

    trio.run(main)


@asynccontextmanager
async def one_file(folder: Path, bench: Bench) -> AsyncIterator[Driver]:
    file = File(folder / "file")
    file.write(1)
    async with exporting(bench) as exports:
        yield Driver(bench, exports, [file])


async def test_a_sealed_window_is_registered_once_for_all_who_ask(folder: Path) -> None:
    bench = Bench(LIMIT)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        exports = [await driver.ask(file, at, 50, growing=False) for at in (0, 5000, WINDOW - 50)]
        assert exports[0] is not None and exports[0] is exports[1] is exports[2]
        assert bench.fabric.registered == 2, "with each of the devices once"
        driver.give_back(0), driver.give_back(0), driver.give_back(0)
        assert await driver.ask(file, 7, 1, growing=False) is exports[0], "it is kept for the next who asks"
        assert driver.exports.registered == Counter(dict.fromkeys(bench.ports, WINDOW))


async def test_the_window_used_longest_ago_makes_room_and_those_in_use_stay(folder: Path) -> None:
    bench = Bench(LIMIT)
    files = [File(folder / name) for name in "abc"]
    async with exporting(bench) as exports:
        driver = Driver(bench, exports, files)
        for seed, file in enumerate(files):
            file.write(seed)
        first = await driver.ask(files[0], 0, 1, growing=False)
        for file, window in ((files[0], 1), (files[1], 0), (files[1], 1)):
            await driver.ask(file, window * WINDOW, 1, growing=False)
        assert await driver.ask(files[2], 0, 1, growing=False) is None
        assert exports.refused == {"as much is in use there as may be registered": 1}
        driver.give_back(2), driver.give_back(1)  # of b the first window, then of a the second
        assert await driver.ask(files[2], 0, 1, growing=False) is not None
        assert files[1].ino in mapped_inodes()
        assert await driver.ask(files[2], WINDOW, 1, growing=False) is not None
        assert first is not None and first.regions, "the one that is in use"
        assert await driver.ask(files[2], 2 * WINDOW, 1, growing=False) is None


async def test_a_device_that_is_full_gets_room_from_idle_windows_and_else_it_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(LIMIT, device_bytes=2 * WINDOW)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        for window in range(2):
            await driver.ask(file, window * WINDOW, 1, growing=False)
        for _ in range(3):
            assert await driver.ask(file, 2 * WINDOW, 1, growing=False) is None
        assert driver.exports.refused == {"it can't be registered there: Cannot allocate memory": 3}
        assert len([each for each in caplog.records if "is full" in each.message]) == 2, "once for each device"
        driver.give_back(0)
        assert await driver.ask(file, 2 * WINDOW, 1, growing=False) is not None


async def test_what_grows_is_not_kept_and_holes_are_not_filled(folder: Path) -> None:
    bench = Bench(LIMIT)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        export = await driver.ask(file, PAGE + 5, PAGE, growing=True)
        assert export is not None and (export.start, export.length) == (PAGE, PAGE + 5)
        driver.give_back(0)
        await driver.exports.close_unless_kept(export)
        assert bench.fabric.registered == 0
        with file.path.open("r+b") as opened:
            os.ftruncate(opened.fileno(), 2 * WINDOW)
            os.ftruncate(opened.fileno(), FILE)
        before = file.path.stat().st_blocks
        assert await driver.ask(file, 2 * WINDOW, 9, growing=False) is None
        assert await driver.ask(file, 2 * WINDOW, 9, growing=True) is None
        assert driver.exports.refused == {"part of it was never written": 2}
        assert file.path.stat().st_blocks == before
        assert await driver.ask(file, 0, 9, growing=False) is not None


@pytest.mark.parametrize("how", ["removed", "cut"])
async def test_memory_of_a_file_that_was_removed_or_cut_comes_back_by_itself(folder: Path, how: str) -> None:
    bench = Bench(LIMIT)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        for growing in (False, True):
            assert await driver.ask(file, 2 * WINDOW, 9, growing=growing) is not None
        assert file.ino in mapped_inodes()
        told: list[bool] = []
        driver.exports.on_freed = lambda: told.append(file.ino in mapped_inodes())
        if how == "removed":
            file.path.unlink()
        else:
            os.truncate(file.path, WINDOW)
        await until(lambda: file.ino not in mapped_inodes(), "its memory is given back")
        assert bench.fabric.registered == 0
        await until(lambda: told or how == "cut", "it is told that there is room")
        assert told == ([False] if how == "removed" else [])
        while driver.held:
            driver.exports.give_back(driver.held.pop()[0])


async def test_registering_does_not_change_the_time_of_a_file(folder: Path) -> None:
    bench = Bench(LIMIT)
    bench.locks_pages = True
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        before = file.path.stat()
        for at, growing in ((0, False), (WINDOW, True), (2 * WINDOW, False)):
            assert await driver.ask(file, at, 9, growing=growing) is not None
        assert file.path.stat().st_mtime_ns == before.st_mtime_ns


async def test_a_fence_waits_for_what_is_being_registered_and_nobody_gets_it(folder: Path) -> None:
    bench = Bench(LIMIT)
    bench.held_up = threading.Event()
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        done: list[str] = []
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def ask() -> None:
                assert await driver.ask(file, 0, 9, growing=False) is None
                done.append("refused")

            await until(lambda: file.ino in mapped_inodes(), "it is being registered")

            @nursery.start_soon
            async def fence() -> None:
                driver.withdraw(file)
                await driver.exports.fence(file.ino)
                assert file.ino not in mapped_inodes() and bench.fabric.registered == 0
                done.append("fenced")

            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            bench.held_up.set()
        assert sorted(done) == ["fenced", "refused"]


async def test_a_fence_does_not_wait_for_what_others_register(folder: Path) -> None:
    bench = Bench(LIMIT)
    bench.held_up = threading.Event()
    files = [File(folder / name) for name in "abcd"]
    async with exporting(bench) as exports:
        driver = Driver(bench, exports, files)
        given: list[Export | None] = []
        async with trio.open_nursery() as nursery:

            async def ask(file: File) -> None:
                given.append(await driver.ask(file, 0, 9, growing=False))

            for seed, file in enumerate(files):
                file.write(seed)
                nursery.start_soon(ask, file)
                await trio.testing.wait_all_tasks_blocked()
            await until(lambda: bench.threads.available_tokens == 0, "all threads are busy")
            driver.withdraw(files[3])
            await exports.fence(files[3].ino)
            await until(lambda: given == [None], "who waited for a thread is refused")
            bench.held_up.set()
        assert None not in given[1:] and len(given) == 4


async def test_a_device_that_does_not_answer_holds_nobody_up_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verbs_exports, "FENCE_WITHIN_S", 0.05)
    bench = Bench(LIMIT)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        assert await driver.ask(file, 0, 9, growing=False) is not None
        bench.held_up = threading.Event()
        with trio.fail_after(5):
            await driver.exports.fence(driver.withdraw(file))
        assert "still registered" in caplog.text and file.ino in mapped_inodes()
        bench.held_up.set()
        await until(lambda: file.ino not in mapped_inodes(), "it is given back in the end")


async def test_however_small_files_are_they_take_no_more_than_so_many_descriptors_and_mappings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs_exports, "MOST_WINDOWS", 5)
    bench = Bench(1 << 30)
    files = [File(folder / str(seed)) for seed in range(20)]
    async with exporting(bench) as exports:
        driver = Driver(bench, exports, files)
        monkeypatch.setattr(exports, "_most_bytes", 1 << 30)
        for seed, file in enumerate(files):
            file.write(seed)
        for file in files:
            assert await driver.ask(file, 0, 9, growing=False) is not None
            driver.give_back(0)
            assert len({file.ino for file in files} & set(mapped_inodes())) <= 5
        for file in files[:5]:
            assert await driver.ask(file, 0, 9, growing=False) is not None
        assert await driver.ask(files[5], 0, 9, growing=False) is None, "all are in use"
        driver.give_back(0)
        assert await driver.ask(files[5], 0, 9, growing=False) is not None


@pytest.mark.parametrize("broken", [1, 2])
async def test_a_device_that_fails_as_nobody_thought_of_loses_nothing_of_the_others(folder: Path, broken: int) -> None:
    bench = Bench(LIMIT)

    def register(address: int, length: int, *, remote: bool) -> DoubleRegion:
        raise TypeError("of another pyverbs")

    for port in bench.all[-broken:]:
        port.register = register  # type: ignore[method-assign]
    async with one_file(folder, bench) as driver:
        export = await driver.ask(driver.files[0], 0, 9, growing=False)
        assert (export is not None) == (broken == 1)
        assert bench.fabric.registered == len(bench.all) - broken


async def test_a_time_that_can_not_be_set_back_loses_nothing_that_was_registered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(LIMIT)
    async with one_file(folder, bench) as driver:
        file = driver.files[0]
        taken = bench.all[0].register

        def register(address: int, length: int, *, remote: bool) -> DoubleRegion:
            with file.path.open("r+b") as opened:
                opened.write(file.content[:1])
            return taken(address, length, remote=remote)

        def utime(*args: object, **how: object) -> None:
            raise PermissionError

        monkeypatch.setattr(bench.all[0], "register", register)
        monkeypatch.setattr(os, "utime", utime)
        assert await driver.ask(file, 0, 9, growing=False) is not None
        assert bench.fabric.registered == 2
        await driver.exports.fence(driver.withdraw(file))
        assert bench.fabric.registered == 0


async def test_a_kernel_that_can_not_map_pages_ahead_lets_them_be_registered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def populate(address: int, length: int, *, writing: bool) -> None:
        raise OSError(errno.EINVAL, "before Linux 5.14")

    monkeypatch.setattr(verbs_windows, "populate", populate)
    async with one_file(folder, Bench(LIMIT)) as driver:
        assert await driver.ask(driver.files[0], 0, 9, growing=False) is not None


async def test_another_version_of_an_inode_that_nobody_told_of_gets_memory_of_its_own(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_file(folder, Bench(LIMIT)) as driver:
        file = driver.files[0]
        before = await driver.ask(file, 0, 9, growing=False)
        file.write(2)
        after = await driver.ask(file, 0, 9, growing=False)
        assert before is not None and after is not None and before is not after
        await until(lambda: before.is_closed, "the old one is given back")
        assert "memory of another version" in caplog.text
        assert await driver.ask(file, WINDOW, 9, growing=False) is not None


async def test_nothing_is_given_before_it_runs_and_after_it_ended(folder: Path) -> None:
    bench = Bench(LIMIT)
    file = File(folder / "file")
    file.write(1)
    before = Driver(bench, Exports(bench, most_registered_bytes=LIMIT), [file])
    assert await before.ask(file, 0, 1, growing=False) is None
    async with exporting(bench) as exports:
        driver = Driver(bench, exports, [file])
        assert await driver.ask(file, 0, 1, growing=False) is not None
    assert await driver.ask(file, 0, 1, growing=False) is None
    assert file.ino not in mapped_inodes()
