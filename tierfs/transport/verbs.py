"""Reads from other nodes by RDMA where both have it, and by TCP else: `VerbsPeers` around `TcpPeers`.

Large pulls alone go by RDMA. Whatever fails there, the same pull goes on by TCP from where it stands, and who asked is
not told: RDMA has to be quicker, and nothing else depends on it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import trio
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import FileChecksum, combine
from tierfs.errors import PeerLacks, PeerRefused, PeerUnavailable, TierfsError
from tierfs.settings import Settings
from tierfs.transport.bulk import Received, write_piece
from tierfs.transport.client import TcpPeers
from tierfs.transport.connection import PeerStalled
from tierfs.transport.peers import MOST_PULL_BYTES, Offer, Pulled
from tierfs.transport.verbs_buffers import BUFFER_BYTES, Buffer, Buffers, NoBuffer
from tierfs.transport.verbs_fabric import Fabric, OpenPort
from tierfs.transport.verbs_messages import Exported
from tierfs.transport.verbs_paths import NoPath, Path, open_path

log = logging.getLogger("tierfs.transport")

#: Smaller pulls take as long to ask for as to send.
LEAST_BYTES = 256 << 10
#: After a failure, and where the other node has no RDMA, it is tried again so much later.
RETRY_S = 60.0
#: The same after the connection was lost: the other node may only be starting again.
RETRY_LOST_S = 5.0
#: A READ takes milliseconds. Less than `peer.stall_s`, as there is another way.
STALL_S = 5.0
#: Paths and buffers that nobody uses are kept for so long, and looked at so often.
IDLE_S = 30.0
_LOOK_S = 5.0
#: A pull of 64 MiB lies in two windows of the holder's. One that gives it in more pieces than so many is refused.
_MOST_ANSWERS = 16
#: Of all nodes together, and as many urgent ones: each takes two buffers and a thread.
_MOST_PULLS = 16
#: How long an end waits for pulls that are being cancelled.
_END_WITHIN_S = 5.0

#: Why a pull went on by TCP: the other node has no RDMA; READs failed; the connection was lost; this range can't be
#: READ (a file with holes, no more memory may be registered there); no memory can be registered here.
Fallback = Literal["no_rdma", "failed", "connection", "not_given", "no_memory"]


@dataclass(eq=False)
class _Peer:
    """What is known of another node's RDMA."""

    streams: trio.CapacityLimiter
    urgent: trio.CapacityLimiter
    #: "": nobody tried yet.
    state: Literal["", "good", "none", "failed"] = ""
    reason: str = ""
    since: float = field(default_factory=time.time)
    try_at: float = 0.0
    is_trying: bool = False
    failures: int = 0
    idle: list[Path] = field(default_factory=list)
    in_use: int = 0
    #: Devices of this node whose links to it failed while others carried READs, until then.
    avoided: dict[OpenPort, float] = field(default_factory=dict)
    pulls: int = 0
    bytes: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)

    def may_try(self) -> bool:
        return self.state == "good" or (not self.is_trying and trio.current_time() >= self.try_at)

    def describe(self, *, has_devices: bool) -> dict[str, Any]:
        return {
            "transport": "verbs" if has_devices and self.state == "good" else "tcp",
            "since": self.since,
            "reason": self.reason,
            "pulls": self.pulls,
            "bytes": self.bytes,
            "fallbacks": dict(self.fallbacks),
        }


class VerbsPeers:
    """`Peers` (see there). By RDMA only while `run` runs, which runs `tcp`, too; the fabric runs around it."""

    def __init__(self, settings: Settings, tcp: TcpPeers, fabric: Fabric) -> None:
        self.tcp = tcp
        self._fabric = fabric
        self._settings = settings.peer
        self._stall_s = min(STALL_S, settings.peer.stall_s)
        self._buffers = Buffers(fabric)
        self._pulls = trio.CapacityLimiter(_MOST_PULLS)
        self._urgent_pulls = trio.CapacityLimiter(_MOST_PULLS)
        self._writers = trio.CapacityLimiter(2 * _MOST_PULLS)
        self._peers: dict[str, _Peer] = {}
        self._is_running = False
        self._in_use = 0
        self._ended = trio.Event()
        #: By RDMA alone.
        self.bytes_read = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. All that is registered and linked is given back at its end."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.tcp.run)
                self._is_running = True
                task_status.started()
                while True:
                    await trio.sleep(_LOOK_S)
                    await self._let_go(trio.current_time() - IDLE_S)
        finally:
            self._is_running = False
            with trio.CancelScope(shield=True):
                with trio.move_on_after(_END_WITHIN_S):
                    while self._in_use:
                        self._ended = trio.Event()
                        await self._ended.wait()
                self._close_paths(float("inf"))
                await self._buffers.close()

    # --- Peers

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
        pulling = _Pull(node, version, offset, length, fd, growing, urgent)
        is_fit = LEAST_BYTES <= length <= MOST_PULL_BYTES and offset >= 0
        if not is_fit or not self._is_running or not self._fabric.ports:
            return await self._by_tcp(pulling)
        peer = self._known(node)
        if not peer.may_try():
            return await self._by_tcp(pulling)
        async with peer.urgent if urgent else peer.streams, self._urgent_pulls if urgent else self._pulls:
            is_whole = peer.may_try() and await self._by_rdma(peer, pulling)
        if is_whole:
            return pulling.pulled
        try:
            return await self._by_tcp(pulling)
        except PeerLacks:
            if pulling.failed:
                peer.try_at = trio.current_time()  # its memory was withdrawn with the file
            raise
        except PeerUnavailable:
            if pulling.failed:
                peer.try_at = trio.current_time() + RETRY_LOST_S
            raise

    async def fetch(self, node: str, version: str, *, most_bytes: int) -> bytes:
        return await self.tcp.fetch(node, version, most_bytes=most_bytes)

    async def checksum(self, node: str, version: str) -> FileChecksum:
        return await self.tcp.checksum(node, version)

    async def verify(self, node: str, version: str) -> FileChecksum:
        return await self.tcp.verify(node, version)

    async def ping(self, node: str) -> float:
        return await self.tcp.ping(node)

    def offers(self, node: str) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        return self.tcp.offers(node)

    # --- telling

    @property
    def bytes_received(self) -> int:
        return self.tcp.bytes_received + self.bytes_read

    @property
    def resumed(self) -> int:
        """Pulls by TCP that broke and went on."""
        return self.tcp.resumed

    def trouble(self, node: str) -> str:
        return self.tcp.trouble(node)

    def describe(self) -> dict[str, Any]:
        """For `status --json`: by node of which large files were asked: `transport` that is used now, `since` when (s
        since 1970), the `reason` where it is not RDMA; and by RDMA: `pulls`, `bytes`, and `fallbacks` by their kind."""
        has_devices = bool(self._fabric.ports)
        return {node: peer.describe(has_devices=has_devices) for node, peer in sorted(self._peers.items())}

    # --- one pull

    async def _by_tcp(self, pulling: _Pull) -> Pulled:
        """What is missing of it."""
        done = pulling.received
        rest = await self.tcp.pull(
            pulling.node,
            pulling.version,
            pulling.offset + done.length,
            pulling.length - done.length,
            pulling.fd,
            growing=pulling.growing,
            urgent=pulling.urgent,
        )
        return Pulled(done.length + rest.length, combine(done.crc64nvme, rest.crc64nvme, rest.length))

    async def _by_rdma(self, peer: _Peer, pulling: _Pull) -> bool:
        """False: the rest of it by TCP, and it is noted why. PeerLacks; PeerUnavailable and PeerRefused where there is
        no connection to the node at all; NoRoom, OSError of the file."""
        is_trial = peer.state != "good"
        peer.is_trying = peer.is_trying or is_trial
        try:
            return await self._try(peer, pulling)
        finally:
            if is_trial:
                peer.is_trying = False

    async def _try(self, peer: _Peer, pulling: _Pull) -> bool:
        async with self._using(peer):
            failures, is_kept = peer.failures, False
            path = self._idle_path(peer)
            connection = await self.tcp.dedicated(pulling.node) if path is None else None
            try:
                if connection is not None:
                    path = await open_path(self.tcp, self._fabric, pulling.node, connection, self._ports(peer))
                assert path is not None
                is_whole = await self._receive(peer, path, pulling)
                is_kept = True
                peer.pulls += is_whole
                if failures == peer.failures:
                    self._note(peer, pulling.node, "good", "")
                return is_whole
            except PeerLacks:
                is_kept = True
                raise
            except NoPath as error:
                self._fall_back(peer, pulling, "no_rdma", str(error))
            except NoBuffer as error:
                self._fall_back(peer, pulling, "no_memory", str(error))
            except (_ReadFailed, PeerStalled, PeerRefused) as error:
                self._fall_back(peer, pulling, "failed", str(error))
            except PeerUnavailable as error:
                self._fall_back(peer, pulling, "connection", error.message)
            except (OSError, TierfsError):
                raise
            except Exception as error:  # of a device, or of a pyverbs that nobody tried
                log.exception("reading from %s by RDMA failed in a way that nobody thought of", pulling.node)
                self._fall_back(peer, pulling, "failed", f"{type(error).__name__}: {error}")
            finally:
                if path is not None:
                    self._give_back(peer, path, is_kept=is_kept)
            return False

    async def _receive(self, peer: _Peer, path: Path, pulling: _Pull) -> bool:
        """False: the other node gives a part of it by TCP only."""
        done = pulling.received
        for _ in range(_MOST_ANSWERS):
            if done.length == pulling.length:
                return True
            at, missing = pulling.offset + done.length, pulling.length - done.length
            exported = await self.tcp.export(
                path.connection, pulling.version, at, missing, growing=pulling.growing, links=len(path.ways)
            )
            if exported.reason:
                peer.fallbacks["not_given"] += 1
                log.debug("%s gives %s by TCP: %s", pulling.node, pulling.version, exported.reason)
                return False
            if not exported.length and not pulling.growing:
                raise PeerRefused(f"{pulling.node} gives nothing of {pulling.version} at {at}")
            if exported.length:
                await self._read(peer, path, exported, pulling)
            if pulling.growing and (not exported.length or at + exported.length >= exported.size_bytes):
                return True
        if done.length < pulling.length:
            raise PeerRefused(f"{pulling.node} gives {pulling.version} in pieces that are too small")
        return True

    async def _read(self, peer: _Peer, path: Path, exported: Exported, pulling: _Pull) -> None:
        """One buffer is READ into while the other one is written from."""
        ports = path.usable_ports
        buffers: list[Buffer] = []
        try:
            for _ in range(min(2, -(-exported.length // BUFFER_BYTES))):
                buffers.append(await self._buffers.take(ports))
            at, turn = 0, 0
            full: Callable[[], Awaitable[None]] | None = None
            while full is not None or at < exported.length:
                jobs = [full] if full is not None else []
                full = None
                length = min(BUFFER_BYTES, exported.length - at)
                if length:
                    buffer = buffers[turn % len(buffers)]
                    jobs.append(partial(self._fill, path, buffer, exported, at, length))
                    full = partial(self._write, peer, buffer, length, pulling)
                await _together(jobs)
                at, turn = at + length, turn + 1
        finally:
            for buffer in buffers:
                self._buffers.give_back(buffer)

    async def _fill(self, path: Path, buffer: Buffer, exported: Exported, at: int, length: int) -> None:
        try:
            await path.read(buffer, exported, at, length, stall_s=self._stall_s)
        except (PeerUnavailable, PeerRefused) as error:
            raise _ReadFailed(error.message) from error

    async def _write(self, peer: _Peer, buffer: Buffer, length: int, pulling: _Pull) -> None:
        def write() -> None:
            done = pulling.received
            checksum = int(crc64nvme(buffer.view[:length], done.crc64nvme))
            write_piece(pulling.fd, buffer.view[:length], pulling.offset + done.length)
            done.length, done.crc64nvme = done.length + length, checksum

        await trio.to_thread.run_sync(write, limiter=self._writers)
        peer.bytes += length
        self.bytes_read += length
        if self._settings.replicate_bytes_s and not pulling.urgent:
            await trio.sleep(self.tcp.owed_s(length))

    # --- paths

    def _known(self, node: str) -> _Peer:
        known = self._peers.get(node)
        if known is None:
            streams = self._settings.streams
            known = self._peers[node] = _Peer(trio.CapacityLimiter(streams), trio.CapacityLimiter(streams))
        return known

    def _idle_path(self, peer: _Peer) -> Path | None:
        """Nobody else's until `_give_back`."""
        ports = self._ports(peer)
        while peer.idle:
            path = peer.idle.pop()
            if path.is_whole and path.ports == ports and path.connection.is_quiet:
                return path
            path.close()
        return None

    def _ports(self, peer: _Peer) -> tuple[OpenPort, ...]:
        now = trio.current_time()
        peer.avoided = {port: until for port, until in peer.avoided.items() if until > now and not port.gone}
        ports = self._fabric.ports
        return tuple(port for port in ports if port not in peer.avoided) or ports

    def _give_back(self, peer: _Peer, path: Path, *, is_kept: bool) -> None:
        if is_kept:
            # The others carried it; one that never comes through would cost each pull a time-out.
            until = trio.current_time() + RETRY_S
            peer.avoided.update({way.port: until for way in path.ways if way.is_connected and not way.is_usable})
        if is_kept and path.is_whole and self._is_running and not path.connection.closed:
            path.idle_since = trio.current_time()
            peer.idle.append(path)
        else:
            path.close()

    @asynccontextmanager
    async def _using(self, peer: _Peer) -> AsyncIterator[None]:
        self._in_use += 1
        peer.in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            peer.in_use -= 1
            if not self._in_use:
                self._ended.set()

    async def _let_go(self, idle_before: float) -> None:
        self._close_paths(idle_before)
        for node, peer in list(self._peers.items()):
            waiting = peer.streams.borrowed_tokens or peer.urgent.borrowed_tokens
            if not peer.idle and not peer.in_use and not waiting and not self.tcp.has_address(node):
                del self._peers[node]  # it left the cluster
        await self._buffers.let_go(idle_before)

    def _close_paths(self, idle_before: float) -> None:
        for peer in self._peers.values():
            for path in [each for each in peer.idle if each.idle_since < idle_before or not each.is_whole]:
                peer.idle.remove(path)
                path.close()

    # --- what is known

    def _fall_back(self, peer: _Peer, pulling: _Pull, kind: Fallback, reason: str) -> None:
        peer.fallbacks[kind] += 1
        pulling.failed = kind == "failed"
        peer.failures += 1
        again_in_s = RETRY_LOST_S if kind == "connection" else RETRY_S
        peer.try_at = trio.current_time() + again_in_s
        self._note(peer, pulling.node, "none" if kind == "no_rdma" else "failed", reason)

    def _note(self, peer: _Peer, node: str, state: Literal["good", "none", "failed"], reason: str) -> None:
        """Told once for each change."""
        is_new = peer.state != state
        peer.reason = reason
        if not is_new:
            return
        peer.state, peer.since = state, time.time()
        if state == "good":
            log.info("files of %s come by RDMA", node)
        else:
            level = logging.WARNING if state == "failed" else logging.INFO
            log.log(level, "files of %s come by TCP, and RDMA is tried again later: %s", node, reason)


class _ReadFailed(Exception):
    """The message says why."""


@dataclass(eq=False)
class _Pull:
    """What was asked for, and what is in the file."""

    node: str
    version: str
    offset: int
    length: int
    fd: int
    growing: bool
    urgent: bool
    received: Received = field(default_factory=Received)
    #: A READ failed.
    failed: bool = False

    @property
    def pulled(self) -> Pulled:
        return Pulled(self.received.length, self.received.crc64nvme)


async def _together(jobs: list[Callable[[], Awaitable[None]]]) -> None:
    """All of them to their end, also where one fails; then the first one's failure, as it is."""
    failures: dict[int, Exception] = {}

    async def finish(index: int, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception as error:
            failures[index] = error

    async with trio.open_nursery() as nursery:
        for index, job in enumerate(jobs):
            nursery.start_soon(finish, index, job)
    for index in sorted(failures):
        raise failures[index]
