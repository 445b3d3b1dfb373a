"""What can never be asked of a key store, found before anything is sent: ValueError, as it is the caller's mistake."""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.catalog.store import (
    MOST_OPERATIONS,
    MOST_TXN_BYTES,
    MOST_VALUE_BYTES,
    OPERATION_BYTES,
    Compare,
    Delete,
    Put,
)

#: A key is a path at most, with what stands before it.
MOST_KEY_BYTES = 8192


def check_key(key: str) -> None:
    if not key or len(key) > MOST_KEY_BYTES or "\0" in key:
        raise ValueError(f"no key of the catalogue: {key[:80]!r} ({len(key)} characters)")


def check_prefix(prefix: str) -> None:
    """Empty is all keys."""
    if prefix:
        check_key(prefix)


def check_newest(keys: Sequence[str], prefixes: Sequence[str]) -> None:
    if len(keys) + len(prefixes) > MOST_OPERATIONS:
        raise ValueError(f"{len(keys) + len(prefixes)} questions at once; {MOST_OPERATIONS} are the most")
    for key in keys:
        check_key(key)
    for prefix in prefixes:
        check_prefix(prefix)


def check_txn(compares: Sequence[Compare], then: Sequence[Put | Delete], otherwise: Sequence[Put | Delete]) -> None:
    """etcd refuses the same things; a few of them only after the transaction went through its log."""
    most = max(len(compares), len(then), len(otherwise))
    if most > MOST_OPERATIONS:
        raise ValueError(f"{most} operations in one transaction; {MOST_OPERATIONS} are the most")
    size = sum(map(size_of, (*compares, *then, *otherwise)))
    if size > MOST_TXN_BYTES:
        raise ValueError(f"a transaction of {size} bytes; {MOST_TXN_BYTES} are the most")
    for compare in compares:
        check_prefix(compare.key) if compare.is_prefix else check_key(compare.key)
        # etcd compares 0 where there is no such key at all, so nothing else can hold "where there is none".
        if compare.is_prefix and (compare.value > 0 if compare.result == "equal" else compare.value <= 0):
            raise ValueError(f"below {compare.key!r}: only `less` than a revision, or `equal` to 0, can be compared")
    for operations in (then, otherwise):
        _check_operations(operations)


def size_of(item: Compare | Put | Delete) -> int:
    """What it adds to a transaction, in bytes."""
    value = len(item.value) if isinstance(item, Put) else 0
    return len(item.key.encode("utf-8", "surrogateescape")) + value + OPERATION_BYTES


def _check_operations(operations: Sequence[Put | Delete]) -> None:
    put: set[str] = set()
    for operation in operations:
        if isinstance(operation, Delete) and operation.is_prefix:
            check_prefix(operation.key)
        else:
            check_key(operation.key)
        if isinstance(operation, Put):
            if len(operation.value) > MOST_VALUE_BYTES:
                raise ValueError(f"{len(operation.value)} bytes for {operation.key!r}; {MOST_VALUE_BYTES} are the most")
            if operation.key in put:
                raise ValueError(f"{operation.key!r} is put twice in one transaction")
            put.add(operation.key)
    for operation in operations:
        if isinstance(operation, Delete) and any(is_in(key, operation.key, operation.is_prefix) for key in put):
            raise ValueError(f"what is put is deleted by the same transaction: {operation.key!r}")


def is_in(key: str, wanted: str, is_prefix: bool) -> bool:
    return key.startswith(wanted) if is_prefix else key == wanted
