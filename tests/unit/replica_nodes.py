"""Several nodes in one process that copy each other's files: real shelves, views, and one catalogue in memory.

What lies between them is `Network`: it reads from the other node's `Copies`, and fails as a test says.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio
from awscrt.checksums import crc64nvme

from tests.unit.step_driver import Driver, until
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer, MemoryStore
from tierfs.catalog.records import FileRecord, Holding, NodeRecord, Part, StepState, TreeRecord, from_bytes, to_bytes
from tierfs.checksum import FileChecksum
from tierfs.cluster.copies import Copies
from tierfs.cluster.draining import Drain
from tierfs.cluster.holdings import Holdings
from tierfs.cluster.part_files import PartFiles
from tierfs.cluster.replication import Replicator
from tierfs.cluster.view import View
from tierfs.errors import PeerUnavailable
from tierfs.settings import Settings
from tierfs.steps.manifest import FileEntry
from tierfs.steps.names import StepPath
from tierfs.steps.registry import Key
from tierfs.transport.peers import Offer, Pulled

KEY = ("run", "step_1")


async def eventually(claim: Callable[[], object], what: str = "it comes so", *, within_s: float = 15.0) -> None:
    await until(claim, what, within_s)


@dataclass
class Network:
    """`down` nodes answer nothing and their connections break; `spoil(node, bytes)` changes what a node sends."""

    nodes: dict[str, Node] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)  # they take what is asked and never answer
    spoil: Callable[[str, bytes], bytes] = lambda node, data: data
    sent: Counter[str] = field(default_factory=Counter)
    broken: trio.Event = field(default_factory=trio.Event)

    def break_connections(self) -> None:
        self.broken.set()
        self.broken = trio.Event()


class FakePeers:
    def __init__(self, network: Network, me: str) -> None:
        self._network = network
        self._me = me

    async def _reach(self, node: str) -> Node:
        await trio.lowlevel.checkpoint()
        if node in self._network.down or self._me in self._network.down or node not in self._network.nodes:
            raise PeerUnavailable(f"{node} is not there")
        if node in self._network.stalled:
            await trio.sleep_forever()
        return self._network.nodes[node]

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
        other = await self._reach(node)
        source = other.copies.open_growing(version) if growing else other.copies.open_version(version)
        try:
            await self._reach(node)
            assert os.fstat(fd).st_size >= offset + length, "it can't be mapped"
            data = self._network.spoil(node, os.pread(source, length, offset))
        finally:
            os.close(source)
        os.pwrite(fd, data, offset)
        self._network.sent[node] += len(data)
        return Pulled(len(data), crc64nvme(data))

    async def fetch(self, node: str, version: str, *, most_bytes: int) -> bytes:
        raise NotImplementedError

    async def checksum(self, node: str, version: str) -> FileChecksum:
        return await (await self._reach(node)).copies.checksum(version)

    @asynccontextmanager
    async def offers(self, node: str) -> AsyncIterator[AsyncIterator[Offer]]:
        other = await self._reach(node)
        async with other.copies.offers() as offers:
            yield self._until_broken(offers)

    async def _until_broken(self, offers: AsyncIterator[Offer]) -> AsyncIterator[Offer]:
        while True:
            broken = self._network.broken
            offer = await _first_of(anext(offers), broken)
            if offer is None:
                raise PeerUnavailable("the connection broke")
            yield offer

    async def ping(self, node: str) -> float:
        return 0.0


async def _first_of(coming: Awaitable[Offer], end: trio.Event) -> Offer | None:
    """What comes, or None where `end` is set first."""
    got: list[Offer] = []

    async def wait() -> None:
        got.append(await coming)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await end.wait()
        nursery.cancel_scope.cancel()
    return got[0] if got else None


class Writing:
    """A file of a step that is being written on a node."""

    def __init__(self, node: Node, inner: str, key: Key) -> None:
        self.node, self.inner, self.key = node, inner, key
        self.rel = f"{key[0]}/{key[1]}/{inner}"
        self.path = node.driver.root / self.rel
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self.ino = os.fstat(self.fd).st_ino
        node.copies.withdraw(self.ino, self.path)
        record = node.driver.registry.at_or_new(StepPath(*key, int(key[1].rpartition("_")[2]), ""))
        assert record is not None
        self.record = record
        self.growing = node.copies.growing(self.rel, self.ino)

    def write(self, data: bytes, offset: int) -> None:
        os.pwrite(self.fd, data, offset)

    def seal(self) -> str:
        info = os.fstat(self.fd)
        os.close(self.fd)
        version = self.node.copies.sealed(self.rel, self.ino)
        self.record.manifest.files[self.inner] = FileEntry(info.st_size, info.st_mtime_ns, self.ino, None, True)
        return version


class Node:
    def __init__(self, network: Network, server: MemoryServer, path: Path, name: str, domain: str, settings: Settings):
        self.name, self.network, self.domain = name, network, domain
        self.store = MemoryStore(server)
        self.driver = Driver(path / name, settings=settings)
        self.copies = Copies(self.driver.registry, name)
        self.copies.scan()
        self.view = View(self.store)
        self.parts = PartFiles(self.store, self.view)
        self.holdings = Holdings(self.store, self.view, self.copies, self.parts, name)
        self.peers = FakePeers(network, name)
        self.replicator = Replicator(
            self.driver.registry, self.view, self.peers, self.copies, self.holdings, self.parts, name
        )
        self.state = "serving"
        self.free_bytes = 1 << 29
        network.nodes[name] = self
        self.scope = trio.CancelScope()

    async def join(self) -> None:
        record = NodeRecord(self.name, (), f"tier-{self.name}", self.domain, 1 << 30, self.free_bytes, state=self.state)
        await self.store.put(keys.node_key(self.name), to_bytes(record))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.replicator.run)
                await nursery.start(self.holdings.run)
                await nursery.start(self.view.run)
                await self.join()
                await eventually(lambda: self.name in self.view.nodes)
                task_status.started()
                await trio.sleep_forever()

    async def lose(self) -> None:
        """The node is gone, with its RAM."""
        self.scope.cancel()
        self.network.down.add(self.name)
        self.network.break_connections()
        await self.store.delete(keys.node_key(self.name))

    def drain(self, nursery: trio.Nursery) -> Drain:
        def member_changed() -> None:
            self.state = drain.state
            nursery.start_soon(self.join)

        drain = Drain(
            self.driver.registry, self.view, self.peers, self.copies, self.replicator.groups, self.name,
            member_changed=member_changed, is_persisted=lambda key: False,
        )  # fmt: skip
        return drain

    def read_all(self, author: Node, inner: str, key: Key = KEY) -> str:
        """A program read the file that the author wrote: its stub is whole, and has the version. Nobody is told."""
        version = author.part(key)[inner].version
        path = self.driver.root.joinpath(*key, inner)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(author.driver.root.joinpath(*key, inner).read_bytes())
        self.copies.adopt(path, path.stat().st_ino, version)
        return version

    def begin(self, inner: str, key: Key = KEY) -> Writing:
        return Writing(self, inner, key)

    def write(self, inner: str, data: bytes, key: Key = KEY) -> str:
        file = self.begin(inner, key)
        file.write(data, 0)
        return file.seal()

    def part(self, key: Key = KEY) -> dict[str, FileRecord]:
        record = self.driver.registry.records.get(key)
        files: dict[str, FileRecord] = {}
        for inner, entry in record.manifest.files.items() if record is not None else ():
            version = self.copies.version_of(entry.ino)
            assert version is not None
            files[inner] = FileRecord(entry.size_bytes, entry.mtime_ns, 0o644, 0, 0, version)
        return files

    def shelf(self, key: Key = KEY) -> dict[str, bytes]:
        """What the shelf has, by version."""
        found = {}
        for version in self.copies.shelved_versions(key):
            path = self.copies.path(version)
            assert path is not None
            found[version] = path.read_bytes()
        return found

    def leftovers(self) -> list[Path]:
        return [path for path in self.copies.shelf.rglob("*") if path.name.endswith(".pull")]


class Cluster:
    def __init__(self, path: Path, nursery: trio.Nursery, settings: Settings) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self.network = Network()
        self._path, self._nursery, self._settings = path, nursery, settings

    async def add(self, name: str, domain: str = "", settings: Settings | None = None) -> Node:
        node = Node(self.network, self.server, self._path, name, domain, settings or self._settings)
        await self._nursery.start(node.run)
        self.network.down.discard(name)
        for other in self.running():
            await eventually(lambda other=other: name in other.view.nodes)
        return node

    def running(self) -> list[Node]:
        return [node for node in self.network.nodes.values() if node.name not in self.network.down]

    async def make(self, key: Key = KEY) -> None:
        await self.store.put(keys.tree_key("/".join(key)), to_bytes(TreeRecord("dir", "a")))

    async def commit(self, key: Key = KEY, generation: int = 1) -> None:
        parts = {node.name: part for node in self.running() if (part := node.part(key))}
        for name, files in parts.items():
            part = Part(name, generation, files)
            await self.store.put(keys.part_key(*key, generation, name, 0), to_bytes(part))
        names = {inner: file for files in parts.values() for inner, file in files.items()}
        state = StepState(
            number=1,
            generation=generation,
            completed_at=float(generation),
            node="a",
            marker=None,
            marker_file=None,
            parts={name: len(files) for name, files in parts.items()},
            files=len(names),
            bytes=sum(file.size_bytes for file in names.values()),
        )
        await self.store.put(keys.state_key(*key), to_bytes(state))
        for node in self.running():
            record = node.driver.registry.records.get(key)
            if record is not None:
                record.manifest.state, record.manifest.generation = "complete", generation
                record.manifest.overwrite = None

    async def remove(self, key: Key = KEY) -> None:
        await self.store.delete(keys.state_key(*key))
        await self.store.delete(keys.holdings_prefix(*key), is_prefix=True)
        await self.store.delete(keys.parts_prefix(*key), is_prefix=True)
        await self.store.delete(keys.tree_key("/".join(key)))

    def held(self, key: Key = KEY) -> defaultdict[str, tuple[str, ...]]:
        """By node, the parts that the catalogue says it holds."""
        prefix = keys.holdings_prefix(*key)
        held = {
            name.removeprefix(prefix): from_bytes(Holding, value.value).parts
            for name, value in self.server.keys.items()
            if name.startswith(prefix)
        }
        return defaultdict(tuple, held)


@asynccontextmanager
async def cluster(path: Path, settings: Settings) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        try:
            yield Cluster(path, nursery, settings)
        finally:
            nursery.cancel_scope.cancel()


def with_replication(*, after_s: float = 0.3, replicas: int = 2) -> Settings:
    settings = Settings()
    settings.replication = replace(settings.replication, after_s=after_s, replicas=replicas)
    return settings
