"""A request's bytes from memory to the socket, and an answer's from the socket to memory, without a copy between."""

from __future__ import annotations

import os
from typing import Any

from tierfs.errors import ObjectUnavailable
from tierfs.objects.store import MIB, Flow


class MemoryBody:
    """A file-like body over a memoryview.

    http.client reads a body in blocks of 16 KiB; here each read gives at least 1 MiB, a slice that goes to send(2) as
    it is. Slices are asked of the flow, so that it limits and stops a request in the middle.
    """

    def __init__(self, data: memoryview, flow: Flow) -> None:
        self._data = data
        self._flow = flow
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> memoryview | bytes:
        if self._at >= len(self._data):
            return b""
        everything = size is None or size < 0
        piece = self._data[self._at :] if everything else self._data[self._at : self._at + max(size or 0, MIB)]
        self._flow.passing(len(piece))
        self._at += len(piece)
        return piece


def read_into(body: Any, into: memoryview, flow: Flow, what: str) -> None:
    """Fill `into` from the body of an answer of botocore, whose connection is kept for the next request then.

    Reads with http.client's own readinto: urllib3's makes a bytes object of each piece first. That one ends silently
    when the connection closes early, so the count is checked here.
    """
    raw = body._raw_stream
    source = getattr(raw, "_fp", raw)
    done = 0
    while done < len(into):
        piece = into[done : done + MIB]
        flow.passing(len(piece))
        end = done + len(piece)
        while done < end:
            got = source.readinto(into[done:end])
            if not got:
                raise ObjectUnavailable(f"{what}: the connection closed after {done} of {len(into)} bytes")
            done += got
    if raw is not source:
        raw.release_conn()
