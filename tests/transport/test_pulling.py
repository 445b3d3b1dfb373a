"""Bytes from one node to another as they were, whatever the network does meanwhile."""

from __future__ import annotations

import os
import random
import time

import pytest
import trio
import trio.testing

from rig.tcp_proxy import Fault, TcpProxy
from tierfs.checksum import CHUNK_BYTES, checksum_fd
from tierfs.errors import NoRoom, PeerLacks, PeerRefused, PeerUnavailable
from tierfs.settings import Settings
from tierfs.transport import client
from tierfs.transport.connection import _limiter
from tierfs.transport.peers import MOST_PULL_BYTES, Offer, Pulled
from transport.nodes import HOLDER, FolderShelf, Pair, pair, port_of, until

MIB = 1 << 20


def crc(data: bytes) -> int:
    from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

    return int(crc64nvme(data))


async def pull_all(pair: Pair, version: str, size: int, fd: int, **how: bool) -> Pulled:
    return await pair.peers.pull(HOLDER, version, 0, size, fd, **how)


async def test_ranges_come_as_they_are_and_holes_as_zeros(settings: Settings, shelf: FolderShelf, target: int) -> None:
    dice = random.Random(4)
    whole = bytearray(dice.randbytes(9 * MIB + 17))
    version = shelf.add(bytes(whole))
    with shelf.path(version).open("r+b") as file:
        file.truncate(4 * MIB)
        file.truncate(len(whole))  # from 4 MiB on it is a hole
        whole[4 * MIB :] = bytes(len(whole) - 4 * MIB)
    empty = shelf.add(b"")
    async with pair(shelf, settings) as both:
        for _ in range(20):
            offset = dice.randrange(len(whole))
            length = dice.randrange(1, len(whole) - offset + 1)
            got = await both.peers.pull(HOLDER, version, offset, length, target)
            assert os.pread(target, length, offset) == whole[offset : offset + length]
            assert got == Pulled(length, crc(bytes(whole[offset : offset + length])))
        assert await pull_all(both, empty, 0, target) == Pulled(0, 0)
        assert await both.peers.fetch(HOLDER, empty, most_bytes=10) == b""
        assert both.server.connections == 1, "one connection is used again and again"
        assert await both.peers.ping(HOLDER) < 5


async def test_several_streams_pull_at_once_and_no_more_than_allowed(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    settings.peer.streams = 3
    data = random.Random(1).randbytes(24 * MIB)
    version = shelf.add(data)
    async with pair(shelf, settings) as both:
        async with trio.open_nursery() as nursery:
            for offset in range(0, len(data), 2 * MIB):
                nursery.start_soon(both.peers.pull, HOLDER, version, offset, 2 * MIB, target)
        assert os.pread(target, len(data), 0) == data
        assert 1 < both.server.connections <= 3


async def test_small_files_and_checksums(settings: Settings, shelf: FolderShelf) -> None:
    data = random.Random(2).randbytes(CHUNK_BYTES + 5)
    version, small = shelf.add(data), shelf.add(b"a marker")
    settings.peer.stall_s = 0.4
    async with pair(shelf, settings) as both:
        assert await both.peers.fetch(HOLDER, small, most_bytes=64) == b"a marker"
        with pytest.raises(PeerLacks, match="more than the 64"):
            await both.peers.fetch(HOLDER, version, most_bytes=64)
        shelf.summing = trio.Event()
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def let_it_take_longer_than_a_stall() -> None:
                assert shelf.summing is not None
                await trio.sleep(1)
                shelf.summing.set()

            summed = await both.peers.checksum(HOLDER, version)
        with shelf.path(version).open("rb") as file:
            assert summed == checksum_fd(file.fileno()) == await both.peers.verify(HOLDER, version)
        with pytest.raises(PeerLacks):
            await both.peers.checksum(HOLDER, f"{HOLDER}/ab")
        assert both.server.connections == 1, "what is lacking costs no connection"


async def test_a_growing_file_gives_what_it_has(settings: Settings, shelf: FolderShelf, target: int) -> None:
    version = shelf.add(b"x" * 1000)
    shelf.growing.add(version)
    async with pair(shelf, settings) as both:
        with pytest.raises(PeerLacks):
            await pull_all(both, version, 1000, target)
        assert (await pull_all(both, version, MIB, target, growing=True)).length == 1000
        assert (await both.peers.pull(HOLDER, version, 1000, MIB, target, growing=True)).length == 0
        with shelf.path(version).open("ab") as file:
            file.write(b"y" * 500)
        got = await both.peers.pull(HOLDER, version, 1000, MIB, target, growing=True)
        assert got == Pulled(500, crc(b"y" * 500))
        shelf.growing.clear()
        with pytest.raises(PeerLacks, match="too few"):
            await pull_all(both, version, MIB, target)


async def test_a_broken_pull_goes_on_where_it_broke_once(settings: Settings, shelf: FolderShelf, target: int) -> None:
    data = random.Random(3).randbytes(8 * MIB)
    version = shelf.add(data)
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            for action in ("reset", "end"):
                both.peers._close_idle(float("inf"))  # the proxy counts the bytes of each connection
                proxy.faults = [Fault(action, after_bytes=5 * MIB)]  # type: ignore[arg-type]
                proxy.passed_down = 0
                assert await pull_all(both, version, len(data), target) == Pulled(len(data), crc(data))
                assert os.pread(target, len(data), 0) == data
                assert proxy.faults[0].hits == 1
                # A reset throws away what was received and not read yet.
                lost = 4 * MIB if action == "reset" else MIB
                assert proxy.passed_down < len(data) + lost, "what was there is not fetched again"
            assert both.peers.resumed == 2
            proxy.faults = [Fault("reset", after_bytes=2 * MIB, times=None)]
            with pytest.raises(PeerUnavailable):
                await pull_all(both, version, len(data), target)


async def test_connections_that_died_while_idle_are_no_failure(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    version = shelf.add(b"z" * 1000)
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            for _ in range(3):
                await pull_all(both, version, 1000, target)
                assert await both.peers.fetch(HOLDER, version, most_bytes=1000) == b"z" * 1000
                proxy.cut()


async def test_a_stall_ends_in_time(settings: Settings, shelf: FolderShelf, target: int) -> None:
    settings.peer.stall_s = 0.5
    version = shelf.add(bytes(8 * MIB))
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            for after_bytes in (0, 1000, 3 * MIB):  # at the greeting, at the answer, in the middle
                proxy.faults = [Fault("stall", after_bytes=after_bytes)]
                began = time.monotonic()
                with pytest.raises(PeerUnavailable):
                    await pull_all(both, version, 8 * MIB, target)
                assert time.monotonic() - began < 2.5
            proxy.faults = []
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(both.peers.pull, HOLDER, version, 0, 8 * MIB, target)
            proxy.faults = [Fault("stall", times=None)]
            began = time.monotonic()
            with pytest.raises(PeerUnavailable):
                await both.peers.ping(HOLDER)
            proxy.faults = []
            assert (await pull_all(both, version, 8 * MIB, target)).length == 8 * MIB
            assert time.monotonic() - began < 1.5, "the other idle connections are not tried one by one"


async def test_a_flipped_bit_shows_in_the_checksum_or_ends_the_connection(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    data = bytes(2 * MIB)
    version = shelf.add(data)
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            proxy.faults = [Fault("flip", after_bytes=MIB)]
            got = await pull_all(both, version, len(data), target)
            assert got.length == len(data)
            assert got.crc64nvme != crc(data)
            assert got.crc64nvme == crc(os.pread(target, len(data), 0)), "it is of what was written"
            await trio.to_thread.run_sync(proxy.cut)
            for after_bytes in (5, 40, 150, 230, 300):
                proxy.faults = [Fault("flip", after_bytes=after_bytes)]
                with pytest.raises((PeerRefused, PeerUnavailable)):
                    await both.peers.checksum(HOLDER, version)


async def test_dead_addresses_are_skipped_and_live_ones_take_turns(
    settings: Settings, shelf: FolderShelf, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = shelf.add(b"q" * 100)
    async with pair(shelf, settings) as both:
        upstream = ("127.0.0.1", port_of(both.addresses[0]))
        with TcpProxy(upstream) as first, TcpProxy(upstream) as second:
            both.addresses[:] = [first.address, second.address]
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(both.peers.pull, HOLDER, version, 0, 100, target)
            assert first.connections and second.connections
            for proxy in (first, second):
                proxy.cut()
            first.refuse = True
            for _ in range(4):
                await pull_all(both, version, 100, target)
                second.cut()
            second.refuse = True
            with pytest.raises(PeerUnavailable, match="can't be reached"):
                await pull_all(both, version, 100, target)
            assert "can't be reached" in both.peers.trouble(HOLDER)
            second.refuse = False
            await pull_all(both, version, 100, target)
            assert both.peers.trouble(HOLDER) == ""
    async with pair(shelf, settings) as both:
        with pytest.raises(PeerUnavailable, match="no address"):
            await both.peers.ping("nobody")


async def test_only_pulls_that_are_not_urgent_are_held_back(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    settings.peer.replicate_bytes_s = 4 * MIB
    settings.peer.streams = 2
    version = shelf.add(bytes(3 * MIB))
    async with pair(shelf, settings) as both:
        began = time.monotonic()
        urgent_took = 0.0
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(both.peers.pull, HOLDER, version, 0, 3 * MIB, target)
            await trio.testing.wait_all_tasks_blocked(0.05)
            started = time.monotonic()
            await pull_all(both, version, 3 * MIB, target, urgent=True)
            urgent_took = time.monotonic() - started
        took = time.monotonic() - began
        assert 6 / 4 * 0.7 < took < 6 / 4 * 2.5
        assert urgent_took < 0.7, "an urgent one neither waits for a stream nor for the limit"


async def test_a_cancelled_pull_leaves_nothing_behind(settings: Settings, shelf: FolderShelf, target: int) -> None:
    version = shelf.add(bytes(4 * MIB))

    def in_use() -> tuple[list[str], int]:
        files = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        return sorted(each for each in files if "shelf" in each), _limiter().borrowed_tokens

    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            proxy.faults = [Fault("stall", after_bytes=2 * MIB, times=None)]
            before = in_use()
            for _ in range(2):
                with trio.move_on_after(0.4) as scope:
                    await pull_all(both, version, 4 * MIB, target)
                assert scope.cancelled_caught
                assert os.fstat(target).st_size <= 2 * MIB
            await trio.to_thread.run_sync(proxy.cut)
            await until(lambda: not both.server.connections, "the holder noticed")
            assert in_use() == before


async def test_a_full_tier_is_no_room(settings: Settings, shelf: FolderShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    version = shelf.add(bytes(MIB))
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        async with pair(shelf, settings) as both:
            with pytest.raises(NoRoom):
                await pull_all(both, version, MIB, full)
            with pytest.raises(ValueError, match="is none"):
                await pull_all(both, version, MOST_PULL_BYTES + 1, full)
    finally:
        os.close(full)


async def test_a_file_that_is_cut_while_it_is_sent_is_an_error(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    version = shelf.add(bytes(32 * MIB))
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            proxy.faults = [Fault("slow", bytes_s=20 * MIB, times=None)]
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def cut_it() -> None:
                    await until(lambda: os.fstat(target).st_size > MIB, "it has begun")
                    os.truncate(shelf.path(version), 3 * MIB)

                with pytest.raises((PeerLacks, PeerUnavailable)):
                    await pull_all(both, version, 32 * MIB, target)
        both.addresses[:] = both.server.addresses
        assert await both.peers.ping(HOLDER) < 5


async def test_offers_come_until_the_connection_is_lost(settings: Settings, shelf: FolderShelf) -> None:
    settings.peer.stall_s = 0.4
    offer = Offer(f"{HOLDER}/ab", "run", "step_1", "__0_0.distcp", 1, 5, sealed=True, growing=f"{HOLDER}/cd")
    async with pair(shelf, settings) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            async with both.peers.offers(HOLDER) as offers:
                await until(lambda: shelf.listeners, "the holder listens")
                await shelf.listeners[0].send(offer)
                assert await anext(offers) == offer
                with trio.move_on_after(1):  # longer than a stall: beats come
                    await anext(offers)
                    raise AssertionError
            async with both.peers.offers(HOLDER) as offers:
                await trio.to_thread.run_sync(proxy.cut)
                with pytest.raises(PeerUnavailable):
                    await anext(offers)
            async with both.peers.offers(HOLDER) as offers:
                await trio.testing.wait_all_tasks_blocked(0.05)
                await shelf.listeners[-1].send(Offer("other/ab", "run", "step_1", "x", 1, 5, sealed=True))
                with pytest.raises(PeerRefused, match="another node wrote"):
                    await anext(offers)
        await until(lambda: not shelf.listeners, "nobody listens any more")


async def test_more_connections_than_places_wait_and_idle_ones_go(
    settings: Settings, shelf: FolderShelf, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfs.transport.server._LEAST_CONNECTIONS", 2)
    monkeypatch.setattr("tierfs.transport.server._CONNECTIONS_A_STREAM", 1)
    settings.peer.serve_streams = 2
    version = shelf.add(bytes(MIB))
    async with pair(shelf, settings) as both:
        others = [client.TcpPeers(settings, f"asker{number}", lambda _: both.addresses) for number in range(4)]
        async with trio.open_nursery() as nursery:
            for each in others:
                nursery.start_soon(each.pull, HOLDER, version, 0, MIB, target)
        assert both.server.connections <= 2
        for each in others:
            each._close_idle(float("inf"))


async def test_who_waits_for_a_stream_is_told_so_and_may_go_away(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    settings.peer.serve_streams = 1
    settings.peer.stall_s = 0.4
    version = shelf.add(bytes(MIB))
    async with pair(shelf, settings) as both:
        streams = both.server._streams
        streams.acquire_on_behalf_of_nowait("another node")
        with trio.move_on_after(0.3):
            await pull_all(both, version, MIB, target)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.peers.pull, HOLDER, version, 0, MIB, target)
            await trio.sleep(1)  # longer than a stall
            streams.release_on_behalf_of("another node")
        await until(lambda: not streams.borrowed_tokens and not streams.statistics().tasks_waiting, "all are free")
        assert both.server.connections == 1
