"""An object store in memory and a client of it, with faults: for tests of what is sent when, and what a crash leaves.

`fault` is asked before and after each request's effect, and may raise. Everything about the order of effects is as with
a real store: each request is one effect, and conditional PUTs are refused where the object is there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio
from awscrt.checksums import crc64nvme

from tierfs.checksum import CHUNK_BYTES, FileChecksum
from tierfs.errors import ObjectExists, ObjectMissing, UploadMissing
from tierfs.objects.client import ClientStats, Listing, PartJournal, SentFile
from tierfs.objects.store import Capabilities, ObjectInfo, SentPart, UnfinishedUpload

Fault = Callable[[str, str, str], None]


@dataclass
class StoredObject:
    data: bytes
    etag: str
    modified: float


@dataclass
class Upload:
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)
    started: float = field(default_factory=time.time)


class MemoryStore:
    """What all clients share. `watch` is called after each effect. Etags differ with each PUT, also of equal bytes."""

    def __init__(self, *, honours_conditions: bool = True) -> None:
        self.honours_conditions = honours_conditions
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self.watch: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)

    def put(self, key: str, data: bytes, *, only_if_absent: bool = False) -> str:
        if only_if_absent and self.honours_conditions and key in self.objects:
            raise ObjectExists(f"{key} exists")
        etag = f"{hashlib.md5(data).hexdigest()}-{next(self._numbers)}"
        self.objects[key] = StoredObject(data, etag, time.time())
        self.watch()
        return etag

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self.objects.pop(key, None) is not None:
                self.watch()

    def keys(self, prefix: str = "") -> list[str]:
        """Without what is kept of the tier as a whole."""
        return sorted(key for key in self.objects if key.startswith(prefix) and not key.startswith(".tierfs/"))


class MemoryClient:
    """Implements `ObjectClient` for one node. A file above `part_bytes` goes in parts."""

    url = "memory://"

    def __init__(self, store: MemoryStore, *, part_bytes: int = 2000, copies_from: MemoryStore | None = None) -> None:
        self.store = store
        self._copies_from = copies_from
        self.stats = ClientStats()
        self.fault: Fault = lambda when, what, key: None
        self.requests: Counter[str] = Counter()
        #: How often each part (key, number; 0 is a whole file) was sent.
        self.sent: Counter[tuple[str, int]] = Counter()
        self._part_bytes = part_bytes

    async def probe(self) -> Capabilities:
        await self._before("probe", "")
        return Capabilities(writable=True, conditional_put=self.store.honours_conditions, checksums=True)

    async def put(self, key: str, data: bytes, *, only_if_absent: bool = False) -> str:
        await self._before("put", key)
        etag = self.store.put(key, data, only_if_absent=only_if_absent)
        self.fault("after", "put", key)
        return etag

    async def get(self, key: str, *, most_bytes: int, retry_for_s: float | None = None) -> tuple[bytes, str]:
        await self._before("get", key)
        found = self.store.objects.get(key)
        if found is None:
            raise ObjectMissing(f"there is no {key}")
        assert len(found.data) <= most_bytes
        return found.data, found.etag

    async def list_all(self, prefix: str, *, delimiter: str = "") -> Listing:
        await self._before("list", prefix)
        objects, prefixes = [], dict[str, None]()
        for key in self.store.keys(prefix):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                found = self.store.objects[key]
                objects.append(ObjectInfo(key, len(found.data), found.etag, found.modified))
        return Listing(tuple(objects), tuple(prefixes))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._before("delete", key)
            self.store.delete([key])
            self.fault("after", "delete", key)

    async def upload(
        self,
        key: str,
        fd: int,
        size_bytes: int,
        *,
        journal: PartJournal,
        on_sent: Callable[[int], None] = lambda sent_bytes: None,
    ) -> SentFile:
        data = os.pread(fd, size_bytes, 0)
        assert len(data) == size_bytes
        chunks = tuple(int(crc64nvme(data[at : at + CHUNK_BYTES])) for at in range(0, size_bytes, CHUNK_BYTES))
        checksum = FileChecksum(size_bytes, int(crc64nvme(data)), chunks)
        if size_bytes <= self._part_bytes:
            await self._before("upload", key)
            etag = self.store.put(key, data)
            self.sent[key, 0] += 1
            self.fault("after", "upload", key)
            on_sent(size_bytes)
            return SentFile(etag, checksum)
        return SentFile(await self._upload_parts(key, data, journal, on_sent), checksum)

    async def _upload_parts(self, key: str, data: bytes, journal: PartJournal, on_sent: Callable[[int], None]) -> str:
        size = self._part_bytes
        count = -(-len(data) // size)
        if journal.upload_id and journal.upload_id not in self.store.uploads:
            made = self.store.objects.get(key)
            if len(journal.parts) == count and made is not None and made.data == data:
                return made.etag  # finished, and the answer was lost
            journal.forget()
        if not journal.upload_id:
            await self._before("start", key)
            upload_id = f"u{next(self.store._numbers)}"
            self.store.uploads[upload_id] = Upload(key)
            self.fault("after", "start", key)
            journal.started(upload_id)
        upload = self.store.uploads[journal.upload_id]
        for number in range(1, count + 1):
            part = data[(number - 1) * size : number * size]
            if number not in journal.parts:
                await self._before("part", key)
                upload.parts[number] = part
                self.sent[key, number] += 1
                self.fault("after", "part", key)
                checksum = int(crc64nvme(part))
                journal.sent(SentPart(number, len(part), f"p{number}", checksum), (checksum,))
            on_sent(len(part))
        await self._before("finish", key)
        if self.store.uploads.pop(journal.upload_id, None) is None:
            raise UploadMissing(f"{key} has no upload {journal.upload_id}")
        etag = self.store.put(key, b"".join(upload.parts[number] for number in sorted(upload.parts)))
        self.fault("after", "finish", key)
        return etag

    async def read_range(
        self, key: str, offset: int, length: int, fd: int, *, urgent: bool = False, retry_for_s: float | None = None
    ) -> int:
        await self._before("read", key)
        found = self.store.objects.get(key)
        if found is None:
            raise ObjectMissing(f"there is no {key}")
        data = found.data[offset : offset + length]
        os.pwrite(fd, data, offset)
        return int(crc64nvme(data))

    async def copy(self, source_url: str, key: str, checksum: FileChecksum) -> str:
        await self._before("copy", key)
        assert self._copies_from is not None
        found = self._copies_from.objects.get(key)
        if found is None:
            raise ObjectMissing(f"there is no {key}")
        assert int(crc64nvme(found.data)) == checksum.full
        etag = self.store.put(key, found.data)
        self.sent[key, 0] += 1
        self.fault("after", "copy", key)
        return etag

    async def list_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        await self._before("list uploads", prefix)
        return [
            UnfinishedUpload(upload.key, upload_id, upload.started)
            for upload_id, upload in self.store.uploads.items()
            if upload.key.startswith(prefix)
        ]

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._before("abort", key)
        self.store.uploads.pop(upload_id, None)

    async def _before(self, what: str, key: str) -> None:
        await trio.lowlevel.checkpoint()
        self.requests[what] += 1
        self.fault("before", what, key)
