"""What the daemon and its worker processes say to each other, on a Unix stream socket: frames of JSON and bytes.

A frame is a head (the three numbers below, big-endian), a JSON object, and a body of raw bytes, so that small
objects need no base64. Descriptors ride along by SCM_RIGHTS, at most one a frame and in order; the head says whether
one does.

Requests are `{"id", "op", …}`, answers `{"id", "ok": {…}}` or `{"id", "error": {"kind", "message", …}}`. The op
`cancel` names in `of` a request whose result nobody wants, and `configure` comes first; both get no answer. `ping` is
answered at once, whatever else goes on.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tierfs import errors
from tierfs.errors import NoRoom, ObjectError, TierfsError

_HEAD = struct.Struct("!III")
"""Bytes of JSON, bytes of the body, descriptors (0 or 1)."""
_MOST_JSON_BYTES = 16 << 20  # a page of 1000 keys of 1024 bytes, each byte escaped, takes 6 MiB
MOST_BODY_BYTES = 64 << 20
READ_BYTES = 256 << 10
ANCILLARY_BYTES = socket.CMSG_SPACE(16 * array.array("i").itemsize)

_KINDS: dict[str, type[TierfsError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and (issubclass(kind, ObjectError) or kind in (errors.SettingsError, errors.StepBusy, NoRoom))
}


class FrameDamaged(Exception):
    """The other side does not speak this protocol; the connection is of no use."""


@dataclass(frozen=True)
class Frame:
    """`fd` is the receiver's to close; -1 when none came along."""

    header: dict[str, Any]
    body: bytes = b""
    fd: int = -1


def encode(header: dict[str, Any], body: bytes = b"", *, has_fd: bool = False) -> bytes:
    if len(body) > MOST_BODY_BYTES:
        raise ValueError(f"a body of {len(body)} bytes is too large for a frame")
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    return b"".join((_HEAD.pack(len(text), len(body), int(has_fd)), text, body))


def ancillary(fd: int | None) -> list[tuple[int, int, array.array[int]]]:
    """For sendmsg: the descriptor that goes along, if any."""
    return [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]


class FrameReader:
    """Makes frames of what was received. It knows no socket, so that a thread and a task use the same."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, messages: list[tuple[int, int, bytes]] | None = None) -> None:
        """Bytes, and the ancillary messages that recvmsg returned with them."""
        self._buffer += data
        for level, kind, raw in messages or ():
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._fds.extend(fds)

    def frames(self) -> Iterator[Frame]:
        """All that are whole. FrameDamaged."""
        while len(self._buffer) >= _HEAD.size:
            json_bytes, body_bytes, fd_count = _HEAD.unpack_from(self._buffer)
            if json_bytes > _MOST_JSON_BYTES or body_bytes > MOST_BODY_BYTES or fd_count > 1:
                raise FrameDamaged("a frame's head is nonsense")
            end = _HEAD.size + json_bytes + body_bytes
            if len(self._buffer) < end:
                return
            if fd_count > len(self._fds):
                raise FrameDamaged("a descriptor did not arrive: the limit of open files may be reached")
            try:
                header = json.loads(self._buffer[_HEAD.size : _HEAD.size + json_bytes])
            except ValueError:
                raise FrameDamaged("a frame is no JSON") from None
            if not isinstance(header, dict):
                raise FrameDamaged("a frame is no JSON object")
            body = bytes(memoryview(self._buffer)[_HEAD.size + json_bytes : end])
            del self._buffer[:end]
            yield Frame(header, body, self._fds.popleft() if fd_count else -1)

    def close(self) -> None:
        """Closes descriptors that no frame has claimed."""
        while self._fds:
            os.close(self._fds.popleft())


def error_header(error: TierfsError) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": type(error).__name__, "message": error.message}
    if isinstance(error, NoRoom):
        said.update(needed_bytes=error.needed_bytes, free_bytes=error.free_bytes)
    return said


def error_from(said: dict[str, Any]) -> TierfsError:
    """The opposite of `error_header`; what is unknown becomes a plain ObjectError."""
    kind, message = _KINDS.get(str(said.get("kind")), ObjectError), str(said.get("message", "no reason was given"))
    if kind is NoRoom:
        return NoRoom(message, needed_bytes=int(said["needed_bytes"]), free_bytes=int(said["free_bytes"]))
    return kind(message)
