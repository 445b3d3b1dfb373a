"""An HTTP/1.1 proxy between an S3 client and a server that breaks what its rules say, and keeps a log of each request.

The Host header passes unchanged, so signatures (SigV4) hold. A thread serves each connection; keep-alive, chunked
answers and `Expect: 100-continue` work as without it.

    with FaultProxy(("127.0.0.1", 8333)) as proxy:
        proxy.add(Rule("answer", method="PUT", path=r"partNumber=3", times=2, status=503, code="SlowDown"))
        ...                                    # the client talks to proxy.url
        assert proxy.whole_bodies()[("/bucket/key", 3)] == 1
"""

from __future__ import annotations

import contextlib
import random
import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from rig.http_stream import PIECE_BYTES, buffered, header_fields, pass_chunks, read_chunks, read_head, read_pieces

_NO_BODY = (204, 304)

Action = Literal[
    "answer",  # read the request, answer `status` with an S3 error `code`: also 200 with an error in its body
    "refuse",  # the same without reading the request's body; the connection ends
    "cut_request",  # reset the connection after `after_bytes` of the request's body; 0 is before anything is done
    "stall_request",  # read no further after `after_bytes` for `seconds`, then reset
    "slow_request",  # pass the request's body on at `bytes_s`
    "flip_request",  # one bit of the request's body differs, at `after_bytes`
    "lose_answer",  # the server does it, the client never hears of it: reset
    "cut_answer",  # reset after `after_bytes` of the answer's body
    "truncate_answer",  # end the connection in order after `after_bytes` of the answer's body
    "stall_answer",  # send no further after `after_bytes` for `seconds`, then reset
    "slow_answer",  # pass the answer's body on at `bytes_s`
    "flip_answer",  # one bit of the answer's body differs, at `after_bytes`
    "ignore_range",  # answer 200 with a body as long as the whole object (zeros around the range) instead of 206
    "delay",  # wait `seconds`, then do it
]


@dataclass
class Rule:
    """Which requests it is for, how often, and what happens to them.

    `method` is a regular expression for all of the method, `path` for a part of the target as it was sent (path and
    query, percent-encoded), `range` for all of the Range header ("" without one). The first `skip` that match pass,
    then it holds for `times` (None: for ever), each with `probability`. `hits` counts those it was used for.
    """

    action: Action
    method: str = ".*"
    path: str = ""
    range: str = ".*"
    times: int | None = 1
    skip: int = 0
    probability: float = 1.0
    status: int = 503
    code: str = "SlowDown"
    after_bytes: int = 0
    seconds: float = 30.0
    bytes_s: int = 1 << 20
    hits: int = 0


@dataclass
class Exchange:
    """One request as it passed. `request_bytes` and `answer_bytes` are of the bodies, as far as they came.

    `status` is what the server answered (0: it was not asked, or did not answer), `told` what the client got to hear.
    """

    at: float
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    fault: str = ""
    length: int = 0
    request_bytes: int = 0
    status: int = 0
    told: int = 0
    answer_bytes: int = 0

    @property
    def part(self) -> int:
        """Number of the part that an UploadPart sends, 0 for all other requests."""
        return int(self.query.get("partNumber", 0)) if self.method == "PUT" else 0

    @property
    def range(self) -> tuple[int, int] | None:
        """First byte and length of a ranged GET."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) - int(found[1]) + 1) if found else None


class _Cut(Exception):
    """A rule ended the connection; `by_reset` or in order."""

    def __init__(self, by_reset: bool) -> None:
        super().__init__()
        self.by_reset = by_reset


@dataclass
class FaultProxy:
    """See the module. `upstream` is the server's address and may be changed; `seed` makes probabilities repeatable.

    It listens at `host`, with a socket of `make_socket`: one of another network namespace, for clients in it.
    """

    upstream: tuple[str, int]
    seed: int = 0
    rules: list[Rule] = field(default_factory=list)
    log: list[Exchange] = field(default_factory=list)
    port: int = 0
    host: str = "127.0.0.1"
    make_socket: Callable[[], socket.socket] = socket.socket

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> FaultProxy:
        self.resume()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        for thread in list(self._threads):
            thread.join(timeout=10)

    def add(self, *rules: Rule) -> None:
        with self._lock:
            self.rules.extend(rules)

    def reseed(self, seed: int) -> None:
        self.seed = seed
        self._dice.seed(seed)

    def clear(self) -> None:
        """No more faults; what is stalled or slow now goes on as it began."""
        with self._lock:
            self.rules.clear()

    def pause(self) -> None:
        """As a server that is down: connections are reset and new ones refused."""
        self._stopping.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def resume(self) -> None:
        """Listen, on the same port as before."""
        self._stopping = threading.Event()
        listener = self.make_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(128)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener, self._stopping)

    def exchanges(self, method: str = ".*", path: str = "") -> list[Exchange]:
        """Of the log so far: those whose method is, and whose path (not percent-encoded) holds, the expression."""
        with self._lock:
            found = list(self.log)
        return [each for each in found if re.fullmatch(method, each.method) and re.search(path, each.path)]

    def whole_bodies(self, path: str = "") -> Counter[tuple[str, int]]:
        """How often the server got all bytes of an object (part 0) or of a part, by path and number."""
        puts = self.exchanges("PUT", path)
        return Counter((each.path, each.part) for each in puts if each.length and each.request_bytes == each.length)

    # ------------------------------------------------------------------ connections

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True, name="fault-proxy")
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(_Connection(self, client, stopping).serve)

    def _rule_for(self, method: str, target: str, asked_range: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                is_meant = re.fullmatch(rule.method, method) and re.search(rule.path, target)
                if rule.times == 0 or not is_meant or not re.fullmatch(rule.range, asked_range):
                    continue
                if rule.skip > 0:
                    rule.skip -= 1
                    continue
                if self._dice.random() >= rule.probability:
                    continue
                rule.hits += 1
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None


class _Connection:
    """One client's connection, and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, stopping: threading.Event) -> None:
        self.proxy = proxy
        self.client = client
        self.stopping = stopping
        self.client_in: BufferedReader = buffered(client)
        self.server: socket.socket | None = None
        self.server_in: BufferedReader | None = None
        self._register(client)

    def serve(self) -> None:
        try:
            while self._request():
                pass
        except _Cut as cut:
            if cut.by_reset:
                # An l_linger of 0 makes close() send a reset instead of an orderly end (socket(7)).
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (OSError, ValueError):
            pass  # either side went away: the other one sees the same
        finally:
            self._hang_up_server()
            with self.proxy._lock:
                self.proxy._sockets.discard(self.client)
            self.client_in.close()
            self.client.close()

    def _register(self, each: socket.socket) -> None:
        with self.proxy._lock:
            self.proxy._sockets.add(each)
        if self.stopping.is_set():
            each.close()

    def _hang_up_server(self) -> None:
        if self.server is None or self.server_in is None:
            return
        with self.proxy._lock:
            self.proxy._sockets.discard(self.server)
        self.server_in.close()
        self.server.close()
        self.server = self.server_in = None

    def _connect(self) -> tuple[socket.socket, BufferedReader]:
        """The connection to the server; another one where the server ended the last."""
        if self.server is not None and select.select([self.server], [], [], 0)[0]:
            self._hang_up_server()
        if self.server is None or self.server_in is None:
            self.server = socket.create_connection(self.proxy.upstream, timeout=10)
            self.server.settimeout(None)
            self.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.server_in = buffered(self.server)
            self._register(self.server)
        return self.server, self.server_in

    # ------------------------------------------------------------------ one request

    def _request(self) -> bool:
        """Serves one; False when the connection is to end."""
        lines = read_head(self.client_in)
        if not lines:
            return False
        method, target, _ = lines[0].split(" ", 2)
        headers = header_fields(lines)
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        rule = self.proxy._rule_for(method, target, headers.get("range", ""))
        fault = rule.action if rule else ""
        length = int(headers.get("content-length", 0))
        exchange = Exchange(time.time(), method, unquote(url.path), query, headers, fault, length)
        with self.proxy._lock:
            self.proxy.log.append(exchange)
        if rule and fault == "refuse":
            self._tell_error(rule, exchange)
            return False
        if rule and fault == "delay":
            self._sleep(rule.seconds)
        if rule and fault in ("cut_request", "stall_request") and not rule.after_bytes:
            self._interrupt(rule)
        if headers.get("expect", "").lower() == "100-continue":
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if rule and fault == "answer":
            for piece in read_pieces(self.client_in, length):
                exchange.request_bytes += len(piece)
            self._tell_error(rule, exchange)
            return True
        self._forward(lines, rule, exchange)
        return self._answer(rule, exchange)

    def _forward(self, lines: list[str], rule: Rule | None, exchange: Exchange) -> None:
        server, _ = self._connect()
        kept = [line for line in lines if not line.lower().startswith("expect:")]
        server.sendall("\r\n".join([*kept, "", ""]).encode("latin-1"))
        if "chunked" in exchange.headers.get("transfer-encoding", ""):
            pass_chunks(self.client_in, server)
            return
        fault = rule.action if rule else ""
        for piece in read_pieces(self.client_in, exchange.length):
            if rule and fault in ("cut_request", "stall_request"):
                piece = piece[: rule.after_bytes - exchange.request_bytes]
            server.sendall(_flipped(piece, rule, "flip_request", exchange.request_bytes))
            exchange.request_bytes += len(piece)
            if rule and fault in ("cut_request", "stall_request") and exchange.request_bytes >= rule.after_bytes:
                self._interrupt(rule)
            if rule and fault == "slow_request":
                self._sleep(len(piece) / rule.bytes_s)
        if rule and fault in ("cut_request", "stall_request"):
            self._interrupt(rule)  # the body was shorter than `after_bytes`

    def _answer(self, rule: Rule | None, exchange: Exchange) -> bool:
        _, server_in = self._connect_for_answer()
        lines = read_head(server_in)
        while lines and lines[0].split(" ")[1] == "100":
            lines = read_head(server_in)
        if not lines:
            raise ConnectionError("the server ended the connection without an answer")
        exchange.status = int(lines[0].split(" ")[1])
        fields = header_fields(lines)
        fault = rule.action if rule else ""
        body, length = self._body(server_in, fields, exchange)
        if fault == "lose_answer":
            for _piece in body:
                pass
            raise _Cut(by_reset=True)
        padding = (0, 0)
        if fault == "ignore_range" and (
            found := re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", fields.get("content-range", ""))
        ):
            padding = (int(found[1]), int(found[3]) - int(found[2]) - 1)
            dropped = ("content-range:", "content-length:")
            lines = ["HTTP/1.1 200 OK", *(line for line in lines[1:] if not line.lower().startswith(dropped))]
            lines.append(f"Content-Length: {int(found[3])}")
        exchange.told = int(lines[0].split(" ")[1])
        self.client.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self._zeros(padding[0])
        chunked = "chunked" in fields.get("transfer-encoding", "")
        for piece in body:
            sent = piece
            if rule and fault in ("cut_answer", "truncate_answer", "stall_answer"):
                sent = piece[: rule.after_bytes - exchange.answer_bytes]
            sent = _flipped(sent, rule, "flip_answer", exchange.answer_bytes)
            self.client.sendall(b"%x\r\n%b\r\n" % (len(sent), sent) if chunked and sent else sent)
            exchange.answer_bytes += len(sent)
            if rule and len(sent) < len(piece):
                self._interrupt(rule)
            if rule and fault == "slow_answer":
                self._sleep(len(piece) / rule.bytes_s)
        if chunked:
            self.client.sendall(b"0\r\n\r\n")
        self._zeros(padding[1])
        closing = "close" in (fields.get("connection", "").lower(), exchange.headers.get("connection", "").lower())
        return not closing and length is not None

    def _connect_for_answer(self) -> tuple[socket.socket, BufferedReader]:
        if self.server is None or self.server_in is None:
            raise ConnectionError("the server is gone")
        return self.server, self.server_in

    def _body(
        self, server_in: BufferedReader, fields: dict[str, str], exchange: Exchange
    ) -> tuple[Iterable[bytes], int | None]:
        """The pieces of the answer's body, and its length: None where only the connection's end tells it."""
        if exchange.method == "HEAD" or exchange.status in _NO_BODY:
            return (), 0
        if "chunked" in fields.get("transfer-encoding", ""):
            return read_chunks(server_in), -1
        if "content-length" in fields:
            length = int(fields["content-length"])
            return read_pieces(server_in, length), length
        return iter(lambda: server_in.read1(PIECE_BYTES), b""), None

    def _tell_error(self, rule: Rule, exchange: Exchange) -> None:
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{rule.code}</Code><Message>injected by the test'
            "</Message><RequestId>fault</RequestId></Error>"
        ).encode()
        head = (
            f"HTTP/1.1 {rule.status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
            "x-amz-request-id: fault\r\n\r\n"
        ).encode()
        exchange.told = rule.status
        self.client.sendall(head if exchange.method == "HEAD" else head + body)

    def _interrupt(self, rule: Rule) -> None:
        if rule.action.startswith("stall"):
            self._sleep(rule.seconds)
        raise _Cut(by_reset=rule.action != "truncate_answer")

    def _sleep(self, seconds: float) -> None:
        if self.stopping.wait(seconds):
            raise _Cut(by_reset=True)

    def _zeros(self, count: int) -> None:
        zeros = bytes(PIECE_BYTES)
        while count > 0:
            piece = zeros[: min(count, PIECE_BYTES)]
            self.client.sendall(piece)
            count -= len(piece)


def _flipped(piece: bytes, rule: Rule | None, action: Action, offset: int) -> bytes:
    """The piece that begins at `offset` of its body, with a bit changed where the rule says so."""
    if rule is None or rule.action != action or not offset <= rule.after_bytes < offset + len(piece):
        return piece
    changed = bytearray(piece)
    changed[rule.after_bytes - offset] ^= 1
    return bytes(changed)
