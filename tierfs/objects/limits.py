"""How many requests go to the store at a time: fewer when it asks to slow down, and urgent ones first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

_GROW_EVERY_S = 10.0


class Concurrency:
    """Additive increase, multiplicative decrease: halved when the store throttles, one more for each 10 s without.

    It begins at `most`: nothing says that the store can't take it. Only numbers and times; `RequestSlots` queues.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = max(1, most)
        self._changed = now
        self._halved = float("-inf")
        self.allowed = self._most

    def throttled(self, began: float, now: float) -> None:
        """A request that `began` at that time was told to slow down. Those that were under way when an earlier one was
        told so say nothing new."""
        if began >= self._halved:
            self.allowed = max(1, self.allowed // 2)
            self._halved = now
        self._changed = now

    def succeeded(self, now: float) -> None:
        if now - self._changed >= _GROW_EVERY_S:
            self.allowed = min(self._most, self.allowed + 1)
            self._changed = now


@dataclass(eq=False)
class _Waiter:
    may_go: trio.Event = field(default_factory=trio.Event)


class RequestSlots:
    """Slots for requests, given in order of asking, but to urgent ones first; a few are for urgent ones only, so that a
    reader doesn't wait behind long uploads."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reserved = max(1, most // 4)
        self._in_use = 0
        self._urgent: deque[_Waiter] = deque()
        self._ordinary: deque[_Waiter] = deque()
        self.concurrency = Concurrency(most, clock())

    @property
    def allowed(self) -> int:
        return self.concurrency.allowed

    @property
    def in_use(self) -> int:
        return self._in_use

    @asynccontextmanager
    async def slot(self, *, urgent: bool = False) -> AsyncIterator[None]:
        waiter = _Waiter()
        queue = self._urgent if urgent else self._ordinary
        queue.append(waiter)
        self._give()
        try:
            await waiter.may_go.wait()
            yield
        finally:
            if waiter.may_go.is_set():
                self._in_use -= 1
            else:
                queue.remove(waiter)
            self._give()

    def throttled(self, began: float) -> None:
        self.concurrency.throttled(began, self._clock())

    def succeeded(self) -> None:
        self.concurrency.succeeded(self._clock())
        self._give()

    def _give(self) -> None:
        for queue, slots in ((self._urgent, self.allowed + self._reserved), (self._ordinary, self.allowed)):
            while queue and self._in_use < slots:
                self._in_use += 1
                queue.popleft().may_go.set()
