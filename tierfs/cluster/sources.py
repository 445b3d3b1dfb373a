"""The bytes of stubs from whoever has them: other nodes by the file's version, then the object tier.

Ranges of one file are spread over its holders, the least busy one first; what a program waits for has a way of its own
beside what follows it. A holder that fails is left alone for a while,
and one that sends wrong bytes too; what nobody gives in time is an error that says who was asked.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TypeVar

import trio

from tierfs.checksum import CHUNK_BYTES, MIB, FileChecksum, combine
from tierfs.cluster.whereabouts import CatalogView, Whereabout, Whereabouts
from tierfs.errors import ObjectError, PeerError, PeerLacks, PeerRefused, PeerUnavailable
from tierfs.hydrate.source import Source
from tierfs.hydrate.stubs import StubMark
from tierfs.persist.reporting import all_of
from tierfs.transport.peers import MOST_PULL_BYTES, Peers, Pulled

log = logging.getLogger("tierfs.cluster")

#: The first read of a file comes in pieces of this size side by side, so that a program waits less for it.
PIECE_BYTES = 4 * MIB
#: A pull that takes longer has failed, though bytes trickle in.
PULL_WITHIN_S = 120.0
#: Summing up goes at 100 MB/s at the least, or the holder is given up.
LEAST_SUM_BYTES_S = 100e6
SUM_WITHIN_S = 10.0
#: A holder that failed comes last for so long, seconds; longer with each failure.
LEFT_ALONE_S = 5.0
LEFT_ALONE_MOST_S = 60.0
#: Before all are asked again.
PAUSE_S = 0.25
#: A file of a step that the cluster calls lost is asked for so long: a node may just be coming back.
LOST_FOR_S = 5.0
#: While a node may still answer, the object tier is not tried again for longer.
OBJECT_RETRY_S = 5.0
#: What is kept of checksums and of who sent what.
VERSIONS_KEPT = 256
PLACES_KEPT = 1024
#: The object tier, where names of nodes stand: no node has an empty name.
OBJECTS = ""

Place = tuple[str, int]
K = TypeVar("K")
V = TypeVar("V")


class Sources:
    """Implements `tierfs.hydrate.source.Source`. `node` is this one. `objects` is set where there is an object tier.

    `retry_for_s` is for the checksums of a file that nobody can give: as long as a read is tried for. Of `streams` to a
    node one is left to reads that programs wait for.
    """

    reads_first = True

    def __init__(
        self,
        view: CatalogView,
        peers: Peers,
        *,
        node: str,
        retry_for_s: float,
        streams: int = 4,
        objects: Source | None = None,
    ) -> None:
        self.objects = objects
        #: Bytes that came from other nodes.
        self.received_bytes = 0
        self._view = view
        self._peers = peers
        self._node = node
        self._retry_for_s = retry_for_s
        self._whereabouts = Whereabouts(view, node)
        #: By node: bytes that are on their way from it.
        self._busy: Counter[str] = Counter()
        #: By node: streams for what nobody waits for right now.
        self._slots: defaultdict[str, trio.CapacityLimiter] = defaultdict(
            lambda: trio.CapacityLimiter(max(1, streams - 1))
        )
        #: By version: reads under way.
        self._reading: Counter[str] = Counter()
        #: By node, or by version and node: until when it comes last; and how often it failed since it last gave a byte.
        self._alone_until: dict[str, float] = {}
        self._lacking_until: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._failures: Counter[str] = Counter()
        self._summed: OrderedDict[str, FileChecksum] = OrderedDict()
        self._not_summed: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._summing: dict[str, trio.Lock] = {}
        #: By version and offset: who sent it last, and how often somebody's share in it was wrong.
        self._served: OrderedDict[Place, set[str]] = OrderedDict()
        self._wrong: OrderedDict[Place, Counter[str]] = OrderedDict()

    # --- checksums

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        """PeerUnavailable, ObjectError."""
        if not mark.version:
            return await self._objects(mark).chunks(mark)
        lock = self._summing.setdefault(mark.version, trio.Lock())
        began = trio.current_time()
        try:
            async with lock:
                summed = self._summed.get(mark.version)
                failed_at, failure = self._not_summed.get(mark.version, (-1.0, ""))
                if summed is None and failed_at >= began:
                    raise PeerUnavailable(failure)  # whoever went ahead waited for the same
                if summed is None:
                    summed = await self._ask_for_sum(mark)
                    _keep(self._summed, mark.version, summed, VERSIONS_KEPT)
        except PeerUnavailable as error:
            _keep(self._not_summed, mark.version, (trio.current_time(), error.message), VERSIONS_KEPT)
            raise
        finally:
            if not lock.statistics().tasks_waiting:
                self._summing.pop(mark.version, None)
        return summed.chunks

    async def _ask_for_sum(self, mark: StubMark) -> FileChecksum:
        asked: dict[str, str] = {}
        began = trio.current_time()
        end = began + self._retry_for_s
        anew = False
        while True:
            found = await self._whereabouts.of(mark, anew=anew)
            known = mark.checksum if mark.checksum is not None else found.checksum
            left = self._candidates(found)
            while left:
                source = self._next(left, mark)
                left.discard(source)
                try:
                    return await self._sum_of(source, replace(mark, checksum=known))
                except (PeerError, ObjectError) as error:
                    self._failed(source, mark, error, asked)
            anew = True
            await self._pause(mark, "its checksums", asked, began, end)

    async def _sum_of(self, source: str, mark: StubMark) -> FileChecksum:
        """What the source says, where it can be right. The mark's checksum is as good as it is known anywhere."""
        if source == OBJECTS:
            chunks = await self._objects(mark).chunks(mark)
            summed = FileChecksum(mark.size_bytes, _combined(chunks, mark.size_bytes), tuple(chunks))
        else:
            try:
                with trio.fail_after(SUM_WITHIN_S + mark.size_bytes / LEAST_SUM_BYTES_S):
                    summed = await self._peers.checksum(source, mark.version)
            except trio.TooSlowError:
                raise PeerUnavailable(f"{source} gave no checksums in time") from None
        is_sound = (
            (summed.size_bytes, summed.chunk_bytes) == (mark.size_bytes, CHUNK_BYTES)
            and len(summed.chunks) == -(-mark.size_bytes // CHUNK_BYTES)
            and _combined(summed.chunks, mark.size_bytes) == summed.full
        )
        if not is_sound or mark.checksum not in (None, summed.full):
            raise PeerRefused(f"{_named(source)} has other bytes than were sealed")
        return summed

    # --- bytes

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        """PeerUnavailable, ObjectError."""
        if not mark.version:
            objects = self._objects(mark)
            return await objects.read_range(mark, offset, length, fd, urgent=urgent, retry_for_s=retry_for_s)
        place = mark.version, offset
        _keep(self._served, place, set(), PLACES_KEPT)
        end = trio.current_time() + retry_for_s
        # Where others are under way already, more pulls would not make it faster.
        is_split = urgent and not self._reading[mark.version] and place not in self._wrong
        piece = PIECE_BYTES if is_split else MOST_PULL_BYTES
        starts = range(0, length, piece)
        sums: dict[int, int] = {}

        async def read(start: int) -> None:
            size = min(piece, length - start)
            sums[start] = await self._read(mark, place, offset + start, size, fd, urgent=urgent, end=end)

        self._reading[mark.version] += 1
        try:
            if len(starts) == 1:
                await read(0)
            else:
                await all_of((partial(read, start) for start in starts), at_once=CHUNK_BYTES // PIECE_BYTES)
        finally:
            self._reading[mark.version] -= 1
            if not self._reading[mark.version]:
                del self._reading[mark.version]
        whole = 0
        for start in starts:
            whole = combine(whole, sums[start], min(piece, length - start))
        return whole

    async def _read(
        self, mark: StubMark, place: Place, offset: int, length: int, fd: int, *, urgent: bool, end: float
    ) -> int:
        asked: dict[str, str] = {}
        anew, began = False, trio.current_time()
        while True:
            found = await self._whereabouts.of(mark, anew=anew)
            left = self._candidates(found)
            while left:
                source = self._next(left, mark, place)
                left.discard(source)
                try:
                    if source == OBJECTS:
                        most_s = OBJECT_RETRY_S if found.holders else float("inf")
                        summed = await self._read_object(
                            mark, found, offset, length, fd, urgent, min(most_s, end - trio.current_time())
                        )
                    else:
                        summed = await self._pull(source, mark, offset, length, fd, urgent=urgent)
                except (PeerError, ObjectError) as error:
                    self._failed(source, mark, error, asked)
                    continue
                self._served.setdefault(place, set()).add(source)
                return summed
            anew = True
            await self._pause(mark, f"bytes from {offset} on", asked, began, end)

    async def _pull(self, node: str, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool) -> int:
        self._busy[node] += length
        try:
            if urgent:
                pulled = await self._pull_now(node, mark, offset, length, fd)
            else:
                async with self._slots[node]:
                    pulled = await self._pull_now(node, mark, offset, length, fd)
        finally:
            self._busy[node] -= length
        if pulled.length != length:
            raise PeerLacks(f"{node} has fewer bytes than were sealed")
        self.received_bytes += length
        self._failures.pop(node, None)
        self._alone_until.pop(node, None)
        return pulled.crc64nvme

    async def _pull_now(self, node: str, mark: StubMark, offset: int, length: int, fd: int) -> Pulled:
        began = trio.current_time()
        try:
            with trio.fail_after(PULL_WITHIN_S):
                # All hydration goes ahead of replication: programs wait for it, or people.
                return await self._peers.pull(node, mark.version, offset, length, fd, urgent=True)
        except trio.TooSlowError:
            raise PeerUnavailable(f"{node} sent {length} bytes too slowly") from None
        except PeerUnavailable:
            # Who took long to fail would do so again.
            self._leave_alone(node, 3 * (trio.current_time() - began))
            raise

    async def _read_object(
        self, mark: StubMark, found: Whereabout, offset: int, length: int, fd: int, urgent: bool, retry_for_s: float
    ) -> int:
        objects = self._objects(mark)
        if mark.checksum is None:
            mark = replace(mark, checksum=found.checksum)
        await objects.chunks(mark)  # it holds these very bytes, or raises
        return await objects.read_range(mark, offset, length, fd, urgent=urgent, retry_for_s=max(0.0, retry_for_s))

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        """The sources of it come last for this place from now on; a single one is left alone altogether."""
        place = mark.version, offset
        served = self._served.pop(place, set())
        wrong = self._wrong.get(place) or Counter()
        wrong.update(served)
        _keep(self._wrong, place, wrong, PLACES_KEPT)
        if len(served) == 1 and OBJECTS not in served:
            node = next(iter(served))
            log.warning("%s sent other bytes than were sealed", node, extra=_extra(mark))
            self._leave_alone(node, LEFT_ALONE_MOST_S)
        if sum(wrong.values()) > 2 or len(wrong) > 2:
            self._summed.pop(mark.version, None)  # or the checksums are what is wrong

    # --- whom to ask

    def _candidates(self, found: Whereabout) -> set[str]:
        return {*found.holders, *([OBJECTS] if self.objects is not None else [])}

    def _next(self, candidates: Collection[str], mark: StubMark, place: Place | None = None) -> str:
        """Who did not send wrong bytes for the place, does not fail, is a node, has little to do, and is near."""
        now = trio.current_time()
        wrong = self._wrong.get(place) if place is not None else None
        own = self._domain(self._node)

        def order(source: str) -> tuple[int, bool, bool, int, bool, int]:
            until = max(self._alone_until.get(source, 0.0), self._lacking_until.get((mark.version, source), 0.0))
            spread = zlib.crc32(f"{self._node} {source} {mark.version}".encode())
            is_far = self._domain(source) != own
            return wrong[source] if wrong else 0, until > now, source == OBJECTS, self._busy[source], is_far, spread

        return min(candidates, key=order)

    def _domain(self, node: str) -> str:
        seen = self._view.nodes.get(node)
        return seen.record.domain if seen is not None else ""

    def _failed(self, source: str, mark: StubMark, error: PeerError | ObjectError, asked: dict[str, str]) -> None:
        asked[_named(source)] = error.message
        if source == OBJECTS or isinstance(error, PeerLacks):
            _keep(self._lacking_until, (mark.version, source), trio.current_time() + LEFT_ALONE_S, PLACES_KEPT)
            return
        self._failures[source] += 1
        most = LEFT_ALONE_MOST_S if isinstance(error, PeerRefused) else 0.0
        self._leave_alone(source, max(most, LEFT_ALONE_S * 2 ** (min(self._failures[source], 6) - 1)))
        log.debug("%s: %s", source, error.message, extra=_extra(mark))

    def _leave_alone(self, node: str, for_s: float) -> None:
        until = trio.current_time() + min(for_s, LEFT_ALONE_MOST_S)
        self._alone_until[node] = max(until, self._alone_until.get(node, 0.0))

    def _is_lost(self, mark: StubMark, began: float) -> bool:
        """The cluster says that a file of the step has no holder left, and that was believed for long enough."""
        seen = self._view.states.get((mark.namespace, mark.step))
        return seen is not None and seen.record.level == "lost" and trio.current_time() - began >= LOST_FOR_S

    async def _pause(self, mark: StubMark, what: str, asked: dict[str, str], began: float, end: float) -> None:
        """Before all are asked again. PeerUnavailable where the time is over."""
        left_s = end - trio.current_time()
        if left_s <= 0 or self._is_lost(mark, began):
            told = "; ".join(f"{name}: {message}" for name, message in asked.items())
            raise PeerUnavailable(
                f"no node that is here gives {what}" + (f" ({told})" if told else f" (nobody holds {mark.version})")
            )
        await trio.sleep(min(left_s, PAUSE_S * random.uniform(0.5, 1.5)))

    def _objects(self, mark: StubMark) -> Source:
        if self.objects is None:
            raise PeerUnavailable(f"{mark.key} is in the object tier only, and this node has none")
        return self.objects


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _combined(chunks: Collection[int], size_bytes: int) -> int:
    whole = done = 0
    for chunk in chunks:
        length = min(CHUNK_BYTES, size_bytes - done)
        if length <= 0:
            break
        whole = combine(whole, chunk, length)
        done += length
    return whole


def _named(source: str) -> str:
    return source or "the object tier"


def _extra(mark: StubMark) -> dict[str, str]:
    return {"namespace": mark.namespace, "step": mark.step, "file": mark.file, "tier": "replica"}
