"""What a worker can do, one function an operation: arguments from a frame, calls of the store, results for a frame."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import CHUNK_BYTES, FileChecksum
from tierfs.errors import ObjectError
from tierfs.objects.bandwidth import Bandwidth
from tierfs.objects.mapped_ranges import MappedRange, RangeChecksum, checksum_of, has_hole, make_room, require_size
from tierfs.objects.messages import MOST_BODY_BYTES
from tierfs.objects.store import MIB, ObjectStore, SentPart, TransferStopped

_PIECE_BYTES = 4 * MIB
#: Ranges with holes are read into memory of the worker instead of mapped: one at a time.
_copying = threading.Lock()


@dataclass
class Request:
    """One request while a thread works on it. It is also the store's `Flow`: the limit, and the way to stop."""

    header: dict[str, Any]
    body: bytes
    fd: int
    bandwidth: Bandwidth
    stop: threading.Event = field(default_factory=threading.Event)
    moved: float = field(default_factory=time.monotonic)
    """When a byte of it moved last."""
    mapped: MappedRange | None = None

    def passing(self, size_bytes: int) -> None:
        self.check()
        pause_s = self.bandwidth.take(size_bytes)
        until = time.monotonic() + pause_s
        self.moved = until
        if pause_s and self.stop.wait(pause_s):
            raise TransferStopped

    def check(self) -> None:
        self.moved = max(self.moved, time.monotonic())
        if self.stop.is_set():
            raise TransferStopped

    def close(self) -> None:
        if self.mapped is not None:
            self.mapped.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Answer:
    result: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def probe(store: ObjectStore, request: Request) -> Answer:
    return Answer(asdict(store.probe()))


def put(store: ObjectStore, request: Request) -> Answer:
    data = memoryview(request.body)
    etag = store.put(
        request.header["key"], data, int(crc64nvme(data)), request, only_if_absent=request.header["only_if_absent"]
    )
    return Answer({"etag": etag})


def put_file(store: ObjectStore, request: Request) -> Answer:
    header = request.header
    with _file_range(request) as (view, checksum):
        etag = store.put(header["key"], view, checksum.full, request)
    return Answer({"etag": etag, "chunks": checksum.chunks})


def put_part(store: ObjectStore, request: Request) -> Answer:
    header = request.header
    with _file_range(request) as (view, checksum):
        etag = store.put_part(header["key"], header["upload_id"], header["number"], view, checksum.full, request)
    return Answer({"etag": etag, "chunks": checksum.chunks})


def sum_range(store: None, request: Request) -> Answer:
    """Chunk checksums of a range, and its MD5, which is a part's ETag in many stores. Asks the store nothing."""
    with _file_range(request) as (view, checksum):
        digest = hashlib.md5(usedforsecurity=False)
        for start in range(0, len(view), MIB):
            request.check()
            digest.update(view[start : start + MIB])
    return Answer({"md5": digest.hexdigest(), "chunks": checksum.chunks})


def get(store: ObjectStore, request: Request) -> Answer:
    most_bytes = min(request.header["most_bytes"], MOST_BODY_BYTES)
    data, etag = store.get(request.header["key"], most_bytes)
    return Answer({"etag": etag}, data)


def read_range(store: ObjectStore, request: Request) -> Answer:
    """Mapped rather than read and written: the same CPU time (measured), one request a range, no memory of our own."""
    header = request.header
    offset, length = header["offset"], header["length"]
    make_room(request.fd, offset, length)
    try:
        request.mapped = MappedRange(request.fd, offset, length, writable=True)
    except ValueError:
        raise ObjectError(
            f"{header['key']}: bytes {offset} to {offset + length} lie beyond the end of the file they are for"
        ) from None
    store.read_range(header["key"], offset, request.mapped.view, request)
    return Answer({"crc64nvme": checksum_of(request.mapped.view, request.check).full})


def sum_object(store: ObjectStore, request: Request) -> Answer:
    """Chunk checksums of an object, read piece by piece into little memory."""
    left, offset, chunks = request.header["size_bytes"], 0, []
    buffer = memoryview(bytearray(_PIECE_BYTES))
    while left:
        chunk, chunk_end = 0, offset + min(left, CHUNK_BYTES)
        while offset < chunk_end:
            piece = buffer[: chunk_end - offset]
            store.read_range(request.header["key"], offset, piece, request)
            chunk = int(crc64nvme(piece, chunk))
            offset, left = offset + len(piece), left - len(piece)
        chunks.append(chunk)
    return Answer({"chunks": chunks})


def copy(store: ObjectStore, request: Request) -> Answer:
    header, known = request.header, request.header["checksum"]
    checksum = FileChecksum(**{**known, "chunks": tuple(known["chunks"])})
    return Answer({"etag": store.copy(header["source_url"], header["key"], checksum, request)})


def list_page(store: ObjectStore, request: Request) -> Answer:
    header = request.header
    page = store.list_page(header["prefix"], delimiter=header["delimiter"], more=header["more"])
    objects = [[each.key, each.size_bytes, each.etag, each.modified] for each in page.objects]
    return Answer({"objects": objects, "prefixes": page.prefixes, "more": page.more})


def delete(store: ObjectStore, request: Request) -> Answer:
    store.delete(request.header["keys"])
    return Answer()


def start_upload(store: ObjectStore, request: Request) -> Answer:
    return Answer({"upload_id": store.start_upload(request.header["key"])})


def list_parts(store: ObjectStore, request: Request) -> Answer:
    parts = store.list_parts(request.header["key"], request.header["upload_id"])
    return Answer({"parts": [[each.number, each.size_bytes, each.etag] for each in parts]})


def finish_upload(store: ObjectStore, request: Request) -> Answer:
    parts = [SentPart(*each) for each in request.header["parts"]]
    return Answer({"etag": store.finish_upload(request.header["key"], request.header["upload_id"], parts)})


def abort_upload(store: ObjectStore, request: Request) -> Answer:
    store.abort_upload(request.header["key"], request.header["upload_id"])
    return Answer()


def list_uploads(store: ObjectStore, request: Request) -> Answer:
    uploads = store.list_uploads(request.header["prefix"])
    return Answer({"uploads": [[each.key, each.upload_id, each.started] for each in uploads]})


OPERATIONS: dict[str, Callable[[Any, Request], Answer]] = {
    operation.__name__: operation
    for operation in (
        probe, put, put_file, put_part, sum_range, get, read_range, sum_object, copy, list_page, delete,
        start_upload, list_parts, finish_upload, abort_upload, list_uploads,
    )
}  # fmt: skip
CONTROL = (sum_range,)
"""These don't need the store."""
UPLOADS = ("put_file", "put_part", "sum_range", "copy")
"""Bulk work of uploads: limited by their bandwidth, and yields to others."""


@contextmanager
def _file_range(request: Request) -> Iterator[tuple[memoryview, RangeChecksum]]:
    """The bytes to send, and their checksums, taken before. StepBusy when the file's size is or becomes another."""
    header = request.header
    offset, length, file_bytes = header["offset"], header["length"], header["file_bytes"]
    require_size(request.fd, file_bytes)
    if has_hole(request.fd, offset, length):
        with _copying:
            copy = memoryview(bytearray(length))
            done = 0
            while done < length:
                request.check()
                got = os.preadv(request.fd, [copy[done : done + MIB]], offset + done)
                if not got:
                    require_size(request.fd, file_bytes)
                    raise OSError(f"a file of {file_bytes} bytes ended at {offset + done}")
                done += got
            yield copy, checksum_of(copy, request.check)
    else:
        try:
            request.mapped = MappedRange(request.fd, offset, length)
        except ValueError:  # it was cut just now
            require_size(request.fd, file_bytes)
            raise
        yield request.mapped.view, checksum_of(request.mapped.view, request.check)
    require_size(request.fd, file_bytes)
