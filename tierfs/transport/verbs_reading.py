"""Bytes of another node's memory by READs: in pieces, over all lanes that lead there, whatever becomes of some of them.

One `Reader` a port takes its completions and gives each to the transfer that posted the READ. `read_range` is one
transfer. Its promises, on which those who own the memory build:

- When it returns or raises, also when it is cancelled, no READ of it is outstanding: nothing writes into the memory
  afterwards. Where READs were, their link was closed.
- A piece is read by another lane only after the link that was given up is closed, as a READ may be late and yet write.
- It writes within the range that was asked for, whatever the other node says of its memory.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import trio

from tierfs.errors import PeerRefused, PeerUnavailable
from tierfs.transport.verbs_port import Completion, Link, Port, QueueFull, Region, Remote

_log = logging.getLogger(__name__)

#: Of one READ. From 1 MiB on, more bytes a READ make it no faster (Mooncake's measurements of EFA on p5en).
PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 4 << 20
#: READs of a port at a time, of all its transfers: 16 MiB take 1.3 ms at 100 Gb/s, many round trips.
WINDOW = 16
#: The device's queue may be full of READs whose link was closed, and nobody tells when it is not any more.
_QUEUE_FULL_S = 0.02
#: A place in the queue is awaited so many times as long as a completion: those who hold the places are given up first.
_PLACE_STALLS = 2


class Reader:
    """The completions of one port. `run` has to run while anybody reads by it; where it ends, so do their READs."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.device = port.capabilities.device
        #: Why the port carries nothing any more; "" while it does.
        self.gone = ""
        #: Completions of READs that nobody waited for: of links that were closed before.
        self.unknown = 0
        #: When a READ last completed or was given up.
        self.changed_at = -math.inf
        self._next_work = 1
        self._pending: dict[int, _Runner] = {}
        self._wait_for_place: set[_Runner] = set()

    @property
    def outstanding(self) -> int:
        return len(self._pending)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ends by itself only where the device is gone (`gone` says why)."""
        why = f"{self.device} is not in use any more"
        task_status.started()
        try:
            while True:
                # What completes after `arm` makes the descriptor readable, what completed before is seen now. Looking
                # may take the event of what it finds, and then nothing is armed: so again, until there was nothing.
                self.port.arm()
                found = self.port.completions()
                if found:
                    self._give_out(found)
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self.port.fd)
        except (PeerUnavailable, OSError, trio.ClosedResourceError) as error:
            why = f"{self.device} is gone: {error}"
            _log.warning("%s", why)
        finally:
            self._end(why)

    def close_link(self, link: Link, why: str) -> None:
        """All its READs, whosever, are over: they have not completed, and won't write. May be called again."""
        try:
            link.close()
        finally:
            given_up = [(work, runner) for work, runner in self._pending.items() if runner.lane.link is link]
            for work, runner in given_up:
                del self._pending[work]
                runner.completed(work, why)
            self._changed()

    # --- for `_Runner`

    def has_place(self, window: int) -> bool:
        return len(self._pending) < max(1, min(window, self.port.capabilities.queue_depth))

    def tell_of_place(self, runner: _Runner) -> None:
        """Wake it, once, when something completed or was given up."""
        self._wait_for_place.add(runner)

    def forget(self, runner: _Runner) -> None:
        self._wait_for_place.discard(runner)

    def post(self, runner: _Runner, at: int, length: int) -> int:
        """QueueFull, PeerUnavailable."""
        if self.gone:
            raise PeerUnavailable(self.gone)
        work = self._next_work
        lane = runner.lane
        lane.link.read(work, lane.region, at, length, lane.remote.address + at, lane.remote.key)
        self._next_work += 1
        self._pending[work] = runner
        return work

    # --- completions

    def _give_out(self, completions: list[Completion]) -> None:
        for each in completions:
            runner = self._pending.pop(each.work, None)
            if runner is None:
                self.unknown += 1
            else:
                runner.completed(each.work, each.error)
        self._changed()

    def _changed(self) -> None:
        self.changed_at = trio.current_time()
        woken, self._wait_for_place = self._wait_for_place, set()
        for runner in woken:
            runner.wake()

    def _end(self, why: str) -> None:
        self.gone = why
        pending, self._pending = self._pending, {}
        for work, runner in pending.items():
            runner.completed(work, why)
        self._changed()


@dataclass(eq=False)
class Lane:
    """One way from the other node's memory into this one's: offset N of `remote` goes to offset N of `region`.

    Several lanes may share a link. Where one of them gives it up (an error, a stall, a cancellation) it is closed for
    all: a link that shall survive other transfers is used by one at a time.
    """

    reader: Reader
    link: Link
    region: Region
    remote: Remote
    #: For messages.
    who: str = "another node"
    #: Why nothing comes by it any more; its link is closed.
    trouble: str = field(default="", init=False)

    @property
    def is_dead(self) -> bool:
        return bool(self.trouble)

    def give_up(self, why: str) -> None:
        """Close the link, and with it every READ."""
        self.trouble = self.trouble or why
        self.reader.close_link(self.link, why)


async def read_range(
    lanes: Sequence[Lane],
    at: int,
    length: int,
    *,
    piece_bytes: int = PIECE_BYTES,
    window: int = WINDOW,
    stall_s: float,
) -> None:
    """READ `length` bytes at offset `at` of the lanes' remote memory, which is one and the same for all of them, to
    the same offset of their regions.

    A lane is dead (`Lane.is_dead`) after an error, after `stall_s` without a completion, and where the transfer was
    cancelled while it had READs; the others read what is missing. `window` READs at most are outstanding on a port,
    of all transfers. PeerUnavailable: no lane is left. PeerRefused: the other node's memory is not that long.
    """
    if at < 0 or length < 0 or piece_bytes < 1:
        raise ValueError(f"not a range to read: {length} bytes at {at} in pieces of {piece_bytes}")
    for lane in lanes:
        _check(lane, at, at + length)
    if not length:
        return
    transfer = _Transfer(at, length, min(piece_bytes, MOST_PIECE_BYTES), window, stall_s)
    transfer.runners = [_Runner(transfer, lane) for lane in lanes if not lane.is_dead]
    try:
        async with trio.open_nursery() as nursery:
            for runner in transfer.runners:
                nursery.start_soon(runner.run)
    finally:
        with ExitStack() as each_of_them:
            for runner in transfer.runners:
                each_of_them.callback(runner.leave)
    if not transfer.is_done:
        who = ", ".join(dict.fromkeys(lane.who for lane in lanes)) or "another node"
        said = "; ".join(f"{lane.reader.device}: {lane.trouble}" for lane in lanes) or "there was none"
        raise PeerUnavailable(f"no lane is left to read memory of {who} ({said})")


def _check(lane: Lane, at: int, end: int) -> None:
    if end > lane.region.length:
        raise ValueError(f"{end - at} bytes at {at} are not within the {lane.region.length} that are registered here")
    if end > lane.remote.length:
        raise PeerRefused(f"{lane.who} lets {lane.remote.length} bytes be read: none up to {end}")
    if lane.remote.address < 0 or lane.remote.address + end > 1 << 64:
        raise PeerRefused(f"{lane.who} named memory at {lane.remote.address}, which can't be")


class _Transfer:
    """What is still to be read; the lanes take from it, and give back what they did not get."""

    def __init__(self, at: int, length: int, piece_bytes: int, window: int, stall_s: float) -> None:
        self.piece_bytes = piece_bytes
        self.window = window
        self.stall_s = stall_s
        self.runners: list[_Runner] = []
        self._missing = length
        self._not_taken: deque[tuple[int, int]] = deque([(at, at + length)])

    @property
    def is_done(self) -> bool:
        return not self._missing

    @property
    def has_piece(self) -> bool:
        return bool(self._not_taken)

    def take(self, most_bytes: int) -> tuple[int, int]:
        """Offset and length."""
        at, end = self._not_taken.popleft()
        cut = min(end, at + min(self.piece_bytes, most_bytes))
        if cut < end:
            self._not_taken.appendleft((cut, end))
        return at, cut - at

    def give_back(self, at: int, length: int) -> None:
        self._not_taken.appendleft((at, at + length))

    def arrived(self, length: int) -> None:
        self._missing -= length
        if self.is_done:
            self.wake()

    def wake(self) -> None:
        for runner in self.runners:
            runner.wake()


class _Runner:
    """One lane's part of one transfer."""

    def __init__(self, transfer: _Transfer, lane: Lane) -> None:
        self.lane = lane
        self._transfer = transfer
        self._reader = lane.reader
        self._most_bytes = lane.reader.port.capabilities.most_read_bytes
        self._outstanding: dict[int, tuple[int, int]] = {}
        #: Of READs that ended without their bytes, until the link is closed.
        self._lost: list[tuple[int, int]] = []
        self._trouble = "" if self._most_bytes > 0 else "the device can't READ"
        #: Since when there was no completion, or no place.
        self._since = trio.current_time()
        self._is_queue_full = False
        self._wake = trio.Event()

    def wake(self) -> None:
        self._wake.set()

    def completed(self, work: int, error: str) -> None:
        at, length = self._outstanding.pop(work)
        self._since = trio.current_time()
        if error:
            self._lost.append((at, length))
            self._trouble = self._trouble or error
        else:
            self._transfer.arrived(length)
        self.wake()

    async def run(self) -> None:
        while not self._transfer.is_done:
            trouble = self._trouble or self._reader.gone or self._stalled()
            if not trouble and self.lane.link.is_broken:
                trouble = "the link is broken"
            if trouble:
                self._fail(trouble)
                return
            # Not before other lanes and tasks had their turn: they are to take the next piece.
            if self._posted_one():
                await trio.lowlevel.checkpoint()
            else:
                await self._wait()

    def leave(self) -> None:
        """READs are left over only where the transfer was cancelled."""
        self._reader.forget(self)
        if self._outstanding:
            self.lane.give_up("the transfer was cancelled")

    def _posted_one(self) -> bool:
        if not self._transfer.has_piece or self._is_queue_full or not self._reader.has_place(self._transfer.window):
            return False
        at, length = self._transfer.take(self._most_bytes)
        try:
            work = self._reader.post(self, at, length)
        except QueueFull:
            self._transfer.give_back(at, length)
            self._is_queue_full = True
            return False
        except PeerUnavailable as error:
            self._transfer.give_back(at, length)
            self._trouble = error.message
            return True
        if not self._outstanding:
            self._since = trio.current_time()
        self._outstanding[work] = (at, length)
        return True

    async def _wait(self) -> None:
        until = self._deadline()
        waits_for_others = not self._outstanding and not self._transfer.has_piece
        if self._transfer.has_piece:
            self._reader.tell_of_place(self)
            if self._is_queue_full:
                until = min(until, trio.current_time() + _QUEUE_FULL_S)
        self._wake = trio.Event()
        with trio.move_on_at(until):
            await self._wake.wait()
        self._is_queue_full = False
        if waits_for_others:
            self._since = trio.current_time()

    def _deadline(self) -> float:
        """No end where the lane waits only for what others read: they have one, and tell."""
        if self._outstanding:
            return self._since + self._transfer.stall_s
        if self._transfer.has_piece:
            return max(self._since, self._reader.changed_at) + _PLACE_STALLS * self._transfer.stall_s
        return math.inf

    def _stalled(self) -> str:
        if trio.current_time() < self._deadline():
            return ""
        if self._outstanding:
            return f"no READ completed for {self._transfer.stall_s:g} s"
        return f"no place in the device's queue for {_PLACE_STALLS * self._transfer.stall_s:g} s"

    def _fail(self, why: str) -> None:
        self.lane.give_up(why)  # its READs come back as lost by it, also those that others closed
        for at, length in self._lost:
            self._transfer.give_back(at, length)
        self._lost.clear()
        self._transfer.wake()
