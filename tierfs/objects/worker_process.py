"""A worker process as the daemon sees it: starts, is asked, may be stopped, and never stays behind."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

import tierfs
from tierfs.errors import ObjectUnavailable
from tierfs.objects.messages import READ_BYTES, Frame, FrameDamaged, FrameReader, ancillary, encode, error_from

log = logging.getLogger("tierfs.objects")

#: How long a worker may take to let go of a file that the caller wants back, and of other requests.
LET_GO_WITHIN_S = 5.0
#: How often a worker that has something to do is asked for a sign of life within the time that it may be silent.
PINGS = 4
_STOP_WITHIN_S = 0.5
_SEND_WITHIN_S = 10.0
_END_WITHIN_S = 0.5
_DIE_WITHIN_S = 2.0


@dataclass
class _Pending:
    done: trio.Event = field(default_factory=trio.Event)
    answer: Frame | None = None


class WorkerProcess:
    """`run` starts it and returns when it has ended, whoever ended it. Afterwards `alive` is False."""

    def __init__(self, configuration: dict[str, Any], store_module: str, silent_after_s: float) -> None:
        self._configuration = configuration
        self._store_module = store_module
        self._silent_after_s = silent_after_s
        self._heard_at = 0.0
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._busy = trio.Event()
        self._sending = trio.Lock()
        self._ended = trio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: trio.socket.SocketType | None = None
        self.alive = True
        self.started = trio.Event()
        """It takes requests, or it has ended."""

    @property
    def load(self) -> int:
        """Requests it works on."""
        return len(self._pending)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_silent)
            await self._serve()
            nursery.cancel_scope.cancel()

    async def _serve(self) -> None:
        reader = FrameReader()
        try:
            self._start()
            assert self._connection is not None
            await self._send({"op": "configure", **self._configuration}, b"", None)
            self.started.set()
            while data := await self._connection.recv(READ_BYTES):
                self._heard_at = trio.current_time()
                reader.feed(data)
                for frame in reader.frames():
                    pending = self._pending.get(int(frame.header["id"]))
                    if pending is not None:
                        pending.answer = frame
                        pending.done.set()
        except (OSError, ObjectUnavailable) as error:
            log.warning("the connection to an upload worker broke: %s", error)
        except FrameDamaged as error:
            log.error("a worker for the object tier (process %d) speaks nonsense: %s", self.pid, error)
        finally:
            self.alive = False
            self.started.set()
            with trio.CancelScope(shield=True):
                await self._end()
            for pending in self._pending.values():
                pending.done.set()
            self._ended.set()

    async def ask(self, header: dict[str, Any], body: bytes, fd: int | None, *, waits_for_file: bool) -> Frame:
        """One attempt. What the store raised is raised here; ObjectUnavailable when the worker died.

        Cancelled, it stops the request. With `waits_for_file` it returns only when the worker can't touch the file any
        more, and ends a worker that doesn't let go of it in time.
        """
        self._last_id += 1
        number = self._last_id
        pending = self._pending[number] = _Pending()
        self._busy.set()
        try:
            await self._send({**header, "id": number}, body, fd)
            try:
                await pending.done.wait()
            except trio.Cancelled:
                await self._stop(number, pending, waits_for_file=waits_for_file)
                raise
        finally:
            del self._pending[number]
        if pending.answer is None:
            raise ObjectUnavailable("the worker process that was doing it died")
        error = pending.answer.header.get("error")
        if error is not None:
            raise error_from(error)
        return pending.answer

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # --- within

    async def _end_when_silent(self) -> None:
        """A worker answers a ping whatever its threads wait for. One that does not is stopped or frozen, and what waits
        for it, among it programs that can't be killed meanwhile, would wait for ever."""
        while True:
            self._heard_at = trio.current_time()
            await self._busy.wait()
            while self._pending:
                silent_s = trio.current_time() - self._heard_at
                if silent_s > self._silent_after_s:
                    log.error("a worker for the object tier (process %d) is silent for %.0f s: ending it", self.pid,
                              silent_s)  # fmt: skip
                    self.kill()
                    return
                self._last_id += 1
                with suppress(ObjectUnavailable):  # then it is being ended
                    await self._send({"op": "ping", "id": self._last_id}, b"", None)
                await trio.sleep(self._silent_after_s / PINGS)
            self._busy = trio.Event()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                # In this very thread, which lives as long as the daemon: PR_SET_PDEATHSIG takes the end of the thread
                # that started a process for the end of its parent. It takes a few milliseconds (vfork).
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tierfs.objects.worker", str(theirs.fileno()),
                     "--store-module", self._store_module],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._connection = trio.socket.from_stdlib_socket(ours)

    async def _send(self, header: dict[str, Any], body: bytes, fd: int | None) -> None:
        """The whole frame or an end of the connection: half a frame would make nonsense of all that follow."""
        data = memoryview(encode(header, body, has_fd=fd is not None))
        try:
            with trio.move_on_after(_SEND_WITHIN_S, shield=True):
                async with self._sending:
                    if not self.alive or self._connection is None:
                        raise ObjectUnavailable("the worker process died")
                    rights = ancillary(fd)
                    while data:
                        data = data[await self._connection.sendmsg([data], rights) :]
                        rights = []
        except OSError as error:
            if error.errno == errno.EBADF:  # the caller's descriptor: nothing was sent
                raise
            self.kill()
            raise ObjectUnavailable(f"a worker process did not take a request: {error}") from None
        if data:
            self.kill()
            raise ObjectUnavailable(f"a worker process took no request for {_SEND_WITHIN_S:.0f} s")

    async def _stop(self, number: int, pending: _Pending, *, waits_for_file: bool) -> None:
        with trio.CancelScope(shield=True):
            with suppress(ObjectUnavailable):
                await self._send({"op": "cancel", "of": number}, b"", None)
            with trio.move_on_after(LET_GO_WITHIN_S if waits_for_file else _STOP_WITHIN_S):
                await pending.done.wait()
            if waits_for_file and not pending.done.is_set():
                log.warning("a worker (process %d) did not let go of a file within %.0f s: ending it", self.pid,
                            LET_GO_WITHIN_S)  # fmt: skip
                self.kill()
                with trio.move_on_after(_DIE_WITHIN_S):
                    await self._ended.wait()

    async def _end(self) -> None:
        """Closes the connection, which asks it to leave, and sees that it does."""
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return
        pidfd = os.pidfd_open(self._process.pid)
        try:
            for within_s in (_END_WITHIN_S, _DIE_WITHIN_S):
                with trio.move_on_after(within_s):
                    await trio.lowlevel.wait_readable(pidfd)
                    break
                self._process.kill()
        finally:
            os.close(pidfd)
        status = self._process.poll()
        if status is None:
            log.error("the worker process %d can't be ended", self._process.pid)
        elif status:
            log.warning("a worker process for the object tier (%d) died with status %d", self._process.pid, status)


def _environment() -> dict[str, str]:
    """This very package is found first, wherever it was imported from; and malloc keeps few arenas, since the threads
    of a worker hold little each."""
    environment = dict(os.environ)
    home = str(Path(tierfs.__file__).resolve().parent.parent)
    paths = [home, *(path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != home)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return environment
