"""A key store in this process: the same promises as etcd's, without a network. For tests, which can make it fail.

Nothing happens beside the calls: a lease that ran out by trio's clock is taken away by whichever call or watch looks
next, and a waiting watch wakes for it, so that a clock that jumps (`trio.testing.MockClock`) works.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import trio

from tierfs.catalog.limits import check_key, check_newest, check_prefix, check_txn, is_in
from tierfs.catalog.store import Batch, Compare, Delete, Event, KeyValue, Put, TxnResult
from tierfs.errors import CatalogCompacted, CatalogUnavailable, LeaseLost

#: Awaited with ("ask", call) before a call has its effect, ("answer", call) before its answer is given, and
#: ("batch", "watch") before a watch tells what it has. May wait, and may raise.
Hook = Callable[[str, str], Awaitable[None]]
_Named = TypeVar("_Named", Compare, Put, Delete, Put | Delete)


@dataclass
class _Lease:
    ttl_s: int
    ends_at: float
    keys: set[str] = field(default_factory=set)


class MemoryServer:
    """What all stores share. `lose_answers` changes more are made but not answered; `down` is true while nobody is
    served (what is kept stays, as on a disk; leases run on)."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.keys: dict[str, KeyValue] = {}
        self.lose_answers = 0
        self.requests = 0
        #: One tuple of events a revision, the first for revision `compacted + 1` or later.
        self._history: dict[int, tuple[Event, ...]] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._down = False
        self._changed = trio.Event()
        #: How often all connections were broken: watches that began before it have ended.
        self.breaks = 0

    @property
    def down(self) -> bool:
        return self._down

    @down.setter
    def down(self, down: bool) -> None:
        self._down = down
        if down:
            self.break_connections()

    def break_connections(self) -> None:
        """All watches end with CatalogUnavailable, as when a leader is lost."""
        self.breaks += 1
        self.wake()

    def compact(self, revision: int | None = None) -> None:
        """Forget what happened up to that revision (default: all)."""
        self.compacted = max(self.compacted, self.revision if revision is None else revision)
        self._history = {at: events for at, events in self._history.items() if at > self.compacted}
        self.wake()

    def wipe(self) -> None:
        """All that was kept is gone, as after a disk's loss; revisions begin anew."""
        self.keys, self._history, self._leases = {}, {}, {}
        self.revision, self.compacted = 1, 0
        self.break_connections()

    def wake(self) -> None:
        """Let every watch look again."""
        self._changed.set()
        self._changed = trio.Event()

    def end_leases(self) -> None:
        """Take away what has run out."""
        now = trio.current_time()
        for lease in [lease for lease, state in self._leases.items() if state.ends_at <= now]:
            self.revoke(lease)

    async def wait(self) -> None:
        """Until something changed, or a lease runs out."""
        changed = self._changed
        ends_at = min((lease.ends_at for lease in self._leases.values()), default=float("inf"))
        with trio.move_on_at(ends_at):
            await changed.wait()

    def events_from(self, revision: int) -> list[Event]:
        if revision <= self.compacted:
            raise CatalogCompacted(
                f"revision {revision} of the catalogue is gone; the oldest is {self.compacted + 1}",
                revision=self.compacted + 1,
            )
        return [event for at in range(revision, self.revision + 1) for event in self._history.get(at, ())]

    def grant(self, ttl_s: int) -> int:
        lease = next(self._lease_ids)
        self._leases[lease] = _Lease(ttl_s, trio.current_time() + ttl_s)
        return lease

    def keep_alive(self, lease: int) -> float:
        state = self._lease(lease)
        state.ends_at = trio.current_time() + state.ttl_s
        self.wake()  # who waits for the lease's end waits longer now
        return float(state.ttl_s)

    def revoke(self, lease: int) -> None:
        state = self._leases.pop(lease, None)
        if state is not None:
            self.apply([Delete(key) for key in sorted(state.keys)])

    def holds(self, compare: Compare) -> bool:
        """Where there is no such key, 0 is compared."""
        found = [value for key, value in self.keys.items() if is_in(key, compare.key, compare.is_prefix)]
        stands = [value.mod_revision if compare.target == "mod" else value.create_revision for value in found] or [0]
        return all(each == compare.value if compare.result == "equal" else each < compare.value for each in stands)

    def apply(self, operations: Sequence[Put | Delete]) -> bool:
        """All of it as one revision; False where nothing changed."""
        for operation in operations:
            if isinstance(operation, Put) and operation.lease:
                self._lease(operation.lease)
        revision, events = self.revision + 1, list[Event]()
        for operation in operations:
            if isinstance(operation, Put):
                events.append(self._put(operation, revision))
            else:
                gone = [key for key in sorted(self.keys) if is_in(key, operation.key, operation.is_prefix)]
                for key in gone:
                    self._unbind(self.keys.pop(key))
                    events.append(Event(key, None))
        if not events:
            return False
        self.revision = revision
        self._history[revision] = tuple(events)
        self.wake()
        return True

    def _put(self, put: Put, revision: int) -> Event:
        before = self.keys.get(put.key)
        if before is not None:
            self._unbind(before)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        created = before.create_revision if before is not None else revision
        self.keys[put.key] = value = KeyValue(put.key, put.value, created, revision, put.lease)
        return Event(put.key, value)

    def _unbind(self, value: KeyValue) -> None:
        if value.lease in self._leases:
            self._leases[value.lease].keys.discard(value.key)

    def _lease(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease:x} has run out")
        return self._leases[lease]


class MemoryStore:
    """One client of a MemoryServer, whose keys all lie below `prefix`. With `cut_off` it reaches nothing."""

    def __init__(self, server: MemoryServer, prefix: str = "", *, hook: Hook | None = None) -> None:
        self.server = server
        self.hook = hook
        self._prefix = prefix
        self._cut_off = False
        self._breaks = 0

    @property
    def cut_off(self) -> bool:
        return self._cut_off

    @cut_off.setter
    def cut_off(self, cut_off: bool) -> None:
        self._cut_off = cut_off
        if cut_off:
            self.break_connections()

    def break_connections(self) -> None:
        """This client's watches end with CatalogUnavailable."""
        self._breaks += 1
        self.server.wake()

    async def range(self, prefix: str, *, newer_than: int = 0) -> tuple[list[KeyValue], int]:
        check_prefix(prefix)
        await self._ask("range")
        full = self._prefix + prefix
        found = [
            self._stripped(value)
            for key, value in sorted(self.server.keys.items())
            if key.startswith(full) and value.mod_revision > newer_than
        ]
        answer = found, self.server.revision
        await self._answer("range")
        return answer

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        await self._ask("get")
        found = self.server.keys.get(self._prefix + key)
        await self._answer("get")
        return self._stripped(found) if found is not None else None

    async def newest(self, keys: Sequence[str], prefixes: Sequence[str], *, newer_than: int) -> int:
        check_newest(keys, prefixes)
        await self._ask("newest")
        wanted = [(self._prefix + key, False) for key in keys] + [(self._prefix + prefix, True) for prefix in prefixes]
        revisions = (
            value.mod_revision
            for key, value in self.server.keys.items()
            if value.mod_revision > newer_than and any(is_in(key, each, is_prefix) for each, is_prefix in wanted)
        )
        newest = max(revisions, default=0)
        await self._answer("newest")
        return newest

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Put | Delete], otherwise: Sequence[Put | Delete] = ()
    ) -> TxnResult:
        return await self._txn("txn", compares, then, otherwise)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return (await self._txn("put", (), (Put(key, value, lease),))).revision

    async def delete(self, key: str, *, is_prefix: bool = False) -> int:
        return (await self._txn("delete", (), (Delete(key, is_prefix),))).revision

    async def grant(self, ttl_s: int) -> int:
        if ttl_s < 1:
            raise ValueError(f"a lease of {ttl_s} s")
        await self._ask("grant")
        lease = self.server.grant(ttl_s)
        await self._answer("grant")
        return lease

    async def keep_alive(self, lease: int) -> float:
        await self._ask("keep_alive")
        ttl_s = self.server.keep_alive(lease)
        await self._answer("keep_alive")
        return ttl_s

    async def revoke(self, lease: int) -> None:
        await self._ask("revoke")
        self.server.revoke(lease)
        await self._answer("revoke")

    def watch(
        self, prefixes: Sequence[str], *, from_revision: int
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        for prefix in prefixes:
            check_prefix(prefix)
        return self._watch(tuple(self._prefix + prefix for prefix in prefixes), from_revision)

    async def aclose(self) -> None:
        self.cut_off = True
        await trio.lowlevel.checkpoint()

    @asynccontextmanager
    async def _watch(self, prefixes: tuple[str, ...], from_revision: int) -> AsyncIterator[AsyncIterator[Batch]]:
        await self._ask("watch")
        if from_revision > self.server.revision + 1:
            raise CatalogCompacted(f"the catalogue has no revision {from_revision - 1} (any more)", revision=1)
        yield _Watch(self, prefixes, from_revision)

    async def _txn(
        self,
        call: str,
        compares: Sequence[Compare],
        then: Sequence[Put | Delete],
        otherwise: Sequence[Put | Delete] = (),
    ) -> TxnResult:
        check_txn(compares, then, otherwise)
        await self._ask(call)
        succeeded = all(self.server.holds(self._full(compare)) for compare in compares)
        changed = self.server.apply([self._full(operation) for operation in (then if succeeded else otherwise)])
        result = TxnResult(succeeded, self.server.revision)
        if changed and self.server.lose_answers:
            self.server.lose_answers -= 1
            raise CatalogUnavailable(f"{call}: the answer was lost")
        await self._answer(call)
        return result

    async def _ask(self, call: str) -> None:
        await trio.lowlevel.checkpoint()
        if self.hook is not None:
            await self.hook("ask", call)
        self.check_reachable(call)
        self.server.requests += 1
        self.server.end_leases()

    async def _answer(self, call: str) -> None:
        if self.hook is not None:
            await self.hook("answer", call)
            self.check_reachable(call)

    def check_reachable(self, call: str) -> None:
        if self.server.down or self._cut_off:
            raise CatalogUnavailable(f"{call}: the catalogue does not answer")

    @property
    def breaks(self) -> tuple[int, int]:
        return self.server.breaks, self._breaks

    def told(self, event: Event) -> Event:
        """The event with this client's names."""
        value = self._stripped(event.value) if event.value is not None else None
        return Event(event.key.removeprefix(self._prefix), value)

    def _stripped(self, value: KeyValue) -> KeyValue:
        return replace(value, key=value.key.removeprefix(self._prefix)) if self._prefix else value

    def _full(self, item: _Named) -> _Named:
        return replace(item, key=self._prefix + item.key) if self._prefix else item


class _Watch(AsyncIterator[Batch]):
    def __init__(self, store: MemoryStore, prefixes: tuple[str, ...], from_revision: int) -> None:
        self._store = store
        self._prefixes = prefixes
        self._next = from_revision
        self._breaks = store.breaks

    async def __anext__(self) -> Batch:
        await trio.lowlevel.checkpoint()
        while True:
            batch = self._batch()
            if batch is None:
                await self._store.server.wait()
                continue
            if self._store.hook is not None:
                await self._store.hook("batch", "watch")
                self._check()
            return batch

    def _batch(self) -> Batch | None:
        self._check()
        server = self._store.server
        server.end_leases()
        events = server.events_from(self._next)
        first, self._next = self._next, max(self._next, server.revision + 1)
        told = tuple(self._store.told(event) for event in events if event.key.startswith(self._prefixes))
        return Batch(server.revision, told) if first < self._next and told else None

    def _check(self) -> None:
        self._store.check_reachable("watch")
        if self._store.breaks != self._breaks:
            raise CatalogUnavailable("watch: the connection to the catalogue was lost")
