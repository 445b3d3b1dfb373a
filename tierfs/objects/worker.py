"""A worker process: does what the daemon asks of the object store, and ends with it.

Started by `tierfs.objects.worker_process` as `python -m tierfs.objects.worker FD`, with one end of a socket pair.
Files come as descriptors and are mapped here, so that no byte of a checkpoint passes through the daemon and its
interpreter lock. A thread works on each request; the main thread only reads, so that a cancellation and the daemon's
end are heard at once.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from tierfs.errors import ObjectError, ObjectUnavailable, TierfsError
from tierfs.objects.bandwidth import Bandwidth
from tierfs.objects.messages import ANCILLARY_BYTES, READ_BYTES, Frame, FrameReader, encode, error_header
from tierfs.objects.store import TransferStopped
from tierfs.objects.worker_operations import CONTROL, OPERATIONS, UPLOADS, Answer, Request

log = logging.getLogger("tierfs.objects")

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
#: Uploads yield to the training that shares the machine; reads don't, since a program may wait for them.
_UPLOAD_NICENESS = 5
_LOOKS_A_STALL = 10
#: Cancelled or stalled threads that never came back: with so many of them a new process is better than this one.
_MOST_LOST_THREADS = 64


class Worker:
    """Serves one daemon until that closes its end.

    A request in which nothing moves for `stalled_after_s` (the daemon says how long) is answered as failed, though its
    thread may never come back: a `file://` tier on a file server that went away.
    """

    def __init__(self, connection: socket.socket, store_module: str) -> None:
        self._connection = connection
        self._store_module = store_module
        self._sending = threading.Lock()
        self._running: dict[int, Request] = {}
        self._lost = 0
        self._bandwidth = {"up": Bandwidth(0), "down": Bandwidth(0)}
        self._stalled_after_s = float("inf")
        self._settings: dict[str, Any] = {}
        self._store: Any = None
        self._opening = threading.Lock()
        # Idle threads are used again, and only as many exist as were ever needed at once.
        self._uploads = ThreadPoolExecutor(256, "upload", initializer=_yield_to_training)
        self._others = ThreadPoolExecutor(256, "request")

    def serve(self) -> None:
        reader = FrameReader()
        looked = time.monotonic()
        while True:
            try:
                data, messages, flags, _ = self._connection.recvmsg(
                    READ_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                if not data:
                    return
                if flags & socket.MSG_CTRUNC:
                    log.error("a descriptor from the daemon was lost: the limit of open files is reached")
                    return
                reader.feed(data, messages)
                for frame in reader.frames():
                    self._hear(frame)
            except TimeoutError:
                pass
            except ConnectionError:
                return
            now = time.monotonic()
            if now - looked >= self._stalled_after_s / _LOOKS_A_STALL:
                looked = now
                self._give_up_stalled(now)

    def _hear(self, frame: Frame) -> None:
        header = frame.header
        match header["op"]:
            case "ping":
                self._answer({"id": header["id"], "ok": {}})
            case "cancel":
                request = self._running.get(header["of"])
                if request is not None:
                    request.stop.set()
            case "configure":
                self._settings = header["store"]
                self._stalled_after_s = header["stalled_after_s"]
                self._connection.settimeout(self._stalled_after_s / _LOOKS_A_STALL)
                self._bandwidth = {name: Bandwidth(header["bytes_s"][name]) for name in ("up", "down")}
                logging.getLogger("tierfs").setLevel(header["log_level"].upper())
            case op:
                direction = "up" if op in UPLOADS else "down"
                request = Request(header, frame.body, frame.fd, self._bandwidth[direction])
                self._running[header["id"]] = request
                (self._uploads if op in UPLOADS else self._others).submit(self._work, request)

    def _work(self, request: Request) -> None:
        answer = Answer()
        header: dict[str, Any] = {"id": request.header["id"]}
        try:
            try:
                request.check()
                operation = OPERATIONS[request.header["op"]]
                answer = operation(self._opened(), request) if operation not in CONTROL else operation(None, request)
                header["ok"] = answer.result
            except TierfsError as error:
                header["error"] = error_header(error)
            except TransferStopped:
                header["error"] = error_header(ObjectUnavailable("the request was stopped"))
            except (OSError, MemoryError) as error:
                log.warning("%s failed unexpectedly", request.header["op"], exc_info=True)
                header["error"] = error_header(ObjectUnavailable(f"{request.header['op']} failed: {error}"))
            except Exception as error:
                log.exception("%s failed in a way that nobody thought of", request.header["op"])
                header["error"] = error_header(ObjectError(f"{request.header['op']} failed: {error!r}"))
            request.close()  # before the answer, which tells the daemon that file and range are its own again
        finally:
            if self._running.pop(request.header["id"], None) is not None:
                self._answer(header, answer.body)
            else:  # it was given up before
                self._lost -= 1

    def _opened(self) -> Any:
        with self._opening:
            if self._store is None:
                from tierfs.objects.opening import StoreSettings

                module = importlib.import_module(self._store_module)
                self._store = module.open_store(StoreSettings.from_json(self._settings))
            return self._store

    def _answer(self, header: dict[str, Any], body: bytes = b"") -> None:
        with self._sending, suppress(OSError):  # the daemon is gone: the main thread sees that, too
            _send(self._connection, encode(header, body))

    def _give_up_stalled(self, now: float) -> None:
        for number, request in list(self._running.items()):
            stalled_s = now - request.moved
            if stalled_s < self._stalled_after_s or self._running.pop(number, None) is None:
                continue
            request.stop.set()
            self._lost += 1
            message = f"{request.header['op']}: no byte moved for {stalled_s:.0f} s"
            self._answer({"id": number, "error": error_header(ObjectUnavailable(message))})
        if self._lost > _MOST_LOST_THREADS:
            log.error("%d requests hang for ever: beginning anew", self._lost)
            os._exit(1)


def _send(connection: socket.socket, data: bytes) -> None:
    """All of it. The reader's time-out holds for the socket as a whole: the daemon may be slow to take the answer."""
    rest = memoryview(data)
    while rest:
        with suppress(TimeoutError):
            rest = rest[connection.send(rest) :]


def _yield_to_training() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _UPLOAD_NICENESS)


def _end_with_parent() -> None:
    """The socket's end says the same, but not to a process that hangs."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tierfs.objects.worker")
    parser.add_argument("fd", type=int)
    parser.add_argument("--store-module", default="tierfs.objects.opening")
    given = parser.parse_args(arguments)
    _end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's ^C is the daemon's business; it flushes first
    logging.basicConfig(format="%(asctime)s worker %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    connection = socket.socket(fileno=given.fd)
    connection.set_inheritable(False)
    Worker(connection, given.store_module).serve()
    sys.stderr.flush()
    os._exit(0)  # threads that are busy are not waited for: nobody wants what they do


if __name__ == "__main__":
    main()
