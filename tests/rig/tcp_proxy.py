"""A proxy between two nodes that does to their bytes what networks do: stall, reset, flip a bit, be slow, be gone.

It knows nothing of the protocol. Faults count bytes of one direction of one connection:

    with TcpProxy(("127.0.0.1", port)) as proxy:
        proxy.faults = [Fault("reset", after_bytes=1_000_000)]
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Literal

PIECE_BYTES = 64 << 10


@dataclass
class Fault:
    """`down` is from the server to the client. `times` is how many connections it meets; None: all. After
    `after_bytes`: `reset` and `end` the connection, `stall` until `cut` or the proxy's end, or flip one bit there
    (`flip`). `slow` passes `bytes_s` from the start."""

    action: Literal["reset", "end", "stall", "flip", "slow"]
    after_bytes: int = 0
    direction: Literal["up", "down"] = "down"
    times: int | None = 1
    bytes_s: float = 0.0
    hits: int = 0


@dataclass
class TcpProxy:
    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    port: int = 0
    connections: int = 0
    refuse: bool = False
    """New connections are closed at once; those that are there go on."""
    recorded: list[bytearray] = field(default_factory=list)
    """What each client sent."""
    passed_down: int = 0

    def __enter__(self) -> TcpProxy:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._over = threading.Event()
        self._released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(timeout=10)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """All connections that are there."""
        with self._lock:
            sockets = list(self._sockets)
            released, self._released = self._released, threading.Event()
        released.set()
        for each in sockets:
            _reset(each)

    def _start(self, target, *arguments) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="tcp-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                _reset(client)
                client.close()
                continue
            try:
                server = socket.create_connection(self.upstream, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            said = bytearray()
            with self._lock:
                self.connections += 1
                self.recorded.append(said)
                self._sockets |= {client, server}
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            closing = threading.Semaphore(1)  # the second of the two threads to end closes both
            self._start(self._pump, client, server, "up", said, closing)
            self._start(self._pump, server, client, "down", None, closing)

    def _take(self, direction: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.direction == direction and fault.times != 0:
                    return fault
        return None

    def _hit(self, fault: Fault) -> None:
        with self._lock:
            fault.hits += 1
            if fault.times is not None:
                fault.times -= 1

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        direction: str,
        said: bytearray | None,
        closing: threading.Semaphore,
    ) -> None:
        passed, met = 0, None
        try:
            while piece := source.recv(PIECE_BYTES):
                fault = self._take(direction)
                if fault is not None and fault is not met and passed + len(piece) > fault.after_bytes:
                    released = self._released
                    keep = max(0, fault.after_bytes - passed)
                    met = fault
                    self._hit(fault)
                    if fault.action == "flip":
                        changed = bytearray(piece)
                        changed[keep] ^= 1
                        piece = bytes(changed)
                    elif fault.action != "slow":
                        sink.sendall(piece[:keep])
                        if fault.action == "stall":
                            released.wait()
                        if fault.action != "end":
                            _reset(sink)
                        return
                sink.sendall(piece)
                if said is not None:
                    said += piece
                else:
                    self.passed_down += len(piece)
                passed += len(piece)
                if met is not None and met.action == "slow":
                    self._over.wait(len(piece) / met.bytes_s)
        except OSError:
            pass  # either side went away; the other one is told below
        finally:
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            if not closing.acquire(blocking=False):
                with self._lock:
                    self._sockets -= {source, sink}
                source.close()
                sink.close()


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        each.shutdown(socket.SHUT_RDWR)
