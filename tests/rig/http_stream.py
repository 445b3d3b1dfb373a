"""HTTP/1.1 as it comes off a socket: heads, bodies by length, bodies in chunks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from io import BufferedReader
from typing import cast

PIECE_BYTES = 256 << 10
_MOST_HEADER_BYTES = 64 << 10


def buffered(connection: socket.socket) -> BufferedReader:
    return cast(BufferedReader, connection.makefile("rb", buffering=PIECE_BYTES))


def read_head(stream: BufferedReader) -> list[str]:
    """The lines before a body; empty where the connection ended."""
    lines: list[str] = []
    size = 0
    while line := stream.readline(_MOST_HEADER_BYTES):
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            return lines
        lines.append(text)
        size += len(line)
        if size > _MOST_HEADER_BYTES:
            raise ValueError("headers without an end")
    return []


def header_fields(lines: list[str]) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}


def read_pieces(stream: BufferedReader, length: int) -> Iterator[bytes]:
    while length:
        piece = stream.read1(min(length, PIECE_BYTES))
        if not piece:
            raise ConnectionError("the connection ended within a body")
        length -= len(piece)
        yield piece


def read_chunks(stream: BufferedReader) -> Iterator[bytes]:
    while size := int(stream.readline().split(b";")[0], 16):
        yield from read_pieces(stream, size)
        stream.readline()
    while stream.readline().strip():
        pass  # trailers


def pass_chunks(stream: BufferedReader, server: socket.socket) -> None:
    """A chunked request as it is, with its trailers (which may be signed)."""
    while True:
        line = stream.readline()
        server.sendall(line)
        size = int(line.split(b";")[0], 16)
        if not size:
            break
        for piece in read_pieces(stream, size + 2):
            server.sendall(piece)
    while line := stream.readline():
        server.sendall(line)
        if not line.strip():
            return
