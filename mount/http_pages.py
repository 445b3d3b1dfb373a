"""A web server for a few pages that are read and never change anything: GET and HEAD, bounded in everything.

Made for whoever watches the daemon: a scraper, a probe, a browser. h11 reads and writes HTTP/1.1.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate

import h11
import trio

from tierfs.errors import MountError

log = logging.getLogger("tierfs.pages")

#: Connections at a time; more wait in the kernel's queue.
MOST_CONNECTIONS = 32
#: A new connection has to bring its request within this.
FIRST_WITHIN_S = 5.0
#: An answer has to be taken within this; an idle connection is kept as long.
WITHIN_S = 30.0
#: A page that takes longer to make is an error.
MADE_WITHIN_S = 20.0
MOST_HEAD_BYTES = 16 << 10
_RECEIVE_BYTES = 16 << 10

#: Sent with every page: nothing is loaded, run or framed, and nothing kept.
SAFE_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
)


@dataclass(frozen=True)
class Page:
    """An answer."""

    body: bytes
    content_type: str
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


#: Makes a page for a request with these header fields (names in lower case).
PageMaker = Callable[[Mapping[str, str]], Awaitable[Page]]


class PageServer:
    """Serves `pages` by their path; a query is ignored. `addresses` are (host, port), "" is all of this machine's."""

    def __init__(self, addresses: Sequence[tuple[str, int]], pages: Mapping[str, PageMaker]) -> None:
        self._addresses = addresses
        self._pages = dict(pages)
        self._slots = trio.Semaphore(MOST_CONNECTIONS)
        #: Where it listens now, (host, port).
        self.listening: list[tuple[str, int]] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. MountError where an address can't be had."""
        listeners: list[trio.SocketListener] = []
        try:
            for host, port in self._addresses:
                try:
                    listeners += await trio.open_tcp_listeners(port, host=host or None)
                except OSError as error:
                    shown = f"{host}:{port}"
                    raise MountError(f"metrics.listen: {shown} can't be listened at: {error.strerror}") from None
            self.listening = [listener.socket.getsockname()[:2] for listener in listeners]
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
                task_status.started()
        finally:
            self.listening = []
            for listener in listeners:
                listener.socket.close()

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        while True:
            await self._slots.acquire()
            try:
                stream = await listener.accept()
            except OSError as error:  # too many open files: others' matter, and it passes
                self._slots.release()
                log.debug("a connection can't be accepted: %s", error)
                await trio.sleep(1.0)
                continue
            except BaseException:
                self._slots.release()
                raise
            nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await _Connection(stream, self._answer).serve()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.LocalProtocolError) as error:
            log.debug("a reader of pages went away: %s", error)
        except Exception:
            log.exception("a connection of a reader of pages failed")
        finally:
            self._slots.release()

    async def _answer(self, request: h11.Request) -> Page:
        if request.method not in (b"GET", b"HEAD"):
            return Page(b"only GET and HEAD\n", "text/plain", 405, (("Allow", "GET, HEAD"),))
        maker = self._pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        if maker is None:
            return Page(f"there are {', '.join(sorted(self._pages))}\n".encode(), "text/plain", 404)
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        try:
            with trio.fail_after(MADE_WITHIN_S):
                return await maker(fields)
        except trio.TooSlowError:
            return Page(b"took too long\n", "text/plain", 503)
        except Exception:
            log.exception("a page could not be made")
            return Page(b"failed; the daemon's log says why\n", "text/plain", 500)


class _Connection:
    """One connection: requests one after the other, as long as both sides keep it."""

    def __init__(self, stream: trio.SocketStream, answer: Callable[[h11.Request], Awaitable[Page]]) -> None:
        self._stream = stream
        self._answer = answer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)

    async def serve(self) -> None:
        within_s = FIRST_WITHIN_S
        while True:
            try:
                with trio.move_on_after(within_s) as scope:
                    request = await self._request()
                if scope.cancelled_caught or request is None:
                    return
                page = await self._answer(request)
            except h11.RemoteProtocolError as error:
                request, page = None, Page(b"not a request\n", "text/plain", error.error_status_hint)
            with trio.move_on_after(WITHIN_S) as scope:
                await self._send(page, without_body=request is not None and request.method == b"HEAD")
            if scope.cancelled_caught or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()
            within_s = WITHIN_S

    async def _request(self) -> h11.Request | None:
        """The next one, without its body; None where the connection ended."""
        request: h11.Request | None = None
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._stream.receive_some(_RECEIVE_BYTES))
            elif isinstance(event, h11.Request):
                request = event
                if request.method not in (b"GET", b"HEAD"):
                    return request  # whatever else it sends is not read: the connection ends after the answer
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif isinstance(event, h11.ConnectionClosed):
                return None

    async def _send(self, page: Page, *, without_body: bool) -> None:
        head = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", page.content_type),
            ("Content-Length", str(len(page.body))),
            *SAFE_HEADERS,
            *page.headers,
        ]
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        if self._http.their_state is not h11.DONE:
            head.append(("Connection", "close"))
        send = self._http.send
        data = send(h11.Response(status_code=page.status, headers=head)) or b""
        if not without_body:
            data += send(h11.Data(data=page.body)) or b""
        data += send(h11.EndOfMessage()) or b""
        await self._stream.send_all(data)
