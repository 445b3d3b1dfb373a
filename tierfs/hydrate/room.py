"""Room for bytes that are brought: what is free and promised to nobody, what may be evicted, what was read longest ago.

Chunks that were read from files too large for the tier are kept as long as there is room, the longest unread go first.
A stub that is being filled whole has its room promised before the first byte is asked for.
"""

from __future__ import annotations

import os
from collections import OrderedDict

import trio

from tierfs.checksum import CHUNK_BYTES
from tierfs.errors import NoRoom
from tierfs.hydrate.partial import MISSING, Fetch, PartialFile
from tierfs.hydrate.stubs import restore_times
from tierfs.hydrate.table import StubTable
from tierfs.ram import syscalls
from tierfs.steps.registry import StepRegistry
from tierfs.units import format_size

# include/uapi/linux/falloc.h; goes with FALLOC_FL_KEEP_SIZE
FALLOC_FL_PUNCH_HOLE = 0x02

#: Left free for saves, which have no time to wait until chunks are given up: so much, or a sixteenth of a small tier.
MARGIN_BYTES = 64 << 20
MARGIN_SHARE = 16
#: How long freed steps are waited for: the kernel frees some 10 GB/s.
FREED_WITHIN_S = 10.0
#: The kernel may still know a removed file, whose memory comes back when it has forgotten it.
FORGOTTEN_WITHIN_S = 0.5
_LOOK_AGAIN_S = 0.005


class HydrationRoom:
    def __init__(self, registry: StepRegistry, table: StubTable) -> None:
        self._registry = registry
        self._tier = registry.tier
        self._table = table
        self._limiter = trio.CapacityLimiter(4)
        self._promised_to: set[PartialFile] = set()
        #: Chunks that have their room and are under way: once they are there they may be given up.
        self.transfers: set[Fetch] = set()
        #: Chunks that are here, the longest unread first.
        self._unread: OrderedDict[tuple[int, int], None] = OrderedDict()

    @property
    def free_bytes(self) -> int:
        """Free, promised to nobody, and not held back for saves."""
        usage = self._tier.usage()
        promised = sum(part.missing_bytes for part in self._promised_to)
        return usage.free_bytes - min(MARGIN_BYTES, usage.size_bytes // MARGIN_SHARE) - promised

    def used(self, part: PartialFile, chunk: int) -> None:
        """The chunk came, or was read."""
        self._unread[part.ino, chunk] = None
        self._unread.move_to_end((part.ino, chunk))

    def promise(self, part: PartialFile) -> None:
        """What is missing of it is as good as taken, until `forget` or `release`."""
        self._promised_to.add(part)

    def release(self, part: PartialFile) -> None:
        self._promised_to.discard(part)

    def forget(self, part: PartialFile) -> None:
        """It is no stub any more: its bytes are not ours to give up."""
        self.release(part)
        for chunk in range(part.count):
            self._unread.pop((part.ino, chunk), None)

    async def for_all_of(self, part: PartialFile, *, eagerly: bool) -> None:
        """Room for all that is missing of a stub, or NoRoom. `eagerly`: chunks of others are given up for it."""
        needed = part.missing_bytes
        if self.free_bytes >= needed:
            return
        await self._evict(needed, part)
        while eagerly and self.free_bytes < needed and await self._give_up_one(sparing=part):
            pass
        free = self.free_bytes
        if free < needed:
            raise NoRoom(
                f"{format_size(needed)} are missing of {part.shown}, and the RAM tier has room for "
                f"{format_size(max(0, free))}; evict or unpin a step, or mount with a larger size",
                needed_bytes=needed,
                free_bytes=max(0, free),
            )

    async def for_chunk(self, part: PartialFile, chunk: int) -> None:
        """Give the chunk its memory. NoRoom where neither an eviction nor giving up others makes any."""
        needed = part.length(chunk)
        while part not in self._promised_to and self.free_bytes < needed:
            if await self._give_up_one() or await self._transfer_ended():
                continue
            await self._evict(needed, part)
            if self.free_bytes < needed and not await self._give_up_one():
                break  # the margin may do
        while True:
            try:
                await self._give(part, chunk)
                return
            except OSError:
                if not await self._give_up_one() and not await self._transfer_ended():
                    break
        free = max(0, self._tier.usage().free_bytes)
        raise NoRoom(
            f"a chunk of {part.shown} needs {format_size(needed)}, and the RAM tier has {format_size(free)} free and "
            f"nothing that may go; evict or unpin a step, or mount with a larger size",
            needed_bytes=needed,
            free_bytes=free,
        )

    async def give_up(self, part: PartialFile, chunk: int) -> None:
        """Make a hole of a chunk that nobody reads, and that the caller has in `part.fetches`."""
        part.set(chunk, MISSING)
        self._unread.pop((part.ino, chunk), None)
        own = part.fd < 0
        fd = self._table.open(part) if own else os.dup(part.fd)
        try:
            start, length = chunk * CHUNK_BYTES, part.length(chunk)
            if chunk == part.count - 1:
                length = CHUNK_BYTES  # with what huge pages reach beyond the end
            mode = syscalls.FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            await trio.to_thread.run_sync(syscalls.fallocate, fd, mode, start, length, limiter=self._limiter)
            if part.mark is not None:
                restore_times(fd, part.mark)
        finally:
            os.close(fd)
        self._tier.released_room()

    async def _give(self, part: PartialFile, chunk: int) -> None:
        start = chunk * CHUNK_BYTES
        fd = os.dup(part.fd)
        try:
            end = start + part.length(chunk)
            await self._tier.give_room(fd, start, end)
        finally:
            os.close(fd)

    async def _give_up_one(self, *, sparing: PartialFile | None = None) -> bool:
        """Give up the longest unread chunk that nobody needs. False when there is none."""
        for ino, chunk in list(self._unread):
            part = self._table.get(ino)
            if part is None or part.is_missing(chunk):
                del self._unread[ino, chunk]
                continue
            if part is sparing or part in self._promised_to or part.pins[chunk] or chunk in part.fetches:
                continue
            mine = part.fetches[chunk] = Fetch()
            try:
                await self.give_up(part, chunk)
            except FileNotFoundError:
                continue
            finally:
                part.fetches.pop(chunk, None)
                mine.done.set()
            return True
        return False

    async def _transfer_ended(self) -> bool:
        """Wait for one of the chunks under way. False when there is none."""
        for fetch in self.transfers:
            await fetch.done.wait()
            return True
        return False

    async def _evict(self, needed: int, part: PartialFile) -> None:
        """Evict what retention allows, and wait until it is freed."""
        mark = part.mark
        sparing = self._registry.records.get((mark.namespace, mark.step)) if mark is not None else None
        if not self._registry.make_room(needed - self.free_bytes, sparing=sparing):
            return
        began = trio.current_time()
        while self.free_bytes < needed:
            waited_s = trio.current_time() - began
            if waited_s > (FREED_WITHIN_S if self._registry.is_freeing else FORGOTTEN_WITHIN_S):
                return
            await trio.sleep(_LOOK_AGAIN_S)
