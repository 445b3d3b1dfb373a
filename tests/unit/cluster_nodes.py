"""Nodes of a cluster in this process: real tiers, a catalogue in memory, and peers that read each other's tiers.

What a node publishes is put by hand, so that each state of the catalogue can be made that others may meet.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio

from tests.unit.step_driver import MARKER, Driver, content, marker, until
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.records import FileRecord, NodeRecord, Operation, Part, StepState, TreeRecord, to_bytes
from tierfs.catalog.store import Delete, Put
from tierfs.checksum import FileChecksum
from tierfs.cluster.copies import Copies
from tierfs.cluster.following import Following
from tierfs.cluster.making import FileMaker
from tierfs.cluster.moved_stubs import mark_anew
from tierfs.cluster.operating import Operating
from tierfs.cluster.showing import Showing
from tierfs.cluster.taking import Taking
from tierfs.cluster.view import View
from tierfs.errors import PeerLacks, PeerUnavailable
from tierfs.hydrate.table import StubTable
from tierfs.transport.peers import Offer, Pulled


class FakePeers:
    """`down` nodes don't answer, `lying` ones send other bytes."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self.down: set[str] = set()
        self.lying: set[str] = set()
        self.fetched: list[tuple[str, str]] = []

    async def fetch(self, node: str, version: str, *, most_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.fetched.append((node, version))
        if node in self.down or node not in self._nodes:
            raise PeerUnavailable(f"{node} does not answer")
        fd = self._nodes[node].copies.open_version(version)
        try:
            data = os.pread(fd, most_bytes, 0)
        finally:
            os.close(fd)
        return data[::-1] if node in self.lying else data

    async def pull(
        self,
        node: str,
        version: str,
        offset: int,
        length: int,
        fd: int,
        *,
        growing: bool = False,
        urgent: bool = False,
    ) -> Pulled:
        raise PeerLacks(version)

    async def checksum(self, node: str, version: str) -> FileChecksum:
        raise PeerLacks(version)

    def offers(self, node: str) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        raise NotImplementedError

    async def ping(self, node: str) -> float:
        return 0.0


class Node:
    """One node; `restart` is what a new daemon does after SIGKILL."""

    def __init__(self, name: str, path: Path, server: MemoryServer, nodes: Mapping[str, Node]) -> None:
        self.name = name
        self.server = server
        self.store = MemoryStore(server)
        self.peers = FakePeers(nodes)
        self.replaced: list[int] = []
        path.mkdir(parents=True)
        self.driver = Driver(path / "tier")
        self._build()

    def _build(self) -> None:
        self.registry = self.driver.registry
        self.root = self.driver.root
        self.registry.invalidate = lambda directory, name: self.driver.told.append((directory, name))
        self.table = StubTable(self.registry)
        self.table.scan()
        self.copies = Copies(self.registry, self.name)
        self.copies.scan()
        self.view = View(self.store)
        maker = FileMaker(
            self.registry, self.view, self.copies, self.peers, self.table.add, on_replaced=self.replaced.append
        )
        maker.mark_anew = lambda record: mark_anew(self.table, record)
        self.showing = Showing(self.registry, self.view, self.copies, maker)
        self.taking = Taking(self.showing)
        self.operating = Operating(self.registry, self.view, self.showing)
        self.following = Following(self.registry, self.view, self.showing, self.taking, self.operating)

    def restart(self) -> None:
        self.driver.restart()
        self._build()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.following.run)
            await nursery.start(self.view.run)
            yield
            nursery.cancel_scope.cancel()

    async def caught_up(self) -> None:
        """Everything that the catalogue has was seen and worked off."""
        await trio.lowlevel.checkpoint()
        assert await self.view.caught_up(["cluster"], ["nodes/", "t/", "c/", "o/"])
        await until(lambda: self.following.is_idle, "what other nodes changed is done here")

    # --- publishing

    async def join(self) -> None:
        await self.store.put(keys.node_key(self.name), to_bytes(NodeRecord(self.name, ("x:1",), tier=self.name)))

    async def publish_directory(self, rel: str, **more: int) -> int:
        """With those above it; returns the revision."""
        parent = rel.rpartition("/")[0]
        if parent and await self.store.get(keys.tree_key(parent)) is None:
            await self.publish_directory(parent)
        record = TreeRecord("dir", self.name, **more)
        return await self.store.put(keys.tree_key(rel), to_bytes(record))

    async def publish_plain(self, rel: str) -> FileRecord:
        file = self.file(rel)
        await self.store.put(keys.tree_key(rel), to_bytes(TreeRecord("file", self.name, file=file)))
        return file

    async def publish_link(self, rel: str, target: str) -> None:
        await self.store.put(keys.tree_key(rel), to_bytes(TreeRecord("link", self.name, target=target)))

    async def publish_part(
        self, step: str, names: Sequence[str], generation: int = 1, *, added: bool = False
    ) -> dict[str, FileRecord]:
        namespace, _, name = step.rpartition("/")
        files = {inner: self.file(f"{step}/{inner}") for inner in names}
        key = keys.part_key(namespace, name, generation, self.name, 0, added=added)
        await self.store.put(key, to_bytes(Part(self.name, generation, files)))
        return files

    async def publish_state(self, step: str, generation: int = 1, *, level: str = "complete") -> None:
        namespace, _, name = step.rpartition("/")
        file = self.file(f"{step}/{MARKER}")
        state = StepState(
            number=self.registry.names.number(name) or 0,
            generation=generation,
            completed_at=float(generation),
            node=self.name,
            marker=MARKER,
            marker_file=file,
            parts={self.name: 1},
            files=3,
            bytes=8000,
            level=level,  # type: ignore[arg-type]
        )
        await self.store.put(keys.state_key(namespace, name), to_bytes(state))

    def path_of_shelf(self, namespace: str, step: str) -> Path:
        return self.copies.shelf / namespace / step

    async def operate(self, operation: Operation) -> None:
        await self.store.put(keys.operation_key(f"{operation.kind}{self.server.revision}"), to_bytes(operation))

    async def delete_step(self, step: str) -> None:
        namespace, _, name = step.rpartition("/")
        await self.store.txn(
            [],
            [
                Delete(keys.tree_key(step)),
                Delete(keys.state_key(namespace, name)),
                Delete(keys.parts_prefix(namespace, name), is_prefix=True),
            ],
        )

    async def put(self, *puts: Put) -> None:
        await self.store.txn([], puts)

    def file(self, rel: str) -> FileRecord:
        path = self.root / rel
        info = path.lstat()
        version = self.copies.seal(path, info.st_ino)
        return FileRecord(
            info.st_size, info.st_mtime_ns, 0o640, info.st_uid, info.st_gid, version, opened_at=self.server.revision
        )

    # --- a save

    async def write(self, step: str, names: Mapping[str, int], seed: int) -> None:
        """Shards of this node, as a program writes them."""
        self.driver.mkdirs(step)
        for inner, size in names.items():
            await self.driver.write(f"{step}/{inner}", content(seed, inner, size))

    async def commit(self, step: str, files: Mapping[str, int], own: Sequence[str], seed: int, generation: int) -> None:
        """This node's part with the marker, and the commit; the step here as the commit makes it."""
        path = self.root / step / MARKER
        path.write_bytes(marker(seed, files))
        await self.publish_part(step, [*own, MARKER], generation)
        await self.publish_state(step, generation)
        record = self.driver.record(step)
        record.manifest.state, record.manifest.generation = "complete", generation
        record.manifest.marker, record.manifest.files = MARKER, record.scan()
        record.manifest.overwrite = None


def names_in(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*") if not found.is_dir()}
