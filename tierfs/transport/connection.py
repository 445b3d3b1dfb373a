"""One connection between two nodes: frames in the trio thread, and the bytes of files in threads, over one socket.

The socket is plain or TLS; both are used without blocking here and with a time-out in `bulk`. One task reads, several
may send. Whatever goes wrong in the middle of a frame leaves the connection useless, and its owner closes it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import trio

from tierfs.errors import PeerRefused, PeerUnavailable
from tierfs.objects.bandwidth import Bandwidth
from tierfs.transport import bulk
from tierfs.transport.frames import (
    HEAD_BYTES,
    TAG_BYTES,
    Frame,
    Kind,
    Tags,
    decode_head,
    decode_json,
    encode,
)

#: More than this is summed up for a tag in a thread.
_INLINE_BYTES = 256 << 10
#: Threads that carry files, in both directions together. Each side has limits of its own, which are lower.
_BULK_THREADS = 512

_T = TypeVar("_T")
_bulk_threads: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("bulk_threads")


class PeerStalled(PeerUnavailable):
    """No byte came for as long as one may take."""


def _limiter() -> trio.CapacityLimiter:
    try:
        return _bulk_threads.get()
    except LookupError:
        made = trio.CapacityLimiter(_BULK_THREADS)
        _bulk_threads.set(made)
        return made


class Connection:
    """`tags` of the two directions are set by the handshake where the connection has keys."""

    def __init__(self, plain: socket.socket, *, stall_s: float, who: str) -> None:
        """`who` is on the other side, for messages; the socket is the connection's from now on."""
        plain.settimeout(0)
        with suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = plain
        self._sending = trio.Lock()
        self._closed = False
        self._send_tags: Tags | None = None
        self._receive_tags: Tags | None = None
        self.stall_s = stall_s
        self.who = who

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def certificate(self) -> dict[str, Any] | None:
        """Of the other side, verified; None without TLS."""
        return self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None

    def use_tags(self, sending: Tags, receiving: Tags) -> None:
        self._send_tags, self._receive_tags = sending, receiving

    def close(self) -> None:
        """At once; whoever waits for it is told."""
        if self._closed:
            return
        self._closed = True
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def reset(self) -> None:
        """Close in such a way that the other side can't take what it has for all there is."""
        if not self._closed:
            # An l_linger of 0 makes close() send a reset instead of an orderly end (socket(7)).
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    @property
    def is_quiet(self) -> bool:
        """Nothing came while nobody asked for anything; else the other side has closed it, or breaks the protocol."""
        if self._closed:
            return False
        try:
            # Of the plain socket even under TLS: only whether there is something matters.
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def secure(self, context: ssl.SSLContext, *, server: bool) -> None:
        """The TLS handshake. PeerRefused, PeerUnavailable."""
        self._socket = context.wrap_socket(
            self._socket, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=False
        )
        await self._when_ready(self._socket.do_handshake)

    async def first_byte(self) -> int:
        """The first that comes, left where it is. PeerUnavailable."""
        byte = await self._when_ready(partial(self._socket.recv, 1, socket.MSG_PEEK))
        if not byte:
            raise PeerUnavailable(f"{self.who} ended the connection")
        return int(byte[0])

    # --- the bytes of files

    async def send_file(self, fd: int, offset: int, length: int) -> None:
        """The body of a BULK that was announced. PeerUnavailable, or `bulk.FileCut`: the connection can't be used
        any more."""
        try:
            await self._in_thread(lambda stop: bulk.send_file(self._socket, fd, offset, length, self.stall_s))
        except TimeoutError:
            raise PeerUnavailable(f"{self.who} took no byte for {self.stall_s:g} s") from None
        except OSError as error:
            raise PeerUnavailable(f"sending to {self.who} failed: {error}") from None

    async def receive_file(
        self, fd: int, offset: int, length: int, received: bulk.Received, bandwidth: Bandwidth | None, bytes_s: float
    ) -> None:
        """The opposite. `received` says how far it came. PeerUnavailable where the connection broke, PeerStalled,
        NoRoom, OSError of the file."""

        def receive(stop: threading.Event) -> None:
            bulk.receive_file(
                self._socket, fd, offset, length, self.stall_s, received,
                bandwidth=bandwidth, bytes_s=bytes_s, stop=stop,
            )  # fmt: skip

        try:
            await self._in_thread(receive)
        except TimeoutError:
            raise PeerStalled(f"{self.who} sent no byte for {self.stall_s:g} s") from None
        except ConnectionError as error:
            raise PeerUnavailable(f"{self.who} did not send all: {error}") from None

    async def _in_thread(self, work: Callable[[threading.Event], None]) -> None:
        """Cancelled, it ends the connection, which ends the thread, and waits for that: file and socket are the
        caller's own again when this returns."""
        stop, running, failed = threading.Event(), True, None

        async def end_it_when_cancelled() -> None:
            try:
                await trio.sleep_forever()
            finally:
                if running:
                    stop.set()
                    with suppress(OSError):
                        # Of the plain socket: SSLSocket.shutdown would take TLS away under the thread.
                        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_it_when_cancelled)
            try:
                await trio.to_thread.run_sync(work, stop, limiter=_limiter())
            except Exception as error:
                failed = error
            finally:
                running = False
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    # --- frames

    async def send(self, kind: Kind, head: dict[str, Any], body: bytes = b"", *, bulk_bytes: int = 0) -> None:
        """PeerUnavailable, after which the connection is closed: half a frame may have been sent."""
        async with self._sending:
            if self._send_tags is not None and len(body) > _INLINE_BYTES:
                tags = self._send_tags
                data = await trio.to_thread.run_sync(lambda: encode(kind, head, body, tags=tags))
            else:
                data = encode(kind, head, body, bulk_bytes=bulk_bytes, tags=self._send_tags)
            rest, whole = memoryview(data), False
            try:
                while rest:
                    with trio.fail_after(self.stall_s):
                        rest = rest[await self._when_ready(partial(self._socket.send, rest), writing=True) :]
                whole = True
            except trio.TooSlowError:
                raise PeerUnavailable(f"{self.who} took no byte for {self.stall_s:g} s") from None
            finally:
                if not whole:
                    self.close()

    async def receive(self, *, most_body_bytes: int = 0, most_bulk_bytes: int = 0) -> Frame:
        """The next one; of BULK the body follows. PeerUnavailable at the connection's end, PeerRefused for what is no
        frame. The caller bounds the time."""
        start = await self._exactly(HEAD_BYTES)
        head = decode_head(start, most_body_bytes=most_body_bytes, most_bulk_bytes=most_bulk_bytes)
        text = await self._exactly(head.json_bytes)
        is_bulk = head.kind is Kind.bulk
        body = b"" if is_bulk else await self._exactly(head.body_bytes)
        tags = self._receive_tags
        if tags is not None:
            tag = await self._exactly(TAG_BYTES)
            if len(body) > _INLINE_BYTES:
                await trio.to_thread.run_sync(tags.check, tag, start, text, body)
            else:
                tags.check(tag, start, text, body)
        return Frame(head.kind, decode_json(text), body, head.body_bytes if is_bulk else 0, text)

    async def _exactly(self, count: int) -> bytes:
        # Grows with what comes, not with what a stranger says will come.
        data = bytearray()
        while len(data) < count:
            most = min(count - len(data), _INLINE_BYTES)
            piece = await self._when_ready(partial(self._socket.recv, most))
            if not piece:
                raise PeerUnavailable(f"{self.who} ended the connection")
            data += piece
        return bytes(data)

    async def _when_ready(self, attempt: Callable[[], _T], *, writing: bool = False) -> _T:
        while True:
            if self._closed:
                raise PeerUnavailable(f"the connection to {self.who} is closed")
            try:
                try:
                    done = attempt()
                except BlockingIOError:
                    await (trio.lowlevel.wait_writable if writing else trio.lowlevel.wait_readable)(self._socket)
                    continue
                except ssl.SSLWantReadError:
                    await trio.lowlevel.wait_readable(self._socket)
                    continue
                except ssl.SSLWantWriteError:
                    await trio.lowlevel.wait_writable(self._socket)
                    continue
            except trio.ClosedResourceError:
                raise PeerUnavailable(f"the connection to {self.who} was closed") from None
            except ssl.SSLEOFError:
                raise PeerUnavailable(f"{self.who} ended the connection") from None
            except ssl.SSLError as error:
                raise PeerRefused(f"no TLS with {self.who}: {error.reason or error}") from None
            except OSError as error:
                raise PeerUnavailable(f"the connection to {self.who} broke: {error}") from None
            await trio.lowlevel.checkpoint()
            return done
