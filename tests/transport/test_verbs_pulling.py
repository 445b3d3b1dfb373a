"""Pulls by RDMA between two nodes, over ports without a device that are as unkind as devices may be: whatever fails
and when, the bytes are right, nobody waits long, and nothing stays registered or linked.

Run it longer with TIERFS_SOAK=1.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rig.tcp_proxy import TcpProxy
from tests.unit.verbs_double import DoubleLink, DoublePort
from tierfs.checksum import checksum_fd
from tierfs.errors import NoRoom, PeerLacks, PeerUnavailable
from tierfs.settings import Settings
from tierfs.transport import client, verbs, verbs_fabric, verbs_serving
from tierfs.transport.peers import MOST_PULL_BYTES, Pulled
from tierfs.transport.verbs_messages import Exported
from tierfs.transport.verbs_port import Kind
from transport.nodes import (
    ASKER,
    HOLDER,
    FolderShelf,
    Rdma,
    RdmaPair,
    port_of,
    rdma_pair,
    until,
    usual_settings,
)

MIB = 1 << 20
SOAK = os.environ.get("TIERFS_SOAK") == "1"
KINDS: tuple[Kind, ...] = ("rc", "srd")
both_kinds = pytest.mark.parametrize("kind", KINDS)


def crc(data: bytes) -> int:
    from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

    return int(crc64nvme(data))


def told(both: RdmaPair) -> dict[str, Any]:
    found: dict[str, Any] = both.peers.describe()[HOLDER]
    return found


async def pull_all(both: RdmaPair, version: str, data: bytes, target: int, **how: bool) -> None:
    got = await both.peers.pull(HOLDER, version, 0, len(data), target, **how)
    assert got == Pulled(len(data), crc(data))
    assert os.pread(target, len(data), 0) == data


@asynccontextmanager
async def begun(both: RdmaPair, pull: Callable[[], Awaitable[None]], target: int) -> AsyncIterator[None]:
    """Some bytes are in the file, and the pull still goes on; at the end it has succeeded."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pull)
        await until(lambda: both.peers.bytes_read > 0, "it has begun")
        yield


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps, so that there is a middle of a pull."""
    monkeypatch.setattr(verbs, "BUFFER_BYTES", 256 << 10)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "_LOOK_S", 0.05)
    monkeypatch.setattr(verbs_fabric, "LOOK_EVERY_S", 0.05)


@both_kinds
async def test_large_pulls_come_by_rdma_and_all_else_by_tcp(
    settings: Settings, shelf: FolderShelf, target: int, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(4)
    data = dice.randbytes(70 * MIB + 17)
    version, small = shelf.add(data), shelf.add(b"a marker")
    rdma = Rdma(1, [kind, kind], [kind, kind, kind])
    async with rdma_pair(shelf, settings, rdma) as both:
        assert await both.peers.fetch(HOLDER, small, most_bytes=64) == b"a marker"
        assert await both.peers.ping(HOLDER) < 5
        with shelf.path(version).open("rb") as file:
            assert await both.peers.checksum(HOLDER, version) == checksum_fd(file.fileno())
        assert both.peers.describe() == {}
        asked = 0
        for _ in range(8):
            offset = dice.randrange(len(data) - MIB)
            length = dice.randrange(MIB, min(MOST_PULL_BYTES, len(data) - offset) + 1)
            asked += length
            got = await both.peers.pull(HOLDER, version, offset, length, target)
            assert got == Pulled(length, crc(data[offset : offset + length]))
            assert os.pread(target, length, offset) == data[offset : offset + length]
        before = both.peers.tcp.bytes_received
        got = await both.peers.pull(HOLDER, version, 5, verbs.LEAST_BYTES - 1, target)
        assert got.length == verbs.LEAST_BYTES - 1 == both.peers.tcp.bytes_received - before
        assert told(both) == {
            "transport": "verbs", "since": told(both)["since"], "reason": "",
            "pulls": 8, "bytes": asked, "fallbacks": {},
        }  # fmt: skip
        assert both.peers.bytes_read == asked
        assert both.server.connections == 2, "one path, used again and again, beside TCP's"
        assert all(rdma.port(f"{ASKER}{number}").posted_reads for number in range(3))
        with pytest.raises(PeerLacks):
            await both.peers.pull(HOLDER, f"{HOLDER}/ab", 0, MIB, target)
        with pytest.raises(PeerLacks, match="too few"):
            await both.peers.pull(HOLDER, version, len(data) - MIB, 2 * MIB, target)
        with pytest.raises(ValueError, match="is none"):
            await both.peers.pull(HOLDER, version, 0, MOST_PULL_BYTES + 1, target)
        assert both.server.connections == 2 and told(both)["transport"] == "verbs", "what lacks is no failure"
    assert [each.levelname for each in caplog.records if "come by RDMA" in each.message] in ([], ["INFO"])


@given(
    seed=st.integers(0, 1 << 30),
    holder=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    asker=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    faults=st.lists(st.sampled_from(["break", "stall", "unplug", "close", "device here", "device there"]), max_size=3),
    streams=st.integers(1, 3),
)
@hypothesis.settings(
    max_examples=200 if SOAK else 12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_fails_and_when_the_bytes_are_right(
    seed: int, holder: list[Kind], asker: list[Kind], faults: list[str], streams: int, slow: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(verbs, "RETRY_S", 0.1)
    monkeypatch.setattr(verbs, "RETRY_LOST_S", 0.05)
    monkeypatch.setattr(verbs, "STALL_S", 0.3)
    with tempfile.TemporaryDirectory() as directory:
        trio.run(_pulls_with_faults, seed, holder, asker, faults, streams, Path(directory))


async def _pulls_with_faults(
    seed: int, holder: list[Kind], asker: list[Kind], faults: list[str], streams: int, directory: Path
) -> None:
    dice = random.Random(seed)
    secret = directory / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    secret.chmod(0o600)
    (directory / "shelf").mkdir()
    shelf, settings = FolderShelf(directory / "shelf"), usual_settings(secret)
    settings.peer.streams = streams
    data = dice.randbytes(6 * MIB + 5)
    version = shelf.add(data)
    target = os.open(directory / "target", os.O_RDWR | os.O_CREAT)
    rdma = Rdma(seed, holder, asker, slowest_s=0.005)
    try:
        async with rdma_pair(shelf, settings, rdma, within_s=60) as both:
            with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
                both.addresses[:] = [proxy.address]
                async with trio.open_nursery() as nursery:
                    for offset in range(0, len(data), 2 * MIB):
                        length = min(2 * MIB, len(data) - offset)
                        nursery.start_soon(_pull_part, both, version, data, offset, length, target)
                    for fault in faults:
                        await trio.sleep(dice.random() * 0.1)
                        await _strike(fault, rdma, both, proxy, dice)
                assert os.pread(target, len(data), 0) == data
    finally:
        os.close(target)


async def _pull_part(both: RdmaPair, version: str, data: bytes, offset: int, length: int, target: int) -> None:
    for attempt in range(5):
        try:
            got = await both.peers.pull(HOLDER, version, offset, length, target, urgent=offset % 3 == 0)
        except PeerUnavailable:  # each fault that cuts TCP may be a failure to the caller
            assert attempt < 4
            continue
        assert got == Pulled(length, crc(data[offset : offset + length]))
        return


async def _strike(fault: str, rdma: Rdma, both: RdmaPair, proxy: TcpProxy, dice: random.Random) -> None:
    links = rdma.links_of(dice.choice([HOLDER, ASKER]))
    match fault:
        case "break" if links:
            dice.choice(links).break_down()
        case "stall" if links:
            dice.choice(links).stall()
        case "close" if links:
            for session in list(both.serving._sessions):
                session.close()
        case "unplug":
            await trio.to_thread.run_sync(proxy.cut)
        case "device here" | "device there":
            node = ASKER if fault.endswith("here") else HOLDER
            ports = [each for each in rdma.opened if each.gid.startswith(node) and not each.is_closed]
            if ports:
                dice.choice(ports).remove()


async def test_a_growing_file_gives_what_it_has(settings: Settings, shelf: FolderShelf, target: int) -> None:
    data = random.Random(3).randbytes(3 * MIB + 17)
    version = shelf.add(data[: 2 * MIB + 5])
    shelf.growing.add(version)
    async with rdma_pair(shelf, settings, Rdma(1, ["srd"], ["srd"])) as both:
        with pytest.raises(PeerLacks):
            await both.peers.pull(HOLDER, version, 0, MIB, target)
        got = await both.peers.pull(HOLDER, version, 0, 8 * MIB, target, growing=True)
        assert got == Pulled(2 * MIB + 5, crc(data[: 2 * MIB + 5]))
        assert (await both.peers.pull(HOLDER, version, got.length, MIB, target, growing=True)).length == 0
        with shelf.path(version).open("ab") as file:
            file.write(data[got.length :])
        more = await both.peers.pull(HOLDER, version, got.length, 8 * MIB, target, growing=True)
        assert more == Pulled(len(data) - got.length, crc(data[got.length :]))
        assert os.pread(target, len(data), 0) == data
        assert told(both)["bytes"] == len(data) and told(both)["fallbacks"] == {}


@pytest.mark.parametrize(("there", "why"), [([], "no RDMA device"), (["rc"], "kind")])
async def test_a_node_without_a_fitting_device_is_asked_by_tcp_and_tried_again(
    settings: Settings, shelf: FolderShelf, target: int, there: list[Kind], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "RETRY_S", 0.3)
    data = random.Random(3).randbytes(2 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, there, ["srd"])
    async with rdma_pair(shelf, settings, rdma) as both:
        for _ in range(3):
            await pull_all(both, version, data, target)
        assert told(both)["transport"] == "tcp" and why in told(both)["reason"]
        assert told(both)["fallbacks"] == {"no_rdma": 1} and both.peers.bytes_read == 0, "it is not asked each time"
        rdma.plugged[HOLDER] = {"holder7": "srd"}
        if there:
            rdma.port("holder0").remove()

        async def comes_by_rdma() -> bool:
            await pull_all(both, version, data, target)
            return both.peers.bytes_read > 0

        deadline = time.monotonic() + 5
        while not await comes_by_rdma():
            assert time.monotonic() < deadline
            await trio.sleep(0.02)
        assert told(both)["transport"] == "verbs" and told(both)["reason"] == ""


async def test_a_node_of_before_there_was_rdma_is_asked_by_tcp(
    settings: Settings, shelf: FolderShelf, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfs.transport.requests._OPERATIONS", ("pull", "fetch", "checksum", "verify", "ping"))
    data = random.Random(3).randbytes(2 * MIB)
    version = shelf.add(data)
    async with rdma_pair(shelf, settings, Rdma(1, ["rc"], ["rc"])) as both:
        for _ in range(2):
            await pull_all(both, version, data, target)
        assert "nobody can be asked to 'link'" in told(both)["reason"] and told(both)["fallbacks"] == {"no_rdma": 1}


@both_kinds
async def test_what_fails_or_stalls_goes_on_by_tcp_and_rdma_is_tried_again_later(
    settings: Settings, shelf: FolderShelf, target: int, kind: Kind, slow: None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(verbs, "RETRY_S", 0.5)
    monkeypatch.setattr(verbs, "STALL_S", 0.5)
    data = random.Random(3).randbytes(16 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, [kind, kind], [kind, kind], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:
        for round_, harm in enumerate((DoubleLink.break_down, DoubleLink.stall), start=1):
            before = both.peers.bytes_read
            async with begun(both, partial(pull_all, both, version, data, target), target):
                await until(lambda before=before: both.peers.bytes_read > before, "it has begun")  # type: ignore[misc]
                for link in rdma.links_of(ASKER):
                    harm(link)
                began = time.monotonic()
            assert time.monotonic() - began < 4
            assert before < both.peers.bytes_read < before + len(data), "what was there is not fetched again"
            assert told(both)["fallbacks"] == {"failed": round_} and told(both)["transport"] == "tcp"
            assert told(both)["reason"]
            await pull_all(both, version, data, target)
            assert told(both)["fallbacks"] == {"failed": round_}, "not before its time"
            await trio.sleep(0.5)
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(pull_all, both, version, data, target)
            assert told(both)["transport"] == "verbs" and told(both)["pulls"] >= 1
    assert len([each for each in caplog.records if each.levelname == "WARNING" and "come by TCP" in each.message]) == 2


async def test_a_link_that_never_carries_anything_is_not_used_again_where_others_do(
    settings: Settings, shelf: FolderShelf, target: int, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "STALL_S", 0.5)
    data = random.Random(3).randbytes(16 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["rc", "rc"], ["rc", "rc"], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:
        async with begun(both, partial(pull_all, both, version, data, target), target):
            next(each for each in rdma.links_of(ASKER) if each.port.gid == f"{ASKER}1").stall()
        assert told(both)["transport"] == "verbs" and told(both)["fallbacks"] == {}
        posted = rdma.port(f"{ASKER}1").posted_reads
        began = time.monotonic()
        await pull_all(both, version, data, target)
        assert told(both)["pulls"] == 2 and rdma.port(f"{ASKER}1").posted_reads == posted
        assert len(rdma.links_of(ASKER)) == 1 and time.monotonic() - began < 5


@pytest.mark.parametrize("node", [HOLDER, ASKER])
async def test_a_device_that_goes_costs_no_pull_and_comes_back(
    settings: Settings, shelf: FolderShelf, target: int, slow: None, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "RETRY_S", 0.3)
    monkeypatch.setattr(verbs_serving, "LOOK_EVERY_S", 0.05)
    data = random.Random(3).randbytes(16 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["srd", "srd"], ["srd", "srd"], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:
        async with begun(both, partial(pull_all, both, version, data, target), target):
            rdma.port(f"{node}0").remove()
        assert told(both)["fallbacks"] == {} and told(both)["pulls"] == 1, "the other one carried it"
        plugged, rdma.plugged[node] = rdma.plugged[node], {}
        before = both.peers.bytes_read
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull_all, both, version, data, target)
            await until(lambda: both.peers.bytes_read > before, "it has begun")
            for port in rdma.opened:
                if port.gid.startswith(node) and not port.is_closed:
                    port.remove()
        assert told(both)["transport"] == "tcp"
        await until(lambda: all(each.is_closed for each in rdma.opened if each.gid.startswith(node)), "they are closed")
        await pull_all(both, version, data, target)
        rdma.plugged[node] = plugged
        deadline = time.monotonic() + 8
        while told(both)["transport"] != "verbs":
            assert time.monotonic() < deadline, told(both)
            await pull_all(both, version, data, target)


async def test_a_lost_connection_costs_no_pull(
    settings: Settings, shelf: FolderShelf, target: int, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "RETRY_S", 0.3)
    data = random.Random(3).randbytes(16 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["srd"], ["srd"], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:
        with TcpProxy(("127.0.0.1", port_of(both.addresses[0]))) as proxy:
            both.addresses[:] = [proxy.address]
            async with begun(both, partial(pull_all, both, version, data, target), target):
                await trio.to_thread.run_sync(proxy.cut)  # the holder closes its ends
            await until(lambda: not rdma.links_of(ASKER) and not rdma.links_of(HOLDER), "both ends are closed")
            await trio.sleep(0.3)
            await pull_all(both, version, data, target)
            assert told(both)["transport"] == "verbs"
            await trio.to_thread.run_sync(proxy.cut)
            failed = told(both)["fallbacks"]
            await pull_all(both, version, data, target)
            assert told(both)["fallbacks"] == failed, "a path that died while it was idle is no failure"


async def test_a_file_that_goes_in_the_middle_is_lacking_and_no_failure(
    settings: Settings, shelf: FolderShelf, target: int, slow: None
) -> None:
    data = random.Random(3).randbytes(16 * MIB)
    version, other = shelf.add(data), shelf.add(data)
    rdma = Rdma(1, ["rc"], ["rc"], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:

        async def lacks() -> None:
            with pytest.raises(PeerLacks):
                await both.peers.pull(HOLDER, version, 0, len(data), target)

        async with begun(both, lacks, target):
            path = shelf.path(version)
            ino = path.stat().st_ino
            hidden = path.rename(path.with_name("aside"))
            await both.serving.exports.fence(ino)
            os.truncate(hidden, 5)
        before = both.peers.bytes_read
        await pull_all(both, other, data, target)
        assert told(both)["transport"] == "verbs" and both.peers.bytes_read == before + len(data)


async def test_a_cancelled_pull_leaves_nothing_behind(
    settings: Settings, shelf: FolderShelf, target: int, slow: None
) -> None:
    data = random.Random(3).randbytes(16 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["srd"], ["srd"], slowest_s=0.02)
    async with rdma_pair(shelf, settings, rdma) as both:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.peers.pull, HOLDER, version, 0, len(data), target)
            await until(lambda: both.peers.bytes_read > 0, "it has begun")
            nursery.cancel_scope.cancel()
        assert not rdma.links_of(ASKER) and not rdma.fabric.outstanding
        await until(lambda: not rdma.links_of(HOLDER), "the holder noticed")
        await pull_all(both, version, data, target)
        assert told(both) | {"since": 0, "bytes": 0} == {
            "transport": "verbs", "since": 0, "reason": "", "pulls": 1, "bytes": 0, "fallbacks": {},
        }  # fmt: skip


async def test_paths_and_buffers_that_nobody_uses_are_given_back(
    settings: Settings, shelf: FolderShelf, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "IDLE_S", 0.2)
    monkeypatch.setattr(client, "IDLE_S", 0.2)
    data = random.Random(3).randbytes(9 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["srd"], ["srd"])
    async with rdma_pair(shelf, settings, rdma) as both:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(pull_all, both, version, data, target)
        mine = rdma.port(f"{ASKER}0")
        await until(
            lambda: not [each for each in rdma.fabric.regions.values() if each.is_open and each.port is mine],
            "nothing is registered any more",
        )
        await until(lambda: rdma.fabric.open_links == 0 and not both.server.connections, "nor connected")
        await pull_all(both, version, data, target)
        assert told(both)["transport"] == "verbs" and told(both)["fallbacks"] == {}


async def test_what_can_not_be_read_comes_by_tcp_without_a_failure(
    settings: Settings, shelf: FolderShelf, target: int
) -> None:
    data = random.Random(3).randbytes(4 * MIB) + bytes(4 * MIB)
    version, whole = shelf.add(data[: 4 * MIB]), shelf.add(data)
    os.truncate(shelf.path(version), len(data))  # from 4 MiB on it is a hole
    rdma = Rdma(1, ["srd"], ["srd"])
    async with rdma_pair(shelf, settings, rdma) as both:
        await pull_all(both, version, data, target)
        assert told(both)["transport"] == "verbs" and told(both)["fallbacks"] == {"not_given": 1}
        await pull_all(both, whole, data, target)
        assert told(both)["pulls"] == 1
    rdma = Rdma(1, ["srd"], ["srd"])
    async with rdma_pair(shelf, settings, rdma) as both:
        for port in rdma.opened:
            port.most_bytes = 0 if port.gid.startswith(ASKER) else port.most_bytes
        await pull_all(both, whole, data, target)
        assert told(both)["transport"] == "tcp" and "no room" in told(both)["reason"]
        assert told(both)["fallbacks"] == {"no_memory": 1}


@pytest.mark.parametrize(
    ("growing", "size_bytes", "given"), [(True, 1 << 40, 0), (False, 1 << 40, 0), (False, 1 << 40, 7)]
)
async def test_a_holder_that_gives_nothing_or_drop_by_drop_is_not_asked_for_ever(
    settings: Settings, shelf: FolderShelf, target: int, growing: bool, size_bytes: int, given: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    data = random.Random(3).randbytes(MIB)
    version = shelf.add(data)
    export = verbs_serving.VerbsSession.export

    async def lie(
        session: verbs_serving.VerbsSession, version: str, offset: int, length: int, *, growing: bool
    ) -> Exported:
        exported = await export(session, version, offset, length, growing=growing)
        return replace(exported, size_bytes=size_bytes, length=given)

    monkeypatch.setattr(verbs_serving.VerbsSession, "export", lie)
    async with rdma_pair(shelf, settings, Rdma(1, ["rc"], ["rc"])) as both:
        if growing:
            assert await both.peers.pull(HOLDER, version, 0, MIB, target, growing=True) == Pulled(0, 0)
        else:
            await pull_all(both, version, data, target)
            assert told(both)["fallbacks"] == {"failed": 1}


@pytest.mark.parametrize("node", [HOLDER, ASKER])
@pytest.mark.parametrize("what", ["link", "connect", "read", "register", "completions"])
async def test_a_device_that_fails_as_nobody_thought_of_costs_no_pull(
    settings: Settings, shelf: FolderShelf, target: int, node: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(3).randbytes(2 * MIB)
    version = shelf.add(data)
    whose = DoubleLink if what in ("connect", "read") else DoublePort
    taken = getattr(whose, what)
    is_broken = False

    def fail(device: Any, *args: Any, **how: Any) -> Any:
        port = device.port if isinstance(device, DoubleLink) else device
        if is_broken and port.gid.startswith(node):
            raise TypeError("of another pyverbs")
        return taken(device, *args, **how)

    monkeypatch.setattr(whose, what, fail)
    async with rdma_pair(shelf, settings, Rdma(1, ["srd"], ["srd"])) as both:
        is_broken = True
        await pull_all(both, version, data, target)
        is_broken = False


async def test_what_fails_each_time_is_told_once(
    settings: Settings, shelf: FolderShelf, target: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = random.Random(3).randbytes(9 * MIB)
    version = shelf.add(data)
    rdma = Rdma(1, ["srd", "srd"], ["srd", "srd"])
    async with rdma_pair(shelf, settings, rdma) as both:
        for port in rdma.opened:
            if port.gid == f"{ASKER}0":
                port.most_bytes = 0
        for _ in range(3):
            await pull_all(both, version, data, target)
        assert told(both)["fallbacks"] == {} and told(both)["pulls"] == 3
    assert len([each for each in caplog.records if "no memory to READ into" in each.message]) == 1


async def test_no_room_here_is_told_and_no_failure_of_the_other_node(settings: Settings, shelf: FolderShelf) -> None:
    version = shelf.add(random.Random(3).randbytes(9 * MIB))
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        async with rdma_pair(shelf, settings, Rdma(1, ["rc"], ["rc"])) as both:
            with pytest.raises(NoRoom):
                await both.peers.pull(HOLDER, version, 0, 9 * MIB, full)
            assert told(both)["fallbacks"] == {}
    finally:
        os.close(full)


async def test_only_pulls_that_are_not_urgent_are_held_back(
    settings: Settings, shelf: FolderShelf, target: int, slow: None
) -> None:
    settings.peer.replicate_bytes_s = 4 * MIB
    data = random.Random(3).randbytes(3 * MIB)
    version = shelf.add(data)
    async with rdma_pair(shelf, settings, Rdma(1, ["srd"], ["srd"])) as both:
        await pull_all(both, version, data, target, urgent=True)  # nobody tries in parallel before it worked once
        began = time.monotonic()
        urgent_took = 0.0
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(pull_all, both, version, data, target)
            await until(lambda: both.peers.bytes_read > len(data), "they have begun")
            started = time.monotonic()
            await pull_all(both, version, data, target, urgent=True)
            urgent_took = time.monotonic() - started
        assert 6 / 4 * 0.7 < time.monotonic() - began < 6 / 4 * 3
        assert urgent_took < 0.9 and told(both)["pulls"] == 4
