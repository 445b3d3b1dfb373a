"""Reading objects back to look at them, in bounded memory: no byte is kept but in a scratch file that is emptied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import trio

from tierfs.checksum import CHUNK_BYTES, FileChecksum, combine
from tierfs.objects.client import ObjectClient
from tierfs.persist.reporting import all_of
from tierfs.ram.syscalls import FALLOC_FL_KEEP_SIZE, fallocate

# include/uapi/linux/falloc.h; goes with FALLOC_FL_KEEP_SIZE.
FALLOC_FL_PUNCH_HOLE = 0x02

#: Chunks that are fetched side by side, of all files together: at 16 MiB each this bounds the memory to 64 MiB.
CHUNKS_AT_ONCE = 4


class ReadBack:
    """Reads objects for one command. `passed_bytes` counts what came."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._slots = trio.Semaphore(CHUNKS_AT_ONCE)
        self.passed_bytes = 0

    async def checksum(self, key: str, size_bytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> FileChecksum:
        """The checksum of the object's first `size_bytes`, as they came. Raises ObjectError."""
        count = -(-size_bytes // chunk_bytes)
        chunks = [0] * count
        with scratch_file() as fd:
            os.ftruncate(fd, size_bytes)
            jobs = (partial(self._chunk, key, fd, size_bytes, chunk_bytes, at, chunks) for at in range(count))
            await all_of(jobs, at_once=CHUNKS_AT_ONCE)
        full = 0
        for at, chunk in enumerate(chunks):
            full = combine(full, chunk, min(chunk_bytes, size_bytes - at * chunk_bytes))
        return FileChecksum(size_bytes, full, tuple(chunks), chunk_bytes)

    async def _chunk(self, key: str, fd: int, size_bytes: int, chunk_bytes: int, at: int, chunks: list[int]) -> None:
        offset = at * chunk_bytes
        length = min(chunk_bytes, size_bytes - offset)
        async with self._slots:
            try:
                chunks[at] = await self._client.read_range(key, offset, length, fd)
            finally:
                fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offset, length)
        self.passed_bytes += length


@contextmanager
def scratch_file() -> Iterator[int]:
    """A nameless file in memory."""
    fd = os.memfd_create("tierfs-scratch", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
