"""What a node gives those who READ its files, asked for over a connection as another node does, and READ by ports that
behave as badly as they may."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from tests.unit.verbs_double import DoubleLink, DoublePort, Fabric, memory
from tierfs.errors import PeerLacks, PeerRefused, PeerUnavailable
from tierfs.settings import Settings
from tierfs.transport import server
from tierfs.transport.connection import Connection
from tierfs.transport.frames import Kind as FrameKind
from tierfs.transport.requests import Request
from tierfs.transport.server import NO_RDMA, TcpServer
from tierfs.transport.tcp import TcpPeers
from tierfs.transport.verbs_fabric import OpenPort
from tierfs.transport.verbs_messages import Exported, Links, Proposal, exported_of, links_of
from tierfs.transport.verbs_port import Kind, LinkAddress
from tierfs.transport.verbs_reading import Lane, Reader, read_range
from tierfs.transport.verbs_serving import VerbsServing
from tierfs.transport.verbs_windows import WINDOW_BYTES
from transport.nodes import ASKER, BOUND_S, HOLDER, FolderShelf, until

MIB = 1 << 20


class Ports:
    """The holder's devices; counts who keeps them."""

    def __init__(self, fabric: Fabric, kinds: list[Kind]) -> None:
        self.doubles = [fabric.port(f"holder{index}", kind) for index, kind in enumerate(kinds)]
        self.ports = tuple(OpenPort(each, Reader(each)) for each in self.doubles)
        self.reason = "" if kinds else "there is no device"
        self.threads = trio.CapacityLimiter(4)
        self.kept: Counter[OpenPort] = Counter()

    def keep(self, port: OpenPort) -> None:
        self.kept[port] += 1

    def release(self, port: OpenPort) -> None:
        self.kept[port] -= 1
        assert self.kept[port] >= 0


@dataclass
class Rig:
    """A holder that serves by RDMA, and the asker's side by hand."""

    fabric: Fabric
    shelf: FolderShelf
    ports: Ports
    serving: VerbsServing
    server: TcpServer
    peers: TcpPeers
    here: list[DoublePort]
    readers: list[Reader]

    @property
    def registered(self) -> int:
        """Of the holder's, in the double's own count."""
        return sum(each.is_open and each.remote for each in self.fabric.regions.values())

    def kept(self) -> dict[OpenPort, int]:
        return dict(+self.ports.kept)

    async def connection(self) -> Asking:
        connection, _ = await self.peers._connection(HOLDER, fresh=True)
        return Asking(self, connection)


@dataclass
class Asking:
    """A connection with links."""

    rig: Rig
    connection: Connection
    ends: list[tuple[int, DoubleLink]] = field(default_factory=list)

    async def ask(self, request: Request) -> dict[str, object]:
        await self.connection.send(FrameKind.request, request.to_head())
        frame = await self.rig.peers._next(self.connection, FrameKind.answer)
        return frame.head

    async def propose(self, proposals: list[Proposal]) -> Links:
        request = Request("link", 500, links=tuple(proposals))
        return links_of(await self.ask(request), len(proposals))

    async def link(self) -> Links:
        """One for each of the asker's ports."""
        self.ends = [(index, port.link()) for index, port in enumerate(self.rig.here)]
        links = await self.propose(
            [Proposal(self.rig.here[index].capabilities.kind, link.address) for index, link in self.ends]
        )
        for (_, link), address in zip(self.ends, links.addresses, strict=True):
            if address is not None:
                link.connect(address)
        return links

    async def export(self, version: str, offset: int, length: int, *, growing: bool = False) -> Exported:
        head = await self.ask(Request("export", 500, version, offset, length, growing))
        return exported_of(head, offset=offset, length=length, links=len(self.ends))

    async def read(self, exported: Exported) -> bytes:
        buffer, address = memory(bytes(exported.length))
        lanes, regions = [], []
        for (index, link), remote in zip(self.ends, exported.remotes, strict=True):
            if remote is not None:
                regions.append(self.rig.here[index].register(address, exported.length, remote=False))
                lanes.append(Lane(self.rig.readers[index], link, regions[-1], remote))
        try:
            await read_range(lanes, 0, exported.length, piece_bytes=64 << 10, stall_s=2)
        finally:
            for each in regions:
                each.close()
        return bytes(buffer)

    async def pull(self, version: str, offset: int, length: int, *, growing: bool = False) -> bytes:
        got = b""
        while len(got) < length:
            exported = await self.export(version, offset + len(got), length - len(got), growing=growing)
            if not exported.length:
                break
            got += await self.read(exported)
        return got

    def close(self) -> None:
        self.connection.close()
        for _, link in self.ends:
            link.close()


@asynccontextmanager
async def rig(
    shelf: FolderShelf, settings: Settings, there: list[Kind], here: list[Kind], *, most_bytes: int = 1 << 30
) -> AsyncIterator[Rig]:
    """And nothing is left of anything afterwards."""
    fabric = Fabric(3, slowest_s=0.001)
    with trio.fail_after(BOUND_S):
        async with trio.open_nursery() as nursery:
            ports = Ports(fabric, there)
            ours = [fabric.port(f"asker{index}", kind) for index, kind in enumerate(here)]
            readers = [Reader(each) for each in ours]
            for reader in readers:
                await nursery.start(reader.run)
            await nursery.start(fabric.run)
            serving = VerbsServing(shelf, ports, most_registered_bytes=most_bytes)
            await nursery.start(serving.run)
            server = TcpServer(shelf, settings, HOLDER, serving)
            await nursery.start(server.run)
            peers = TcpPeers(settings, ASKER, lambda node: server.addresses if node == HOLDER else ())
            await nursery.start(peers.run)
            made = Rig(fabric, shelf, ports, serving, server, peers, ours, readers)
            yield made
            nursery.cancel_scope.cancel()
    assert made.registered == 0 and not +ports.kept and serving.links == 0
    assert not any(not link.is_closed for link in fabric.links.values() if link.port in ports.doubles)
    assert fabric.misuse == []
    for port in (*ours, *ports.doubles):
        port.close()


@pytest.fixture
def shelf() -> Iterator[FolderShelf]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield FolderShelf(Path(directory))


async def test_files_are_read_over_every_link_as_they_are(settings: Settings, shelf: FolderShelf) -> None:
    data = random.Random(1).randbytes(5 * MIB + 77)
    version = shelf.add(data)
    async with rig(shelf, settings, ["srd", "rc"], ["rc", "srd", "srd", "rc"]) as both:
        path = await both.connection()
        links = await path.link()
        assert all(links.addresses) and links.reason == "" and both.serving.links == 4
        assert [each.gid for each in links.addresses if each] == ["holder1", "holder0", "holder0", "holder1"]
        for offset, length in ((0, len(data)), (12345, 3 * MIB), (len(data) - 5, 5)):
            assert await path.pull(version, offset, length) == data[offset : offset + length]
        assert both.registered == 2, "one window, with both devices"
        assert both.serving.exports.given == 3
        assert all(port.posted_reads for port in both.here)
        empty = shelf.add(b"")
        assert await path.export(empty, 0, 0) == Exported(0, 0, 0, (None,) * 4)
        assert await both.peers.ping(HOLDER) < 5
        path.close()
        await until(lambda: both.serving.links == 0, "links end with their connection")
        assert both.registered == 2, "the window is kept for whoever asks next"


async def test_a_range_over_two_windows_is_given_in_two_answers(settings: Settings, shelf: FolderShelf) -> None:
    block = random.Random(1).randbytes(MIB)
    version = shelf.add(block * (WINDOW_BYTES // MIB + 1))
    async with rig(shelf, settings, ["srd"], ["srd"]) as both:
        path = await both.connection()
        await path.link()
        first = await path.export(version, WINDOW_BYTES - 100, 500)
        assert (first.length, first.size_bytes) == (100, WINDOW_BYTES + MIB)
        assert await path.pull(version, WINDOW_BYTES - 100, 500) == block[-100:] + block[:400]
        path.close()


async def test_what_grows_is_read_as_far_as_it_is_written(settings: Settings, shelf: FolderShelf) -> None:
    data = random.Random(2).randbytes(100_000)
    version = shelf.add(data[:60_000])
    shelf.growing.add(version)
    async with rig(shelf, settings, ["rc"], ["rc"]) as both:
        path = await both.connection()
        await path.link()
        with pytest.raises(PeerLacks):
            await path.export(version, 0, 5)
        assert await path.pull(version, 5000, MIB, growing=True) == data[5000:60_000]
        assert both.registered == 0, "at its end there is nothing to be registered"
        with shelf.path(version).open("ab") as file:
            file.write(data[60_000:])
        assert await path.pull(version, 60_000, 40_000, growing=True) == data[60_000:]
        assert both.registered == 1
        path.close()
        await until(lambda: both.registered == 0, "what grew is given back with the connection")
        shelf.growing.clear()
        other = await both.connection()
        await other.link()
        with pytest.raises(PeerLacks, match="too few"):
            await other.export(version, 0, MIB)
        assert await other.pull(version, 0, len(data)) == data, "what is lacking costs no connection"
        other.close()


async def test_what_was_fenced_is_not_read_any_more(settings: Settings, shelf: FolderShelf) -> None:
    data = random.Random(3).randbytes(MIB)
    version = shelf.add(data)
    async with rig(shelf, settings, ["srd"], ["srd"]) as both:
        path = await both.connection()
        await path.link()
        exported = await path.export(version, 0, MIB)
        await both.serving.exports.fence(os.stat(shelf.path(version)).st_ino)
        with pytest.raises(PeerUnavailable):
            await path.read(exported)
        await path.link()
        assert await path.pull(version, 0, MIB) == data, "the shelf still gives it out"
        path.close()


async def test_whatever_is_fenced_in_the_middle_of_reads_they_are_right_or_fail(
    settings: Settings, shelf: FolderShelf
) -> None:
    dice = random.Random(7)
    data = dice.randbytes(MIB)
    version = shelf.add(data)
    ino = os.stat(shelf.path(version)).st_ino
    outcomes: Counter[str] = Counter()
    async with rig(shelf, settings, ["srd", "rc"], ["srd", "rc"]) as both:

        async def ask() -> None:
            while min(outcomes["read"], outcomes["fenced"]) < 20:
                path = await both.connection()
                try:
                    await path.link()
                    while True:
                        got = await path.pull(version, 0, MIB)
                        assert got in (data, b""), "right, or not given as it is about to leave"
                        outcomes["read"] += bool(got)
                        await trio.lowlevel.checkpoint()
                except PeerUnavailable:
                    outcomes["fenced"] += 1
                finally:
                    path.close()

        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as asking:
                nursery.start_soon(_fence_again_and_again, both, ino, dice)
                for _ in range(4):
                    asking.start_soon(ask)
            nursery.cancel_scope.cancel()


async def _fence_again_and_again(both: Rig, ino: int, dice: random.Random) -> None:
    while True:
        await trio.sleep(dice.random() * 0.02)
        await both.serving.exports.fence(ino)


async def test_a_connection_by_which_others_read_is_not_the_first_to_make_place(
    settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(3).randbytes(MIB)
    version = shelf.add(data)
    async with rig(shelf, settings, ["srd"], ["srd"]) as both:
        both.server._most = 3  # with the one that is waited for
        path = await both.connection()
        await path.link()
        exported = await path.export(version, 0, MIB)
        plain = await both.connection()
        await plain.ask(Request("ping", 500))
        other = await both.connection()
        assert await other.ask(Request("ping", 500)) == {}
        assert not plain.connection.is_quiet, "it was idle for the shortest time, and nobody reads by it"
        assert await path.read(exported) == data and path.connection.is_quiet
        monkeypatch.setattr(server, "READS_WITHIN_S", 0)
        await other.ask(Request("ping", 500))
        last = await both.connection()
        assert await last.ask(Request("ping", 500)) == {}
        await until(lambda: both.serving.links == 0, "nor does it stay for ever")
        for each in (path, plain, other, last):
            each.close()


async def test_why_there_are_no_links_is_told_and_the_connection_serves_as_before(
    settings: Settings, shelf: FolderShelf
) -> None:
    version = shelf.add(b"bytes")
    for there, reason in (([], "there is no device"), (["rc"], "no RDMA device of the kind srd")):
        async with rig(shelf, settings, there, ["srd"]) as both:  # type: ignore[arg-type]
            path = await both.connection()
            links = await path.link()
            assert links.addresses == (None,) and reason in links.reason
            assert await path.ask(Request("ping", 500)) == {}
            both.server._serves_links = None
            other = await both.connection()
            assert (await other.link()).reason == NO_RDMA
            with pytest.raises(PeerRefused, match="without links"):
                await other.export(version, 0, 5)
            path.close(), other.close()


async def test_an_address_that_is_none_ends_the_connection_with_all_its_links(
    settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(link: DoubleLink, peer: LinkAddress) -> None:
        if peer.gid == "nobody":
            raise PeerRefused("that is no address")
        if peer.gid == "nowhere":
            raise PeerUnavailable("no way there")
        link.peer = peer

    monkeypatch.setattr(DoubleLink, "connect", connect)
    async with rig(shelf, settings, ["srd"], ["srd"]) as both:
        path = await both.connection()
        good, far, none = (Proposal("srd", LinkAddress(gid, 9)) for gid in ("here", "nowhere", "nobody"))
        links = await path.propose([good, far, good])
        assert [each is not None for each in links.addresses] == [True, False, True]
        assert (await path.propose([far])).reason == "no way there"
        assert both.serving.links == 0, "new links are instead of those before"
        await path.propose([good, good])
        with pytest.raises(PeerRefused, match="no address"):
            await path.propose([good, none])
        await until(lambda: both.serving.links == 0, "nothing is left of it")
        assert both.kept() == {}
        path.close()


async def test_links_and_memory_of_a_device_that_went_are_closed_and_the_others_serve(
    settings: Settings, shelf: FolderShelf
) -> None:
    data = random.Random(4).randbytes(MIB)
    version = shelf.add(data)
    async with rig(shelf, settings, ["srd", "srd"], ["srd", "srd"]) as both:
        path = await both.connection()
        await path.link()
        assert await path.pull(version, 0, MIB) == data
        lost = both.ports.ports[0]
        lost.reader.gone = "it was pulled out"
        await until(lambda: lost not in both.kept(), "nobody keeps it any more")
        exported = await path.export(version, 0, MIB)
        assert [each is not None for each in exported.remotes] == [False, True]
        assert await path.read(exported) == data
        both.ports.ports[1].reader.gone = "this one too"
        assert (await path.export(version, 0, MIB)).reason
        assert await path.ask(Request("ping", 500)) == {}
        path.close()


async def test_connections_that_come_and_go_leave_nothing_behind(settings: Settings, shelf: FolderShelf) -> None:
    dice = random.Random(5)
    files = {shelf.add(data): data for data in (dice.randbytes(MIB + index) for index in range(4))}
    async with rig(shelf, settings, ["srd", "rc"], ["rc", "srd"], most_bytes=3 * MIB) as both:

        async def come_and_go(seed: int) -> None:
            mine = random.Random(seed)
            path = await both.connection()
            try:
                with trio.move_on_after(mine.random() * 0.3):
                    await path.link()
                    for _ in range(5):
                        version = mine.choice(list(files))
                        offset = mine.randrange(MIB)
                        exported = await path.export(version, offset, MIB - offset, growing=mine.random() < 0.3)
                        if exported.length:  # else all the memory there may be is in use
                            assert await path.read(exported) == files[version][offset:MIB]
            finally:
                path.close()

        for start in range(3):
            async with trio.open_nursery() as nursery:
                for seed in range(8):
                    nursery.start_soon(come_and_go, start * 8 + seed)
        await until(lambda: both.serving.links == 0, "links end with their connections")
        assert both.serving.exports.given
        await until(lambda: sum(both.kept().values()) == both.registered <= 6, "only whole windows are kept")
        assert all(registered <= 3 * MIB for registered in both.serving.exports.registered.values())
