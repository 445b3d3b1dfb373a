"""What the contract is tested on: a store in memory, and one on a real etcd."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from rig.etcd_server import Etcd
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.opening import open_store
from tierfs.catalog.store import Batch, Event, KeyStore

MEMORY, ETCD = "memory", "etcd"


class Target(Protocol):
    def open(self) -> KeyStore:
        """One more client of the same catalogue."""
        ...

    def compact(self) -> None: ...

    def restart(self) -> None:
        """Stop serving, and serve again what was kept."""
        ...


class MemoryTarget:
    def __init__(self) -> None:
        self._server = MemoryServer()

    def open(self) -> MemoryStore:
        return MemoryStore(self._server, "tierfs/tests/")

    def compact(self) -> None:
        self._server.compact()

    def restart(self) -> None:
        self._server.down = True
        self._server.down = False


class EtcdTarget:
    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._name = f"t{uuid.uuid4().hex[:12]}"

    def open(self) -> KeyStore:
        return open_store(self._etcd.settings(self._name))

    def compact(self) -> None:
        self._etcd.compact()

    def restart(self) -> None:
        self._etcd.restart()


class Told:
    """Reads a watch, and remembers what it was told."""

    def __init__(self, batches: AsyncIterator[Batch]) -> None:
        self._batches = batches
        self.events: list[Event] = []
        self.revision = 0

    async def until(self, revision: int) -> list[Event]:
        """Up to that revision; what came since the last call."""
        before = len(self.events)
        while self.revision < revision:
            batch = await self._batches.__anext__()
            assert batch.revision > self.revision
            self.revision = batch.revision
            self.events += batch.events
        return self.events[before:]


@asynccontextmanager
async def told(store: KeyStore, prefixes: list[str], *, from_revision: int) -> AsyncIterator[Told]:
    async with store.watch(prefixes, from_revision=from_revision) as batches:
        yield Told(batches)
