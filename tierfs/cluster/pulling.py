"""One file of another node on its way to this node's shelf: pieces, checksums, other holders, and what goes wrong.

A file that still grows is fetched as it grows, so that little is left to do when it is sealed. Its writer may have
gone back meanwhile; so nothing counts before the checksums of all chunks are those of the sealed file. Those that
differ are fetched again.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from tierfs.checksum import CHUNK_BYTES, FileChecksum
from tierfs.cluster.copy_index import PULLING
from tierfs.cluster.pieces import Piece, Pieces
from tierfs.cluster.replica_room import ReplicaRoom
from tierfs.cluster.versions import write_version
from tierfs.errors import ChecksumMismatch, NoRoom, PeerError, PeerLacks, PeerRefused
from tierfs.steps.registry import Key
from tierfs.transport.peers import Peers

log = logging.getLogger("tierfs.cluster")

#: What came of a growing file in this time is fetched, however little it is.
GROWN_FOR_S = 0.05
#: Differing chunks are fetched so often from one holder, and then from another.
ATTEMPTS = 4
#: So many holders in a row, or one so often.
MOST_MISMATCHES = 3
#: A growing file without news for so long is asked for: its name may be gone.
ASK_AFTER_S = 2.0
#: Between attempts that failed.
PAUSE_S = 0.2
MOST_PAUSE_S = 2.0
#: Without a byte for so long it is given up; what is missing of a complete step is planned again.
GIVE_UP_S = 60.0
#: Summing up takes a second for some GB; who needs longer than this is as good as lost.
SUM_WITHIN_S = 600.0
_SERIAL = itertools.count(1)


class ShelfPlaces(Protocol):
    """What is needed of `tierfs.cluster.copies.Copies`."""

    def has(self, version: str) -> bool: ...

    def place(self, key: Key, version: str) -> Path: ...

    def shelved(self, key: Key, version: str, path: Path) -> None: ...

    def checksum_known(self, version: str, checksum: FileChecksum) -> None: ...


async def let_go(fd: int) -> None:
    """Close a file that may have no name any more: the kernel takes 0.1 s to free a GiB of it. Not cancelled."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(os.close, fd)


class Streams:
    """At most so many pulls from each node at a time."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self._limiters: dict[str, trio.CapacityLimiter] = {}

    def to(self, node: str) -> trio.CapacityLimiter:
        if node not in self._limiters:
            self._limiters[node] = trio.CapacityLimiter(self.streams)
        return self._limiters[node]


@dataclass(frozen=True)
class Means:
    """What all pulls share."""

    peers: Peers
    shelf: ShelfPlaces
    room: ReplicaRoom
    streams: Streams
    #: The tier's `trim`: takes back what a file has beyond its end.
    trim: Callable[[int], None]


class FilePull:
    """`holders` tells, each time it is asked, who may have the file now, the best first.

    With `may_evict` old steps that retention lets go make way for it. `version` is the growing name until `seal`.
    `run` returns once the file is on the shelf (True), or is given up or dropped (False); nothing of it is left then.
    """

    def __init__(
        self,
        means: Means,
        key: Key,
        inner: str,
        version: str,
        holders: Callable[[FilePull], Sequence[str]],
        *,
        may_evict: bool = True,
    ) -> None:
        self.key = key
        self.inner = inner
        self.version = version
        self.may_evict = may_evict
        self.pieces = Pieces()
        self._means = means
        self._holders = holders
        self._failures: Counter[str] = Counter()
        self._news = trio.Event()
        self._scope = trio.CancelScope()
        self._fd = -1
        self._path: Path | None = None
        self._length = 0  # of the file, so far
        self._given: Counter[int] = Counter()  # bytes of each chunk that have their memory
        self._lacking: set[str] = set()
        self._mismatches = 0
        self._came_at = trio.current_time()
        self._trouble: Exception | None = None

    @property
    def shown(self) -> str:
        return f"{'/'.join(self.key)}/{self.inner}"

    def grew(self, size_bytes: int) -> None:
        """Its node has so much of it now; less than before when it was cut."""
        if not self.pieces.sealed:
            self.pieces.grow(size_bytes)
            self._tell()

    def seal(self, version: str, size_bytes: int) -> None:
        """It grows no more, and has its final name."""
        if not self.pieces.sealed:
            self.version = version
            self.pieces.seal(size_bytes)
            self._failures.clear()
            self._lacking.clear()
            self._tell()

    def drop(self) -> None:
        """It is not wanted any more."""
        self._scope.cancel()

    async def run(self) -> bool:
        """NoRoom where the RAM tier can't take it."""
        try:
            with self._scope:
                return await self._bring()
            return False
        finally:
            self._means.room.release(self)
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            if self._fd >= 0:
                await let_go(self._fd)

    async def _bring(self) -> bool:
        pause = PAUSE_S
        while True:
            if self.pieces.sealed and self._means.shelf.has(self.version):
                return True
            holder = self._next_holder()
            version = self.version
            try:
                if holder is not None:
                    await self._bring_from(holder)
                    return True
            except (PeerError, ChecksumMismatch) as error:
                if self.version != version:
                    continue  # it was sealed just then, or cut
                self._failures[holder or ""] += 1
                if self._is_hopeless(error, holder or ""):
                    log.log(
                        logging.DEBUG if isinstance(error, PeerLacks) else logging.WARNING,
                        "%s is not copied for now: %s",
                        self.shown,
                        error,
                        extra=self._extra(),
                    )
                    return False
                level = logging.WARNING if self._failures[holder or ""] == 1 else logging.DEBUG
                log.log(level, "copying %s from %s: %s", self.shown, holder, error, extra=self._extra())
            if trio.current_time() - self._came_at > GIVE_UP_S:
                log.warning("copying %s is given up for now", self.shown, extra=self._extra())
                return False
            with trio.move_on_after(pause):
                await self._next_news()
            pause = min(2 * pause, MOST_PAUSE_S)

    def _is_hopeless(self, error: Exception, holder: str) -> bool:
        """It grows no more and was not sealed, nobody holds it any more, or nobody sends the right bytes."""
        if isinstance(error, ChecksumMismatch):
            self._mismatches += 1
            return self._mismatches >= MOST_MISMATCHES
        if not isinstance(error, PeerLacks):
            return False
        self._lacking.add(holder)
        return not self.pieces.sealed or self._lacking.issuperset(self._holders(self))

    def _next_holder(self) -> str | None:
        """Of those that failed least the first."""
        return min(self._holders(self), key=lambda node: self._failures[node], default=None)

    async def _bring_from(self, holder: str) -> None:
        """All of it, verified, on the shelf. PeerError, ChecksumMismatch, NoRoom, OSError."""
        expected: list[FileChecksum] = []
        self._trouble = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ask_checksum, holder, expected)
            await self._transfer(holder)
            if self._trouble is not None:
                nursery.cancel_scope.cancel()
        self._raise_trouble()
        checksum = expected[0]
        if checksum.size_bytes != self.pieces.size_bytes or checksum.chunk_bytes != CHUNK_BYTES:
            raise PeerRefused(
                f"{holder} has {checksum.size_bytes} bytes of {self.version}, which was sealed with "
                f"{self.pieces.size_bytes}"
            )
        for attempt in range(ATTEMPTS):
            differing = self.pieces.differing(checksum.chunks)
            if not differing:
                await self._shelve(checksum)
                return
            # A writer that went back is the usual reason, the first time.
            log.log(
                logging.DEBUG if attempt == 0 else logging.WARNING,
                "%d chunks of %s from %s differ from what was sealed",
                len(differing),
                self.shown,
                holder,
                extra=self._extra(),
            )
            self.pieces.again(differing)
            await self._transfer(holder)
            self._raise_trouble()
        if differing := self.pieces.differing(checksum.chunks):
            self.pieces.again(differing)
            raise ChecksumMismatch(f"{holder} keeps sending other bytes of {self.shown} than were sealed")
        await self._shelve(checksum)

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    async def _ask_checksum(self, holder: str, answer: list[FileChecksum]) -> None:
        """Ask as soon as it is sealed: summing up goes on beside the transfer of what is left."""
        while not self.pieces.sealed:
            await self._next_news()
        try:
            with trio.fail_after(SUM_WITHIN_S):
                answer.append(await self._means.peers.checksum(holder, self.version))
        except trio.TooSlowError:
            self._fail(PeerRefused(f"{holder} does not sum up {self.version}"))
        except PeerError as error:
            self._fail(error)

    async def _transfer(self, holder: str) -> None:
        """Fetch what is missing until the sealed file is whole. Where that fails `_trouble` says why."""
        waiting_since: float | None = None
        async with trio.open_nursery() as nursery:
            while self._trouble is None and not self.pieces.is_whole:
                now = trio.current_time()
                at_once = waiting_since is not None and now - waiting_since >= GROWN_FOR_S
                piece = self.pieces.next(at_once=at_once) if self.pieces.busy < self._means.streams.streams else None
                if piece is not None:
                    waiting_since = None
                    nursery.start_soon(self._fetch, holder, piece)
                    continue
                is_waiting = not self.pieces.busy and self.pieces.missing_bytes > 0
                waiting_since = (waiting_since or now) if is_waiting else None
                with trio.move_on_after(GROWN_FOR_S if is_waiting else ASK_AFTER_S) as scope:
                    await self._next_news()
                if scope.cancelled_caught and not is_waiting and not self.pieces.busy and not self.pieces.sealed:
                    await self._ask_whether_it_grows(holder)
            if self._trouble is not None:
                nursery.cancel_scope.cancel()

    async def _fetch(self, holder: str, piece: Piece) -> None:
        version, is_growing = self.version, not self.pieces.sealed
        length = crc = 0
        try:
            async with self._means.streams.to(holder):
                await self._make_ready(piece)
                pulled = await self._means.peers.pull(
                    holder, version, piece.offset, piece.length, self._fd, growing=is_growing
                )
            if not 0 <= pulled.length <= piece.length or (pulled.length < piece.length and not is_growing):
                raise PeerRefused(f"{holder} sent {pulled.length} bytes for {piece.length} of {version}")
            length, crc = pulled.length, pulled.crc64nvme
            if length:
                self._came_at = trio.current_time()
            elif self.version == version:
                raise PeerLacks(f"{holder} has less of {self.shown} than it offered")
        except (PeerError, NoRoom, OSError) as error:
            if self.version == version:  # else it was sealed just then: its bytes are asked for by the new name
                self._fail(error)
        finally:
            self.pieces.ended(piece, length, crc)
            self._tell()

    async def _make_ready(self, piece: Piece) -> None:
        """The file, with memory for the piece. NoRoom, OSError."""
        room = self._means.room
        if self._fd < 0:
            self._open()
        end = piece.offset + piece.length
        start = max(piece.offset, piece.chunk * CHUNK_BYTES + self._given[piece.chunk])
        if start < end:
            whole = self.pieces.size_bytes - self._given.total()
            needed = whole if self.pieces.sealed else room.promised_to(self) + end - start
            await room.promise(self, needed, for_step=self.key, may_evict=self.may_evict)
            await room.give(self, self._fd, start, end)
            self._given[piece.chunk] = end - piece.chunk * CHUNK_BYTES
        if end > self._length:  # memory beyond the end can't be mapped
            os.ftruncate(self._fd, end)
            self._length = end

    def _open(self) -> None:
        # One that was dropped and is just ending may be of the same version.
        self._path = self._means.shelf.place(self.key, self.version).with_name(f"{next(_SERIAL)}{PULLING}")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    async def _ask_whether_it_grows(self, holder: str) -> None:
        """What was removed while it was written is offered no more, and nobody says so."""
        if self.pieces.size_bytes == 0:
            return
        fd = os.memfd_create("tierfs-ask")
        try:
            os.ftruncate(fd, 1)
            await self._means.peers.pull(holder, self.version, 0, 1, fd, growing=True)
            self._came_at = trio.current_time()
        except PeerError as error:
            self._fail(error)
        finally:
            os.close(fd)

    async def _shelve(self, checksum: FileChecksum) -> None:
        """Whole and verified: it has its version and its name."""
        shelf = self._means.shelf
        place = shelf.place(self.key, self.version)
        if self._fd < 0:  # an empty file
            self._open()
        assert self._path is not None
        os.ftruncate(self._fd, self.pieces.size_bytes)
        self._means.trim(self._fd)
        write_version(self._fd, self.version)
        self._path.rename(place)
        self._path = None
        shelf.shelved(self.key, self.version, place)
        shelf.checksum_known(self.version, checksum)

    def _fail(self, error: Exception) -> None:
        if self._trouble is None:
            self._trouble = error
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def _next_news(self) -> None:
        await self._news.wait()

    def _extra(self) -> dict[str, str]:
        return {"namespace": self.key[0], "step": self.key[1], "file": self.inner, "tier": "ram"}
