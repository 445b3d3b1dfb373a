"""Whole pulls between two nodes of one process by a real device: each opens it for itself."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import trio

from tierfs.errors import PeerLacks
from tierfs.transport.client import TcpPeers
from tierfs.transport.peers import Pulled
from tierfs.transport.server import TcpServer
from tierfs.transport.verbs import VerbsPeers
from tierfs.transport.verbs_fabric import Devices
from tierfs.transport.verbs_port import Capabilities
from tierfs.transport.verbs_serving import VerbsServing
from transport.nodes import ASKER, HOLDER, FolderShelf, until, usual_settings

MIB = 1 << 20
#: An emulated processor on a busy machine takes its time.
_WITHIN_S = 90


async def test_pulls_come_by_the_device_and_go_on_by_tcp_where_a_file_goes(device: Capabilities) -> None:
    from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

    data = random.Random(7).randbytes(9 * MIB + 17)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        secret = Path(directory) / "secret"
        secret.write_text("0123456789abcdef0123456789abcdef\n")
        secret.chmod(0o600)
        settings = usual_settings(secret)
        settings.peer.verbs_devices = device.device
        (shelf := FolderShelf(Path(directory) / "shelf")).directory.mkdir()
        version, going = shelf.add(data), shelf.add(data)
        target = os.open(Path(directory) / "target", os.O_RDWR | os.O_CREAT)
        with trio.fail_after(_WITHIN_S):
            async with trio.open_nursery() as nursery:
                there, here = Devices(settings), Devices(settings)
                await nursery.start(there.run)
                await nursery.start(here.run)
                await until(lambda: there.ports and here.ports, "both opened it", within_s=30)
                serving = VerbsServing(shelf, there, most_registered_bytes=settings.peer.verbs_registered_bytes)
                await nursery.start(serving.run)
                server = TcpServer(shelf, settings, HOLDER, serving)
                await nursery.start(server.run)
                peers = VerbsPeers(settings, TcpPeers(settings, ASKER, lambda _: server.addresses), here)
                await nursery.start(peers.run)
                for offset, length in ((0, len(data)), (3, 5 * MIB), (4096, MIB)):
                    got = await peers.pull(HOLDER, version, offset, length, target)
                    expected = data[offset : offset + length]
                    assert os.pread(target, length, offset) == expected
                    assert got == Pulled(length, int(crc64nvme(expected)))
                told = peers.describe()[HOLDER]
                assert (told["pulls"], told["fallbacks"]) == (3, {}), told
                assert peers.bytes_read == len(data) + 6 * MIB and not peers.tcp.bytes_received
                async with trio.open_nursery() as pulls:
                    pulls.start_soon(_lacks, peers, going, len(data), target)
                    before = peers.bytes_read
                    await until(lambda: peers.bytes_read > before, "it has begun", within_s=30)
                    path = shelf.path(going)
                    ino = path.stat().st_ino
                    gone = path.rename(path.with_name("gone"))
                    await serving.exports.fence(ino)
                    os.truncate(gone, 0)
                nursery.cancel_scope.cancel()
        assert not serving.links and not any(serving.exports.registered.values())
        os.close(target)


async def _lacks(peers: VerbsPeers, version: str, length: int, target: int) -> None:
    try:
        got = await peers.pull(HOLDER, version, 0, length, target)
    except PeerLacks:
        return
    assert got.length == length  # all of it was READ before the file went
