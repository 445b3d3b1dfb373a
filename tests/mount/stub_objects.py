"""An object tier for the tests of stubs: a directory, with bytes that are made up where no file holds them.

manifests/NAMESPACE/STEP.json   the committed manifests
data/KEY                        objects that were sent; the bytes of others are `content` of their key
orders.json                     what goes wrong from now on, see `Orders`
fetches                         a line for each range that was asked for: key, chunk, urgent
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import trio
from awscrt.checksums import crc64nvme

from tierfs.checksum import CHUNK_BYTES, combine
from tierfs.errors import ObjectMissing, ObjectUnavailable
from tierfs.persist.object_manifest import ObjectDirectory, ObjectFile, ObjectManifest, read_manifest

MIB = 1 << 20
MTIME_NS = 1_700_000_000_123_456_789


@functools.lru_cache(16)
def _unit(key: str, chunk: int) -> bytes:
    """A MiB of a chunk. All MiBs of it are the same but for their first bytes, which makes this fast."""
    return hashlib.shake_128(f"{key} {chunk}".encode()).digest(1 << 16) * 16


def chunk_content(key: str, chunk: int, length: int) -> bytearray:
    data = bytearray(_unit(key, chunk) * (-(-length // MIB)))
    for at in range(0, length, MIB):
        data[at : at + 8] = at.to_bytes(8, "big")
    return data[:length]


def content(key: str, offset: int, length: int) -> bytes:
    """The bytes of an object that nobody sent."""
    out, end = bytearray(), offset + length
    while offset < end:
        chunk = offset // CHUNK_BYTES
        start = offset - chunk * CHUNK_BYTES
        take = min(CHUNK_BYTES - start, end - offset)
        out += chunk_content(key, chunk, start + take)[start:]
        offset += take
    return bytes(out)


def object_file(key: str, size_bytes: int, *, mode: int = 0o644) -> ObjectFile:
    chunks, full = [], 0
    for chunk in range(-(-size_bytes // CHUNK_BYTES)):
        length = min(CHUNK_BYTES, size_bytes - chunk * CHUNK_BYTES)
        chunks.append(int(crc64nvme(chunk_content(key, chunk, length))))
        full = combine(full, chunks[-1], length)
    return ObjectFile(size_bytes, full, tuple(chunks), MTIME_NS, mode, 0, 0)


def put_step(objects: Path, namespace: str, step: str, files: dict[str, int], *, marker: str | None = None) -> None:
    """A committed step whose objects are `content`."""
    number = int("".join(filter(str.isdigit, step)))
    made = {inner: object_file(f"{namespace}/{step}/{inner}", size) for inner, size in files.items()}
    save_manifest(
        objects,
        ObjectManifest(
            namespace, step, number, 1, 1.7e9, marker, made, ObjectDirectory(MTIME_NS, 0o755, 0, 0), CHUNK_BYTES
        ),
    )


def save_manifest(objects: Path, manifest: ObjectManifest) -> None:
    path = objects / "manifests" / manifest.namespace / f"{manifest.step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.to_bytes())


def load_manifest(objects: Path, namespace: str, step: str) -> ObjectManifest:
    path = objects / "manifests" / namespace / f"{step}.json"
    if not path.exists():
        raise ObjectMissing(f"there is no {path}")
    return read_manifest(path.read_bytes(), namespace, step)


class LocalClient:
    """What of `tierfs.objects.client.ObjectClient` hydration uses.

    Orders: `delay_s` for each range; `hold`: ranges wait until it is gone; `fail`: keys that can't be had; `corrupt`:
    how often the range "KEY CHUNK" comes with flipped bits.
    """

    def __init__(self, objects: Path) -> None:
        self.objects = objects
        self._corrupted: Counter[str] = Counter()

    def forget_faults(self) -> None:
        """Count from now on which ranges came wrong."""
        self._corrupted.clear()

    def orders(self) -> dict[str, Any]:
        try:
            return json.loads((self.objects / "orders.json").read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}

    async def read_range(
        self, key: str, offset: int, length: int, fd: int, *, urgent: bool = False, retry_for_s: float | None = None
    ) -> int:
        name = f"{key} {offset // CHUNK_BYTES}"
        with (self.objects / "fetches").open("a") as log:
            log.write(f"{name} {'urgent' if urgent else 'lazy'}\n")
        while self.orders().get("hold"):  # noqa: ASYNC110 - another process ends it
            await trio.sleep(0.01)
        orders = self.orders()
        await trio.sleep(orders.get("delay_s", 0.0))
        if key in orders.get("fail", []):
            raise ObjectUnavailable(f"{key}: the test says no")
        data = await trio.to_thread.run_sync(self._bytes, key, offset, length)
        self._corrupted[name] += 1
        if self._corrupted[name] <= orders.get("corrupt", {}).get(name, 0):
            for at in range(0, length, 1000):
                data[at] ^= 1
        own = os.dup(fd)

        def write() -> None:
            view = memoryview(data)
            # In pieces: a daemon that is killed leaves half a chunk.
            for at in range(0, length, MIB):
                os.pwrite(own, view[at : at + MIB], offset + at)

        try:
            await trio.to_thread.run_sync(write)
        finally:
            os.close(own)
        return int(crc64nvme(data))

    def _bytes(self, key: str, offset: int, length: int) -> bytearray:
        path = self.objects / "data" / key
        if not path.exists():
            return bytearray(content(key, offset, length))
        with path.open("rb") as file:
            return bytearray(os.pread(file.fileno(), length, offset))
