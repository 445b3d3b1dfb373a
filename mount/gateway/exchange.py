"""HTTP/1.1 on one connection: a request in, its body in pieces, an answer out. By h11, which does no I/O of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import h11
import trio

from mount.gateway.counts import Counts
from mount.gateway.refusal import Refusal

READ_BYTES = 1 << 20
#: Between two requests of a client that keeps its connection, and for the head of one, seconds.
IDLE_S = 120.0
#: A client that sends nothing of its body, or takes nothing of an answer, for so long is given up, seconds.
STALL_S = 60.0
_LINGER_S = 1.0

_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


class ClientGone(Exception):
    """The connection is of no more use: closed, stalled, or no HTTP is spoken on it."""


@dataclass(frozen=True)
class Request:
    """`parts` is the path, cut at `/` and decoded; header names are in small letters."""

    method: str
    parts: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def body_bytes(self) -> int | None:
        """As its head says it, which h11 has held against the rules; None where it comes in chunks."""
        length = self.headers.get("content-length")
        return int(length) if length is not None and "transfer-encoding" not in self.headers else None


class Exchange:
    """One client. `next_request`, then `body` or `discard_body`, then one answer; and again."""

    def __init__(self, stream: trio.SocketStream, counts: Counts) -> None:
        self._stream = stream
        self._counts = counts
        self._http = h11.Connection(h11.SERVER)

    async def next_request(self) -> Request | None:
        """None when the client is done. ClientGone; Refusal for what is no request, after which there is no other."""
        with trio.move_on_after(IDLE_S):
            event = await self._next_event()
            if isinstance(event, h11.Request):
                return _request(event)
        return None

    async def body(self) -> AsyncIterator[bytes]:
        """The body in pieces as they come. ClientGone where it ends early."""
        if self._http.they_are_waiting_for_100_continue:
            await self._send(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
        while True:
            with trio.move_on_after(STALL_S) as scope:
                event = await self._next_event()
            if scope.cancelled_caught:
                raise ClientGone("nothing of the body came for a minute")
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise ClientGone("the connection ended within a body")
            self._counts.received_bytes += len(event.data)
            yield bytes(event.data)

    async def discard_body(self) -> None:
        """What of the body was not read: a client that still sends does not look for an answer."""
        if self._http.their_state is h11.SEND_BODY and not self._http.they_are_waiting_for_100_continue:
            async with aclosing(self.body()) as pieces:  # type: ignore[type-var]
                async for _ in pieces:
                    pass

    async def answer(self, status: int, value: Any) -> None:
        """JSON."""
        data = json.dumps(value).encode()
        await self.begin_answer(status, len(data), [("Content-Type", "application/json")])
        await self.send_piece(data)
        await self.end_answer()

    async def refuse(self, refusal: Refusal) -> None:
        """An error's answer, once the body was taken. Nothing where an answer was begun already."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.discard_body()
            await self.answer(refusal.status, {"detail": refusal.message})

    async def begin_answer(self, status: int, size_bytes: int, headers: list[tuple[str, str]]) -> None:
        self._counts.answered(status)
        head = h11.Response(status_code=status, headers=[("Content-Length", str(size_bytes)), *headers])
        await self._send(self._http.send(head))

    async def send_piece(self, data: bytes) -> None:
        await self._send(self._http.send(h11.Data(data=data)))
        self._counts.sent_bytes += len(data)

    async def end_answer(self) -> None:
        await self._send(self._http.send(h11.EndOfMessage()))

    async def begin_next(self) -> bool:
        """Whether the connection can carry another request."""
        await self.discard_body()
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._stream.receive_some(READ_BYTES))
        except _GONE as error:
            raise ClientGone(str(error)) from None
        except h11.RemoteProtocolError as error:
            raise Refusal(error.error_status_hint, f"not a request: {error}") from None
        assert not isinstance(event, type) or event is h11.PAUSED
        return event

    async def _send(self, data: bytes | None) -> None:
        if not data:
            return
        try:
            with trio.move_on_after(STALL_S) as scope:
                await self._stream.send_all(data)
        except _GONE as error:
            raise ClientGone(str(error)) from None
        if scope.cancelled_caught:
            raise ClientGone("the client takes nothing of its answer")


def _request(event: h11.Request) -> Request:
    """The target may also be a whole URL, as clients write it to a proxy (RFC 9112, 3.2.2)."""
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
    try:
        url = urlsplit(event.target.decode("ascii"))
        parts = tuple(unquote(part, errors="strict") for part in url.path.split("/")[1:])
        query = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=20).items()}
    except ValueError as error:
        raise Refusal(400, f"the request's target can't be read: {error}") from None
    return Request(event.method.decode("ascii"), parts, query, headers)


async def close(stream: trio.SocketStream) -> None:
    """Ends the connection once the last answer is delivered: who still sends would be reset. Cancelled, at once."""
    try:
        with trio.move_on_after(_LINGER_S), suppress(*_GONE):
            await stream.send_eof()
            while await stream.receive_some(READ_BYTES):
                pass
    finally:
        await trio.aclose_forcefully(stream)
