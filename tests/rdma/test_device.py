"""A real device: READs between two ports of it, by the completion descriptor, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest
import trio
import trio.lowlevel

from rdma.memory import Memory
from tests.conftest import repository
from tierfs.errors import PeerUnavailable
from tierfs.transport.verbs_device import DeviceLink, DevicePort, DeviceRegion
from tierfs.transport.verbs_port import Capabilities, Completion, LinkAddress, QueueFull

#: An emulated processor on a busy machine takes its time.
_WITHIN_S = 60
_PIECE = 1 << 20


@contextlib.contextmanager
def _linked(asker: DevicePort, holder: DevicePort) -> Iterator[tuple[DeviceLink, DeviceLink]]:
    asks, holds = asker.link(), holder.link()
    asks.connect(holds.address)
    holds.connect(asks.address)
    try:
        yield asks, holds
    finally:
        asks.close()
        holds.close()


async def _completions(port: DevicePort, count: int) -> list[Completion]:
    """So many, and each wait is for the descriptor."""
    found: list[Completion] = []
    with trio.fail_after(_WITHIN_S):
        while len(found) < count:
            port.arm()
            more = port.completions()
            found += more
            if not more:
                await trio.lowlevel.wait_readable(port.fd)
    return found


@pytest.mark.parametrize("size", [4096, 1 << 20, 8 << 20])
async def test_bytes_come_as_they_are(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory, size: int
) -> None:
    with _linked(asker, holder) as (link, _):
        pieces = list(range(0, size, _PIECE))
        for at in pieces:
            region = held.region
            length = min(_PIECE, size - at)
            link.read(at + 5, target.region, at, length, region.address + at, region.remote_key)
        done = await _completions(asker, len(pieces))
    assert sorted(done, key=lambda each: each.work) == [Completion(at + 5) for at in pieces]
    assert target.bytes[:size] == held.bytes[:size]
    assert not any(target.bytes[size:])


async def test_the_descriptor_tells_of_a_completion(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    with _linked(asker, holder) as (link, _):
        for work in range(3):
            asker.arm()
            assert asker.completions() == []
            link.read(work, target.region, 0, 1 << 20, held.region.address, held.region.remote_key)
            done: list[Completion] = []
            with trio.fail_after(_WITHIN_S):
                while not done:
                    await trio.lowlevel.wait_readable(asker.fd)
                    done = asker.completions()
            assert done == [Completion(work)]


async def test_an_event_that_came_before_is_not_told_again(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    with _linked(asker, holder) as (link, _):
        asker.arm()
        assert asker.completions() == []
        link.read(1, target.region, 0, 4096, held.region.address, held.region.remote_key)
        assert await _completions(asker, 1) == [Completion(1)]
        asker.arm()
        assert asker.completions() == []
        with trio.move_on_after(0.5) as scope:
            await trio.lowlevel.wait_readable(asker.fd)
        assert scope.cancelled_caught


async def test_a_wrong_key_is_an_error_and_breaks_the_link(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    with _linked(asker, holder) as (link, _):
        link.read(9, target.region, 0, 4096, held.region.address, held.region.remote_key ^ 0x5A5A00)
        [done] = await _completions(asker, 1)
        assert done.work == 9 and "does not let this memory be read" in done.error
        if asker.capabilities.kind == "rc":
            assert link.is_broken
            with pytest.raises(PeerUnavailable, match="broke"):
                link.read(10, target.region, 0, 4096, held.region.address, held.region.remote_key)
    assert not any(target.bytes[:4096])
    with _linked(asker, holder) as (link, _):
        link.read(11, target.region, 0, 4096, held.region.address, held.region.remote_key)
        assert await _completions(asker, 1) == [Completion(11)]


async def test_memory_that_others_may_not_read(asker: DevicePort, holder: DevicePort, target: Memory) -> None:
    with Memory(holder, 4096, remote=False) as private, _linked(asker, holder) as (link, _):
        link.read(1, target.region, 0, 4096, private.region.address, private.region.remote_key)
        [done] = await _completions(asker, 1)
        assert done.error


async def test_nobody_reads_a_region_after_its_close(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    with _linked(asker, holder) as (link, _):
        held.region.close()
        link.read(2, target.region, 0, 4096, held.region.address, held.region.remote_key)
        [done] = await _completions(asker, 1)
        assert done.work == 2 and done.error
    assert not any(target.bytes[:4096])


async def test_the_queue_is_full_and_has_room_again(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    depth = asker.capabilities.queue_depth
    with _linked(asker, holder) as (link, _), _linked(asker, holder) as (other, _):
        for work in range(depth):
            link.read(work, target.region, work * 64, 64, held.region.address + work * 64, held.region.remote_key)
        with pytest.raises(QueueFull):
            other.read(depth, target.region, 0, 64, held.region.address, held.region.remote_key)
        done = await _completions(asker, depth)
        assert {each.work for each in done} == set(range(depth)) and not any(each.error for each in done)
        other.read(depth, target.region, 0, 64, held.region.address, held.region.remote_key)
        assert await _completions(asker, 1) == [Completion(depth)]
    assert target.bytes[: depth * 64] == held.bytes[: depth * 64]


async def test_a_closed_link_writes_nothing_more_and_gives_its_places_back(
    asker: DevicePort, holder: DevicePort, held: Memory, target: Memory
) -> None:
    depth = asker.capabilities.queue_depth
    with _linked(asker, holder) as (link, _), _linked(asker, holder) as (other, _):
        for work in range(depth):
            link.read(work, target.region, 0, _PIECE, held.region.address, held.region.remote_key)
        link.close()
        seen = bytes(target.bytes[:_PIECE])
        with pytest.raises(PeerUnavailable, match="closed"):
            link.read(depth, target.region, 0, 64, held.region.address, held.region.remote_key)
        earlier = asker.completions()
        for work in range(depth, 2 * depth):
            other.read(work, target.region, _PIECE, 64, held.region.address + _PIECE, held.region.remote_key)
        done = [each for each in await _completions(asker, depth) if each.work >= depth]
        assert [each.error for each in done] == [""] * depth
        assert all(each.work < depth for each in earlier)
        assert bytes(target.bytes[:_PIECE]) == seen


async def test_the_other_side_goes_away(asker: DevicePort, holder: DevicePort, held: Memory, target: Memory) -> None:
    with _linked(asker, holder) as (link, holds):
        holds.close()
        link.read(3, target.region, 0, 4096, held.region.address, held.region.remote_key)
        [done] = await _completions(asker, 1)
        assert done.work == 3 and done.error


def test_only_memory_for_writing_can_be_registered(asker: DevicePort) -> None:
    with pytest.raises(OSError) as refused:
        asker.register(0x1000, 4096, remote=True)
    assert refused.value.errno > 0 and asker.capabilities.device in str(refused.value)


def test_a_read_stays_within_its_region(asker: DevicePort, holder: DevicePort, held: Memory, target: Memory) -> None:
    region: DeviceRegion = target.region
    with _linked(asker, holder) as (link, _):
        for at, length in ((-1, 64), (0, 0), (region.length, 1), (0, asker.capabilities.most_read_bytes + 1)):
            with pytest.raises(ValueError):
                link.read(1, region, at, length, held.region.address, held.region.remote_key)


def test_a_port_is_closed_with_reads_outstanding(device: Capabilities, holder: DevicePort, held: Memory) -> None:
    port = DevicePort(device)
    with Memory(port, _PIECE, remote=False) as memory:
        link, holds = port.link(), holder.link()
        link.connect(holds.address)
        holds.connect(link.address)
        port.arm()
        for work in range(8):
            link.read(work, memory.region, 0, _PIECE, held.region.address, held.region.remote_key)
        link.close()
        holds.close()
    port.close()
    port.close()
    with pytest.raises(OSError):
        port.link()


def test_another_process_reads(device: Capabilities, holder: DevicePort, held: Memory) -> None:
    link = holder.link()
    child = subprocess.Popen(
        [sys.executable, "-c", _ASKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=repository()
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        link.connect(LinkAddress(*json.loads(child.stdout.readline())))
        own = link.address
        address = [own.gid, own.queue_pair, own.sequence, own.key]
        answer, _ = child.communicate(
            json.dumps([address, held.region.address, held.region.remote_key]) + "\n", timeout=_WITHIN_S
        )
        assert child.returncode == 0
        assert int(answer) == zlib.crc32(held.bytes[:_PIECE])
    finally:
        child.kill()
        child.wait()
        link.close()


_ASKER = """
import json, select, sys, zlib
sys.path[:0] = ["tests"]
from rdma.memory import Memory
from tierfs.transport.verbs_device import DevicePort
from tierfs.transport.verbs_devices import find_devices
from tierfs.transport.verbs_port import LinkAddress
port = DevicePort(find_devices().devices[0])
with Memory(port, 1 << 20, remote=False) as memory:
    link = port.link()
    own = link.address
    print(json.dumps([own.gid, own.queue_pair, own.sequence, own.key]), flush=True)
    peer, address, key = json.loads(input())
    link.connect(LinkAddress(*peer))
    port.arm()
    link.read(1, memory.region, 0, 1 << 20, address, key)
    done = []
    while not done:
        if not select.select([port.fd], [], [], 60)[0]:
            sys.exit("no completion")
        done = port.completions()
        port.arm()
    link.close()
    if done[0].error:
        sys.exit(done[0].error)
    print(zlib.crc32(memory.bytes))
port.close()
"""
