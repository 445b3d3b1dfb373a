"""Two nodes of the transport in one process: a directory of files as the shelf, and what the tests ask of it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tests.unit.verbs_double import DoubleLink, DoublePort, DoubleRegion, Fabric
from tierfs.catalog.records import check_version
from tierfs.checksum import FileChecksum, checksum_fd
from tierfs.errors import PeerLacks
from tierfs.settings import Settings
from tierfs.transport.peers import Offer
from tierfs.transport.tcp import TcpPeers, TcpServer
from tierfs.transport.verbs import VerbsPeers
from tierfs.transport.verbs_devices import Found
from tierfs.transport.verbs_fabric import Devices
from tierfs.transport.verbs_port import Capabilities, Kind, Port
from tierfs.transport.verbs_serving import VerbsServing

HOLDER, ASKER = "holder", "asker"
BOUND_S = 20


@dataclass
class FolderShelf:
    """Files of a directory by their version's token; those in `growing` are still being written."""

    directory: Path
    growing: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    listeners: list[trio.MemorySendChannel[Offer]] = field(default_factory=list)
    summing: trio.Event | None = None

    def add(self, data: bytes, token: str = "") -> str:
        token = token or secrets.token_hex(8)
        (self.directory / token).write_bytes(data)
        return f"{HOLDER}/{token}"

    def path(self, version: str) -> Path:
        return self.directory / check_version(version).partition("/")[2]

    def open_version(self, version: str) -> int:
        self.asked.append(version)
        if version in self.growing:
            raise PeerLacks(f"{version} is not whole")
        return self._open(version)

    def open_growing(self, version: str) -> int:
        self.asked.append(version)
        return self._open(version)

    def _open(self, version: str) -> int:
        try:
            return os.open(self.path(version), os.O_RDONLY)
        except FileNotFoundError:
            raise PeerLacks(f"{version} is not here") from None

    async def checksum(self, version: str) -> FileChecksum:
        if self.summing is not None:
            await self.summing.wait()
        fd = self._open(version)
        try:
            return await trio.to_thread.run_sync(checksum_fd, fd)
        finally:
            os.close(fd)

    async def verify(self, version: str) -> FileChecksum:
        return await self.checksum(version)

    def offers(self) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        return self._offers()

    @asynccontextmanager
    async def _offers(self) -> AsyncIterator[AsyncIterator[Offer]]:
        send, receive = trio.open_memory_channel[Offer](100)
        self.listeners.append(send)
        try:
            yield receive
        finally:
            self.listeners.remove(send)


def usual_settings(secret: Path | None) -> Settings:
    settings = Settings()
    settings.cluster.listen = "127.0.0.1:0"
    settings.cluster.secret_file = secret
    settings.peer.stall_s = 5.0
    return settings


@dataclass
class Pair:
    """`addresses` is where the asker looks for the holder, and may be changed."""

    shelf: FolderShelf
    server: TcpServer
    peers: TcpPeers
    addresses: list[str]


@asynccontextmanager
async def pair(
    shelf: FolderShelf, settings: Settings, *, asks: Settings | None = None, through: Sequence[str] = ()
) -> AsyncIterator[Pair]:
    """`asks` are the asker's settings where they differ."""
    addresses: list[str] = list(through)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            server = TcpServer(shelf, settings, HOLDER)
            await nursery.start(server.run)
            if not addresses:
                addresses += server.addresses
            peers = TcpPeers(asks or settings, ASKER, lambda node: addresses if node == HOLDER else ())
            await nursery.start(peers.run)
            yield Pair(shelf, server, peers, addresses)
            nursery.cancel_scope.cancel()


class SmallPort(DoublePort):
    """Takes memory up to a length."""

    most_bytes = 1 << 62

    def register(self, address: int, length: int, *, remote: bool) -> DoubleRegion:
        if length > self.most_bytes:
            raise OSError(errno.ENOMEM, f"{self.gid} has no room for {length} bytes")
        return super().register(address, length, remote=remote)


class Rdma:
    """What the two nodes of `rdma_pair` have for RDMA: ports without a device. `plugged` may be changed."""

    def __init__(self, seed: int, holder: Sequence[Kind], asker: Sequence[Kind], *, slowest_s: float = 0.0) -> None:
        self.fabric = Fabric(seed, slowest_s=slowest_s)
        self.plugged: dict[str, dict[str, Kind]] = {
            node: {f"{node}{number}": kind for number, kind in enumerate(kinds)}
            for node, kinds in ((HOLDER, holder), (ASKER, asker))
        }
        self.opened: list[SmallPort] = []

    def devices(self, node: str, settings: Settings) -> Devices:
        def find(wanted: str) -> Found:
            plugged = self.plugged[node].items()
            found = tuple(Capabilities(name, kind, True, 1 << 30, 16) for name, kind in plugged)
            return Found(found, "" if found else f"{node} has no RDMA device")

        def open_port(capabilities: Capabilities) -> Port:
            port = SmallPort(self.fabric, capabilities, capabilities.device)
            self.fabric.ports[capabilities.device] = port
            self.opened.append(port)
            return port

        return Devices(settings, find=find, open_port=open_port)

    def port(self, name: str) -> DoublePort:
        return self.fabric.ports[name]

    def links_of(self, node: str) -> list[DoubleLink]:
        """Those that are open and connected."""
        links = self.fabric.links.values()
        return [each for each in links if each.port.gid.startswith(node) and each.peer and not each.is_closed]

    def check_nothing_left(self) -> None:
        assert self.fabric.misuse == []
        assert not [each for each in self.fabric.regions.values() if each.is_open]
        assert self.fabric.open_links == 0
        assert all(port.is_closed for port in self.opened)


@dataclass
class RdmaPair:
    """`addresses` as for `Pair`."""

    shelf: FolderShelf
    server: TcpServer
    serving: VerbsServing
    peers: VerbsPeers
    addresses: list[str]


@asynccontextmanager
async def rdma_pair(
    shelf: FolderShelf, settings: Settings, rdma: Rdma, *, within_s: float = BOUND_S
) -> AsyncIterator[RdmaPair]:
    """Both nodes with devices; nothing is left of what they registered and linked afterwards."""
    addresses: list[str] = []
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            await nursery.start(rdma.fabric.run)
            there, here = rdma.devices(HOLDER, settings), rdma.devices(ASKER, settings)
            await nursery.start(there.run)
            await nursery.start(here.run)
            serving = VerbsServing(shelf, there, most_registered_bytes=settings.peer.verbs_registered_bytes)
            await nursery.start(serving.run)
            server = TcpServer(shelf, settings, HOLDER, serving)
            await nursery.start(server.run)
            addresses += server.addresses
            tcp = TcpPeers(settings, ASKER, lambda node: addresses if node == HOLDER else ())
            peers = VerbsPeers(settings, tcp, here)
            await nursery.start(peers.run)
            yield RdmaPair(shelf, server, serving, peers, addresses)
            nursery.cancel_scope.cancel()
    rdma.check_nothing_left()


async def until(condition: Callable[[], object], what: str, *, within_s: float = 5.0) -> None:
    """Let others run until it holds, with a bound."""
    deadline = trio.current_time() + within_s
    while not condition():
        assert trio.current_time() < deadline, f"not within {within_s:g} s: {what}"
        await trio.sleep(0.01)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
