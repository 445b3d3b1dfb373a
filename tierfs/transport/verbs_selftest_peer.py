"""The RDMA self-test between two machines: the holder's side served over a connection, and asked over one.

    about                    -> what this side is, for the report, and how large memory may be
    link    first, links     -> its ends (`tierfs.transport.verbs_messages`)
    hold    size_bytes       -> where its memory lies, and digests
    let_go                   -> the memory can't be READ any more

A connection begins as any between nodes, with the cluster's credentials. Nothing of the file system can be reached by
it: what is READ is random bytes.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from tierfs.errors import PeerError, PeerRefused, PeerUnavailable
from tierfs.json_fields import Fields, Wrong
from tierfs.settings import Settings
from tierfs.transport.addresses import is_loopback, join_address, split_address
from tierfs.transport.connection import Connection
from tierfs.transport.credentials import Credentials, Tickets
from tierfs.transport.frames import Frame, Kind, decode_json
from tierfs.transport.hello import HELLO_WITHIN_S, greet, welcome
from tierfs.transport.requests import error_head, error_of
from tierfs.transport.server import where_to_listen
from tierfs.transport.verbs_messages import Links, Proposal, links_head, links_of, proposals_head, proposals_of
from tierfs.transport.verbs_port import Port, Remote
from tierfs.transport.verbs_selftest_holder import MIDDLE_BYTES, Held, Holding

log = logging.getLogger("tierfs.transport")

#: What the two sides call themselves where the setting `node` says nothing else.
HOLDER_NODE = "verbs-selftest"
ASKER_NODE = "verbs-selftest-asker"
DEFAULT_LISTEN = ":7127"
_CONNECT_WITHIN_S = 10.0
#: Filling, summing up and registering 1 GiB takes some seconds.
_ANSWER_WITHIN_S = 120.0
#: An asker that asks nothing for so long is gone; its own work between two requests is reading a large memory once.
_IDLE_S = 300.0
_MOST_ABOUT_BYTES = 1 << 20


# --- holding


class SelfTestServer:
    """Lets one asker at a time test; `about` is what it is told of this side. SettingsError where the settings
    contradict each other."""

    def __init__(
        self,
        settings: Settings,
        ports: Sequence[Port],
        *,
        about: Mapping[str, Any],
        most_bytes: int,
        threads: trio.CapacityLimiter,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        """It listens at `cluster.listen`; the ports stay the caller's. `told` is told who comes and goes."""
        self.node = settings.node or HOLDER_NODE
        self._credentials = Credentials(settings.cluster)
        self._where = where_to_listen(settings, self._credentials)
        self._stall_s = settings.peer.stall_s
        self._ports = ports
        self._about = {**about, "most_bytes": most_bytes}
        self._most_bytes = most_bytes
        self._threads = threads
        self._told = told
        self._busy = trio.Lock()
        self._listeners: list[trio.SocketListener] = []
        self.addresses: tuple[str, ...] = ()
        """HOST:PORT; known once it listens."""
        #: Askers whose connection was let in and has ended.
        self.served = 0
        self.changed = trio.Event()

    async def listen(self) -> None:
        """Before `run`. OSError where it can't."""
        for host, port in self._where:
            self._listeners += await trio.open_tcp_listeners(port, host=host or None)
        self.addresses = tuple(join_address(*each.socket.getsockname()[:2]) for each in self._listeners)

    async def run(self) -> None:
        """Until cancelled."""
        await trio.serve_listeners(self._serve, self._listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        plain = _plain_socket(stream)
        connection = Connection(plain, stall_s=self._stall_s, who=_name_of(plain))
        try:
            with trio.fail_after(HELLO_WITHIN_S):
                node = await welcome(connection, self._credentials, self.node, Tickets())
            who = f"{node} at {connection.who}"
            try:
                self._busy.acquire_nowait()
            except trio.WouldBlock:
                raise PeerUnavailable("another node is being tested with: try again") from None
            try:
                self._told(f"{who} tests")
                await self._answer_all(connection)
            finally:
                self._busy.release()
                self.served += 1
                changed, self.changed = self.changed, trio.Event()
                changed.set()
        except PeerError as error:
            self._told(f"{connection.who}: {error.message}")
            with trio.move_on_after(1):
                await _tell(connection, error)
        except trio.TooSlowError:
            self._told(f"{connection.who} said nothing in time")
        finally:
            connection.close()

    async def _answer_all(self, connection: Connection) -> None:
        """Until the other side ends the connection (PeerUnavailable), or asks for what can't be."""
        holding = Holding(self._ports, self._threads)
        try:
            while True:
                with trio.fail_after(_IDLE_S):
                    frame = await connection.receive()
                try:
                    head, body = await self._answer(holding, frame)
                except PeerRefused:
                    raise
                except PeerError as error:
                    await connection.send(Kind.error, error_head(error))
                else:
                    await connection.send(Kind.answer, head, body)
        finally:
            holding.close()

    async def _answer(self, holding: Holding, frame: Frame) -> tuple[dict[str, Any], bytes]:
        if frame.kind is not Kind.request:
            raise PeerRefused(f"a request was expected, and {frame.kind.name} came")
        try:
            fields = Fields(frame.head, "a request")
            match fields.text("op"):
                case "about":
                    fields.end()
                    return {}, json.dumps(self._about).encode()
                case "link":
                    first, proposals = fields.integer("first"), proposals_of(fields.any("links"))
                    fields.end()
                    return links_head(await holding.link(first, proposals)), b""
                case "hold":
                    size_bytes = fields.integer("size_bytes", least=MIDDLE_BYTES)
                    fields.end()
                    if size_bytes > self._most_bytes or size_bytes % MIDDLE_BYTES:
                        raise Wrong(f"{size_bytes} bytes are not whole MiB, up to {self._most_bytes}")
                    return _held_head(await holding.hold(size_bytes)), b""
                case "let_go":
                    fields.end()
                    await holding.let_go()
                    return {}, b""
                case other:
                    raise Wrong(f"nobody can be asked to {other[:40]!r}")
        except Wrong as error:
            raise PeerRefused(f"a request is damaged: {error}") from None


# --- asking


class RemoteHolder:
    """`Holder` (`tierfs.transport.verbs_selftest_holder`) at the other end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._links = 0
        self.about: dict[str, Any] = {}
        """What the other side told of itself."""
        self.most_bytes = 0

    async def ask_about(self) -> None:
        frame = await self._ask({"op": "about"}, most_body_bytes=_MOST_ABOUT_BYTES)
        about = decode_json(frame.body)
        most_bytes = about.pop("most_bytes", 0)
        if type(most_bytes) is not int or most_bytes < MIDDLE_BYTES:
            raise PeerRefused("what the other side says of itself is damaged")
        self.about, self.most_bytes = about, most_bytes

    async def link(self, first: int, proposals: Sequence[Proposal]) -> Links:
        frame = await self._ask({"op": "link", "first": first, "links": proposals_head(proposals)})
        self._links = len(proposals)
        return links_of(frame.head, len(proposals))

    async def hold(self, size_bytes: int) -> Held:
        return _held_of((await self._ask({"op": "hold", "size_bytes": size_bytes})).head, size_bytes, self._links)

    async def let_go(self) -> None:
        await self._ask({"op": "let_go"})

    async def _ask(self, head: dict[str, Any], *, most_body_bytes: int = 0) -> Frame:
        await self._connection.send(Kind.request, head)
        with trio.move_on_after(_ANSWER_WITHIN_S):
            frame = await self._connection.receive(most_body_bytes=most_body_bytes)
            if frame.kind is Kind.error:
                raise error_of(frame.head)
            if frame.kind is not Kind.answer:
                raise PeerRefused(f"{self._connection.who} sent {frame.kind.name} where an answer comes")
            return frame
        raise PeerUnavailable(f"{self._connection.who} did not answer within {_ANSWER_WITHIN_S:g} s")


@asynccontextmanager
async def remote_holder(settings: Settings, peer: str) -> AsyncIterator[RemoteHolder]:
    """The one that runs at `peer`, [NODE@]HOST:PORT. PeerUnavailable, PeerRefused, SettingsError; ValueError where
    that is no address."""
    node, _, address = peer.rpartition("@")
    host, port = split_address(address)
    credentials = Credentials(settings.cluster)
    if credentials.none and not is_loopback(host):
        raise PeerRefused(
            f"{address} is another machine, and nothing says how to know it: set cluster.secret_file, or "
            "cluster.tls_cert, tls_key and tls_ca, on both"
        )
    try:
        with trio.fail_after(_CONNECT_WITHIN_S):
            stream = await trio.open_tcp_stream(host, port)
    except (OSError, trio.TooSlowError) as error:
        raise PeerUnavailable(f"no connection to {address}: {error or 'not in time'}") from error
    connection = Connection(_plain_socket(stream), stall_s=settings.peer.stall_s, who=peer)
    try:
        try:
            with trio.fail_after(HELLO_WITHIN_S):
                await greet(connection, credentials, settings.node or ASKER_NODE, node or HOLDER_NODE)
        except trio.TooSlowError:
            raise PeerUnavailable(f"{peer} did not answer the greeting") from None
        holder = RemoteHolder(connection)
        await holder.ask_about()
        yield holder
    finally:
        connection.close()


# --- what both say


def _held_head(held: Held) -> dict[str, Any]:
    remotes = [None if each is None else [each.address, each.length, each.key] for each in held.remotes]
    return {"remotes": remotes, "sums": {str(length): each for length, each in held.sums.items()}}


def _held_of(head: Mapping[str, object], size_bytes: int, links: int) -> Held:
    """PeerRefused."""
    try:
        fields = Fields(dict(head), "an answer about memory")
        remotes, sums = fields.any("remotes"), fields.mapping("sums")
        fields.end()
        if not isinstance(remotes, list) or len(remotes) != links:
            raise Wrong(f"memory for {links} links was asked for")
        found = {int(length): each for length, each in sums.items() if type(each) is int}
        if not {MIDDLE_BYTES, size_bytes} <= set(found):
            raise Wrong("digests are missing")
        return Held(tuple(_remote_of(each, size_bytes) for each in remotes), found)
    except (Wrong, ValueError) as error:
        raise PeerRefused(f"an answer about memory is damaged: {error}") from None


def _remote_of(value: object, size_bytes: int) -> Remote | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or any(type(each) is not int or each < 0 for each in value):
        raise Wrong("a place of memory is none")
    remote = Remote(*value)
    if remote.length != size_bytes or remote.address + size_bytes > 1 << 64 or remote.key >= 1 << 32:
        raise Wrong("a place of memory can't be")
    return remote


async def _tell(connection: Connection, error: PeerError) -> None:
    if not connection.closed:
        try:
            await connection.send(Kind.error, error_head(error))
        except PeerError as failure:
            log.debug("%s could not be told: %s", connection.who, failure.message)


def _plain_socket(stream: trio.SocketStream) -> socket.socket:
    taken = stream.socket
    return socket.socket(taken.family, taken.type, taken.proto, fileno=taken.detach())


def _name_of(plain: socket.socket) -> str:
    try:
        return join_address(*plain.getpeername()[:2])
    except OSError:
        return "a node that is gone again"
