"""Hydration: the bytes of stubs are brought from where they are, chunk by chunk as they are read, or all of them.

A read is served as soon as the chunks under it are here and verified; meanwhile the rest of the file follows, where the
tier has room for all of it. A stub that is whole loses its mark and is an ordinary file from then on. In a tier too
small for the file, chunks come on demand, and those that were not read for the longest time go again.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from tierfs.checksum import CHUNK_BYTES, combine, to_text
from tierfs.errors import NoRoom, ObjectCorrupt, ObjectUnavailable, TierfsError
from tierfs.hydrate import eviction
from tierfs.hydrate.aside import Aside
from tierfs.hydrate.fetching import NOT_SERVED, FetchCounts, Fetcher
from tierfs.hydrate.partial import PartialFile
from tierfs.hydrate.population import Population
from tierfs.hydrate.room import HydrationRoom
from tierfs.hydrate.source import Source
from tierfs.hydrate.stubs import StubMark, remove_mark, restore_times, with_mtime, write_mark
from tierfs.hydrate.table import StubTable
from tierfs.persist.object_manifest import ObjectManifest
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.hydrate")

#: Chunks in flight for one file that is filled, and for all of them together: 16 MiB each.
FILL_AT_ONCE = 8
FILLS_AT_ONCE = 32
#: Fetched ahead of a program that reads on and on in a file that there is no room for.
AHEAD = 3
#: A program that has read so much without a jump reads on.
READS_ON_BYTES = 4 << 20
#: A program that closed the file may open it again: filling goes on for so long.
GRACE_S = 10.0
#: After the tier had no room for all of a file it is asked again at most so often.
ASK_AGAIN_S = 5.0
#: Small files that are brought by themselves, at once.
SOON_AT_ONCE = 8


class Hydration:
    """All stubs of a mount. Nothing is brought but while `run` runs.

    `serve_objects` is called where there is an object tier: its steps are shown from there, and what is evicted is held
    against its manifests.
    """

    def __init__(self, registry: StepRegistry, source: Source) -> None:
        self.registry = registry
        #: The object tier's manifest of a step where it is known at once, else None.
        self.kept_manifest: Callable[[str, str], ObjectManifest | None] = lambda namespace, step: None
        #: Files that differ from their objects, by inode number.
        self.not_evictable: set[int] = set()
        self.table = StubTable(registry)
        self.on_whole: Callable[[int], None] = lambda ino: None
        #: A file was replaced by a stub with another inode.
        self.on_replaced: Callable[[int], None] = lambda ino: None
        #: A stub with a version has all its bytes, verified: the file at the path is marked with the version here,
        #: before it is an ordinary one. May raise OSError, and then it stays a stub for now.
        self.on_whole_version: Callable[[int, Path, str], None] = lambda ino, path, version: None
        #: The version that a whole file has in the cluster, by inode; None for none.
        self.version_of: Callable[[int], str | None] = lambda ino: None
        #: A whole file of that version, the inode, became a stub.
        self.on_version_left: Callable[[int, str], None] = lambda ino, version: None
        #: This node's disk holds the file as it is.
        self.is_on_disk: Callable[[StepRecord, str, FileEntry], bool] = lambda record, inner, entry: False
        self._source = source
        self._room = HydrationRoom(registry, self.table)
        self._fetcher = Fetcher(registry, source, self._room)
        self._fetcher.settled = self._settled
        self._aside = Aside(partial(self._fetcher.bring, urgent=True))
        self._serving = trio.Event()
        self._fill_slots = trio.Semaphore(FILLS_AT_ONCE)
        self._soon = trio.Semaphore(SOON_AT_ONCE)
        self._ask_at: dict[int, float] = {}
        self._population = Population(registry, self.table, self._bring_soon)

    def serve_objects(
        self,
        manifest_of: Callable[[str, str], Awaitable[ObjectManifest]],
        kept_manifest: Callable[[str, str], ObjectManifest | None] | None = None,
    ) -> None:
        """There is an object tier. `manifest_of` gives its manifest of a step, from memory where it was asked for
        lately; `kept_manifest` the same where it is known at once, else None."""
        self._population.manifest_of = manifest_of
        if kept_manifest is not None:
            self.kept_manifest = kept_manifest

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Brings what is asked for, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._fetcher.nursery = nursery
                self._serving.set()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._fetcher.nursery = None
            self._serving = trio.Event()

    @property
    def tier_of(self) -> Callable[[StubMark], str]:
        """Where the bytes of a stub are expected to come from, as log lines and figures say it."""
        return self._fetcher.tier_of

    @tier_of.setter
    def tier_of(self, tier_of: Callable[[StubMark], str]) -> None:
        self._fetcher.tier_of = tier_of

    # --- what there is

    def scan(self) -> None:
        """At start, before the first request: find the stubs. Blocking."""
        self.table.scan()
        for part in self.table:
            for chunk in part.chunks_here():
                self._room.used(part, chunk)

    def is_stub(self, ino: int) -> bool:
        return ino in self.table

    def hydrated_bytes(self, ino: int) -> int:
        """How many of a stub's bytes are in RAM; 0 for what is no stub."""
        part = self.table.get(ino)
        return part.here_bytes if part is not None else 0

    def mtime_ns(self, ino: int) -> int | None:
        """The modification time to show for a stub; bringing bytes moves the inode's own. None for what is no stub."""
        part = self.table.get(ino)
        return part.mark.mtime_ns if part is not None and part.mark is not None else None

    @property
    def counts(self) -> FetchCounts:
        return self._fetcher.counts

    @property
    def in_flight(self) -> int:
        """How many chunks are being fetched now."""
        return len(self._room.transfers)

    # --- steps

    async def populate(self, record: StepRecord) -> None:
        """Make the stubs of a step that nobody looked into yet. TierfsError, OSError."""
        await self._population.populate(record)
        self.table.sweep()

    def ram_bytes(self, record: StepRecord) -> int:
        return eviction.ram_bytes(self, record)

    def evict(self, record: StepRecord) -> bool:
        return eviction.evict(self, record)

    # --- what the file system tells

    def opened(self, ino: int) -> None:
        """A program opened the stub."""
        part = self.table.get(ino)
        if part is not None:
            part.is_open = True

    def closed(self, ino: int) -> None:
        """The last handle is gone."""
        part = self.table.get(ino)
        if part is not None:
            part.is_open = False
            self._aside.drop(ino)
            part.left_at = trio.current_time()

    def times_set(self, ino: int, mtime_ns: int) -> None:
        """A program set the file's modification time."""
        part = self.table.get(ino)
        if part is None or part.mark is None:
            return
        part.mark = with_mtime(part.mark, mtime_ns)
        fd = self.table.open(part)
        try:
            write_mark(fd, part.mark)
            restore_times(fd, part.mark)
        finally:
            os.close(fd)

    # --- bytes

    async def read(self, ino: int, offset: int, size: int) -> bytes | None:
        """Bytes of a stub, once their chunks are here; fewer at the end of the file. None: it is no stub (any more).

        Raises ObjectError, PeerError, ChecksumMismatch, NoRoom, OSError.
        """
        part = self.table.get(ino)
        if part is None:
            return None
        await self._until_served()
        async with self._using(part):
            size = min(size, part.size_bytes - offset)
            if size <= 0:
                return b""
            chunks = range(offset // CHUNK_BYTES, (offset + size - 1) // CHUNK_BYTES + 1)
            self._look_ahead(part, offset, size, chunks)
            part.pins.update(chunks)
            try:
                try:
                    while missing := [chunk for chunk in chunks if not part.is_good(chunk)]:
                        await self._bring(part, missing, urgent=True)
                except NoRoom:
                    return await self._aside.read(part, offset, size)
                for chunk in chunks:
                    if ino in self.table:
                        self._room.used(part, chunk)
                return os.pread(part.fd, size, offset)
            finally:
                part.pins.subtract(chunks)
                part.pins += Counter()  # drops what is at 0

    async def hydrate(self, ino: int, *, on_progress: Callable[[int], None] = lambda here_bytes: None) -> None:
        """Bring all of a stub. Returns at once for what is none. `on_progress` gets how many bytes are in RAM.

        NoRoom before much is fetched; ObjectError, PeerError, ChecksumMismatch, OSError; what came stays for the next
        time.
        """
        part = self.table.get(ino)
        if part is None:
            return
        await self._until_served()
        part.wants += 1
        try:
            async with self._using(part):
                while ino in self.table:
                    if part.is_whole and not part.fetches:
                        self._end_if_whole(part)  # that failed before, or it would be in the table no more
                        continue
                    if not part.filling:
                        if part.fill_error is not None:
                            raise part.fill_error
                        await self._room.for_all_of(part, eagerly=True)
                        if not part.filling and ino in self.table:
                            self._fill(part)
                            continue
                    changed = part.changed
                    on_progress(part.here_bytes)
                    await changed.wait()
                on_progress(part.size_bytes)
        finally:
            part.wants -= 1
            if not part.wants:
                part.fill_error = None

    async def _until_served(self) -> None:
        """A new daemon answers requests a moment before it can fetch anything: they wait. ObjectUnavailable."""
        if self._serving.is_set():
            return  # without a checkpoint: the stub might be evicted before anybody counts as its user
        with trio.move_on_after(self.registry.settings.transfer.read_retry_for_s):
            await self._serving.wait()
            return
        raise ObjectUnavailable(NOT_SERVED)

    async def _bring(self, part: PartialFile, chunks: Iterable[int], *, urgent: bool) -> None:
        """Once all these chunks are good, or one of them failed. They may be given up again if they aren't pinned."""
        fetches = [self._fetcher.start(part, chunk, urgent=urgent) for chunk in chunks if not part.is_good(chunk)]
        for fetch in fetches:
            await fetch.done.wait()
            if fetch.error is not None:
                raise fetch.error

    def _look_ahead(self, part: PartialFile, offset: int, size: int, chunks: range) -> None:
        """What should come besides the chunks under this read."""
        part.cursor = chunks[0]
        part.run_bytes = part.run_bytes + size if part.read_end == offset else size
        part.read_end = offset + size
        if part.filling or self._fetcher.nursery is None:
            return
        if trio.current_time() >= self._ask_at.get(part.ino, 0.0):
            self._ask_at[part.ino] = trio.current_time() + ASK_AGAIN_S
            self._fetcher.nursery.start_soon(self._fill_if_room, part)
        elif part.run_bytes >= READS_ON_BYTES:
            for chunk in range(chunks[-1] + 1, min(chunks[-1] + 1 + AHEAD, part.count)):
                if not part.is_good(chunk) and self._room.free_bytes >= part.length(chunk):
                    self._fetcher.start(part, chunk, urgent=True)

    # --- filling

    async def _fill_if_room(self, part: PartialFile) -> None:
        if self._source.reads_first:
            for fetch in list(part.fetches.values()):
                await fetch.done.wait()
        try:
            await self._room.for_all_of(part, eagerly=False)
        except NoRoom:
            return
        if part.ino in self.table and not part.filling and self._is_wanted(part):
            self._fill(part)

    def _is_wanted(self, part: PartialFile) -> bool:
        return part.is_open or part.wants > 0 or trio.current_time() < part.left_at + GRACE_S

    def _fill(self, part: PartialFile) -> None:
        """Bring all chunks from the reader's place on, for as long as somebody wants them."""
        nursery = self._fetcher.nursery
        if nursery is None:
            part.fill_error = ObjectUnavailable(NOT_SERVED)
            return
        part.filling = True
        self._room.promise(part)
        nursery.start_soon(self._filling, part)

    async def _filling(self, part: PartialFile) -> None:
        try:
            async with self._using(part), trio.open_nursery() as nursery:
                for _ in range(min(FILL_AT_ONCE, part.count)):
                    nursery.start_soon(self._fill_some, part)
        except (TierfsError, OSError) as error:
            self._fill_failed(part, error)
        finally:
            part.filling = False
            self._room.release(part)
            part.tell()

    async def _fill_some(self, part: PartialFile) -> None:
        while self._is_wanted(part) and part.fill_error is None:
            async with self._fill_slots:
                chunk = part.next_wanted()
                if chunk is not None:
                    try:
                        urgent = part.is_open and not self._source.reads_first
                        await self._bring(part, [chunk], urgent=urgent)
                    except (TierfsError, OSError) as error:
                        self._fill_failed(part, error)
                        return
            if chunk is None:
                others = next(iter(part.fetches.values()), None)
                if others is None:
                    return
                await others.done.wait()

    def _fill_failed(self, part: PartialFile, error: Exception) -> None:
        if part.wants:
            part.fill_error = error
        self._ask_at[part.ino] = trio.current_time() + ASK_AGAIN_S

    def _bring_soon(self, inos: Iterable[int]) -> None:
        """Bring these small files, without anybody waiting for them."""
        if self._fetcher.nursery is not None:
            for ino in inos:
                self._fetcher.nursery.start_soon(self._bring_one_soon, ino)

    async def _bring_one_soon(self, ino: int) -> None:
        async with self._soon:
            try:
                await self.hydrate(ino)
            except (TierfsError, OSError) as error:
                log.debug("a small file is not fetched now: %s", error)

    # --- in use

    @asynccontextmanager
    async def _using(self, part: PartialFile) -> AsyncIterator[None]:
        """For the time of the block the stub's descriptor is open and the checksums of its chunks are known."""
        part.users += 1
        try:
            if part.chunks is None or part.fd < 0:
                await self._get_ready(part)
            yield
        finally:
            part.users -= 1
            self._let_go(part)

    async def _get_ready(self, part: PartialFile) -> None:
        mark = part.mark
        if mark is None:
            raise ObjectCorrupt(f"{part.shown} is a stub whose mark is damaged, so nobody knows where its bytes are")
        if part.fd < 0:
            part.fd = self.table.open(part)
        chunks = await self._source.chunks(mark)
        if len(chunks) != part.count:
            raise ObjectCorrupt(f"{part.shown} has {part.count} chunks, and {len(chunks)} checksums of them are known")
        part.chunks = chunks

    def _let_go(self, part: PartialFile) -> None:
        if part.users:
            return
        if part.fd >= 0:
            os.close(part.fd)
            part.fd = -1
        part.chunks = None

    def _settled(self, part: PartialFile) -> None:
        try:
            self._end_if_whole(part)
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            log.log(
                logging.DEBUG if is_gone else logging.WARNING,
                "%s can't be made an ordinary file: %s", part.shown, error,
            )  # fmt: skip
        self._let_go(part)

    def _end_if_whole(self, part: PartialFile) -> None:
        """All bytes are here and verified: an ordinary file from now on."""
        if part.fetches or not part.is_whole or part.ino not in self.table or part.mark is None:
            return
        fd = self.table.open(part)
        try:
            self.registry.tier.trim(fd)
            restore_times(fd, part.mark)
            if part.mark.version:
                self.on_whole_version(part.ino, self.registry.tier.path / part.where, part.mark.version)
            remove_mark(fd)
        finally:
            os.close(fd)
        if part.mark.checksum is None and part.chunks is not None:
            self._note_checksum(part, part.mark, part.chunks)
        self.table.drop(part)
        self._room.forget(part)
        self._ask_at.pop(part.ino, None)
        self.counts.files += 1
        part.tell()
        self.on_whole(part.ino)
        mark = part.mark
        log.debug("hydrated", extra={"namespace": mark.namespace, "step": mark.step, "file": mark.file, "tier": "ram"})

    def _note_checksum(self, part: PartialFile, mark: StubMark, chunks: tuple[int, ...]) -> None:
        """The step's manifest learns what its file sums up to, which whoever showed the stub did not know."""
        record = self.registry.records.get((mark.namespace, mark.step))
        entry = record.manifest.files.get(mark.file) if record is not None else None
        if record is None or entry is None or entry.ino != part.ino or entry.checksum is not None:
            return
        summed = 0
        for chunk, checksum in enumerate(chunks):
            summed = combine(summed, checksum, part.length(chunk))
        record.manifest.files[mark.file] = FileEntry(entry.size_bytes, entry.mtime_ns, entry.ino, to_text(summed), True)
        record.unsaved = True
