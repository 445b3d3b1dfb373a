"""Short ways to put bytes into a store and get them back."""

from __future__ import annotations

import random

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.objects.store import MIB, ObjectInfo, ObjectStore, SentPart, TransferStopped


class Freely:
    """A flow that only counts."""

    def __init__(self) -> None:
        self.passed = 0

    def passing(self, size_bytes: int) -> None:
        self.passed += size_bytes


class StoppedAfter(Freely):
    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self.limit = size_bytes

    def passing(self, size_bytes: int) -> None:
        super().passing(size_bytes)
        if self.passed > self.limit:
            raise TransferStopped


def put(store: ObjectStore, key: str, data: bytes, *, only_if_absent: bool = False) -> str:
    return store.put(key, memoryview(data), crc64nvme(data), Freely(), only_if_absent=only_if_absent)


def get(store: ObjectStore, key: str) -> bytes:
    return store.get(key, 64 * MIB)[0]


def put_part(store: ObjectStore, key: str, upload_id: str, number: int, data: bytes) -> SentPart:
    checksum = crc64nvme(data)
    etag = store.put_part(key, upload_id, number, memoryview(data), checksum, Freely())
    return SentPart(number, len(data), etag, checksum)


def list_all(store: ObjectStore, prefix: str, *, delimiter: str = "") -> tuple[list[ObjectInfo], list[str]]:
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    more = ""
    while True:
        page = store.list_page(prefix, delimiter=delimiter, more=more)
        objects += page.objects
        prefixes += page.prefixes
        more = page.more
        if not more:
            return objects, prefixes


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    return [each.key for each in list_all(store, prefix)[0]]


def noise(size_bytes: int) -> bytes:
    return random.randbytes(size_bytes)
