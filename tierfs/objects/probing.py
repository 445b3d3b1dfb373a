"""Whether a store works and keeps a condition, found out by doing it once with a scratch object."""

from __future__ import annotations

import uuid

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.errors import ObjectCorrupt, ObjectExists
from tierfs.objects.store import ObjectStore

_BODY = b"tierfs looked what this object store can do; this object may be removed\n"
_OTHER = b"a second writer's\n"

NO_CONDITION = (
    "the store ignores If-None-Match: nodes that commit the same step at once can't tell who was first, so let only "
    "one node write to it"
)


class Unhindered:
    """A Flow without limits."""

    def passing(self, size_bytes: int) -> None:
        return


def keeps_condition(store: ObjectStore) -> bool:
    """Writes, reads and removes an object below `.tierfs/`; True where a second conditional PUT was refused.

    Raises whatever keeps the store from being used.
    """
    key = f".tierfs/probe-{uuid.uuid4().hex}"
    flow = Unhindered()
    try:
        store.put(key, memoryview(_BODY), crc64nvme(_BODY), flow, only_if_absent=True)
        try:
            store.put(key, memoryview(_OTHER), crc64nvme(_OTHER), flow, only_if_absent=True)
            wanted, conditional = _OTHER, False
        except ObjectExists:
            wanted, conditional = _BODY, True
        found, _ = store.get(key, len(_BODY) + len(_OTHER))
        if found != wanted:
            raise ObjectCorrupt(f"{store.url} gave other bytes back than were written to {key}")
    finally:
        store.delete([key])
    return conditional
