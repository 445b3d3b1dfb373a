"""Lets other nodes read what this one holds: answers their requests from the shelf, files by sendfile.

Bounded in everything: connections, transfers at a time (`peer.serve_streams`), bytes of a frame, and the time in which
a greeting is said and a byte is taken. What breaks, or does not keep the protocol, costs its own connection only.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import trio

from tierfs.errors import PeerError, PeerLacks, PeerRefused, PeerUnavailable, SettingsError, TierfsError
from tierfs.settings import Settings
from tierfs.transport.addresses import is_loopback, join_address, split_setting
from tierfs.transport.bulk import FileCut
from tierfs.transport.connection import Connection
from tierfs.transport.credentials import TICKET_S, Credentials, Tickets
from tierfs.transport.frames import Kind
from tierfs.transport.hello import HELLO_WITHIN_S, welcome
from tierfs.transport.peers import Shelf
from tierfs.transport.requests import Request, checksum_answer, error_head, offer_head, request_of
from tierfs.transport.verbs_messages import Exported, Links, Proposal, exported_head, links_head

log = logging.getLogger("tierfs.transport")

#: Connections for each transfer that is served at a time: other nodes keep some that are idle.
_CONNECTIONS_A_STREAM = 8
_LEAST_CONNECTIONS = 128
#: A connection on which nothing was asked for so long is closed; clients close theirs earlier.
IDLE_S = 120.0
#: To whom proposes links to a node that does not use RDMA.
NO_RDMA = "this node has no RDMA: it is not used here"
#: A window of 64 MiB is READ and written in less, unless the bandwidth for it is limited.
READS_WITHIN_S = 5.0
_TELL_WITHIN_S = 1.0
_BACKLOG = 512
_PAUSE_S = 0.1
_WARN_EVERY_S = 30.0
#: accept(2): these pass, or concern one connection only.
_ACCEPT_ERRNOS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPERM, errno.EPROTO,
     errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
)  # fmt: skip


class LinkSession(Protocol):
    """What one connection has of this node's RDMA ports: its links, and the memory that was exported to it last."""

    async def link(self, proposals: tuple[Proposal, ...]) -> Links:
        """Ends of this node's for these, instead of those it had. PeerRefused: an address can be none."""
        ...

    async def export(self, version: str, offset: int, length: int, *, growing: bool) -> Exported:
        """Where the range lies; what was exported before may be read no longer. PeerLacks, as for a pull."""
        ...

    def close(self) -> None:
        """The connection is gone: nothing of it may be read any more. May be called again."""
        ...


class LinkServing(Protocol):
    """Implemented by `tierfs.transport.verbs_serving`."""

    def session(self) -> LinkSession: ...


class TcpServer:
    """Listens at `cluster.listen` while `run` runs. SettingsError where the settings contradict each other."""

    def __init__(self, shelf: Shelf, settings: Settings, node: str, serving: LinkServing | None = None) -> None:
        """Without `serving` nobody reads by RDMA here."""
        self._shelf = shelf
        self._serves_links = serving
        self._node = node
        self._stall_s = settings.peer.stall_s
        self._credentials = Credentials(settings.cluster)
        self._where = where_to_listen(settings, self._credentials)
        self._tickets = Tickets()
        self._streams = trio.CapacityLimiter(settings.peer.serve_streams)
        self._most = max(_LEAST_CONNECTIONS, settings.peer.serve_streams * _CONNECTIONS_A_STREAM)
        self._serving: dict[_Served, None] = {}
        self._changed = trio.Event()
        self._warned = float("-inf")
        self.addresses: tuple[str, ...] = ()
        """Where it listens, HOST:PORT; known from the start of `run` on."""
        self.bytes_sent = 0
        self.transfers = 0
        self.refused = 0

    @property
    def connections(self) -> int:
        return len(self._serving)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; all connections are closed then. SettingsError where it can't listen."""
        listeners: list[trio.SocketListener] = []
        try:
            for host, port in self._where:
                listeners += await _listen(host, port)
            self.addresses = tuple(join_address(*each.socket.getsockname()[:2]) for each in listeners)
            if self._credentials.none:
                log.warning(
                    "there is neither cluster.secret_file nor cluster.tls_cert: other machines are not let in, this "
                    "node listens at %s only",
                    ", ".join(self.addresses),
                )
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
                task_status.started()
        finally:
            for listener in listeners:
                listener.socket.close()

    # --- connections

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            await self._have_place()
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _ACCEPT_ERRNOS:
                    raise
                log.warning("a connection of another node can't be taken: %s", error)
                await trio.sleep(_PAUSE_S)
                continue
            plain = _plain_socket(stream.socket)
            served = _Served(Connection(plain, stall_s=self._stall_s, who=_name_of(plain)))
            self._serving[served] = None
            nursery.start_soon(self._serve, served)

    async def _have_place(self) -> None:
        """When all places are taken the connection that is idle longest goes; where all are busy, new ones wait."""
        while len(self._serving) >= self._most:
            idle = min((each for each in self._serving if each.idle_since is not None), default=None,
                       key=_Served.unused_since)  # fmt: skip
            if idle is not None:
                idle.idle_since = None
                idle.scope.cancel()
            await self._changed.wait()

    def _wake(self) -> None:
        """There may be a place now for a connection that waits."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _serve(self, served: _Served) -> None:
        connection = served.connection
        try:
            with served.scope:
                await self._talk(served)
        except PeerRefused as error:
            self._note_refused(connection.who, error)
            await _tell(connection, error)
        except (PeerUnavailable, SettingsError) as error:
            log.debug("the connection of %s ended: %s", connection.who, error.message)
            await _tell(connection, PeerUnavailable(error.message))
        except Exception:
            # One connection must not be the end of all others, nor of the daemon.
            log.exception("serving %s failed in a way that nobody thought of", connection.who)
        finally:
            if served.links is not None:
                served.links.close()
            connection.close()
            del self._serving[served]
            self._wake()

    def _note_refused(self, who: str, error: PeerRefused) -> None:
        """In the log, but strangers don't fill it."""
        self.refused += 1
        now = trio.current_time()
        level = logging.WARNING if now - self._warned >= _WARN_EVERY_S else logging.DEBUG
        self._warned = now if level == logging.WARNING else self._warned
        log.log(level, "%s was refused: %s", who, error.message)

    async def _talk(self, served: _Served) -> None:
        connection = served.connection
        with trio.move_on_after(HELLO_WITHIN_S) as hurried:
            node = await welcome(connection, self._credentials, self._node, self._tickets)
            connection.who = f"{node} at {connection.who}"
        if hurried.cancelled_caught:
            return
        while True:
            with trio.move_on_after(IDLE_S) as idle:
                frame = await connection.receive()
            if idle.cancelled_caught:
                return
            served.idle_since = None
            request = request_of(frame)
            try:
                await self._answer(served, request, node)
            except (PeerRefused, PeerUnavailable):
                raise
            except (TierfsError, OSError) as error:
                if connection.closed:
                    raise PeerUnavailable(f"the connection broke: {error}") from None
                await connection.send(Kind.error, error_head(_as_peer_error(error, request)))
            served.idle_since = trio.current_time()
            self._wake()

    # --- requests

    async def _answer(self, served: _Served, request: Request, node: str) -> None:
        connection = served.connection
        match request.op:
            case "pull":
                await self._pull(connection, request)
            case "fetch":
                await self._fetch(connection, request)
            case "checksum" | "verify":
                sum_up = self._shelf.verify if request.op == "verify" else self._shelf.checksum
                async with _beating(connection, request):
                    checksum = await sum_up(request.version)
                head, body = checksum_answer(checksum)
                await connection.send(Kind.answer, head, body)
            case "offers":
                await self._offers(connection, request)
            case "ping":
                await connection.send(Kind.answer, {})
            case "ticket":
                if not self._credentials.by_ticket or connection.certificate is None:
                    raise PeerRefused("this node gives out no tickets: it has no cluster.encryption = off")
                name, key = self._tickets.give(node)
                await connection.send(Kind.answer, {"ticket": name, "key": key.hex(), "for_s": int(TICKET_S)})
            case "link":
                await connection.send(Kind.answer, links_head(await self._link(served, request)))
            case "export":
                if served.links is None:
                    raise PeerRefused("memory was asked for on a connection without links")
                async with _beating(connection, request):
                    exported = await served.links.export(
                        request.version, request.offset, request.length, growing=request.growing
                    )
                await connection.send(Kind.answer, exported_head(exported))

    async def _link(self, served: _Served, request: Request) -> Links:
        if self._serves_links is None:
            return Links((None,) * len(request.links), NO_RDMA)
        if served.links is None:
            served.links = self._serves_links.session()
        async with _beating(served.connection, request):
            return await served.links.link(request.links)

    async def _pull(self, connection: Connection, request: Request) -> None:
        is_mine = False
        try:
            try:
                self._streams.acquire_nowait()
                is_mine = True
            except trio.WouldBlock:
                async with _beating(connection, request):
                    await self._streams.acquire()
                    is_mine = True
            opening = self._shelf.open_growing if request.growing else self._shelf.open_version
            fd = opening(request.version)
            try:
                await self._send_range(connection, request, fd)
            finally:
                os.close(fd)
        finally:
            if is_mine:
                self._streams.release()

    async def _send_range(self, connection: Connection, request: Request, fd: int) -> None:
        size = os.fstat(fd).st_size
        length = min(request.length, max(0, size - request.offset))
        if length < request.length and not request.growing:
            raise PeerLacks(f"{request.version} has {size} bytes here: too few for what is asked for")
        self.transfers += 1
        await connection.send(Kind.bulk, {"size_bytes": size}, bulk_bytes=length)
        if not length:
            return
        try:
            await connection.send_file(fd, request.offset, length)
        except FileCut:
            connection.reset()
            raise PeerUnavailable(f"{request.version} was cut while it was being sent") from None
        except BaseException:
            connection.reset()
            raise
        self.bytes_sent += length

    async def _fetch(self, connection: Connection, request: Request) -> None:
        fd = self._shelf.open_version(request.version)
        try:
            size = os.fstat(fd).st_size
            if size > request.length:
                raise PeerLacks(f"{request.version} has {size} bytes, more than the {request.length} asked for")
            async with _beating(connection, request):
                data = await trio.to_thread.run_sync(_read_whole, fd, size)
        finally:
            os.close(fd)
        if len(data) != size:
            raise PeerLacks(f"{request.version} was cut while it was read")
        await connection.send(Kind.answer, {}, data)

    async def _offers(self, connection: Connection, request: Request) -> None:
        """Until the connection ends. What is not an offer is a beat, so both sides notice when the other is gone."""
        await connection.send(Kind.answer, {})
        async with _beating(connection, request), self._shelf.offers() as offers:
            async for offer in offers:
                await connection.send(Kind.offer, offer_head(offer))
        raise PeerUnavailable("there are no more offers")


class _Served:
    """A connection of another node. `idle_since` while nothing more is asked of this one; `links` once it asked for
    some."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.scope = trio.CancelScope()
        self.idle_since: float | None = None
        self.links: LinkSession | None = None

    def unused_since(self) -> float:
        """Where it is idle. By its links the other node may READ what it was given last, which is not seen here."""
        since = self.idle_since or 0.0
        return since + READS_WITHIN_S if self.links is not None else since


@asynccontextmanager
async def _beating(connection: Connection, request: Request) -> AsyncIterator[None]:
    """Says now and then that the answer is being worked on. When the other side is gone, what is within is cancelled
    and PeerUnavailable raised."""
    gone: PeerError | None = None
    failed: BaseException | None = None
    async with trio.open_nursery() as nursery:

        async def beat() -> None:
            nonlocal gone
            while True:
                await trio.sleep(request.beat_ms / 1000)
                try:
                    with trio.CancelScope(
                        shield=True
                    ):  # bounded by the connection's own time-out; a frame is sent whole
                        await connection.send(Kind.beat, {})
                except PeerError as error:
                    gone = error
                    nursery.cancel_scope.cancel()
                    return

        nursery.start_soon(beat)
        try:
            yield
        except Exception as error:  # out of the nursery as it is, not in a group
            failed = error
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    if gone is not None:
        raise gone


async def _tell(connection: Connection, error: PeerError) -> None:
    with suppress(PeerError), trio.move_on_after(_TELL_WITHIN_S):
        await connection.send(Kind.error, error_head(error))


def _as_peer_error(error: Exception, request: Request) -> PeerError:
    if isinstance(error, PeerError):
        return error
    log.warning("%s of %s failed here: %s", request.op, request.version or "this node", error)
    return PeerUnavailable(f"it can't be read there: {error}")


def _read_whole(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.pread(fd, size - len(data), len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


def _plain_socket(taken: trio.socket.SocketType) -> socket.socket:
    return socket.socket(taken.family, taken.type, taken.proto, fileno=taken.detach())


def _name_of(plain: socket.socket) -> str:
    try:
        return join_address(*plain.getpeername()[:2])
    except OSError:
        return "a node that is gone again"


def where_to_listen(settings: Settings, credentials: Credentials) -> list[tuple[str, int]]:
    """Loopback addresses only, where nothing says who may be let in."""
    where = split_setting(settings.cluster.listen, "cluster.listen")
    if not where:
        raise SettingsError("cluster.listen names no address: HOST:PORT, or :PORT for all", key="cluster.listen")
    if not credentials.none:
        return where
    for host, port in where:
        if host and not is_loopback(host):
            raise SettingsError(
                f"cluster.listen is {join_address(host, port)}, and nothing says which nodes may be let in: set "
                "cluster.secret_file (`openssl rand -hex 32`, the same on all nodes), or cluster.tls_cert, tls_key and "
                "tls_ca",
                key="cluster.listen",
            )
    return [(host or "127.0.0.1", port) for host, port in where]


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        try:
            return await trio.open_tcp_listeners(port, host=host or None, backlog=_BACKLOG)
        except OSError:
            if host:
                raise
            return await trio.open_tcp_listeners(port, host="0.0.0.0", backlog=_BACKLOG)  # a machine without IPv6
    except OSError as error:
        raise SettingsError(
            f"this node can't listen at {join_address(host, port)} (cluster.listen): {error}", key="cluster.listen"
        ) from None
