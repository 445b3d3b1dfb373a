"""Chunks that the tier has no room for at all: a few of them, in memory beside it.

So a read in a full tier is slow rather than refused.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import trio

from tierfs.checksum import CHUNK_BYTES
from tierfs.hydrate.partial import PartialFile

#: 128 MiB: programs that read as many places side by side don't take each other's chunks away.
KEPT = 8


class Aside:
    """`bring` fetches and verifies one chunk into a descriptor. One at a time is brought."""

    def __init__(self, bring: Callable[[PartialFile, int, int], Awaitable[None]]) -> None:
        self._bring = bring
        self._lock = trio.Lock()
        self._kept: OrderedDict[tuple[int, int], int] = OrderedDict()

    async def read(self, part: PartialFile, offset: int, size: int) -> bytes:
        """Bytes within the file. Raises what `bring` raises, and OSError where there is no memory."""
        found, end = bytearray(), offset + size
        async with self._lock:
            while offset < end:
                chunk = offset // CHUNK_BYTES
                fd = await self._chunk(part, chunk)
                at = offset - chunk * CHUNK_BYTES
                piece = os.pread(fd, min(end - offset, CHUNK_BYTES - at), offset)
                found += piece
                offset += len(piece)
        return bytes(found)

    async def _chunk(self, part: PartialFile, chunk: int) -> int:
        key = (part.ino, chunk)
        fd = self._kept.get(key)
        if fd is None:
            while len(self._kept) >= KEPT:
                os.close(self._kept.popitem(last=False)[1])
            fd = os.memfd_create("tierfs-chunk", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, part.size_bytes)  # it lies at its own offset, in a file of holes
                await self._bring(part, chunk, fd)
            except BaseException:
                os.close(fd)
                raise
            self._kept[key] = fd
        self._kept.move_to_end(key)
        return fd

    def drop(self, ino: int) -> None:
        """Nobody reads the file any more."""
        for key in [key for key in self._kept if key[0] == ino]:
            os.close(self._kept.pop(key))
