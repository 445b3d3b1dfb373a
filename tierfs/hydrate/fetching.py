"""Bringing one chunk of a stub: fetched into the file, verified by its checksum, and only then shown."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import CHUNK_BYTES, READ_BYTES
from tierfs.errors import (
    ChecksumMismatch,
    DiskError,
    ObjectCorrupt,
    ObjectError,
    ObjectMissing,
    ObjectUnavailable,
    PeerError,
    TierfsError,
)
from tierfs.hydrate.partial import GOOD, MISSING, UNCHECKED, Fetch, PartialFile
from tierfs.hydrate.room import HydrationRoom
from tierfs.hydrate.source import Source
from tierfs.hydrate.stubs import StubMark, restore_times
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.hydrate")

#: A chunk that comes wrong is asked for so often: bits flip on the way, and another holder may have them right, but a
#: damaged object stays damaged.
ATTEMPTS = 3
_OF_TIERS = (ObjectError, PeerError, DiskError)
NOT_SERVED = "what is not in RAM is not served (any more)"


@dataclass
class FetchCounts:
    """Since the daemon began; by the tier that bytes came from, `disk`, `object` or `replica`, failures by the error's
    name too. `files` became whole."""

    files: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)


class Fetcher:
    """Fetches chunks in tasks of its own, so that several readers share one, and none dies with its reader."""

    def __init__(self, registry: StepRegistry, source: Source, room: HydrationRoom) -> None:
        self._registry = registry
        self._source = source
        self._room = room
        self._threads = trio.CapacityLimiter(2)
        #: What `status` says of a step whose bytes could not be had, but may be had later; by the step's path.
        self._passing: dict[str, str] = {}
        self.nursery: trio.Nursery | None = None
        self.counts = FetchCounts()
        #: A fetch ended, well or not, and nobody was told yet.
        self.settled: Callable[[PartialFile], None] = lambda part: None
        #: The tier that the bytes of a stub are expected to come from.
        self.tier_of: Callable[[StubMark], str] = _tier

    def start(self, part: PartialFile, chunk: int, *, urgent: bool) -> Fetch:
        """The chunk is being brought; see `Fetch`. It must not be good already."""
        fetch = part.fetches.get(chunk)
        if fetch is None:
            fetch = Fetch()
            if self.nursery is None:
                fetch.error = ObjectUnavailable(NOT_SERVED)
                fetch.done.set()
                return fetch
            part.fetches[chunk] = fetch
            part.users += 1  # its descriptor
            self.nursery.start_soon(self._fetch, part, chunk, fetch, urgent)
        return fetch

    async def _fetch(self, part: PartialFile, chunk: int, fetch: Fetch, urgent: bool) -> None:
        try:
            if part.state is not None and part.state[chunk] == UNCHECKED:
                await self._check_left(part, chunk)
            if not part.is_good(chunk):
                await self._room.for_chunk(part, chunk)
                self._room.transfers.add(fetch)
                await self.bring(part, chunk, part.fd, urgent=urgent)
                part.set(chunk, GOOD)
            self._room.used(part, chunk)
        except (TierfsError, OSError) as error:
            fetch.error = error
            with contextlib.suppress(OSError):
                await self._room.give_up(part, chunk)
        except BaseException:
            fetch.error = ObjectUnavailable(f"{part.shown} is not fetched any more: the daemon stops")
            raise
        finally:
            if part.mark is not None and part.fd >= 0:
                with contextlib.suppress(OSError):
                    restore_times(part.fd, part.mark)
            part.fetches.pop(chunk, None)
            self._room.transfers.discard(fetch)
            part.users -= 1
            self.settled(part)
            fetch.done.set()
            part.tell()

    async def bring(self, part: PartialFile, chunk: int, fd: int, *, urgent: bool) -> None:
        """Fetch the chunk into a file, and return once it is what was sealed.

        Raises ObjectError, PeerError, ChecksumMismatch.
        """
        if part.mark is None or part.chunks is None:
            raise ObjectError(f"nobody knows where the bytes of {part.shown} are")
        expected = part.chunks[chunk]
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = await self._source.read_range(
                    part.mark,
                    chunk * CHUNK_BYTES,
                    part.length(chunk),
                    fd,
                    urgent=urgent,
                    retry_for_s=self._registry.settings.transfer.read_retry_for_s,
                )
            except ObjectMissing as error:
                raise self._failed(part, chunk, ObjectError(f"the object is gone ({error.message})")) from None
            except _OF_TIERS as error:
                raise self._failed(part, chunk, error) from None
            if found == expected:
                self.counts.bytes[self.tier_of(part.mark)] += part.length(chunk)
                self._came(part, chunk)
                return
            self._source.came_wrong(part.mark, chunk * CHUNK_BYTES)
            log.warning(
                "chunk %d came with another checksum than was sealed (attempt %d of %d)", chunk, attempt, ATTEMPTS,
                extra=self._extra(part),
            )  # fmt: skip
        raise self._failed(
            part, chunk, ChecksumMismatch(f"it came {ATTEMPTS} times with another checksum than was sealed")
        )

    async def _check_left(self, part: PartialFile, chunk: int) -> None:
        """Bytes that an earlier daemon brought: right, or made a hole again."""
        if part.chunks is None:
            return
        fd = os.dup(part.fd)
        try:
            found = await trio.to_thread.run_sync(
                _checksum, fd, chunk * CHUNK_BYTES, part.length(chunk), limiter=self._threads
            )
        finally:
            os.close(fd)
        if found == part.chunks[chunk]:
            part.set(chunk, GOOD)
        else:
            part.set(chunk, MISSING)

    def _came(self, part: PartialFile, chunk: int) -> None:
        """What the store could not give a while ago, it gives again: `status` has no need of it any more."""
        if part.mark is not None:
            rel = f"{part.mark.namespace}/{part.mark.step}"
            message = self._passing.pop(rel, "")
            if message and any(each["message"] == message for each in self._registry.problems):
                self._registry.clear_problems(rel)

    def _failed(self, part: PartialFile, chunk: int, error: TierfsError) -> TierfsError:
        """Say what can't be read, and why."""
        message = f"chunk {chunk} of {part.shown} can't be fetched: {error.message}"
        log.error("%s", message, extra=self._extra(part))
        tier = self.tier_of(part.mark) if part.mark is not None else _tier(None)
        self.counts.failures[tier, type(error).__name__] += 1
        if part.mark is not None:
            rel = f"{part.mark.namespace}/{part.mark.step}"
            self._registry.problem("error", message, rel)
            if isinstance(error, _OF_TIERS) and error.may_pass and not isinstance(error, ObjectCorrupt):
                self._passing[rel] = message
        return type(error)(message) if isinstance(error, (ChecksumMismatch, *_OF_TIERS)) else error

    def _extra(self, part: PartialFile) -> dict[str, str]:
        mark = part.mark
        named = (mark.namespace, mark.step, mark.file) if mark is not None else ("", "", part.shown)
        return {"namespace": named[0], "step": named[1], "file": named[2], "tier": _tier(mark)}


def _tier(mark: StubMark | None) -> str:
    """Where the bytes are expected to come from, as log lines say it."""
    return "replica" if mark is not None and mark.version else "object"


def _checksum(fd: int, start: int, length: int) -> int:
    buffer, done, summed = memoryview(bytearray(min(READ_BYTES, length))), 0, 0
    while done < length:
        got = os.preadv(fd, [buffer[: length - done]], start + done)
        if not got:
            break
        summed = int(crc64nvme(buffer[:got], summed))
        done += got
    return summed
