"""The daemon's side of the control socket: one JSON object a line each way, many clients at a time.

A request is `{"op": NAME, ...arguments}`. The answer is any number of `{"progress": {...}}` lines and then one of
`{"ok": true, "result": ...}` and `{"ok": false, "error": {"kind", "message", "exit_code"}}`. Requests of one
connection are answered one after the other. A client that goes away cancels what was done for it.
"""

from __future__ import annotations

import array
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import trio

from mount.handover import HANDOVER
from mount.runtime import unix_address
from tierfs.errors import InstanceError, TierfsError

log = logging.getLogger("tierfs.control")

MOST_LINE_BYTES = 1 << 20
_SEND_WITHIN_S = 30.0
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
_PEER = struct.Struct("iII")  # pid, uid, gid: struct ucred of SO_PEERCRED, unix(7)


class Progress(Protocol):
    """What an operation calls to say how far it is."""

    async def __call__(self, values: Mapping[str, Any], /) -> None: ...


Operation = Callable[[dict[str, Any], Progress], Awaitable[Any]]


class ControlServer:
    """Serves `operations` on the Unix socket `path`, to processes of this user and of root only.

    An operation gets the request's arguments without `op`. What it raises becomes an error reply: a TierfsError with
    its kind, an OSError with its text, and anything else is logged with its traceback. `fuse_fd`, if given, is handed
    to a new keeper that asks for it.
    """

    def __init__(self, path: Path, operations: Mapping[str, Operation], *, fuse_fd: int | None = None) -> None:
        self._path = path
        self._operations = operations
        self._fuse_fd = fuse_fd

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; started once clients can connect. The socket of an earlier daemon is replaced."""
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            with unix_address(fresh) as address:
                await listener.bind(address)
            fresh.chmod(0o600)
            listener.listen(64)
            fresh.replace(self._path)
            ours = self._path.stat().st_ino
            try:
                task_status.started()
                await trio.serve_listeners(self._serve, [trio.SocketListener(listener)])
            finally:
                with suppress(OSError):
                    if self._path.stat().st_ino == ours:
                        self._path.unlink()

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = _Connection(stream)
        try:
            async with stream:
                if connection.is_allowed():
                    await connection.serve(self._answer)
                else:
                    await connection.fail(InstanceError("only the user of this instance and root may ask"))
        except _GONE:
            pass
        except Exception:
            log.exception("a connection to the control socket failed")

    async def _answer(self, connection: _Connection, line: bytes) -> None:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("op"), str):
                raise ValueError('a request is an object with "op"')
        except (ValueError, RecursionError) as error:
            await connection.fail(InstanceError(f"not a request: {error}"))
            return
        op = request.pop("op")
        if op == HANDOVER and self._fuse_fd is not None:
            await connection.hand_over(self._fuse_fd)
            return
        operation = self._operations.get(op)
        if operation is None:
            known = ", ".join(sorted(self._operations))
            await connection.fail(InstanceError(f"unknown operation {op!r}; this version knows {known}"))
            return
        try:
            reply: dict[str, Any] = {"ok": True, "result": await operation(request, connection.progress)}
            encoded = json.dumps(reply)
        except TierfsError as error:
            await connection.fail(error)
        except _GONE:
            raise
        except OSError as error:
            await connection.fail(TierfsError(str(error)))
        except Exception as error:
            log.exception("the operation %s failed", op)
            await connection.fail(
                TierfsError(f"{op} failed inside the daemon ({type(error).__name__}: {error}); its log has the details")
            )
        else:
            await connection.send(encoded)


class _Connection:
    """One client: cuts its lines, and cancels the answer when it goes away."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._sending = trio.Lock()  # operations may report progress from several tasks

    def is_allowed(self) -> bool:
        credentials = self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(credentials)
        return uid in (0, os.geteuid())

    async def serve(self, answer: Callable[[_Connection, bytes], Awaitable[None]]) -> None:
        lines, requests = trio.open_memory_channel[bytes](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, lines, nursery.cancel_scope)
            with suppress(*_GONE):
                async with requests:
                    async for line in requests:
                        await answer(self, line)
            nursery.cancel_scope.cancel()

    async def _read(self, lines: trio.MemorySendChannel[bytes], scope: trio.CancelScope) -> None:
        """Runs beside the answer, so that it sees the client's end, which cancels the answer (unless another request
        of the client waits here before its end)."""
        rest = b""
        async with lines:
            while True:
                try:
                    data = await self._stream.receive_some(1 << 16)
                except trio.BrokenResourceError:
                    data = b""
                if not data:
                    scope.cancel()
                    return
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    if len(line) > MOST_LINE_BYTES:
                        break
                    if line.strip():
                        await lines.send(line)
                else:
                    if len(rest) <= MOST_LINE_BYTES:
                        continue
                with suppress(*_GONE):
                    await self.fail(InstanceError(f"a request is at most {MOST_LINE_BYTES} bytes long"))
                return

    async def progress(self, values: Mapping[str, Any], /) -> None:
        await self.send(json.dumps({"progress": dict(values)}))

    async def fail(self, error: TierfsError) -> None:
        said = {"kind": type(error).__name__, "message": error.message, "exit_code": error.exit_code}
        await self.send(json.dumps({"ok": False, "error": said}))

    async def send(self, text: str) -> None:
        """A client that doesn't read for long is given up, and what is done for it."""
        with trio.move_on_after(_SEND_WITHIN_S) as scope:
            async with self._sending:
                await self._stream.send_all(text.encode() + b"\n")
        if scope.cancelled_caught:
            raise trio.BrokenResourceError("the client does not read")

    async def hand_over(self, fd: int) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        async with self._sending:
            await self._stream.socket.sendmsg([b'{"ok": true, "result": "with this line"}\n'], [rights])
