"""What this node writes into steps, told to the nodes that copy it while it is still growing.

A subscriber gets each sealed file once, by its version, and before that its size as it grows, under a name of its own.
Growth is looked at only while somebody waits for news. Sizes are told as they are now, so they never pile up; sealed
files wait in a queue, and a subscriber that lets too many wait is cut off: it asks anew and compares.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from tierfs.errors import PeerUnavailable
from tierfs.transport.peers import Offer

log = logging.getLogger("tierfs.cluster")

#: How often growing files are looked at, seconds: at 10 GB/s that is a pull of 300 MB behind the writer.
LOOK_EVERY_S = 0.03
#: Growth below this is not told before the file is sealed.
LEAST_GROWTH_BYTES = 1 << 20
#: Offers that may wait for one subscriber: some MB.
MOST_WAITING = 20_000
#: A file that has so much less memory than its size was made long before it was written.
_SPARSE_BYTES = 2 << 20
#: Growing names that are still understood after the seal: a pull may have begun just then.
_KEPT_NAMES = 4096


@dataclass
class GrowingFile:
    """A file that is open for writing; `fd` is ours."""

    version: str
    namespace: str
    step: str
    inner: str
    generation: int
    ino: int
    fd: int

    def size_bytes(self) -> int:
        """How far it is written from its start, as far as can be told; 0 for a file whose bytes come anywhere."""
        info = os.fstat(self.fd)
        return info.st_size if info.st_blocks * 512 + _SPARSE_BYTES >= info.st_size else 0

    def offer(self, size_bytes: int) -> Offer:
        return Offer(self.version, self.namespace, self.step, self.inner, self.generation, size_bytes, sealed=False)


@dataclass
class _Subscriber:
    waiting: deque[Offer] = field(default_factory=deque)
    told: dict[str, int] = field(default_factory=dict)
    news: trio.Event = field(default_factory=trio.Event)
    is_lost: bool = False


class Offering:
    """Used from the trio thread. `sealed_now` gives what a new subscriber hears of first."""

    def __init__(self, sealed_now: Callable[[], Iterable[Offer]], *, most_waiting: int = MOST_WAITING) -> None:
        self._sealed_now = sealed_now
        self._most_waiting = most_waiting
        self._growing: dict[int, GrowingFile] = {}  # by inode number
        self._by_version: dict[str, GrowingFile] = {}
        self._became: OrderedDict[str, str] = OrderedDict()
        self._subscribers: list[_Subscriber] = []

    def growing(self, ino: int) -> GrowingFile | None:
        return self._growing.get(ino)

    def tell_now(self, ino: int) -> int:
        """Offer all that is written of a growing file at once, however little that is; returns how much, 0 for none."""
        file = self._growing.get(ino)
        if file is None:
            return 0
        size = file.size_bytes()
        for subscriber in self._subscribers:
            subscriber.told[file.version] = min(subscriber.told.get(file.version, 0), size - LEAST_GROWTH_BYTES)
        self._wake()
        return size

    def named(self, version: str) -> GrowingFile | None:
        return self._by_version.get(version)

    def became(self, version: str) -> str | None:
        """The final version of a file that grew under this one."""
        return self._became.get(version)

    def begin(self, file: GrowingFile) -> None:
        self._growing[file.ino] = file
        self._by_version[file.version] = file
        self._wake()

    def end(self, ino: int, sealed: Offer | None) -> None:
        """It grows no more; `sealed` is what became of it, if it is part of a step."""
        file = self._growing.pop(ino, None)
        if file is not None:
            del self._by_version[file.version]
            os.close(file.fd)
            if sealed is not None:
                self._became[file.version] = sealed.version
                if len(self._became) > _KEPT_NAMES:
                    self._became.popitem(last=False)
        for subscriber in self._subscribers:
            if file is not None:
                subscriber.told.pop(file.version, None)
            if sealed is not None:
                subscriber.waiting.append(sealed)
                if len(subscriber.waiting) > self._most_waiting:
                    subscriber.waiting.clear()
                    subscriber.is_lost = True
        self._wake()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Offer]]:
        subscriber = _Subscriber(deque(self._sealed_now()))
        self._subscribers.append(subscriber)
        iterator = self._news(subscriber)
        try:
            yield iterator
        finally:
            self._subscribers.remove(subscriber)
            with trio.CancelScope(shield=True):
                await iterator.aclose()

    def close(self) -> None:
        for ino in list(self._growing):
            self.end(ino, None)

    async def _news(self, subscriber: _Subscriber) -> AsyncGenerator[Offer, None]:
        while True:
            if subscriber.is_lost:
                log.error("a node that copies from this one is too slow to hear of it all; it has to ask again")
                raise PeerUnavailable(f"more than {self._most_waiting} offers waited: ask again")
            while subscriber.waiting:
                yield subscriber.waiting.popleft()
            for file in list(self._growing.values()):
                size = file.size_bytes() if file.version in self._by_version else 0
                if size >= subscriber.told.get(file.version, 0) + LEAST_GROWTH_BYTES:
                    subscriber.told[file.version] = size
                    yield file.offer(size)
            if subscriber.waiting or subscriber.is_lost:
                continue
            subscriber.news = trio.Event()
            with trio.move_on_after(LOOK_EVERY_S if self._growing else float("inf")):
                await subscriber.news.wait()

    def _wake(self) -> None:
        for subscriber in self._subscribers:
            subscriber.news.set()
