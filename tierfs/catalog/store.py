"""A store of keys with revisions, leases, transactions and watches: etcd's model (https://etcd.io/docs/v3.4/learning/).

Each change of the store has a revision, one higher than the last; a transaction is one change. All calls
are async, used from the trio thread, bounded in time by the implementation, and cancelled at once.
`tierfs.catalog.etcd` talks to a cluster, `tierfs.catalog.memory` is the same in this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class KeyValue:
    """`create_revision` is when the key was made (again), `mod_revision` its last change; `lease` is 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Compare:
    """True when the revision of the key stands so to `value`; an absent key has 0.

    With `is_prefix` it must hold for every key that begins with `key` (and holds where there is none).
    """

    key: str
    target: Literal["mod", "create"]
    result: Literal["equal", "less"]
    value: int
    is_prefix: bool = False


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str
    is_prefix: bool = False


@dataclass(frozen=True)
class TxnResult:
    """`revision` is the store's after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True)
class Event:
    """What became of a key; `value` is None when it was deleted."""

    key: str
    value: KeyValue | None


@dataclass(frozen=True)
class Batch:
    """All events of one or more whole revisions, in order; `revision` is the last of them. Without events: nothing
    happened up to there."""

    revision: int
    events: tuple[Event, ...]


class KeyStore(Protocol):
    """Raises CatalogUnavailable (the change may have been made all the same), CatalogDenied, ValueError for what can
    never be asked (a transaction of more than MOST_OPERATIONS or MOST_TXN_BYTES, a value above MOST_VALUE_BYTES)."""

    async def range(self, prefix: str, *, newer_than: int = 0) -> tuple[list[KeyValue], int]:
        """Every key that begins so, by key, and the store's revision; only those changed after revision `newer_than`.

        All of one moment, however many pages it takes.
        """
        ...

    async def get(self, key: str) -> KeyValue | None: ...

    async def newest(self, keys: Sequence[str], prefixes: Sequence[str], *, newer_than: int) -> int:
        """The highest mod_revision above `newer_than` among the keys named and those below the prefixes; 0 for none.

        Linearizable: sees each change that was answered before it was asked. One round trip.
        """
        ...

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Put | Delete], otherwise: Sequence[Put | Delete] = ()
    ) -> TxnResult: ...

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Returns the revision. LeaseLost where the lease is gone."""
        ...

    async def delete(self, key: str, *, is_prefix: bool = False) -> int: ...

    async def grant(self, ttl_s: int) -> int:
        """A new lease."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Renew it once; returns its seconds. LeaseLost."""
        ...

    async def revoke(self, lease: int) -> None:
        """Its keys go with it. Gone already is fine."""
        ...

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """Every change below these prefixes from that revision on, in order, each revision once and whole.

        Entering or waiting ends with CatalogCompacted (also where the store has not even reached the revision before:
        it was lost, or put back), or CatalogUnavailable when the connection is lost: watch again from the revision
        after the last batch. etcd sends everything between the first and the last prefix, so they should lie together.
        """
        ...

    async def aclose(self) -> None: ...


#: etcd's default --max-txn-ops.
MOST_OPERATIONS = 128
MOST_VALUE_BYTES = 1 << 20
#: etcd refuses a request above 1.5 MiB (--max-request-bytes). Keys and values of a transaction together, with
#: OPERATION_BYTES for each compare, put and delete.
MOST_TXN_BYTES = 1_500_000
OPERATION_BYTES = 200
