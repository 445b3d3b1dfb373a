"""Transfers by READs over ports that behave as badly as they may: whatever fails or is cancelled and when, there is no
wrong byte, no write outside the range or after the end, no hang, and nothing left over.

Run it longer with TIERFS_SOAK=1.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.step_driver import until
from tests.unit.verbs_double import DoubleLink, DoublePort, DoubleRegion, Fabric, Read, joined, memory, remote_of
from tierfs.errors import PeerRefused, PeerUnavailable
from tierfs.transport.verbs_port import Kind, Port, QueueFull
from tierfs.transport.verbs_reading import MOST_PIECE_BYTES, Lane, Reader, read_range

SOAK = os.environ.get("TIERFS_SOAK") == "1"
STALL_S = 5.0
KINDS: tuple[Kind, ...] = ("rc", "srd")
KEPT = 0xA5
both_kinds = pytest.mark.parametrize("kind", KINDS)


@dataclass
class Rig:
    """A node that reads, by its ports, from the ports opposite."""

    fabric: Fabric
    here: list[DoublePort] = field(default_factory=list)
    there: list[DoublePort] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)

    def add(self, kind: Kind, *, queue_depth: int = 16, most_read_bytes: int = 1 << 30) -> Port:
        name = f"efa{len(self.here)}"
        self.here.append(
            self.fabric.port(f"{name}-here", kind, queue_depth=queue_depth, most_read_bytes=most_read_bytes)
        )
        self.there.append(self.fabric.port(f"{name}-there", kind))
        self.readers.append(Reader(self.here[-1]))
        return self.here[-1]


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        for each in rig.readers:
            await nursery.start(each.run)
        await nursery.start(rig.fabric.run)
        yield rig
        nursery.cancel_scope.cancel()
    for port in [*rig.here, *rig.there]:
        port.close()


class Copy:
    """Memory of the other node, what this node has of it, and the lanes between."""

    def __init__(self, rig: Rig, size: int, seed: int, *, ports: list[int] | None = None) -> None:
        self.fabric = rig.fabric
        self.content = random.Random(seed).randbytes(size)
        self.source, source_address = memory(self.content)
        self.target, target_address = memory(bytes([KEPT]) * size)
        self.regions: list[DoubleRegion] = []
        self.theirs: list[DoubleLink] = []
        self.lanes: list[Lane] = []
        self.links: list[DoubleLink] = []
        for index in range(len(rig.here)) if ports is None else ports:
            into = rig.here[index].register(target_address, size, remote=False)
            out = rig.there[index].register(source_address, size, remote=True)
            ours, theirs = joined(rig.here[index], rig.there[index])
            self.regions += [into, out]
            self.links.append(ours)
            self.theirs.append(theirs)
            self.lanes.append(Lane(rig.readers[index], ours, into, remote_of(out), "node-7"))

    async def read(self, at: int, length: int, piece_bytes: int = 64, window: int = 4) -> None:
        await read_range(self.lanes, at, length, piece_bytes=piece_bytes, window=window, stall_s=STALL_S)

    @property
    def is_begun(self) -> bool:
        """Some bytes came by the first lane's port, or are about to."""
        return self.lanes[0].reader.outstanding > 0 and any(byte != KEPT for byte in self.target[:4096])

    def check_over(self) -> None:
        """Right after the end, however it came: no READ of it may be under way."""
        ours = {id(link) for link in self.links}
        assert not [read for read in self.fabric.outstanding if id(read.link) in ours]
        for lane, link in zip(self.lanes, self.links, strict=True):
            assert lane.is_dead <= link.is_closed

    def check(self, at: int, length: int, *, is_whole: bool) -> None:
        outside = bytes([KEPT])
        assert self.target[:at] == outside * at
        assert self.target[at + length :] == outside * (len(self.target) - at - length)
        if is_whole:
            assert self.target[at : at + length] == self.content[at : at + length]

    async def check_quiet(self) -> None:
        """Nothing is written later, which would be other bytes than before."""
        before = bytes(self.target)
        self.source[:] = bytes(byte ^ 0xFF for byte in self.source)
        await trio.sleep(1)
        assert self.target == before

    def close(self) -> None:
        for link in [*self.links, *self.theirs]:
            link.close()
        for region in self.regions:
            region.close()


def check_nothing_left(rig: Rig) -> None:
    assert rig.fabric.misuse == []
    assert (rig.fabric.registered, rig.fabric.open_links, rig.fabric.outstanding) == (0, 0, [])
    for port, reader in zip(rig.here, rig.readers, strict=True):
        assert reader.outstanding == 0
        assert port.most_posted <= port.capabilities.queue_depth


def rig_of(*kinds: Kind, seed: int = 1, queue_depth: int = 16, most_read_bytes: int = 1 << 30) -> Rig:
    rig = Rig(Fabric(seed))
    for kind in kinds:
        rig.add(kind, queue_depth=queue_depth, most_read_bytes=most_read_bytes)
    return rig


# --- one thing at a time


@both_kinds
async def test_a_range_is_read_over_all_lanes_and_their_links_stay(kind: Kind, autojump_clock: object) -> None:
    async with running(rig_of(kind, kind, kind)) as rig:
        copy = Copy(rig, 10_000, 7)
        await copy.read(1000, 8001)
        copy.check_over()
        copy.check(1000, 8001, is_whole=True)
        assert all(port.posted_reads > 20 for port in rig.here)
        await copy.read(0, 1000)
        await copy.read(9001, 999)
        assert copy.target == copy.content
        assert not any(lane.is_dead or link.is_closed for lane, link in zip(copy.lanes, copy.links, strict=True))
        await copy.check_quiet()
        copy.close()
    check_nothing_left(rig)


async def test_pieces_are_no_longer_than_a_device_reads(autojump_clock: object) -> None:
    rig = Rig(Fabric(3))
    rig.add("srd", most_read_bytes=100)
    rig.add("srd", most_read_bytes=7)
    async with running(rig):
        copy = Copy(rig, 5000, 7)
        copy.links[0].stall()  # what is read again by the other lane was taken in longer pieces
        await copy.read(0, 5000, piece_bytes=1000)
        copy.check(0, 5000, is_whole=True)
        assert [lane.is_dead for lane in copy.lanes] == [True, False]
        copy.close()
    check_nothing_left(rig)


async def test_no_piece_is_above_4_mib(autojump_clock: object) -> None:
    async with running(rig_of("srd")) as rig:
        copy = Copy(rig, 3 * MOST_PIECE_BYTES, 7)
        await copy.read(0, 3 * MOST_PIECE_BYTES, piece_bytes=1 << 30)
        copy.check(0, 3 * MOST_PIECE_BYTES, is_whole=True)
        assert rig.here[0].posted_reads == 3
        copy.close()
    check_nothing_left(rig)


@both_kinds
async def test_transfers_of_a_port_share_its_window_and_a_full_queue_is_waited_for(
    kind: Kind, autojump_clock: object
) -> None:
    async with running(rig_of(kind, queue_depth=8)) as rig:
        copies = [Copy(rig, 6000, seed) for seed in range(5)]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for copy in copies:
                nursery.start_soon(copy.read, 0, 6000, 64, 5)
        assert rig.here[0].most_posted == 5
        assert trio.current_time() - began < STALL_S  # each place that gets free is taken
        # Somebody else's READs take place in the queue, too.
        other = Copy(rig, 800, 9)
        other.links[0].stall()
        for work in range(6):
            other.links[0].read(1_000_000 + work, other.regions[0], work, 1, other.lanes[0].remote.address, 1)
        again = Copy(rig, 6000, 10)
        await again.read(0, 6000, 64, 100)
        assert rig.here[0].refused
        for copy in [*copies, again]:
            copy.check(0, 6000, is_whole=True)
            copy.close()
        other.close()
        await trio.sleep(1)
    check_nothing_left(rig)


async def test_a_queue_that_others_filled_is_tried_again_though_nobody_tells(autojump_clock: object) -> None:
    async with running(rig_of("srd", queue_depth=8)) as rig:
        copy, other = Copy(rig, 1000, 7), Copy(rig, 8, 9)
        other.links[0].stall()
        for work in range(8):
            other.links[0].read(1_000_000 + work, other.regions[0], work, 1, other.lanes[0].remote.address, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.read, 0, 1000)
            await trio.sleep(1)
            rig.here[0].posted.clear()  # no completion
        assert trio.current_time() < 2
        copy.check(0, 1000, is_whole=True)
        copy.close()
        other.close()
    check_nothing_left(rig)


async def test_a_silent_node_that_has_all_places_kills_no_lane_of_others(autojump_clock: object) -> None:
    async with running(rig_of("srd")) as rig:
        silent, *others = [Copy(rig, 1000, seed) for seed in range(8)]
        silent.links[0].stall()

        async def fails() -> None:
            with pytest.raises(PeerUnavailable, match="no READ completed"):
                await silent.read(0, 1000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails)
            while len(rig.here[0].posted) < 4:
                await trio.lowlevel.checkpoint()
            for copy in others:
                nursery.start_soon(copy.read, 0, 1000)
        for copy in others:
            copy.check(0, 1000, is_whole=True)
        for copy in [silent, *others]:
            copy.close()
        await trio.sleep(1)
    check_nothing_left(rig)


@both_kinds
async def test_an_error_says_who_and_why(kind: Kind, autojump_clock: object) -> None:
    async with running(rig_of(kind)) as rig:
        copy = Copy(rig, 1000, 7)
        copy.regions[1].close()
        with pytest.raises(PeerUnavailable, match=r"node-7 \(efa0-here: remote access error\)"):
            await copy.read(0, 1000)
        copy.check_over()
        with pytest.raises(PeerUnavailable, match="remote access error"):
            await copy.read(0, 1000)
        await copy.check_quiet()
        copy.close()
    check_nothing_left(rig)


async def test_without_a_lane_there_is_an_error() -> None:
    with pytest.raises(PeerUnavailable, match="there was none"):
        await read_range([], 0, 1, stall_s=1)


async def test_a_link_that_only_one_side_connected_reads_nothing(autojump_clock: object) -> None:
    async with running(rig_of("srd")) as rig:
        copy = Copy(rig, 1000, 7)
        link, other = rig.here[0].link(), rig.there[0].link()
        link.connect(other.address)
        copy.lanes[0].link = link
        with pytest.raises(PeerUnavailable, match="does not know this node"):
            await copy.read(0, 1000)
        assert link.is_closed
        other.close()
        copy.close()
    check_nothing_left(rig)


async def test_a_range_beyond_the_memory_of_either_side_is_refused(autojump_clock: object) -> None:
    async with running(rig_of("srd")) as rig:
        copy = Copy(rig, 1000, 7)
        lane = copy.lanes[0]
        with pytest.raises(ValueError, match="registered here"):
            await copy.read(1, 1000)
        with pytest.raises(ValueError, match="not a range"):
            await copy.read(-1, 10)
        for remote in (
            type(lane.remote)(lane.remote.address, 999, lane.remote.key),
            type(lane.remote)((1 << 64) - 5, 1000, lane.remote.key),
            type(lane.remote)(-1, 1000, lane.remote.key),
        ):
            lying = Lane(lane.reader, lane.link, lane.region, remote)
            with pytest.raises(PeerRefused):
                await read_range([lane, lying], 0, 1000, stall_s=STALL_S)
        assert not rig.here[0].posted_reads
        await copy.read(1000, 0)
        assert not rig.here[0].posted_reads
        copy.close()
    check_nothing_left(rig)


async def test_a_stalled_lane_is_given_up_after_the_time_and_its_pieces_are_read_by_others(
    autojump_clock: object,
) -> None:
    async with running(rig_of("srd", "rc")) as rig:
        copy = Copy(rig, 5000, 7)
        copy.links[0].stall()
        began = trio.current_time()
        await copy.read(0, 5000)
        assert STALL_S <= trio.current_time() - began < STALL_S + 1
        assert copy.lanes[0].trouble == "no READ completed for 5 s"
        copy.check_over()
        copy.check(0, 5000, is_whole=True)
        await copy.check_quiet()
        copy.close()
    check_nothing_left(rig)


async def test_a_lane_that_waited_long_for_another_may_still_take_its_pieces(autojump_clock: object) -> None:
    """It has no READ for many times `stall_s`, which is not its fault."""
    async with running(rig_of("srd", "srd")) as rig:
        copy = Copy(rig, 10 * 64, 7)
        copy.links[0].stall()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.read, 0, 10 * 64)
            for _ in range(3):
                await trio.sleep(STALL_S - 1)
                rig.fabric.carry(rig.fabric.outstanding[0])
        assert trio.current_time() - began > 3 * STALL_S
        copy.check(0, 10 * 64, is_whole=True)
        assert [lane.is_dead for lane in copy.lanes] == [True, False]
        copy.close()
    check_nothing_left(rig)


async def test_a_removed_device_takes_its_lanes_with_it_and_later_ones(autojump_clock: object) -> None:
    async with running(rig_of("srd", "srd")) as rig:
        copy = Copy(rig, 50_000, 7)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.read, 0, 50_000)
            await until(lambda: copy.is_begun, "the transfer began", every_s=0.0001)
            rig.here[0].remove()
        copy.check(0, 50_000, is_whole=True)
        assert "efa0-here was removed" in rig.readers[0].gone
        alone = Copy(rig, 100, 8, ports=[0])
        with pytest.raises(PeerUnavailable, match="was removed"):
            await alone.read(0, 100)
        copy.close()
        alone.close()
    check_nothing_left(rig)


@both_kinds
async def test_cancelled_it_leaves_no_read_behind(kind: Kind, autojump_clock: object) -> None:
    async with running(rig_of(kind, kind)) as rig:
        copy = Copy(rig, 500_000, 7)
        scope = trio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await copy.read(100, 490_000, window=16)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await until(lambda: len(rig.fabric.outstanding) >= 20, "many READs are under way", every_s=0.0001)
            scope.cancel()
        assert scope.cancelled_caught
        copy.check_over()
        copy.check(100, 490_000, is_whole=False)
        await copy.check_quiet()
        assert sum(reader.unknown for reader in rig.readers)  # READs that complete though nobody waits for them
        copy.close()
    check_nothing_left(rig)


async def test_a_link_closed_by_one_transfer_is_a_dead_lane_of_the_other(autojump_clock: object) -> None:
    async with running(rig_of("srd", "srd")) as rig:
        one, two = Copy(rig, 500_000, 7, ports=[0]), Copy(rig, 500_000, 8, ports=[0, 1])
        two.links[0].close()
        two.links[0] = two.lanes[0].link = one.links[0]
        scope = trio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await one.read(0, 500_000, window=16)

        def both_read() -> bool:
            """By the link that they share: one's are given up with it."""
            into = [read.into for read in rig.fabric.outstanding if read.link is one.links[0]]
            return min(into.count(copy.regions[0]) for copy in (one, two)) >= 4

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            nursery.start_soon(two.read, 0, 500_000, 64, 16)
            await until(both_read, "both are under way", every_s=0.0001)
            scope.cancel()
            began = trio.current_time()
        assert trio.current_time() - began < STALL_S  # told, and not found by waiting
        two.check(0, 500_000, is_whole=True)
        assert [lane.is_dead for lane in two.lanes] == [True, False]
        one.close()
        two.close()
    check_nothing_left(rig)


class InstantLink:
    """Completes each READ at once, and copies nothing: what is left is the cost of the transfer's own work."""

    def __init__(self, link: DoubleLink) -> None:
        self.link, self.port = link, link.port

    def read(self, work: int, *to: Any) -> None:
        if len(self.port.posted) >= self.port.capabilities.queue_depth:
            raise QueueFull
        self.port.posted.append(read := Read(self.link, work, *to))
        self.port.complete(read, "")


async def test_the_work_for_a_piece_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(rig_of("srd")) as rig:
        copy = Copy(rig, 40_000, 7)
        instant = InstantLink(copy.links[0])
        monkeypatch.setattr(copy.links[0], "read", instant.read)
        steps: list[int] = []
        for length in (2_000, 20_000):
            counter = Counter()
            trio.lowlevel.add_instrument(counter)
            await copy.read(0, length, piece_bytes=1)
            trio.lowlevel.remove_instrument(counter)
            steps.append(counter.steps)
        assert steps[1] < 13 * steps[0]
        copy.close()
    check_nothing_left(rig)


class Counter(trio.abc.Instrument):
    steps = 0

    def before_task_step(self, task: object) -> None:
        self.steps += 1


# --- everything at once


FAULTS = ("stall link", "break link", "close their link", "deregister", "remove", "stall port")


@dataclass(frozen=True)
class Fault:
    kind: str
    after_s: float
    copy: int
    lane: int


@dataclass(frozen=True)
class Plan:
    seed: int
    ports: tuple[tuple[Kind, int, int], ...]  # kind, queue depth, most bytes of a READ
    ranges: tuple[tuple[int, int, int, int], ...]  # offset, length, bytes of a piece, window: one a transfer
    faults: tuple[Fault, ...]
    cancel_after_s: tuple[float | None, ...]


moments = st.floats(0, 0.4, allow_nan=False).map(lambda s: round(s, 4))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    port = st.tuples(st.sampled_from(KINDS), st.integers(1, 12), st.sampled_from([1, 10, 100, 1 << 30]))
    ports = draw(st.lists(port, min_size=1, max_size=3))
    one = st.tuples(st.integers(0, 50), st.integers(0, 1500), st.sampled_from([16, 64, 333]), st.integers(1, 20))
    ranges = draw(st.lists(one, min_size=1, max_size=3))
    fault = st.builds(
        Fault, st.sampled_from(FAULTS), moments, st.integers(0, len(ranges) - 1), st.integers(0, len(ports) - 1)
    )
    faults = draw(st.lists(fault, max_size=5))
    cancels = draw(st.tuples(*[st.one_of(st.none(), moments)] * len(ranges)))
    return Plan(draw(st.integers(0, 1 << 32)), tuple(ports), tuple(ranges), tuple(faults), cancels)


async def do(fault: Fault, rig: Rig, copies: list[Copy]) -> None:
    await trio.sleep(fault.after_s)
    copy = copies[fault.copy]
    link = copy.links[fault.lane]
    match fault.kind:
        case "stall link":
            link.stall()
        case "break link":
            link.break_down()
        case "close their link":
            copy.theirs[fault.lane].close()
        case "deregister":
            copy.regions[2 * fault.lane + 1].close()
        case "remove":
            rig.here[fault.lane].remove()
        case "stall port":
            for each in copies:
                each.links[fault.lane].stall()


def may_die(plan: Plan, copy: int, lane: int) -> bool:
    """The whole port, or this link of it, has a fault."""
    of_port = ("remove", "stall port")
    return any(each.lane == lane and (each.kind in of_port or each.copy == copy) for each in plan.faults)


async def carry_out(plan: Plan) -> None:
    rig = Rig(Fabric(plan.seed))
    for kind, queue_depth, most_read_bytes in plan.ports:
        rig.add(kind, queue_depth=queue_depth, most_read_bytes=most_read_bytes)
    async with running(rig):
        copies = [Copy(rig, at + length + 20, at + length) for at, length, _, _ in plan.ranges]

        async def transfer(index: int) -> None:
            at, length, piece_bytes, window = plan.ranges[index]
            copy, cancel_after_s = copies[index], plan.cancel_after_s[index]
            is_whole = False
            with trio.move_on_after(cancel_after_s if cancel_after_s is not None else 1000):
                try:
                    await copy.read(at, length, piece_bytes, window)
                    is_whole = True
                except PeerUnavailable as error:
                    assert "node-7" in error.message
                    assert all(lane.is_dead for lane in copy.lanes)
                finally:
                    copy.check_over()
            if cancel_after_s is None and not all(may_die(plan, index, lane) for lane in range(len(plan.ports))):
                assert is_whole
            copy.check(at, length, is_whole=is_whole)
            for lane, link in enumerate(copy.links):
                if not link.is_closed and not may_die(plan, index, lane):
                    assert not copy.lanes[lane].is_dead
            await copy.check_quiet()
            copy.check(at, length, is_whole=False)

        with trio.fail_after(900):
            async with trio.open_nursery() as nursery:
                for fault in plan.faults:
                    nursery.start_soon(do, fault, rig, copies)
                for index in range(len(copies)):
                    nursery.start_soon(transfer, index)
        for copy in copies:
            copy.close()
        await trio.sleep(1)
    check_nothing_left(rig)


@settings(max_examples=20_000 if SOAK else 150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_no_fault_and_no_cancellation_leaves_a_wrong_byte_or_anything_behind(plan: Plan) -> None:
    trio.run(carry_out, plan, clock=trio.testing.MockClock(autojump_threshold=0))
