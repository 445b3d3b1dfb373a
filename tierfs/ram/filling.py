"""Keeps the ballast at its target: fills it while the machine is quiet, shrinks it where data needs the room."""

from __future__ import annotations

import logging
import time

import trio

from tierfs.ram import growth
from tierfs.ram.memory import available_memory_bytes, total_memory_bytes
from tierfs.ram.room import TmpfsRoom, whole_huge_pages
from tierfs.units import format_size

log = logging.getLogger("tierfs.ram")

# Touching cold memory is slow (0.5 to 1 GB/s on a small virtual machine), so it goes in pieces of some 40 ms.
_COLD_PIECE = 32 << 20
_WARM_PIECE = 128 << 20

# Pages freed this recently are still warm: hosts take idle memory away after some seconds.
_WARM_S = 2.0

_IDLE_LOOK_S = 1.0
# With nothing to do and so much of all memory available that nobody can use it up meanwhile.
_REST_LOOK_S = 5.0
_PLENTY = 0.25
_SET_RIGHT_S = 4.0  # what is made up for was done by hand
_RELEASE_LOOK_S = 0.02  # after a release, and twice as long each time nothing came of it
_SAVING_LOOK_S = 0.1
_MEMORY_LOOK_S = 0.3

# A piece that took this many times its own CPU time met other work on the CPUs; then filling steps back.
_BUSY_RATIO = 1.5
_STEP_BACK = 4.0


class BallastKeeper:
    """Owns the ballast's size: `target_bytes` is what it aims at, `problem` what keeps it from that, if anything."""

    def __init__(self, room: TmpfsRoom, size_bytes: int, limit_bytes: int | None) -> None:
        """`limit_bytes` None is all that memory allows, 0 is no ballast. Lets go at once of what is too much."""
        self._room = room
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes
        self._total_memory = total_memory_bytes()
        self._changed = trio.Event()
        self._saving = False
        self._warm_bytes = 0
        self._warm_until = 0.0
        self._release_until = 0.0
        self._release_look_s = _RELEASE_LOOK_S
        self._set_right_at = 0.0
        self._memory_read = 0
        self._memory_read_at = -_MEMORY_LOOK_S
        self._data_bytes = room.state().data_bytes
        self.problem = ""
        self.target_bytes = 0
        excess = -self._missing_bytes()
        if excess > 0:
            room.ballast.take(excess)

    def room_was_released(self) -> None:
        """Data was deleted or trimmed. The kernel frees its pages once the last user is gone, so look some times."""
        self._release_until = time.monotonic() + _WARM_S
        self._release_look_s = _RELEASE_LOOK_S
        self._changed.set()

    def save_is_running(self, saving: bool) -> None:
        """Filling with cold memory waits while a save runs."""
        if self._saving and not saving:
            self._changed.set()
        self._saving = saving

    def look_if_in_the_way(self) -> None:
        """Data may grow past the room made for it, which leaves more in memory than the tier's size: shrink soon."""
        state = self._room.state()
        if state.data_bytes + state.held_bytes > self._size_bytes + _COLD_PIECE:
            self._changed.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Moves the ballast towards its target, piece by piece. Runs until cancelled."""
        limiter = trio.CapacityLimiter(1)
        task_status.started()
        while True:
            self._changed = trio.Event()
            try:
                pause = await self._step(limiter)
            except OSError as error:
                self._tell(f"the ballast can't be kept: {error}; saves are slower without it")
                pause = _IDLE_LOOK_S
            with trio.move_on_after(pause):
                await self._changed.wait()

    async def _step(self, limiter: trio.CapacityLimiter) -> float:
        """One piece of work. Returns the seconds to wait before the next one."""
        now = time.monotonic()
        if now - self._set_right_at >= _SET_RIGHT_S:
            self._set_right_at = now
            await trio.to_thread.run_sync(self._room.ballast.set_right, limiter=limiter)
        missing = self._missing_bytes()
        if missing < 0:
            await trio.to_thread.run_sync(self._room.ballast.take, -missing, limiter=limiter)
            return 0.0
        warm = whole_huge_pages(min(self._warm_bytes, missing)) if now < self._warm_until else 0
        if warm:
            piece = min(warm, _WARM_PIECE)
            self._warm_bytes -= piece
            grown = await trio.to_thread.run_sync(lambda: self._grow(piece, probably_warm=True)[0], limiter=limiter)
            return 0.0 if grown else _IDLE_LOOK_S
        if missing == 0:
            self._tell("")
            if now < self._release_until:
                self._release_look_s *= 2
                return self._release_look_s
            is_plenty = self._available_memory(self._room.ballast.held_bytes(), now) > self._total_memory * _PLENTY
            return _REST_LOOK_S if is_plenty else _IDLE_LOOK_S
        if self._saving:
            return _SAVING_LOOK_S
        piece = min(missing, _COLD_PIECE)
        grown, wall, cpu = await trio.to_thread.run_sync(
            lambda: self._grow(piece, probably_warm=False), limiter=limiter
        )
        if not grown:
            self._tell(f"no memory for {format_size(missing)} of the ballast; saves beyond what it holds are slower")
            return _IDLE_LOOK_S
        return wall * _STEP_BACK if wall > cpu * _BUSY_RATIO else 0.0

    def _grow(self, piece: int, *, probably_warm: bool) -> tuple[int, float, float]:
        """Returns the bytes taken, and the seconds and CPU seconds that took. Runs in a thread."""
        wall, cpu = time.perf_counter(), time.thread_time()
        grown = self._room.ballast.grow(piece, probably_warm=probably_warm)
        return grown, time.perf_counter() - wall, time.thread_time() - cpu

    def _missing_bytes(self) -> int:
        """How much the ballast should grow, or shrink when negative. Notes on the way what became free and is warm."""
        state = self._room.state()
        now = time.monotonic()
        freed, self._data_bytes = self._data_bytes - state.data_bytes, state.data_bytes
        if now > self._warm_until:
            self._warm_bytes = 0
        if freed > 0:
            self._warm_bytes += freed
            self._warm_until = now + _WARM_S
        self.target_bytes = growth.ballast_target(
            limit_bytes=self._limit_bytes,
            size_bytes=self._size_bytes,
            data_bytes=state.data_bytes,
            held_bytes=state.held_bytes,
            total_memory=self._total_memory,
            available_memory=self._available_memory(state.held_bytes, now),
        )
        return self.target_bytes - state.held_bytes

    def _available_memory(self, held_bytes: int, now: float) -> int:
        """As read at most _MEMORY_LOOK_S ago (reading takes a fifth of a millisecond), less what we took since."""
        if now - self._memory_read_at >= _MEMORY_LOOK_S:
            self._memory_read_at = now
            self._memory_read = available_memory_bytes() + held_bytes
        return self._memory_read - held_bytes

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
