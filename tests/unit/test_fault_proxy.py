"""The fault proxy breaks what its rules say and nothing else; otherwise a fault test could pass without a fault."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rig.fault_proxy import FaultProxy, Rule

BODY = bytes(range(256)) * 4096  # 1 MiB


class Store(BaseHTTPRequestHandler):
    """Keeps what is PUT, gives it back whole, by range, or in chunks."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        self.objects[self.path] = body
        self._answer(200, b"", {"X-Host": self.headers["Host"], "X-Expect": self.headers.get("Expect", "none")})

    def do_GET(self) -> None:
        body = self.objects[self.path]
        if self.headers.get("X-Chunked"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (body[:1000], body[1000:]):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif asked := self.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            self._answer(206, body[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(body)}"})
        else:
            self._answer(200, body, {})

    def do_HEAD(self) -> None:
        self._answer(200, self.objects[self.path], {})

    def _answer(self, status: int, body: bytes, fields: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**fields, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        pass  # connections that end in the middle are what is tested


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    handler = type("FreshStore", (Store,), {"objects": {"/b/there": BODY}})
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        with FaultProxy(("127.0.0.1", server.server_port), seed=1) as proxy:
            yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)
    yield connection
    connection.close()


Client = http.client.HTTPConnection


def ask(client: Client, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    client.request(method, path, body, headers)
    answer = client.getresponse()
    return answer.status, answer.read()


def stored(proxy: FaultProxy, path: str) -> bytes:
    """What the server holds, asked for past the proxy."""
    direct = http.client.HTTPConnection(*proxy.upstream, timeout=20)
    try:
        return ask(direct, "GET", path)[1]
    finally:
        direct.close()


def test_without_rules_all_passes_on_one_connection_and_is_logged(proxy: FaultProxy, client: Client) -> None:
    client.request("PUT", "/b/new?partNumber=3&uploadId=x", BODY, {"Host": "named:1", "Expect": "100-continue"})
    answer = client.getresponse()
    assert (answer.status, answer.headers["X-Host"], answer.headers["X-Expect"]) == (200, "named:1", "none")
    answer.read()
    own_address = client.sock.getsockname()
    assert ask(client, "GET", "/b/there", Range="bytes=100-299") == (206, BODY[100:300])
    assert ask(client, "GET", "/b/there", **{"X-Chunked": "yes"}) == (200, BODY)
    assert ask(client, "HEAD", "/b/there") == (200, b"")
    assert ask(client, "GET", "/b/there") == (200, BODY)
    assert client.sock.getsockname() == own_address
    put, ranged, *_ = proxy.exchanges()
    assert (put.part, put.request_bytes, put.status, put.told) == (3, len(BODY), 200, 200)
    assert (ranged.range, ranged.answer_bytes) == ((100, 200), 200)
    assert proxy.whole_bodies() == {("/b/new", 3): 1}


def test_an_injected_answer_comes_instead_of_the_servers(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Rule("answer", method="PUT", path="/b/", skip=1, times=2, status=403, code="AccessDenied"))
    answers = [ask(client, "PUT", f"/b/{i}", BODY) for i in range(4)]
    assert [status for status, _ in answers] == [200, 403, 403, 200]
    assert b"<Code>AccessDenied</Code>" in answers[1][1]
    assert [each.status for each in proxy.exchanges("PUT")] == [200, 0, 0, 200]


def test_refused_before_the_body_is_read(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Rule("refuse", status=503))
    client.putrequest("PUT", "/b/new")
    client.putheader("Content-Length", str(len(BODY)))
    client.endheaders()
    assert client.getresponse().status == 503
    assert proxy.exchanges()[0].request_bytes == 0


@pytest.mark.parametrize("after", [0, 300_000])
def test_a_cut_request_never_reaches_the_store(proxy: FaultProxy, client: Client, after: int) -> None:
    proxy.add(Rule("cut_request", after_bytes=after))
    with pytest.raises((ConnectionError, BrokenPipeError)):
        ask(client, "PUT", "/b/there", BODY[::-1])
    assert stored(proxy, "/b/there") == BODY
    assert proxy.exchanges()[0].request_bytes == after
    assert not proxy.whole_bodies()


def test_a_lost_answer_was_done(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Rule("lose_answer"))
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(client, "PUT", "/b/new", BODY)
    assert stored(proxy, "/b/new") == BODY
    assert (proxy.exchanges()[0].status, proxy.exchanges()[0].told) == (200, 0)


def test_a_flipped_bit_goes_up_and_comes_down(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Rule("flip_request", method="PUT", after_bytes=700_000), Rule("flip_answer", method="GET", after_bytes=7))
    ask(client, "PUT", "/b/new", BODY)
    came = ask(client, "GET", "/b/there")[1]
    for got, at in ((stored(proxy, "/b/new"), 700_000), (came, 7)):
        assert [i for i in range(len(BODY)) if got[i] != BODY[i]] == [at]


@pytest.mark.parametrize(
    ("action", "error"), [("cut_answer", ConnectionError), ("truncate_answer", http.client.IncompleteRead)]
)
def test_an_answer_ends_early(proxy: FaultProxy, client: Client, action: str, error: type[Exception]) -> None:
    proxy.add(Rule(action, method="GET", after_bytes=500_000))  # type: ignore[arg-type]
    with pytest.raises(error):
        ask(client, "GET", "/b/there")
    assert proxy.exchanges()[0].answer_bytes == 500_000


def test_an_ignored_range_gets_the_length_of_the_whole_and_other_bytes(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Rule("ignore_range", range="bytes=1000-.*"))
    assert ask(client, "GET", "/b/there", Range="bytes=0-1999") == (206, BODY[:2000])
    status, body = ask(client, "GET", "/b/there", Range="bytes=1000-1999")
    assert (status, len(body)) == (200, len(BODY))
    assert body[1000:2000] == BODY[1000:2000] != body[:1000]
    assert ask(client, "GET", "/b/there", Range="bytes=1000-1999") == (206, BODY[1000:2000])


@pytest.mark.parametrize("rule", [Rule("slow_request", bytes_s=2 << 20), Rule("slow_answer", bytes_s=2 << 20)])
def test_slow_takes_its_time_and_all_arrives(proxy: FaultProxy, client: Client, rule: Rule) -> None:
    rule.method = "PUT" if rule.action == "slow_request" else "GET"
    proxy.add(rule)
    begin = time.monotonic()
    assert ask(client, "PUT", "/b/new", BODY)[0] == 200
    assert ask(client, "GET", "/b/new") == (200, BODY)
    assert time.monotonic() - begin >= 0.4  # of 0.5


@pytest.mark.parametrize("action", ["stall_request", "stall_answer"])
def test_a_stall_ends_with_the_clients_patience(proxy: FaultProxy, action: str) -> None:
    proxy.add(Rule(action, after_bytes=1000, seconds=60))  # type: ignore[arg-type]
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.3)
    try:
        with pytest.raises(TimeoutError):
            ask(client, *(("PUT", "/b/new", BODY) if action == "stall_request" else ("GET", "/b/there")))
    finally:
        client.close()


def test_probability_repeats_with_the_seed(proxy: FaultProxy) -> None:
    def fates(seed: int) -> list[bool]:
        other = FaultProxy(proxy.upstream, seed=seed)
        other.add(Rule("answer", times=None, probability=0.5))
        return [other._rule_for("GET", "/b/there", "") is not None for _ in range(64)]

    assert fates(3) == fates(3) != fates(4)
    assert 10 < sum(fates(3)) < 54


def test_paused_it_is_a_server_that_is_down_and_resumed_it_is_back_on_its_port(
    proxy: FaultProxy, client: Client
) -> None:
    assert ask(client, "GET", "/b/there") == (200, BODY)
    proxy.pause()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(client, "GET", "/b/there")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", proxy.port), timeout=5):
        pass
    proxy.resume()
    client.close()
    assert ask(client, "GET", "/b/there") == (200, BODY)


def test_a_server_that_is_gone_is_a_connection_that_ends(proxy: FaultProxy, client: Client) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy.upstream = unused.getsockname()
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask(client, "GET", "/b/there")
