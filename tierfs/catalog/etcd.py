"""The catalogue in etcd. One member is spoken to at a time; when it is of no use, the next one is.

etcd's answers are linearizable: a read sees what was answered before it was asked, whichever member is asked. All keys
lie below `tierfs/NAME/`, NAME being the cluster's. Keys are bytes there; names that are not UTF-8 go through unchanged.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from tierfs.catalog import etcd_messages as messages
from tierfs.catalog.etcd_connection import Connection, Credentials, Traffic, WatchStream
from tierfs.catalog.etcd_errors import Refused, error_of, is_denied
from tierfs.catalog.etcd_messages import Method
from tierfs.catalog.limits import check_key, check_newest, check_prefix, check_txn
from tierfs.catalog.store import Batch, Compare, Delete, Event, KeyValue, Put, TxnResult
from tierfs.errors import CatalogCompacted, CatalogDenied, CatalogError, CatalogUnavailable, LeaseLost, SettingsError
from tierfs.settings import Settings

SCHEME = "etcd://"
#: A range is read in pages of about so many bytes. Nothing is known of the first but that values have 1 MiB at most.
_PAGE_BYTES = 4 << 20
_FIRST_PAGE_KEYS = 64
_MOST_PAGE_KEYS = 1000
#: Keys that are looked at in one go; then others have their turn.
_CONVERTED_AT_ONCE = 128
#: A range is begun again so often when etcd forgets its revision between two pages.
_RANGE_TRIES = 3
#: Between two tries of the same call while there is time.
_PAUSE_S = 0.1
#: Of a call's time this is for its answer; the rest is for finding out whether the member is of any use.
_ANSWER_SHARE = 0.8


class EtcdStore:
    """Nothing is asked before the first call. `first` is which member is asked first; by chance where it is None, so
    that not all nodes have their watches at the same one."""

    def __init__(self, settings: Settings, *, first: int | None = None) -> None:
        self.traffic = Traffic()
        self._endpoints = settings.catalog.removeprefix(SCHEME).split(",")
        self._base = f"tierfs/{settings.cluster.name}/"
        self.timeout_s = settings.etcd.timeout_s
        self._user = settings.etcd.user
        self._password_file = settings.etcd.password_file
        self._tls = (settings.etcd.ca, settings.etcd.key, settings.etcd.cert)
        self._credentials: Credentials | None = None
        self._connection: Connection | None = None
        self._next_endpoint = random.randrange(len(self._endpoints)) if first is None else first
        self._connecting = trio.Lock()
        self._closed = False
        if self._user and self._password_file is None:
            raise SettingsError("etcd.user is set, so etcd.password_file is needed", key="etcd.password_file")

    async def range(self, prefix: str, *, newer_than: int = 0) -> tuple[list[KeyValue], int]:
        check_prefix(prefix)
        for _ in range(_RANGE_TRIES):
            try:
                return await self._range(prefix, newer_than)
            except CatalogCompacted:
                continue
        raise CatalogUnavailable(f"etcd forgets revisions faster than {prefix!r} can be read")

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        answer = await self._call(messages.RANGE, messages.RangeRequest(key=self._bytes(key)))
        return self._key_value(answer.kvs[0]) if answer.kvs else None

    async def newest(self, keys: Sequence[str], prefixes: Sequence[str], *, newer_than: int) -> int:
        check_newest(keys, prefixes)
        if not keys and not prefixes:
            return 0
        wanted = [(key, False) for key in keys] + [(prefix, True) for prefix in prefixes]
        questions = [
            messages.RangeRequest(
                **self._keys(key, is_prefix),
                limit=1,
                sort_order=messages.SORT_DESCEND,
                sort_target=messages.SORT_BY_MOD,
                keys_only=True,
                min_mod_revision=newer_than + 1,
            )
            for key, is_prefix in wanted
        ]
        request = messages.TxnRequest(success=[messages.RequestOp(request_range=each) for each in questions])
        answer = await self._call(messages.READ_TXN, request)
        found = [value.mod_revision for each in answer.responses for value in each.response_range.kvs]
        return max(found, default=0)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Put | Delete], otherwise: Sequence[Put | Delete] = ()
    ) -> TxnResult:
        check_txn(compares, then, otherwise)
        request = messages.TxnRequest(
            compare=[self._compare(compare) for compare in compares],
            success=[self._operation(operation) for operation in then],
            failure=[self._operation(operation) for operation in otherwise],
        )
        answer = await self._call(messages.TXN, request)
        return TxnResult(answer.succeeded, answer.header.revision)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return (await self.txn((), (Put(key, value, lease),))).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        return (await self.txn((), (Delete(key, is_prefix),))).revision

    async def grant(self, ttl_s: int) -> int:
        if ttl_s < 1:
            raise ValueError(f"a lease of {ttl_s} s")
        return int((await self._call(messages.GRANT, messages.LeaseGrantRequest(TTL=ttl_s))).ID)

    async def keep_alive(self, lease: int) -> float:
        answer = await self._call(messages.KEEP_ALIVE, messages.LeaseKeepAliveRequest(ID=lease))
        if answer.TTL <= 0:
            raise LeaseLost(f"lease {lease:x} has run out")
        return float(answer.TTL)

    async def revoke(self, lease: int) -> None:
        try:
            await self._call(messages.REVOKE, messages.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        if not prefixes or from_revision < 1:
            raise ValueError(f"a watch of {prefixes!r} from revision {from_revision}")
        for prefix in prefixes:
            check_prefix(prefix)
        return self._watch(tuple(prefixes), from_revision)

    async def aclose(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._drop(self._connection)
        await trio.lowlevel.checkpoint()

    async def about(self) -> tuple[str, int]:
        """The version of the member that is asked, and the bytes of its data base; ("", 0) where nobody may ask."""
        try:
            answer = await self._call(messages.STATUS, messages.StatusRequest())
        except CatalogDenied:
            return "", 0
        return str(answer.version), int(answer.dbSize)

    async def check_answers(self, connection: Connection) -> None:
        """Unless the member has just answered something else: give it up, and end its watches, if it is silent now."""
        if trio.current_time() - connection.heard_at >= self.timeout_s:
            await self._probe(connection)

    # ---- ranges ----------------------------------------------------------------------------------------------------

    async def _range(self, prefix: str, newer_than: int) -> tuple[list[KeyValue], int]:
        key, end = self._bytes(prefix), _after_all(self._bytes(prefix))
        found: list[KeyValue] = []
        revision, limit, more = 0, _FIRST_PAGE_KEYS, True
        while more:
            request = messages.RangeRequest(
                key=key,
                range_end=end,
                limit=limit,
                revision=revision,
                min_mod_revision=newer_than + 1 if newer_than else 0,
            )
            answer = await self._call(messages.RANGE, request)
            revision = revision or answer.header.revision
            before, size = len(found), 0
            for count, value in enumerate(answer.kvs, 1):
                found.append(self._key_value(value))
                size += len(value.key) + len(value.value)
                if count % _CONVERTED_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
            more = answer.more and len(found) > before
            if more:
                key = bytes(answer.kvs[-1].key) + b"\0"
                limit = min(max(_PAGE_BYTES * (len(found) - before) // size, 1), _MOST_PAGE_KEYS)
        return found, revision

    # ---- watches ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _watch(self, prefixes: tuple[str, ...], from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        begins = [self._bytes(prefix) for prefix in prefixes]
        create = messages.WatchCreateRequest(
            key=min(begins),
            range_end=max(_after_all(begin) for begin in begins),
            start_revision=from_revision,
            progress_notify=True,
            fragment=True,
        )
        # A watch that is refused does not say whether it is the token or the permission: this call renews the token.
        await self._check_history(from_revision)
        connection = await self._connected(trio.current_time() + self.timeout_s)
        try:
            stream = connection.watch(
                messages.WatchRequest(create_request=create), _Reading(self, connection.endpoint, prefixes)
            )
        except Refused as refused:
            raise error_of(refused) from None
        try:
            with trio.move_on_after(self.timeout_s) as waiting:
                await _next(stream)  # that it was made
            if waiting.cancelled_caught:
                self._drop(connection)
                raise CatalogUnavailable(f"etcd at {connection.endpoint}: no watch in time")
            # etcd 3.4 forgets a deletion when it compacts to just that revision, and a watch from there would miss it.
            await self._check_history(from_revision)
            yield _Batches(self, connection, stream)
        finally:
            stream.close()

    async def _check_history(self, from_revision: int) -> None:
        """CatalogCompacted unless all changes from that revision on are known, and the one before it was made."""
        request = messages.RangeRequest(
            key=self._bytes(""), limit=1, keys_only=True, revision=max(from_revision - 1, 1)
        )
        await self._call(messages.RANGE, request)

    # ---- calls -----------------------------------------------------------------------------------------------------

    async def _call(self, method: Method, request: Any) -> Any:
        """Within `etcd.timeout_s` or little more; again, also by other members, where that can do no harm."""
        deadline = trio.current_time() + self.timeout_s
        token_was_renewed = False
        while True:
            connection = await self._connected(deadline)
            left_s = max(deadline - trio.current_time(), 0.05)
            share = _ANSWER_SHARE
            if method.repeatable and len(self._endpoints) > 1:
                share /= 2  # so that another member can still answer
            token = connection.token
            try:
                return await connection.call(method, request, within_s=left_s * share)
            except Refused as refused:
                again = refused.is_no_leader or (method.repeatable and (refused.is_connection or refused.is_timeout))
                if refused.is_token and self._user and not token_was_renewed:
                    token_was_renewed = again = True
                    await self._renew_token(connection, token, deadline)
                elif refused.is_connection:
                    self._drop(connection)
                elif refused.is_timeout:
                    await self._probe(connection)
                if not again or deadline - trio.current_time() < self.timeout_s * (1 - _ANSWER_SHARE):
                    raise error_of(refused) from None
                if not refused.is_token:
                    await trio.sleep(_PAUSE_S)

    async def _probe(self, connection: Connection) -> None:
        """After a call that nobody answered: give the member up, unless it answers what costs it nothing."""
        if connection.is_probed or connection.closed:
            return
        connection.is_probed = True
        try:
            if not await _has_leader(connection, self.timeout_s * (1 - _ANSWER_SHARE)):
                self._drop(connection)
        except Refused:
            self._drop(connection)
        finally:
            connection.is_probed = False

    async def _connected(self, deadline: float) -> Connection:
        """Raises CatalogUnavailable, CatalogDenied."""
        with trio.move_on_at(deadline):
            async with self._connecting:
                while True:
                    if self._closed:
                        raise CatalogUnavailable("the catalogue was closed")
                    if self._connection is not None:
                        return self._connection
                    await self._connect(deadline)
        raise CatalogUnavailable(f"etcd at {', '.join(self._endpoints)}: no answer in time")

    async def _connect(self, deadline: float) -> None:
        """Try each member once; returns without a connection where one of them may soon have a leader."""
        failures: list[CatalogError] = []
        is_electing = False
        for left in range(len(self._endpoints), 0, -1):
            # Leave each one that is still to be asked its part of the time.
            within_s = max((deadline - trio.current_time()) / left, 0.05)
            connection = await self._new_connection()
            try:
                await self._authenticate(connection, within_s)
                if await _has_leader(connection, within_s):
                    if not self._closed:
                        self._connection = connection
                    return
                is_electing = True
            except Refused as refused:
                is_electing = is_electing or refused.is_no_leader
                error = error_of(refused)
                failures.append(CatalogUnavailable(str(error)) if isinstance(error, ValueError) else error)
            finally:
                if connection is not self._connection:
                    connection.close()
                    self._next_endpoint += 1
        if not is_electing:
            raise next((each for each in failures if isinstance(each, CatalogDenied)), failures[0])
        await trio.sleep(_PAUSE_S)

    async def _new_connection(self) -> Connection:
        if self._credentials is None:
            self._credentials = await trio.to_thread.run_sync(_read_credentials, self._tls)
        endpoint = self._endpoints[self._next_endpoint % len(self._endpoints)]
        return Connection(endpoint, self._credentials, timeout_s=self.timeout_s, traffic=self.traffic)

    async def _authenticate(self, connection: Connection, within_s: float) -> None:
        if not self._user or self._password_file is None:
            return
        password = await trio.to_thread.run_sync(_read_password, self._password_file)
        request = messages.AuthenticateRequest(name=self._user, password=password)
        connection.token = (await connection.call(messages.AUTHENTICATE, request, within_s=within_s)).token

    async def _renew_token(self, connection: Connection, refused: str, deadline: float) -> None:
        """Unless another call has done it meanwhile. Watches go on."""
        with trio.move_on_at(deadline):
            async with self._connecting:
                if connection.token == refused:
                    try:
                        await self._authenticate(connection, max(deadline - trio.current_time(), 0.05))
                    except Refused as again:
                        raise error_of(again) from None

    def _drop(self, connection: Connection) -> None:
        """Its watches end too."""
        if connection is self._connection:
            self._connection = None
            self._credentials = None  # certificates are renewed by others
            self._next_endpoint += 1
        connection.close()

    # ---- names -----------------------------------------------------------------------------------------------------

    def _bytes(self, key: str) -> bytes:
        return (self._base + key).encode("utf-8", "surrogateescape")

    def name(self, key: bytes) -> str:
        return key.decode("utf-8", "surrogateescape").removeprefix(self._base)

    def _keys(self, key: str, is_prefix: bool) -> dict[str, bytes]:
        begin = self._bytes(key)
        return {"key": begin, "range_end": _after_all(begin)} if is_prefix else {"key": begin}

    def _key_value(self, value: Any) -> KeyValue:
        return KeyValue(self.name(value.key), value.value, value.create_revision, value.mod_revision, value.lease)

    def event(self, event: Any) -> Event:
        is_gone = event.type == messages.EVENT_DELETE
        return Event(self.name(event.kv.key), None if is_gone else self._key_value(event.kv))

    def _compare(self, compare: Compare) -> Any:
        return messages.Compare(
            **self._keys(compare.key, compare.is_prefix),
            result=messages.COMPARE_RESULTS[compare.result],
            target=messages.COMPARE_TARGETS[compare.target],
            **{f"{compare.target}_revision": compare.value},
        )

    def _operation(self, operation: Put | Delete) -> Any:
        if isinstance(operation, Put):
            key = self._bytes(operation.key)
            put = messages.PutRequest(key=key, value=operation.value, lease=operation.lease)
            return messages.RequestOp(request_put=put)
        delete = messages.DeleteRangeRequest(**self._keys(operation.key, operation.is_prefix))
        return messages.RequestOp(request_delete_range=delete)


async def _has_leader(connection: Connection, within_s: float) -> bool:
    """Whether it answers, and knows a leader. Raises Refused where it does not answer."""
    try:
        return bool((await connection.call(messages.STATUS, messages.StatusRequest(), within_s=within_s)).leader)
    except Refused as refused:
        if is_denied(refused):
            return True  # whoever may not ask for it has been answered
        raise


class _Reading:
    """Makes batches of a watch's responses, in the stream's thread.

    What etcd sends at once is whole revisions, in fragments where it is much. A response's own revision says nothing
    while a watch is catching up: only its events do, or a response without any, which is sent when it has caught up.
    """

    def __init__(self, store: EtcdStore, endpoint: str, prefixes: tuple[str, ...]) -> None:
        self._store = store
        self._endpoint = endpoint
        self._prefixes = prefixes
        self._events: list[Event] = []
        self._revision = 0

    def __call__(self, response: Any) -> Batch | CatalogError | None:
        if response.compact_revision:
            oldest = response.compact_revision + 1
            return CatalogCompacted(f"etcd has forgotten what was before revision {oldest}", revision=oldest)
        if response.canceled:
            said = f"etcd at {self._endpoint}: the watch was ended: {response.cancel_reason}"
            is_denied = "permission denied" in response.cancel_reason
            return CatalogDenied(f"{said}; see etcd.user") if is_denied else CatalogUnavailable(said)
        for count, each in enumerate(response.events, 1):
            self._revision = each.kv.mod_revision
            event = self._store.event(each)
            if event.key.startswith(self._prefixes):
                self._events.append(event)
            if count % _CONVERTED_AT_ONCE == 0:
                time.sleep(0)  # let trio's thread run
        if response.fragment:
            return None
        revision, events = self._revision or response.header.revision, tuple(self._events)
        was_told_something, self._events, self._revision = bool(self._revision), [], 0
        return Batch(revision, events) if events or not was_told_something else None


class _Batches(AsyncIterator[Batch]):
    def __init__(self, store: EtcdStore, connection: Connection, stream: WatchStream) -> None:
        self._store = store
        self._connection = connection
        self._stream = stream

    async def __anext__(self) -> Batch:
        while True:
            with trio.move_on_after(self._store.timeout_s):
                batch = await _next(self._stream)
                self._connection.heard_at = trio.current_time()
                return batch
            await self._store.check_answers(self._connection)


async def _next(stream: WatchStream) -> Batch:
    try:
        batch: Batch = await stream.next()
    except Refused as refused:
        raise error_of(refused) from None
    return batch


def _after_all(prefix: bytes) -> bytes:
    """The first key after all that begin so. `tierfs/` stands before each, so something is left to count up."""
    short = prefix.rstrip(b"\xff")
    return short[:-1] + bytes([short[-1] + 1])


def _read_credentials(files: tuple[Path | None, Path | None, Path | None]) -> Credentials:
    try:
        return Credentials(*(file.read_bytes() if file is not None else None for file in files))
    except OSError as error:
        raise CatalogDenied(f"{error.filename}: {error.strerror}; see etcd.ca, etcd.cert and etcd.key") from None


def _read_password(file: Path) -> str:
    try:
        return file.read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogDenied(f"{file}: {error}; see etcd.password_file") from None
