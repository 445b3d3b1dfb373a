"""What an object store must be able to do. `file_store` and `s3_store` do it; `workers` runs it beside the daemon.

Calls block, belong in threads, and may be made from several threads at once. Each is one attempt, bounded in time by
the store's own time-outs (the client library may repeat a request that failed within a few seconds); whoever calls
decides about trying again. Keys are relative to the store's prefix, '/' between components, never empty, and are
validated by the caller (`tierfs.persist.layout`).

Failures are raised as `tierfs.errors.ObjectError`, never as the client library's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierfs.checksum import FileChecksum

MIB = 1 << 20
GIB = 1 << 30

#: A file below this goes in one request. Amazon S3 allows 5 GiB in one PUT, parts of 5 MiB to 5 GiB, 10,000 parts.
SINGLE_PUT_BYTES = 32 * MIB
LEAST_PART_BYTES = 16 * MIB
#: What one request lets a store copy within itself. It is silent meanwhile, so this has to be well within a time-out.
COPY_BYTES = 256 * MIB
#: Larger parts save no time any more; smaller ones make more requests, of which a prefix takes 3,500 a second at first.
USUAL_PART_BYTES = 64 * MIB
#: So many parts let a file alone use as many connections.
PARTS_AT_ONCE = 16
MOST_PARTS = 9_000
#: Keys in one DeleteObjects request, and entries in one page of a listing (Amazon S3's limits).
BATCH_KEYS = 1000


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a listing. `etag` is opaque, changes with the content, and carries no quotes."""

    key: str
    size_bytes: int
    etag: str
    modified: float


@dataclass(frozen=True)
class Page:
    """A page of a listing; `prefixes` are what the delimiter cut off (they end with it). `more` continues, "" ends."""

    objects: tuple[ObjectInfo, ...]
    prefixes: tuple[str, ...]
    more: str = ""


@dataclass(frozen=True)
class PartInfo:
    """A part of an upload that the store has."""

    number: int
    size_bytes: int
    etag: str


@dataclass(frozen=True)
class SentPart:
    """A part to finish an upload with. `crc64nvme` is of its bytes."""

    number: int
    size_bytes: int
    etag: str
    crc64nvme: int


@dataclass(frozen=True)
class UnfinishedUpload:
    key: str
    upload_id: str
    started: float


@dataclass(frozen=True)
class Capabilities:
    """What a probe of the endpoint found. `notes` are sentences for people: what is missing and what follows.

    `conditional_put`: a PUT with If-None-Match is refused where the object exists. Some servers ignore the condition
    silently, and then two nodes that commit at once can't tell who was first.
    """

    writable: bool
    conditional_put: bool
    checksums: bool
    notes: tuple[str, ...] = ()


class Flow(Protocol):
    """Looks at the bytes that pass in one call: a bandwidth limit, and the way to stop.

    Called before each piece (about 1 MiB) with its length. Sleeps as long as the limit asks for. Raises
    `TransferStopped`, a BaseException so that no client library takes it for a failure to repeat.
    """

    def passing(self, size_bytes: int) -> None: ...


class TransferStopped(BaseException):
    """Nobody wants the result any more."""


class ObjectStore(Protocol):
    """See the module. `memoryview`s are of a mapped file or of any buffer; they are not kept after the call."""

    url: str

    def probe(self) -> Capabilities:
        """Writes and removes a scratch object below `.tierfs/`. Raises what keeps the store from being used."""
        ...

    def put(self, key: str, data: memoryview, crc64nvme: int, flow: Flow, *, only_if_absent: bool = False) -> str:
        """One whole object, checked by the store against the checksum; returns its ETag. ObjectExists (412)."""
        ...

    def get(self, key: str, most_bytes: int) -> tuple[bytes, str]:
        """A small object and its ETag. ObjectMissing; ObjectError where it is larger than `most_bytes`."""
        ...

    def read_range(self, key: str, offset: int, into: memoryview, flow: Flow) -> None:
        """Fill `into` from the object's bytes at `offset`. Raises where fewer bytes come, or others than asked for
        (a Range that was ignored). What came is not verified: no client detects a flipped byte here."""
        ...

    def list_page(self, prefix: str, *, delimiter: str = "", more: str = "") -> Page:
        """Objects whose key begins with `prefix`, in order of key where the store has one, up to BATCH_KEYS."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Up to BATCH_KEYS keys. One that is not there is no error."""
        ...

    def copy(self, source_url: str, key: str, checksum: FileChecksum, flow: Flow) -> str:
        """Make the object that another store of the same kind and server has under this key one of this store, without
        its bytes coming by here; returns its ETag. `checksum` is what is known of it: a store that sums up what it
        copies is held to that. ObjectMissing; SettingsError where the other store is of another kind."""
        ...

    def start_upload(self, key: str) -> str:
        """Begin an upload in parts; returns its id."""
        ...

    def put_part(self, key: str, upload_id: str, number: int, data: memoryview, crc64nvme: int, flow: Flow) -> str:
        """Part `number` (from 1); returns its ETag. UploadMissing when the store forgot the upload."""
        ...

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        """What the store has of an upload. UploadMissing."""
        ...

    def finish_upload(self, key: str, upload_id: str, parts: Sequence[SentPart]) -> str:
        """Make the object of all parts, in order, without gaps; returns its ETag. UploadMissing.

        The checksum of the whole (combined from the parts') is sent along and checked by stores that can.
        """
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Forget the parts. One that is not there is no error."""
        ...

    def list_uploads(self, prefix: str) -> list[UnfinishedUpload]: ...

    def close(self) -> None: ...


def part_bytes(size_bytes: int) -> int:
    """The size of the parts of a file, bytes: a pure function, so that a resumed upload and another node agree.

    Whole multiples of 16 MiB (the chunks that checksums are kept for): a sixteenth of the file, from 16 MiB to 64 MiB,
    and more where it would be above 9,000 parts.
    """
    wanted = max(min(-(-size_bytes // PARTS_AT_ONCE), USUAL_PART_BYTES), -(-size_bytes // MOST_PARTS))
    return max(LEAST_PART_BYTES, -(-wanted // (16 * MIB)) * (16 * MIB))
