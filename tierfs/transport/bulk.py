"""The bytes themselves: from a file into a socket, and from a socket into a file. Blocking, for threads.

Both let go of the interpreter lock for each piece. A received piece goes through one small buffer that stays in the
processor's cache: summed up there, then written. That costs one copy more than receiving into a mapping of the file,
but the copy is cheap, and page faults and a second pass for the checksum are saved: 1.1 times the bytes a second of a
bare recv_into a mapping (measured on one machine, tmpfs with huge pages; bench/transport_tcp.py). And a file that is cut
meanwhile or a full tmpfs is an error here, no SIGBUS.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
from dataclasses import dataclass

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.errors import NoRoom
from tierfs.objects.bandwidth import Bandwidth

PIECE_BYTES = 1 << 20
#: TLS hands out a record (16 KiB) at a time; so much of them is gathered before it is written.
_GATHER_BYTES = 256 << 10
_SENDFILE_BYTES = 8 << 20
#: A slower limit takes smaller pieces, so that the sender sees bytes go several times a second.
_PIECES_A_SECOND = 8
_LEAST_PIECE_BYTES = 4 << 10

_buffers = threading.local()


class FileCut(Exception):
    """The file that is being sent ended before the bytes that were promised."""


class Stopped(Exception):
    """Somebody does not want the rest any more."""


@dataclass
class Received:
    """How far one transfer came; true also after an exception."""

    length: int = 0
    crc64nvme: int = 0


def send_file(connection: socket.socket, fd: int, offset: int, length: int, stall_s: float) -> None:
    """TimeoutError after `stall_s` in which the other side took no byte; FileCut; OSError."""
    connection.settimeout(stall_s)
    try:
        if isinstance(connection, ssl.SSLSocket):
            _send_through_buffer(connection, fd, offset, length)
        else:
            _send_file(connection, fd, offset, length, stall_s)
    finally:
        connection.settimeout(0)


def _send_file(connection: socket.socket, fd: int, offset: int, length: int, stall_s: float) -> None:
    out, end = connection.fileno(), offset + length
    waiting = select.poll()
    waiting.register(out, select.POLLOUT)
    while offset < end:
        try:
            sent = os.sendfile(out, fd, offset, min(end - offset, _SENDFILE_BYTES))
        except BlockingIOError:
            if not waiting.poll(stall_s * 1000):
                raise TimeoutError from None
            continue
        if not sent:
            raise FileCut
        offset += sent


def _send_through_buffer(connection: socket.socket, fd: int, offset: int, length: int) -> None:
    buffer, end = _buffer(), offset + length
    while offset < end:
        got = os.preadv(fd, [buffer[: min(end - offset, _GATHER_BYTES)]], offset)
        if not got:
            raise FileCut
        offset += got
        rest = buffer[:got]
        while rest:
            rest = rest[connection.send(rest) :]


def receive_file(
    connection: socket.socket,
    fd: int,
    offset: int,
    length: int,
    stall_s: float,
    received: Received,
    *,
    bandwidth: Bandwidth | None = None,
    bytes_s: float = 0,
    stop: threading.Event,
) -> None:
    """TimeoutError after `stall_s` without a byte; ConnectionError where the other side ends; NoRoom; OSError."""
    piece_bytes = PIECE_BYTES
    if bandwidth is not None and bytes_s > 0:
        piece_bytes = max(_LEAST_PIECE_BYTES, min(PIECE_BYTES, int(bytes_s / _PIECES_A_SECOND)))
    gather_bytes = min(piece_bytes, _GATHER_BYTES) if isinstance(connection, ssl.SSLSocket) else 1
    buffer = _buffer()
    connection.settimeout(stall_s)
    try:
        while received.length < length:
            most = min(piece_bytes, length - received.length)
            got = 0
            while got < min(gather_bytes, most):
                more = _receive(connection, buffer[got:most])
                if not more:
                    raise ConnectionError("the other node ended the connection")
                got += more
            checksum = crc64nvme(buffer[:got], received.crc64nvme)
            _write(fd, buffer[:got], offset + received.length)
            received.length += got
            received.crc64nvme = checksum
            if bandwidth is not None and stop.wait(bandwidth.take(got)):
                raise Stopped
    finally:
        connection.settimeout(0)


def _receive(connection: socket.socket, into: memoryview) -> int:
    try:
        return connection.recv_into(into)
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:  # of TLS, too; what the file says must not be taken for this
        raise ConnectionError(str(error)) from None


def _write(fd: int, piece: memoryview, offset: int) -> None:
    try:
        while piece:
            written = os.pwrite(fd, piece, offset)
            offset += written
            piece = piece[written:]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        room = os.fstatvfs(fd)
        free = room.f_bavail * room.f_frsize
        raise NoRoom(
            f"the RAM tier has {free} bytes free: no room for a file that another node holds",
            needed_bytes=len(piece),
            free_bytes=free,
        ) from None


def _buffer() -> memoryview:
    """One a thread; trio uses its threads again."""
    if not hasattr(_buffers, "piece"):
        _buffers.piece = memoryview(bytearray(PIECE_BYTES))
    found: memoryview = _buffers.piece
    return found
