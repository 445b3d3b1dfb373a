"""Asks other nodes: several connections to each, several addresses of each, and one more try where one broke."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from tierfs.checksum import FileChecksum, combine
from tierfs.errors import PeerLacks, PeerRefused, PeerUnavailable, SettingsError
from tierfs.json_fields import Fields, Wrong
from tierfs.objects.bandwidth import Bandwidth
from tierfs.settings import Settings
from tierfs.transport.addresses import is_loopback, join_address, split_address
from tierfs.transport.bulk import Received
from tierfs.transport.connection import Connection, PeerStalled
from tierfs.transport.credentials import Credentials
from tierfs.transport.frames import Frame, Kind
from tierfs.transport.hello import HELLO_WITHIN_S, greet
from tierfs.transport.peers import MOST_PULL_BYTES, Offer, Pulled
from tierfs.transport.requests import Operation, Request, checksum_of, error_of, offer_of
from tierfs.transport.verbs_messages import Exported, Links, Proposal, exported_of, links_of

log = logging.getLogger("tierfs.transport")

#: An idle connection is kept for so long, less than a server keeps it.
IDLE_S = 30.0
#: An address that could not be connected to comes last for so long.
DEAD_S = 30.0
_CONNECT_WITHIN_S = 5.0
_BEATS_A_STALL = 4
_MOST_BEATS_MS = 60_000
_LOOKS_AN_IDLE = 4
#: From all nodes together, and as many urgent ones: each takes a thread and a buffer (`bulk.PIECE_BYTES`).
_MOST_RECEIVERS = 32


@dataclass
class _Idle:
    connection: Connection
    since: float


@dataclass
class _Node:
    """What this one has with another: its idle connections, the streams to it, and which address comes next."""

    streams: trio.CapacityLimiter
    urgent: trio.CapacityLimiter
    idle: list[_Idle] = field(default_factory=list)
    dead: dict[str, float] = field(default_factory=dict)
    turn: int = 0
    trouble: str = ""
    ticket: tuple[str, bytes] | None = None
    ticket_until: float = 0.0
    asking_ticket: trio.Lock = field(default_factory=trio.Lock)


class TcpPeers:
    """`Peers` (see there). `address_of` gives the addresses, HOST:PORT, that a node advertises; none: not known.

    Calls need no `run`, but idle connections are closed in time only by it, and all of them at its end.
    """

    def __init__(self, settings: Settings, node: str, address_of: Callable[[str], Sequence[str]]) -> None:
        """SettingsError where the settings contradict each other."""
        self._settings = settings.peer
        self._stall_s = settings.peer.stall_s
        self._node = node
        self._address_of = address_of
        self._credentials = Credentials(settings.cluster)
        self._bandwidth = Bandwidth(settings.peer.replicate_bytes_s)
        self._receivers = trio.CapacityLimiter(_MOST_RECEIVERS)
        self._urgent_receivers = trio.CapacityLimiter(_MOST_RECEIVERS)
        self._nodes: dict[str, _Node] = {}
        self.bytes_received = 0
        self.resumed = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        try:
            task_status.started()
            while True:
                await trio.sleep(IDLE_S / _LOOKS_AN_IDLE)
                self._close_idle(trio.current_time() - IDLE_S)
        finally:
            self._close_idle(float("inf"))

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
        if not 0 <= length <= MOST_PULL_BYTES or offset < 0:
            raise ValueError(f"a pull of {length} bytes at {offset} is none")
        known = self._known(node)
        got = Pulled(0, 0)
        resumed = False
        receivers = self._urgent_receivers if urgent else self._receivers
        async with known.urgent if urgent else known.streams, receivers:
            while True:
                rest = self._request("pull", version, offset + got.length, length - got.length, growing=growing)
                connection, is_fresh = await self._connection(node)
                received = Received()
                try:
                    length = got.length + await self._receive(connection, rest, fd, received, urgent=urgent)
                    self._keep(node, connection)
                    return _both(got, received)
                except PeerLacks:
                    self._keep(node, connection)
                    raise
                except PeerStalled:
                    self._drop_idle(known)
                    raise
                except PeerUnavailable as error:
                    got = _both(got, received)
                    if is_fresh or received.length:
                        if resumed:
                            raise
                        resumed = True
                        self.resumed += 1
                    log.debug("a pull from %s broke after %d bytes and goes on: %s", node, got.length, error.message)
                finally:
                    self.bytes_received += received.length
                    self._close_unless_kept(node, connection)

    async def fetch(self, node: str, version: str, *, most_bytes: int) -> bytes:
        most_bytes = min(most_bytes, MOST_PULL_BYTES)
        frame = await self._ask(node, self._request("fetch", version, 0, most_bytes), most_body_bytes=most_bytes)
        self.bytes_received += len(frame.body)
        return frame.body

    async def checksum(self, node: str, version: str) -> FileChecksum:
        return checksum_of(await self._ask(node, self._request("checksum", version), most_body_bytes=MOST_PULL_BYTES))

    async def verify(self, node: str, version: str) -> FileChecksum:
        return checksum_of(await self._ask(node, self._request("verify", version), most_body_bytes=MOST_PULL_BYTES))

    async def ping(self, node: str) -> float:
        asked = trio.current_time()
        await self._ask(node, self._request("ping"), most_body_bytes=0)
        return trio.current_time() - asked

    @asynccontextmanager
    async def offers(self, node: str) -> AsyncIterator[AsyncIterator[Offer]]:
        connection, _ = await self._connection(node, fresh=True)
        try:
            await connection.send(Kind.request, self._request("offers").to_head())
            await self._next(connection, Kind.answer)
            each = self._each_offer(connection, node)
            try:
                yield each
            finally:
                await each.aclose()
        finally:
            connection.close()

    async def _each_offer(self, connection: Connection, node: str) -> AsyncGenerator[Offer, None]:
        while True:
            yield offer_of((await self._next(connection, Kind.offer)).head, node)

    # --- for `VerbsPeers`

    async def dedicated(self, node: str) -> Connection:
        """A connection of its own, the caller's to close. PeerUnavailable, PeerRefused."""
        connection, _ = await self._connection(node, fresh=True)
        return connection

    async def propose(self, connection: Connection, proposals: Sequence[Proposal]) -> Links:
        """Links that belong to the connection. PeerUnavailable; PeerRefused, also by a node that knows of none."""
        request = self._request("link", links=tuple(proposals))
        await connection.send(Kind.request, request.to_head())
        return links_of((await self._next(connection, Kind.answer)).head, len(proposals))

    async def export(
        self, connection: Connection, version: str, offset: int, length: int, *, growing: bool, links: int
    ) -> Exported:
        """Where this range can be READ, by each of the connection's `links`. PeerLacks, after which the connection can
        be used; PeerUnavailable, PeerRefused."""
        request = self._request("export", version, offset, length, growing=growing)
        await connection.send(Kind.request, request.to_head())
        frame = await self._next(connection, Kind.answer)
        return exported_of(frame.head, offset=offset, length=length, links=links)

    def owed_s(self, length: int) -> float:
        """How long whoever received so many bytes, not urgent ones, has to wait by the bandwidth limit."""
        return self._bandwidth.take(length)

    def has_address(self, node: str) -> bool:
        return bool(self._address_of(node))

    # --- requests

    def trouble(self, node: str) -> str:
        """Why the last try to connect to it failed; "" where it did not, or nobody tried."""
        return self._nodes[node].trouble if node in self._nodes else ""

    def _request(
        self,
        op: Operation,
        version: str = "",
        offset: int = 0,
        length: int = 0,
        *,
        growing: bool = False,
        links: tuple[Proposal, ...] = (),
    ) -> Request:
        beat_ms = max(10, min(_MOST_BEATS_MS, int(self._stall_s * 1000 / _BEATS_A_STALL)))
        return Request(op, beat_ms, version, offset, length, growing, links)

    async def _ask(self, node: str, request: Request, *, most_body_bytes: int) -> Frame:
        """An answer in one frame. An idle connection that turns out to be dead is no failure of the node's."""
        while True:
            connection, is_fresh = await self._connection(node)
            try:
                await connection.send(Kind.request, request.to_head())
                frame = await self._next(connection, Kind.answer, most_body_bytes=most_body_bytes)
                self._keep(node, connection)
                return frame
            except PeerLacks:
                self._keep(node, connection)
                raise
            except PeerStalled:
                self._drop_idle(self._known(node))
                raise
            except PeerUnavailable:
                if is_fresh:
                    raise
            finally:
                self._close_unless_kept(node, connection)

    async def _receive(
        self, connection: Connection, request: Request, fd: int, received: Received, *, urgent: bool
    ) -> int:
        """How many bytes were announced, when all of them are in the file."""
        await connection.send(Kind.request, request.to_head())
        frame = await self._next(connection, Kind.bulk, most_bulk_bytes=request.length)
        length = frame.body_bytes
        if length < request.length and not request.growing:
            raise PeerRefused(f"{connection.who} sends {length} bytes where {request.length} were asked for")
        if length:
            bandwidth = None if urgent or not self._settings.replicate_bytes_s else self._bandwidth
            await connection.receive_file(
                fd, request.offset, length, received, bandwidth, self._settings.replicate_bytes_s
            )
        return length

    async def _next(
        self, connection: Connection, kind: Kind, *, most_body_bytes: int = 0, most_bulk_bytes: int = 0
    ) -> Frame:
        """The next frame that is no beat; what an ERROR says is raised."""
        while True:
            with trio.move_on_after(self._stall_s):
                frame = await connection.receive(most_body_bytes=most_body_bytes, most_bulk_bytes=most_bulk_bytes)
                if frame.kind is Kind.beat:
                    continue
                if frame.kind is Kind.error:
                    raise error_of(frame.head)
                if frame.kind is not kind:
                    raise PeerRefused(f"{connection.who} sent {frame.kind.name} where {kind.name} comes")
                return frame
            raise PeerStalled(f"{connection.who} sent no byte for {self._stall_s:g} s")

    # --- connections

    def _known(self, node: str) -> _Node:
        known = self._nodes.get(node)
        if known is None:
            streams = self._settings.streams
            known = self._nodes[node] = _Node(trio.CapacityLimiter(streams), trio.CapacityLimiter(streams))
        return known

    async def _connection(self, node: str, *, fresh: bool = False) -> tuple[Connection, bool]:
        """An idle one, or a new one (then True)."""
        known = self._known(node)
        while known.idle and not fresh:
            connection = known.idle.pop().connection
            if connection.is_quiet:
                return connection, False
            connection.close()
        return await self._connect(node, known), True

    def _keep(self, node: str, connection: Connection) -> None:
        if not connection.closed:
            self._known(node).idle.append(_Idle(connection, trio.current_time()))

    def _close_unless_kept(self, node: str, connection: Connection) -> None:
        if not any(each.connection is connection for each in self._known(node).idle):
            connection.close()

    def _drop_idle(self, known: _Node) -> None:
        """Where one connection is silent, those beside it are as dead, and would take as long to tell."""
        while known.idle:
            known.idle.pop().connection.close()

    def _close_idle(self, before: float) -> None:
        for node, known in list(self._nodes.items()):
            for each in [each for each in known.idle if each.since < before]:
                known.idle.remove(each)
                each.connection.close()
            in_use = known.streams.borrowed_tokens or known.urgent.borrowed_tokens
            if not known.idle and not in_use and not self._address_of(node):
                del self._nodes[node]  # it left the cluster

    async def _connect(self, node: str, known: _Node) -> Connection:
        """To the address whose turn it is; those that did not answer lately come last."""
        addresses = list(self._address_of(node))
        if not addresses:
            raise PeerUnavailable(f"no address of the node {node} is known")
        known.turn += 1
        start = known.turn % len(addresses)
        now = trio.current_time()
        in_turn = addresses[start:] + addresses[:start]
        in_turn.sort(key=lambda address: now < known.dead.get(address, 0.0))
        refused: PeerRefused | None = None
        said = []
        for address in in_turn:
            try:
                connection = await self._connect_to(node, known, address)
                known.dead.pop(address, None)
                known.trouble = ""
                return connection
            except PeerRefused as error:
                refused = error
            except (PeerUnavailable, SettingsError) as error:
                said.append(f"{address}: {error.message}")
            known.dead[address] = trio.current_time() + DEAD_S
        failure = refused or PeerUnavailable(f"the node {node} can't be reached ({'; '.join(said)})")
        known.trouble = failure.message
        raise failure

    async def _connect_to(self, node: str, known: _Node, address: str) -> Connection:
        if not self._credentials.by_ticket:
            return await self._greeted(node, address, None)
        for attempt in range(2):
            ticket = await self._ticket(node, known, address)
            try:
                return await self._greeted(node, address, ticket)
            except PeerUnavailable:
                # The other node may have been started again, and then it knows no ticket of before.
                if known.ticket is ticket:
                    known.ticket = None
                if attempt:
                    raise
        raise AssertionError

    async def _ticket(self, node: str, known: _Node, address: str) -> tuple[str, bytes]:
        async with known.asking_ticket:
            if known.ticket is None or trio.current_time() > known.ticket_until:
                connection = await self._greeted(node, address, None)
                try:
                    await connection.send(Kind.request, self._request("ticket").to_head())
                    frame = await self._next(connection, Kind.answer)
                finally:
                    connection.close()
                try:
                    fields = Fields(frame.head, "a ticket")
                    known.ticket = (fields.text("ticket"), bytes.fromhex(fields.text("key")))
                    known.ticket_until = trio.current_time() + fields.integer("for_s") / 2
                    fields.end()
                except (Wrong, ValueError) as error:
                    raise PeerRefused(f"a ticket of {node} is damaged: {error}") from None
            return known.ticket

    async def _greeted(self, node: str, address: str, ticket: tuple[str, bytes] | None) -> Connection:
        plain = await self._open(address)
        connection = Connection(plain, stall_s=self._stall_s, who=f"{node} at {address}")
        is_greeted = False
        try:
            with trio.fail_after(min(HELLO_WITHIN_S, self._stall_s)):
                await greet(connection, self._credentials, self._node, node, ticket=ticket)
            is_greeted = True
        except trio.TooSlowError:
            raise PeerUnavailable("no answer to the greeting") from None
        finally:
            if not is_greeted:
                connection.close()
        return connection

    async def _open(self, address: str) -> socket.socket:
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise PeerUnavailable(str(error)) from None
        if self._credentials.none and not is_loopback(host):
            raise PeerRefused(
                f"{join_address(host, port)} is another machine, and nothing says how to know it: set "
                "cluster.secret_file, or cluster.tls_cert, tls_key and tls_ca"
            )
        try:
            with trio.fail_after(min(_CONNECT_WITHIN_S, self._stall_s)):
                stream = await trio.open_tcp_stream(host, port)
        except trio.TooSlowError:
            raise PeerUnavailable("no connection in time") from None
        except OSError as error:
            raise PeerUnavailable(f"no connection: {error}") from None
        taken = stream.socket
        return socket.socket(taken.family, taken.type, taken.proto, fileno=taken.detach())


def _both(got: Pulled, received: Received) -> Pulled:
    return Pulled(got.length + received.length, combine(got.crc64nvme, received.crc64nvme, received.length))
