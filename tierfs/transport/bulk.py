"""The bytes themselves: from a file into a socket, and from a socket into a file. Blocking, for threads.

Both let go of the interpreter lock for each piece. What is received is summed up piece by piece in a buffer that stays
in the processor's cache, and written from there. That is one copy more than receiving into a mapping of the file, and
yet costs little: the kernel zeroes a huge page that is touched through a mapping, and not one that is written. And a
file that is cut meanwhile or a full tmpfs is an error here, no SIGBUS.

Measured over a veth pair (bench/transport_tcp.py) with two streams: 1.1 times the speed of bare sendfile and recv_into
a mapping, at 1.3 times its CPU, checksum included. With one stream 0.73: the sender waits while a piece is summed up
and written, and with pieces of 4 MiB, more than a socket's buffer, it was 0.44.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import threading
from dataclasses import dataclass

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.errors import NoRoom
from tierfs.objects.bandwidth import Bandwidth

#: Less than a socket's buffer (net.ipv4.tcp_wmem is 4 MiB at the most): the sender goes on while one is written.
PIECE_BYTES = 1 << 20
#: To be encrypted at once.
_TLS_BYTES = 256 << 10
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
    # Waits within the call: a sendfile that may not block reads pages that it then has no place for, which costs three
    # times the CPU where the network is slower than memory.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(stall_s))
    out, end = connection.fileno(), offset + length
    while offset < end:
        try:
            sent = os.sendfile(out, fd, offset, min(end - offset, _SENDFILE_BYTES))
        except BlockingIOError:
            raise TimeoutError from None
        if not sent:
            raise FileCut
        offset += sent


def _timeval(seconds: float) -> bytes:
    """struct timeval (sys/time.h)."""
    microseconds = max(1, int(seconds * 1e6))
    return struct.pack("@ll", microseconds // 1_000_000, microseconds % 1_000_000)


def _send_through_buffer(connection: socket.socket, fd: int, offset: int, length: int) -> None:
    buffer, end = _buffer(), offset + length
    while offset < end:
        got = os.preadv(fd, [buffer[: min(end - offset, _TLS_BYTES)]], offset)
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
    source = _Source(connection, stall_s)
    try:
        while received.length < length:
            at = offset + received.length
            most = min(piece_bytes - at % piece_bytes, length - received.length)
            got = _receive_piece(source, fd, at, most, received)
            if bandwidth is not None and stop.wait(bandwidth.take(got)):
                raise Stopped
    finally:
        source.leave()


def _receive_piece(source: _Source, fd: int, offset: int, length: int, received: Received) -> int:
    """All of it, or an exception; what came is written in either case, so that a resumption begins where it broke."""
    buffer, got, checksum = _buffer(), 0, received.crc64nvme
    try:
        while got < length:
            more = source.receive(buffer[got:length])
            checksum = crc64nvme(buffer[got : got + more], checksum)
            got += more
    finally:
        if got:
            write_piece(fd, buffer[:got], offset)
            received.length += got
            received.crc64nvme = checksum
    return got


class _Source:
    """A socket that is received from. A plain one waits within recv, which saves Python's own poll before each."""

    def __init__(self, connection: socket.socket, stall_s: float) -> None:
        self._connection = connection
        self._flags = 0
        if isinstance(connection, ssl.SSLSocket):
            connection.settimeout(stall_s)
        else:
            # The kernel gathers a piece, and wakes this thread, which then takes the interpreter lock, once for it. Not
            # by SO_RCVLOWAT: with a window that is still small that waits for a delayed acknowledgement each time, and
            # a pull came to 1/20 of the speed.
            self._flags = socket.MSG_WAITALL
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(stall_s))

    def receive(self, into: memoryview) -> int:
        """At least one byte; less than all after `stall_s`, too. TimeoutError, ConnectionError."""
        try:
            got = self._connection.recv_into(into, 0, self._flags)
        except BlockingIOError:
            raise TimeoutError from None
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:  # of TLS, too; what the file says must not be taken for this
            raise ConnectionError(str(error)) from None
        if not got:
            raise ConnectionError("the other node ended the connection")
        return got

    def leave(self) -> None:
        """As others want the socket."""
        self._connection.settimeout(0)


def write_piece(fd: int, piece: memoryview, offset: int) -> None:
    """All of it. NoRoom, OSError."""
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
