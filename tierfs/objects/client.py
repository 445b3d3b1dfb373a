"""The object tier as the daemon's tasks use it: async, tried again with back-off, bounded in concurrency and bandwidth.

`tierfs.objects.pool.WorkerPool` is the implementation; tests may use any object with these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierfs.checksum import FileChecksum
from tierfs.objects.store import Capabilities, ObjectInfo, SentPart, UnfinishedUpload


@dataclass(frozen=True)
class Listing:
    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True)
class SentFile:
    """A file that is an object now. `checksum` is of what was sent, chunk by chunk."""

    etag: str
    checksum: FileChecksum


class PartJournal(Protocol):
    """What of one file's upload survives the daemon: each call returns once a successor would find it."""

    upload_id: str
    """"" before `started`."""
    parts: dict[int, SentPart]
    """Sent and answered, by number."""
    chunks: dict[int, tuple[int, ...]]
    """The checksums of the chunks of each of these parts."""

    def started(self, upload_id: str) -> None: ...

    def sent(self, part: SentPart, chunks: tuple[int, ...]) -> None: ...

    def forget(self) -> None:
        """The upload is of no use any more (the store lost it): the next `started` begins anew."""
        ...


@dataclass
class ClientStats:
    """For `status`. Counters since the daemon began; `last_error` is a sentence with its cause, "" when the last
    request succeeded; `throttled` counts SlowDown answers; `concurrency` is what the limiter allows now."""

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    concurrency: int = 0
    last_error: str = ""
    last_error_at: float = 0.0
    errors_by_kind: dict[str, int] = field(default_factory=dict)


class ObjectClient(Protocol):
    """Each call tries again what may pass (throttling, resets, time-outs, credentials being renewed, a refused
    checksum) with jittered back-off for up to `retry_for_s` seconds (None: the setting `transfer.retry_for_s`), and
    then raises the last ObjectError. All are cancelled at once by trio's cancellation; what a worker was doing stops.
    """

    url: str
    stats: ClientStats

    async def probe(self) -> Capabilities: ...

    async def put(self, key: str, data: bytes, *, only_if_absent: bool = False) -> str:
        """Returns the ETag. ObjectExists, also where an earlier attempt of this very call made it: compare."""
        ...

    async def get(self, key: str, *, most_bytes: int, retry_for_s: float | None = None) -> tuple[bytes, str]: ...

    async def list_all(self, prefix: str, *, delimiter: str = "") -> Listing:
        """All pages."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Any number of keys."""
        ...

    async def upload(
        self,
        key: str,
        fd: int,
        size_bytes: int,
        *,
        journal: PartJournal,
        on_sent: Callable[[int], None] = lambda sent_bytes: None,
    ) -> SentFile:
        """Make an object of the file behind `fd` (which stays the caller's): parts in parallel, those in the journal
        not again. `on_sent` gets the bytes of each part that is done, also of those that were before."""
        ...

    async def read_range(
        self, key: str, offset: int, length: int, fd: int, *, urgent: bool = False, retry_for_s: float | None = None
    ) -> int:
        """Fetch bytes of the object into the file at the same offset. Returns the CRC64NVME of what was written there,
        for the caller to compare. An urgent one (a program waits) goes ahead of others."""
        ...

    async def copy(self, source_url: str, key: str, checksum: FileChecksum) -> str:
        """Make an object of the one that the store at `source_url` has under the same key; returns its ETag."""
        ...

    async def list_uploads(self, prefix: str) -> list[UnfinishedUpload]: ...

    async def abort_upload(self, key: str, upload_id: str) -> None: ...
