"""What a store can do, found out by doing it once with a scratch object."""

from __future__ import annotations

import time
import uuid

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.errors import ObjectCorrupt, ObjectDenied, ObjectError, ObjectExists
from tierfs.objects.store import Capabilities, ObjectStore

_PREFIX = ".tierfs/probe-"
_BODY = b"tierfs looked what this object store can do; this object may be removed\n"
_OTHER = b"a second writer's\n"
#: What a process that was killed while probing left is removed after a day: another node may be at it just now.
_LEFT_BEHIND_S = 86400.0

_NO_CONDITION = (
    "the store ignores If-None-Match: nodes that commit the same step at once can't tell who was first, so let only "
    "one node write to it"
)
_NO_CHECKSUMS = (
    "the store does not check CRC64NVME checksums: a byte that is changed on the way to it is noticed only by "
    "`tierfs verify` or when the step is read"
)


class Unhindered:
    """A Flow without limits."""

    def passing(self, size_bytes: int) -> None:
        return


def found_capabilities(store: ObjectStore) -> Capabilities:
    """Writes, reads, lists and removes an object below `.tierfs/`. Raises whatever keeps the store from being used;
    one that may only be read is no failure.
    """
    for left in store.list_page(_PREFIX).objects:
        if left.modified < time.time() - _LEFT_BEHIND_S:
            store.delete([left.key])
    key = f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        store.put(key, memoryview(_BODY), crc64nvme(_BODY), Unhindered(), only_if_absent=True)
    except ObjectDenied as error:
        note = f"this node can only read from the object tier: {error.message}"
        return Capabilities(writable=False, conditional_put=False, checksums=False, notes=(note,))
    try:
        _check_reading(store, key)
        conditional = _is_refused(store, key, _OTHER, only_if_absent=True)
        checksums = _is_refused(store, key, _OTHER, checksum=crc64nvme(_BODY))
    finally:
        store.delete([key])
    notes = ([] if conditional else [_NO_CONDITION]) + ([] if checksums else [_NO_CHECKSUMS])
    try:
        store.list_uploads(_PREFIX)
    except ObjectError as error:
        notes.append(
            f"uploads that a crash left can't be listed ({error.message}); let a lifecycle rule of the bucket abort "
            "incomplete multipart uploads after some days"
        )
    return Capabilities(writable=True, conditional_put=conditional, checksums=checksums, notes=tuple(notes))


def _check_reading(store: ObjectStore, key: str) -> None:
    if store.get(key, len(_BODY))[0] != _BODY:
        raise ObjectCorrupt(f"{store.url}/{key}: other bytes came back than were written")
    part = bytearray(len(_OTHER))
    store.read_range(key, 1, memoryview(part), Unhindered())
    if part != _BODY[1 : 1 + len(part)]:
        raise ObjectCorrupt(f"{store.url}/{key}: other bytes came back than were asked for by a Range")
    if [each.key for each in store.list_page(key).objects] != [key]:
        raise ObjectCorrupt(f"{store.url}/{key}: an object that was just written is not listed")


def _is_refused(
    store: ObjectStore, key: str, data: bytes, *, only_if_absent: bool = False, checksum: int | None = None
) -> bool:
    sent = crc64nvme(data) if checksum is None else checksum
    try:
        store.put(key, memoryview(data), sent, Unhindered(), only_if_absent=only_if_absent)
    except (ObjectExists, ObjectCorrupt):
        return True
    return False
