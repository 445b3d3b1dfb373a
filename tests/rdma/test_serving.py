"""A node's files as memory of a real device: what locked pages do to a file, and what a fence does about it."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from rdma.memory import Memory
from tierfs.errors import PeerLacks, PeerUnavailable
from tierfs.transport.verbs_device import DeviceLink, DevicePort
from tierfs.transport.verbs_fabric import OpenPort
from tierfs.transport.verbs_messages import Exported, Proposal
from tierfs.transport.verbs_reading import Lane, Reader, read_range
from tierfs.transport.verbs_serving import VerbsServing, VerbsSession
from transport.nodes import FolderShelf, until

MIB = 1 << 20
SIZE = 6 * MIB + 77
#: An emulated processor on a busy machine takes its time.
_WITHIN_S = 60


class Ports:
    """The holder's one device."""

    def __init__(self, port: DevicePort) -> None:
        self.ports = (OpenPort(port, Reader(port)),)
        self.reason = ""
        self.threads = trio.CapacityLimiter(2)
        self.kept: Counter[OpenPort] = Counter()

    def keep(self, port: OpenPort) -> None:
        self.kept[port] += 1

    def release(self, port: OpenPort) -> None:
        self.kept[port] -= 1


@dataclass
class Asker:
    """A connection's session, and this side's end of its link."""

    shelf: FolderShelf
    serving: VerbsServing
    session: VerbsSession
    port: DevicePort
    reader: Reader
    target: Memory
    link: DeviceLink | None = None

    async def export(self, version: str, *, growing: bool = False) -> Exported:
        await self.connect()
        return await self.session.export(version, 0, SIZE, growing=growing)

    async def connect(self) -> None:
        """Anew: an error may have broken the link."""
        if self.link is not None:
            self.reader.close_link(self.link, "there is another")
        self.link = self.port.link()
        links = await self.session.link([Proposal(self.port.capabilities.kind, self.link.address)])
        assert links.addresses[0] is not None, links.reason
        self.link.connect(links.addresses[0])

    async def read(self, exported: Exported) -> bytes:
        assert self.link is not None and exported.remotes[0] is not None, exported.reason
        lane = Lane(self.reader, self.link, self.target.region, exported.remotes[0])
        await read_range([lane], 0, exported.length, stall_s=_WITHIN_S)
        return self.target.bytes[: exported.length]


@asynccontextmanager
async def running(shelf: FolderShelf, asker: DevicePort, holder: DevicePort, target: Memory) -> AsyncIterator[Asker]:
    ports = Ports(holder)
    with trio.fail_after(2 * _WITHIN_S):
        async with trio.open_nursery() as nursery:
            reader = Reader(asker)
            await nursery.start(reader.run)
            serving = VerbsServing(shelf, ports, most_registered_bytes=256 * MIB)
            await nursery.start(serving.run)
            made = Asker(shelf, serving, serving.session(), asker, reader, target)
            yield made
            if made.link is not None:
                reader.close_link(made.link, "the test is over")
            nursery.cancel_scope.cancel()
    assert not +ports.kept


@pytest.fixture
def shelf() -> Iterator[FolderShelf]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield FolderShelf(Path(directory))


def free_bytes(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bfree * room.f_frsize


async def test_what_is_written_after_a_fence_is_what_is_read(
    shelf: FolderShelf, asker: DevicePort, holder: DevicePort, target: Memory
) -> None:
    first, second = (random.Random(seed).randbytes(SIZE) for seed in (1, 2))
    version = shelf.add(first)
    path = shelf.path(version)
    before = path.stat()
    async with running(shelf, asker, holder, target) as node:
        exported = await node.export(version)
        assert await node.read(exported) == first
        assert path.stat().st_mtime_ns == before.st_mtime_ns, "who reads does not change the file"
        assert path.stat().st_blocks == before.st_blocks
        await node.serving.exports.fence(path.stat().st_ino)
        with pytest.raises(PeerUnavailable):
            await node.read(exported)
        with path.open("r+b") as file:
            file.truncate(0)
            file.write(second)
        assert await node.read(await node.export(version)) == second


@pytest.mark.parametrize("growing", [False, True])
async def test_the_room_of_a_removed_file_comes_back(
    shelf: FolderShelf, asker: DevicePort, holder: DevicePort, target: Memory, growing: bool
) -> None:
    before = free_bytes(shelf.directory)
    data = random.Random(1).randbytes(SIZE)
    version = shelf.add(data)
    async with running(shelf, asker, holder, target) as node:
        exported = await node.export(version, growing=growing)
        shelf.path(version).unlink()
        assert free_bytes(shelf.directory) <= before - SIZE, "what is locked keeps its room"
        assert await node.read(exported) == data
        await until(lambda: free_bytes(shelf.directory) > before - SIZE // 2, "the room is back", within_s=_WITHIN_S)
        with pytest.raises(PeerLacks):
            await node.export(version, growing=growing)


async def test_a_hole_is_not_filled_and_what_grew_is_read_anew(
    shelf: FolderShelf, asker: DevicePort, holder: DevicePort, target: Memory
) -> None:
    data = random.Random(1).randbytes(SIZE)
    version = shelf.add(data[: 2 * MIB])
    path = shelf.path(version)
    async with running(shelf, asker, holder, target) as node:
        assert await node.read(await node.export(version, growing=True)) == data[: 2 * MIB]
        os.truncate(path, SIZE)
        blocks = path.stat().st_blocks
        for growing in (True, False):
            exported = await node.export(version, growing=growing)
            assert exported.reason == "part of it was never written" and exported.remotes == (None,)
        assert path.stat().st_blocks == blocks
        with path.open("r+b") as file:
            file.write(data)
        assert await node.read(await node.export(version)) == data


async def test_a_file_that_is_cut_without_a_word_is_let_go_of(
    shelf: FolderShelf, asker: DevicePort, holder: DevicePort, target: Memory
) -> None:
    version = shelf.add(bytes(SIZE))
    async with running(shelf, asker, holder, target) as node:
        await node.export(version)
        assert node.serving.exports.registered
        os.truncate(shelf.path(version), MIB)
        await until(lambda: not node.serving.exports.registered, "it is given back", within_s=_WITHIN_S)
