"""One connection to one member of etcd: calls that trio can wait for and cancel, and streams of watches.

gRPC works in threads of its own. A call's end is told to trio from there; only a stream needs a thread of ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import trio

from tierfs.catalog.etcd_errors import Refused
from tierfs.catalog.etcd_messages import AUTHENTICATE, WATCH, Method

#: gRPC ends a call at its deadline itself; this much later it is given up without its word.
_GRACE_S = 1.0
#: Responses of a watch that wait for the reader; gRPC holds the rest back at etcd.
_UNREAD = 16


@dataclass
class Traffic:
    """What was asked and how many bytes of messages went both ways, without gRPC's own."""

    requests: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class Credentials:
    """PEM texts; all None is a connection without TLS."""

    ca: bytes | None = None
    key: bytes | None = None
    cert: bytes | None = None


class Connection:
    """Made without waiting for anything: the first call connects. `closed` once it was of no use."""

    def __init__(self, endpoint: str, credentials: Credentials, *, timeout_s: float, traffic: Traffic) -> None:
        self.endpoint = endpoint
        self.token = ""
        self.closed = False
        self.is_probed = False
        #: When (by trio's clock) the member last answered.
        self.heard_at = trio.current_time()
        self._traffic = traffic
        options = _options(timeout_s)
        if credentials == Credentials():
            self._channel = grpc.insecure_channel(endpoint, options=options)
        else:
            tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.cert)
            self._channel = grpc.secure_channel(endpoint, tls, options=options)

    def close(self) -> None:
        """What is under way ends."""
        if not self.closed:
            self.closed = True
            self._channel.close()

    async def call(self, method: Method, request: Any, *, within_s: float) -> Any:
        """Raises Refused. Cancelled: nobody waits any more, but it may be done all the same."""
        if self.closed:
            raise self._lost(method)
        start = self._channel.unary_unary(
            method.path, request_serializer=self._sent, response_deserializer=self._received(method)
        )
        try:
            future = start.future(request, timeout=within_s, metadata=self._metadata(method))
        except ValueError:  # closed meanwhile
            raise self._lost(method) from None
        try:
            with trio.move_on_after(within_s + _GRACE_S):
                await _done(future)
            if not future.done():
                raise Refused(method.name, self.endpoint, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        finally:
            if not future.done():
                future.cancel()
        if future.code() is not grpc.StatusCode.OK:
            raise Refused(method.name, self.endpoint, future.code(), future.details() or "")
        self.heard_at = trio.current_time()
        return future.result(timeout=0)

    def watch(self, request: Any, read: Callable[[Any], object]) -> WatchStream:
        """`read` makes of each response, in a thread of its own, what `WatchStream.next` gives or raises; None is
        nothing. Raises Refused."""
        if self.closed:
            raise self._lost(WATCH)
        start = self._channel.stream_stream(
            WATCH.path, request_serializer=self._sent, response_deserializer=self._received(WATCH)
        )
        ended = threading.Event()
        try:
            call = start(_one_then_wait(request, ended), metadata=self._metadata(WATCH))
        except ValueError:
            raise self._lost(WATCH) from None
        return WatchStream(call, ended, self.endpoint, read)

    def _metadata(self, method: Method) -> list[tuple[str, str]]:
        # hasleader: a member that has lost the others says so at once, and ends watches for it.
        # Whoever asks for a new token must not show an old one.
        shown = [("token", self.token)] if self.token and method is not AUTHENTICATE else []
        return [("hasleader", "true"), *shown]

    def _lost(self, method: Method) -> Refused:
        return Refused(method.name, self.endpoint, grpc.StatusCode.CANCELLED, "the connection was given up")

    def _sent(self, request: Any) -> bytes:
        data: bytes = request.SerializeToString()
        self._traffic.requests += 1
        self._traffic.sent_bytes += len(data)
        return data

    def _received(self, method: Method) -> Callable[[bytes], Any]:
        def parse(data: bytes) -> Any:
            self._traffic.received_bytes += len(data)
            return method.answer.FromString(data)

        return parse


class WatchStream:
    """What comes of one watch."""

    def __init__(self, call: Any, ended: threading.Event, endpoint: str, read: Callable[[Any], object]) -> None:
        self._call = call
        self._ended = ended
        self._endpoint = endpoint
        self._make = read
        self._send, self._receive = trio.open_memory_channel[Any](_UNREAD)
        self._token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._read, name="tierfs-watch", daemon=True).start()

    async def next(self) -> Any:
        """Raises what `read` made an error of, and Refused when the stream has ended. Cancelled, nothing is lost."""
        item = await self._receive.receive()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._ended.set()
        self._call.cancel()
        self._receive.close()

    def _read(self) -> None:
        refused = Refused(WATCH.name, self._endpoint, grpc.StatusCode.CANCELLED, "the watch ended")
        # Nobody listens any more where the channel is closed, or trio is at its end.
        with suppress(trio.BrokenResourceError, trio.RunFinishedError, trio.Cancelled):
            try:
                for response in self._call:
                    item = self._make(response)
                    if item is not None:
                        self._tell(item)
            except grpc.RpcError:
                refused = Refused(WATCH.name, self._endpoint, self._call.code(), self._call.details() or "")
            self._tell(refused)
        self._ended.set()
        self._call.cancel()

    def _tell(self, item: object) -> None:
        trio.from_thread.run(self._send.send, item, trio_token=self._token)


async def _done(future: Any) -> None:
    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def tell(_: Any) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future.add_done_callback(tell)
    await done.wait()


def _one_then_wait(request: Any, ended: threading.Event) -> Iterator[Any]:
    # A request stream that ends would let etcd end the watch. gRPC runs this in a thread.
    yield request
    ended.wait()


def _options(timeout_s: float) -> list[tuple[str, int]]:
    """Defined in gRPC's `include/grpc/impl/channel_arg_names.h`; times in milliseconds."""
    timeout_ms = max(int(timeout_s * 1000), 100)
    return [
        # No pings of gRPC's: it sends them as it likes, and etcd ends connections that send more than it likes. A
        # connection whose packets are dropped is found by unanswered calls, which the store makes also while it waits.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", timeout_ms),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # etcd bounds what it takes; what it sends is bounded by what was asked.
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # The cluster's own network: no proxy. A connection that was given up must not come back by another channel.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
