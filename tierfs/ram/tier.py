"""The RAM tier: its directories, how full it is, and the background work that keeps room ready.

Data is written by the kernel, straight into the files of the tier. This module only sees to it that the room is there
in time: it gives each growing shard room ahead of its writer, takes back at the end what was not used, and keeps
what is free in the ballast.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from tierfs.ram import growth, syscalls
from tierfs.ram.filling import BallastKeeper
from tierfs.ram.growing import Shard, look, unwritten_bytes
from tierfs.ram.growth import RoomRules
from tierfs.ram.room import PlainRoom, Room, RoomState, TmpfsRoom
from tierfs.ram.tmpfs import HUGE_PAGE, TmpfsGrant
from tierfs.settings import RamSettings
from tierfs.units import format_size

log = logging.getLogger("tierfs.ram")

# begin_shard answers a program's open: it gives at once what takes at most this long.
_BEGIN_S = 0.005
_BEGIN_BYTES = 256 << 20
_BEGIN_LOCK_S = 0.002

# What `reserve` gives at most (some 20 ms), and from what size on it does: less, `begin_shard` gives by itself.
_RESERVE_BYTES = 2 << 30
_RESERVE_FROM_BYTES = 64 << 20

_PAGE = os.sysconf("SC_PAGE_SIZE")

_GUESS_S = 0.001
_GUESSES_A_SECOND = 20

_ASK_AGAIN_S = 0.02
_ASK_AGAIN_REFUSED_S = 1.0

# In a full tier every file that is closed is a reason to say so; the first of them is the one to name.
_SAY_AGAIN_S = 10.0

# How long `problems` tells of a writer that got ENOSPC, though there is room again, while its file is there.
_SHOWN_S = 300.0


@dataclass(frozen=True)
class RamUsage:
    """How full the tier is, in bytes.

    `used_bytes` is memory that data holds: every page of a file counts whole, and where the tmpfs has `huge=always` a
    page is 2 MiB until the file is closed. Room that a growing shard was given but has not written is free: it comes
    back when the shard is closed. Until then another writer can't have it, but neither could it have what that
    shard is about to write. The ballast is free room, too. `free_bytes` is `size_bytes` less `used_bytes`.
    """

    size_bytes: int
    used_bytes: int
    free_bytes: int
    ballast_bytes: int
    ballast_target_bytes: int
    files: int
    files_free: int


@dataclass(frozen=True)
class GrowingShard:
    """A shard that is open for writing: its size when last seen, and since when (time.time())."""

    size_bytes: int
    since: float


@dataclass(frozen=True)
class RamProblem:
    """Something that a person should know: `severity` is warning or error, `path` is relative to the mount."""

    severity: str
    message: str
    path: str = ""


class RamTier:
    """The RAM tier of one instance, in the directory `path`.

    With a grant, `path` is a tmpfs of its own and its limit belongs to this object from now on. Without one it is a
    plain directory: nothing is enforced by the kernel, nothing is reserved, and usage comes from walking it.

    All methods belong to the trio thread. Raises OSError when the directories can't be made.
    """

    def __init__(self, path: Path, settings: RamSettings, size_bytes: int, grant: TmpfsGrant | None) -> None:
        self.path = path
        self.root = path / "root"
        self.meta = path / "meta"
        self.generations = path / "generations"
        self.trash = path / "trash"
        self.root.mkdir(mode=0o755, exist_ok=True)
        for private in (self.meta, self.generations, self.trash):
            private.mkdir(mode=0o700, exist_ok=True)
        self.size_bytes = size_bytes
        self.grant = grant
        self.on_pressure: Callable[[int], bool] | None = None
        self._rules = RoomRules(settings.runway_bytes, settings.first_extent_bytes)
        self._shards: dict[int, Shard] = {}
        self._busy: Shard | None = None  # the one that a thread gives room to; it may have ended meanwhile
        self._gave = trio.Event()  # of `_busy`: the thread is done
        self._wake = trio.Event()
        self._begin_rate = 20e9
        self._reserving = trio.CapacityLimiter(2)
        #: Guesses that threads are giving now, to files that are no shards yet.
        self._promised_bytes = 0
        self._ask_at = 0.0
        self._guesses: list[float] = []
        self._full: tuple[RamProblem, int] | None = None
        self._show_until = 0.0
        self._say_again_at = 0.0
        self._room: Room
        self._ballast: BallastKeeper | None = None
        if grant is None:
            self._room = PlainRoom(path, size_bytes)
        else:
            self._room = room = TmpfsRoom(path, size_bytes)
            limit = None if settings.ballast == "auto" else 0 if settings.ballast == "off" else int(settings.ballast)
            self._ballast = BallastKeeper(room, size_bytes, limit)

    @property
    def growing(self) -> dict[int, GrowingShard]:
        """The shards that are open for writing, by node id."""
        return {shard.nodeid: GrowingShard(shard.size_bytes, shard.since) for shard in self._shards.values()}

    def usage(self) -> RamUsage:
        """How full the tier is now, from the kernel's own counts."""
        state = self._room.state()
        used = max(0, state.data_bytes - self._held_ahead_bytes())
        return RamUsage(
            size_bytes=self.size_bytes,
            used_bytes=used,
            free_bytes=max(0, self.size_bytes - used) if self.grant is not None else state.free_bytes,
            ballast_bytes=state.held_bytes,
            ballast_target_bytes=min(self._ballast.target_bytes, state.free_bytes) if self._ballast is not None else 0,
            files=state.files,
            files_free=state.files_free,
        )

    def problems(self) -> list[RamProblem]:
        """What is wrong now. A tier that ran full stays listed until there is room, and long enough to be read."""
        state = self._room.state()
        # Half of it is room again, also when a writer wanted more than the whole.
        if self._full is not None and state.free_bytes >= max(min(self._full[1], self.size_bytes // 2), HUGE_PAGE):
            # What a writer that failed had been given comes back at once; whoever looks for why it failed comes later.
            is_there = (self.root / self._full[0].path).exists()
            if not is_there or self._full[0].severity != "error" or time.monotonic() >= self._show_until:
                self._full = None
        found = [] if self._full is None else [self._full[0]]
        if state.files > 0 and state.files_free == 0:  # a tmpfs without a limit says that it has none of either
            found.append(RamProblem("error", self._no_inodes(state.files)))
        if self._ballast is not None and self._ballast.problem:
            found.append(RamProblem("warning", self._ballast.problem))
        return found

    async def reserve(self, fd: int, expected_bytes: int | None, *, likely_large: bool = False) -> None:
        """Give a file that is about to be written what it will probably need; call it before `begin_shard`.

        Giving room takes the inode's lock, which a writer holds through each write(2). What is given before the writer
        has the file costs some 10 ms a GiB; what is given later comes late, and the writer meets cold memory
        meanwhile (measured: 780 ms instead of 160 for 512 MiB). So all of it now, up to _RESERVE_BYTES, and the rest
        by `run`. Only from the ballast: other memory is no better for being given early.
        """
        free, is_guess = self._room.state().free_bytes, expected_bytes is None
        if expected_bytes is None:
            expected_bytes = growth.first_guess(self._rules, self._spare_bytes(free)) if likely_large else 0
        end = min(expected_bytes, free, _RESERVE_BYTES) // HUGE_PAGE * HUGE_PAGE
        before = os.fstat(fd)
        if self._ballast is None or end < _RESERVE_FROM_BYTES or before.st_blocks * 512 >= end:
            return
        promised = end if is_guess else 0
        self._promised_bytes += promised
        try:
            await trio.to_thread.run_sync(
                lambda: self._room.give(fd, before.st_size, end, from_ballast_only=True), limiter=self._reserving
            )
            os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # opening a file does not change it
        except OSError as error:
            log.debug("no room is given ahead: %s", error)
        finally:
            self._promised_bytes -= promised

    def begin_shard(self, nodeid: int, fd: int, expected_bytes: int | None, *, likely_large: bool = False) -> None:
        """A file was opened for writing, and nobody had it open for writing before. Returns within some 5 ms.

        Room for `expected_bytes` is made: a first part now, the rest by `run`. When nobody knows the size, room comes
        once the file shows that it grows, so that small files cost nothing; at once if it is `likely_large`, say by its
        name. `fd` must be writable; it is duplicated.
        """
        now = time.monotonic()
        shard = self._shards.get(nodeid)
        if shard is not None:
            shard.expected_bytes = expected_bytes or shard.expected_bytes
            return
        state = os.fstat(fd)
        size, given = state.st_size, max(state.st_size, state.st_blocks * 512)  # a daemon before us may have given room
        shard = Shard(nodeid, os.dup(fd), time.time(), size, given, expected_bytes, seen_at=now, grown_at=now)
        if expected_bytes is None and likely_large:
            shard.guess_bytes = growth.first_guess(self._rules, self._spare_bytes(self._room.state().free_bytes))
        self._shards[nodeid] = shard
        end = self._room_end(shard)
        if end > shard.given_bytes:
            at_once = min(_BEGIN_BYTES, int(self._begin_rate * _BEGIN_S) // HUGE_PAGE * HUGE_PAGE)
            end = min(end, shard.given_bytes + at_once)
            self._give_at_once(shard, end)
        self._wake.set()

    async def give_room(self, fd: int, start: int, end: int) -> None:
        """Memory for a range of a file that is filled by others than a writer. OSError (ENOSPC): all or none of it."""

        def give() -> None:
            given = self._room.give(fd, start, end)
            if given < end:
                syscalls.fallocate(fd, syscalls.FALLOC_FL_KEEP_SIZE, given, end - given)

        await trio.to_thread.run_sync(give, limiter=self._reserving)

    def trim(self, fd: int) -> None:
        """Take back what a file without a writer has beyond its end. Keeps its mtime."""
        with suppress(OSError):
            self._room.trim(fd)

    async def before_times_are_set(self, nodeid: int) -> None:
        """A program is about to set the file's times, so it has written what it wanted: no more room is given.

        On a tmpfs fallocate(2) counts as a change of the file, also beyond its end. So what a thread is giving right
        now is waited for: after this returns nothing but the program's own writes moves the times.
        """
        shard = self._shards.get(nodeid)
        if shard is not None:
            shard.times_set = True
        while self._busy is not None and self._busy.nodeid == nodeid:
            self._busy.times_set = True
            await self._gave.wait()

    def end_shard(self, nodeid: int) -> None:
        """The last writer is gone: room that it did not use goes back. Keeps the file's mtime."""
        shard = self._shards.pop(nodeid, None)
        if shard is None:
            return
        free = self._room.state().free_bytes + unwritten_bytes(shard)
        if self.grant is not None and free < HUGE_PAGE:
            look(shard, time.monotonic())
            largest = max([shard, *self._shards.values()], key=lambda one: one.size_bytes)  # a small one fills no tier
            self._note_full(largest, HUGE_PAGE, free)
        if shard is self._busy:  # A thread is giving it room: `_give` ends it after that, with the times of now.
            info = os.fstat(shard.fd)
            shard.ended_times = info.st_atime_ns, info.st_mtime_ns
        else:
            self._finish(shard)

    async def trim_leftovers(self) -> int:
        """Take back room that an earlier daemon gave to shards whose writers closed while no daemon was there.

        To be called after a takeover, once `begin_shard` was called for every file that still has a writer: those are
        left alone. Returns the bytes gained.
        """
        gained = 0
        for top in (self.root, self.generations):
            for directory, _, names in os.walk(top):
                for name in names:
                    gained += self._trim_leftover(Path(directory) / name)
                await trio.lowlevel.checkpoint()
        if gained:
            self.released_room()
        return gained

    def _trim_leftover(self, path: Path) -> int:
        try:
            state = path.lstat()
            is_over = stat.S_ISREG(state.st_mode) and state.st_blocks * 512 > -(-state.st_size // _PAGE) * _PAGE
            if not is_over or state.st_ino in self._shards:
                return 0
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return self._room.trim(fd)
            finally:
                os.close(fd)
        except OSError:  # gone meanwhile, or not ours to write
            return 0

    def released_room(self) -> None:
        """Something was deleted: the room that it held becomes ballast again while its pages are warm."""
        if self._ballast is not None:
            self._ballast.room_was_released()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps growing shards ahead of their writers, and free room in the ballast. Runs until cancelled.

        Then it closes every file of the tier that it holds open. The ballast keeps its room for the next daemon.
        """
        try:
            async with trio.open_nursery() as nursery:
                if self._ballast is not None:
                    await nursery.start(self._ballast.run)
                task_status.started()
                await self._follow()
        finally:
            self.close()

    def close(self) -> None:
        """Closes what is open; the tier is of no use afterwards. `run` does this at its end."""
        for shard in self._shards.values():
            os.close(shard.fd)
        self._shards.clear()
        self._room.close()

    async def _follow(self) -> None:
        """Looks at the growing shards, as often as the fastest of them asks for, and sleeps while there is none."""
        limiter = trio.CapacityLimiter(1)
        while True:
            if not self._shards:
                if self._ballast is not None:
                    self._ballast.save_is_running(False)
                await self._wake.wait()
            self._wake = trio.Event()
            now = time.monotonic()
            for shard in list(self._shards.values()):
                look(shard, now)
                self._consider_a_guess(shard, now)
            if self._ballast is not None:
                self._ballast.save_is_running(any(s.growth().is_hot for s in self._shards.values()))
                self._ballast.look_if_in_the_way()
            self._ask_for_room(now)
            for shard in list(self._shards.values()):
                # It may have ended while another was given room: its descriptor's number is somebody else's now.
                if self._shards.get(shard.nodeid) is shard:
                    await self._give(shard, limiter)
            growing = [shard.growth() for shard in self._shards.values()]
            delay = growth.look_after_s(growing, self._rules, self._spare_bytes(self._room.state().free_bytes))
            with trio.move_on_after(delay):
                await self._wake.wait()

    def _consider_a_guess(self, shard: Shard, now: float) -> None:
        """A file that is open for a while with nothing in it may become a shard: a first extent awaits it.

        Small files are closed before that, and not many files a second get one, or unpacking an archive of small
        files would cost more in room moved about than in writing.
        """
        known = shard.guess_bytes or shard.size_bytes or shard.expected_bytes is not None
        if known or now - shard.grown_at < _GUESS_S:
            return
        self._guesses = [moment for moment in self._guesses if now - moment < 1]
        if len(self._guesses) < _GUESSES_A_SECOND:
            self._guesses.append(now)
            shard.guess_bytes = self._rules.first_extent_bytes

    async def _give(self, shard: Shard, limiter: trio.CapacityLimiter) -> None:
        if shard.sparse or shard.times_set or self.grant is None:
            return
        end = self._room_end(shard)
        if end <= shard.given_bytes:
            return
        self._busy, self._gave = shard, trio.Event()
        try:
            start = max(shard.given_bytes, shard.size_bytes)
            shard.given_bytes = await trio.to_thread.run_sync(self._room.give, shard.fd, start, end, limiter=limiter)
        except OSError as error:
            log.warning("giving room to %s failed: %s", self._path_of(shard), error)
        finally:
            self._busy = None
            self._gave.set()
            if self._shards.get(shard.nodeid) is not shard:
                self._finish(shard)

    def _room_end(self, shard: Shard) -> int:
        free = self._room.state().free_bytes
        return growth.room_end(shard.growth(), self._rules, free, self._spare_bytes(free))

    def _spare_bytes(self, free_bytes: int) -> int:
        """What shards of unknown size may be given ahead, of all that is free; what is promised is as good as given."""
        ahead = sum(unwritten_bytes(shard) for shard in self._shards.values() if shard.expected_bytes is None)
        return growth.spare_bytes(free_bytes - self._promised_bytes, ahead + self._promised_bytes)

    def _give_at_once(self, shard: Shard, end: int) -> None:
        start, began, before = shard.given_bytes, time.perf_counter(), os.fstat(shard.fd)
        with suppress(OSError):
            shard.given_bytes = self._room.give(shard.fd, start, end, from_ballast_only=True, wait_s=_BEGIN_LOCK_S)
            os.utime(shard.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # opening a file does not change it
        given, took = shard.given_bytes - start, time.perf_counter() - began
        if given:
            self._begin_rate = 0.7 * self._begin_rate + 0.3 * min(given / took, 1e12)

    def _finish(self, shard: Shard) -> None:
        """Trims a shard that ended, unless a new writer came meanwhile: trimming would cut what that one writes."""
        try:
            if shard.ended_times is not None and shard.nodeid not in self._shards:
                os.utime(shard.fd, ns=shard.ended_times)
            if shard.nodeid not in self._shards and self._room.trim(shard.fd) >= HUGE_PAGE:
                self.released_room()
        except OSError as error:
            log.warning("trimming %s failed: %s", self._path_of(shard), error)
        finally:
            os.close(shard.fd)

    def _ask_for_room(self, now: float) -> None:
        """Has something evicted before the room is out. Where nothing may go, says who filled the tier."""
        if now < self._ask_at or not self._shards:
            return
        state = self._room.state()
        missing = growth.missing_bytes([s.growth() for s in self._shards.values()], self._rules, state.free_bytes)
        if missing == 0:
            return
        self._ask_at = now + _ASK_AGAIN_S
        if self.on_pressure is not None and self.on_pressure(missing):
            self.released_room()
            return
        self._ask_at = now + _ASK_AGAIN_REFUSED_S
        largest = max(self._shards.values(), key=lambda shard: max(shard.rate, shard.size_bytes))
        self._note_full(largest, missing, state.free_bytes + unwritten_bytes(largest))

    def _note_full(self, shard: Shard, missing_bytes: int, free_bytes: int) -> None:
        path = self._path_of(shard)
        severity = "error" if free_bytes < HUGE_PAGE else "warning"
        said = self._full[0] if self._full is not None else None
        if said and said.severity == severity and (said.path == path or time.monotonic() < self._say_again_at):
            return
        state = "is full" if severity == "error" else f"runs full ({format_size(free_bytes)} left)"
        fate = "gets ENOSPC" if severity == "error" else "will get ENOSPC when that is used"
        message = (
            f"the RAM tier of {format_size(self.size_bytes)} {state} while {path} grows "
            f"({format_size(shard.size_bytes)} so far, {format_size(missing_bytes)} short) and nothing may be evicted: "
            f"its writer {fate}; evict or unpin a step, keep fewer steps, or mount with a larger size"
        )
        self._full = (RamProblem(severity, message, path), missing_bytes)
        self._show_until = time.monotonic() + _SHOWN_S
        self._say_again_at = time.monotonic() + _SAY_AGAIN_S
        log.log(logging.ERROR if severity == "error" else logging.WARNING, "%s", message)

    def _no_inodes(self, files: int) -> str:
        return (
            f"the RAM tier has no inode left for another file ({files} files and directories): whoever makes one gets "
            f"ENOSPC, though {format_size(self.usage().free_bytes)} are free; remove files, or allow more with "
            f"`mount -o remount,nr_inodes=NUMBER {self.path}`"
        )

    def _path_of(self, shard: Shard) -> str:
        try:
            path = Path(f"/proc/self/fd/{shard.fd}").readlink()
        except OSError:
            return f"node {shard.nodeid}"
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def _held_ahead_bytes(self) -> int:
        return sum(unwritten_bytes(shard) for shard in self._shards.values())


__all__ = ["GrowingShard", "RamProblem", "RamTier", "RamUsage", "RoomState"]
