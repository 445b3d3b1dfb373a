"""What is known of one stub while the daemon runs: which of its chunks are here, and who wants more of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import trio

from tierfs.checksum import CHUNK_BYTES
from tierfs.hydrate.stubs import StubMark

#: States of a chunk. UNCHECKED: an earlier daemon brought bytes, and nobody knows any more whether they are right.
MISSING, UNCHECKED, GOOD = 0, 1, 2


@dataclass(eq=False)
class Fetch:
    """A chunk is being brought or given up; `error` is why that failed, once `done`."""

    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


class PartialFile:
    """A stub by its inode number. `where` is its last known path relative to the tier, to be checked when used."""

    __slots__ = (
        "changed",
        "chunks",
        "cursor",
        "fd",
        "fetches",
        "fill_error",
        "filling",
        "ino",
        "is_open",
        "left_at",
        "mark",
        "pins",
        "read_end",
        "run_bytes",
        "state",
        "users",
        "wants",
        "where",
    )

    def __init__(self, ino: int, mark: StubMark | None, where: str) -> None:
        self.ino = ino
        self.mark = mark  # None: the mark is damaged, so that nothing can be read
        self.where = where
        self.state: bytearray | None = None  # of each chunk; None: all are missing
        self.fd = -1
        self.chunks: tuple[int, ...] | None = None  # their checksums, while in use
        self.fetches: dict[int, Fetch] = {}
        self.pins: Counter[int] = Counter()  # chunks that a read needs now
        self.users = 0  # tasks that need `fd` and `chunks`
        self.is_open = False  # a program has it open
        self.left_at = 0.0  # when the last handle was closed (trio.current_time)
        self.wants = 0  # tasks that want all of it
        self.cursor = 0  # where the reader is: filling goes on from there
        self.read_end = 0  # the byte where the last read ended, to tell one who reads on
        self.run_bytes = 0  # how much was read on and on without a jump
        self.filling = False
        self.fill_error: Exception | None = None
        self.changed = trio.Event()

    @property
    def shown(self) -> str:
        """Its path as programs know it."""
        return self.where.removeprefix("root/")

    @property
    def size_bytes(self) -> int:
        return self.mark.size_bytes if self.mark is not None else 0

    @property
    def count(self) -> int:
        """How many chunks it has."""
        return -(-self.size_bytes // CHUNK_BYTES)

    def length(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self.size_bytes - chunk * CHUNK_BYTES)

    def is_good(self, chunk: int) -> bool:
        return self.state is not None and self.state[chunk] == GOOD

    def is_missing(self, chunk: int) -> bool:
        return self.state is None or self.state[chunk] == MISSING

    def set(self, chunk: int, value: int) -> None:
        if self.state is None:
            self.state = bytearray(self.count)
        self.state[chunk] = value

    @property
    def is_whole(self) -> bool:
        return self.count == 0 or (self.state is not None and self.state.count(GOOD) == self.count)

    @property
    def here_bytes(self) -> int:
        """Bytes in RAM, verified or not."""
        if self.state is None:
            return 0
        missing = self.state.count(MISSING)
        return self.size_bytes - self._bytes_of(missing, last=self.state[-1] == MISSING) if self.state else 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that need room that was not given yet."""
        coming = sum(self.length(chunk) for chunk in self.fetches if self.is_missing(chunk))
        return self.size_bytes - self.here_bytes - coming

    def _bytes_of(self, chunks: int, *, last: bool) -> int:
        size = chunks * CHUNK_BYTES
        return size - (CHUNK_BYTES - self.length(self.count - 1)) if last else size

    def next_wanted(self) -> int | None:
        """The next chunk to bring: from the reader's place on to the end, then from the start."""
        for _ in range(self.count):
            if not self.is_good(self.cursor):
                break
            self.cursor = (self.cursor + 1) % self.count  # also so that good ones are passed over only once
        for chunk in chain(range(self.cursor, self.count), range(self.cursor)):
            if not self.is_good(chunk) and chunk not in self.fetches:
                return chunk
        return None

    def chunks_here(self) -> Iterator[int]:
        for chunk, value in enumerate(self.state or b""):
            if value != MISSING:
                yield chunk

    def tell(self) -> None:
        """Wake who waits for any progress of it."""
        self.changed.set()
        self.changed = trio.Event()


def find_data(fd: int, part: PartialFile) -> None:
    """Note which chunks have bytes that an earlier daemon brought. Moves the descriptor's position."""
    at = 0
    while at < part.size_bytes:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: no more data; EINVAL: a file system that can't tell, so all is fetched again
            return
        chunk = at // CHUNK_BYTES
        part.set(chunk, UNCHECKED)
        at = (chunk + 1) * CHUNK_BYTES
