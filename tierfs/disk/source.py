"""Bytes of stubs from this node's disk, then from wherever else they are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import trio

from tierfs.disk.direct_io import copy_range
from tierfs.disk.disk_step import DiskStep
from tierfs.errors import DiskError
from tierfs.hydrate.source import Source
from tierfs.hydrate.stubs import StubMark

#: Reads at a time: a local disk is at its fastest with few large ones.
AT_ONCE = 4


class DiskFirst:
    """A `Source`. `stored` finds what the disk has under a step's name, `failed` is told of a copy that can't be read
    or has other bytes than were stored."""

    def __init__(
        self,
        stored: Callable[[str, str], DiskStep | None],
        failed: Callable[[DiskStep, str, str], None],
        others: Source | None = None,
    ) -> None:
        #: None: there is nothing else.
        self.others = others
        self.read_bytes = 0
        self._stored = stored
        self._failed = failed
        self._limiter = trio.CapacityLimiter(AT_ONCE)

    @property
    def reads_first(self) -> bool:
        return self.others is not None and self.others.reads_first

    def has(self, mark: StubMark) -> bool:
        return self._find(mark) is not None

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        stored = self._find(mark)
        if stored is not None:
            await trio.lowlevel.checkpoint()
            return stored.step.files[mark.file].chunks
        return await self._elsewhere(mark).chunks(mark)

    async def read_range(
        self, mark: StubMark, offset: int, length: int, fd: int, *, urgent: bool, retry_for_s: float
    ) -> int:
        stored = self._find(mark)
        if stored is not None:
            try:
                summed = await self._read(stored.directory / mark.file, offset, length, fd, within_s=retry_for_s)
            except (OSError, EOFError, trio.TooSlowError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                    raise  # of where the bytes go
                why = (error.strerror if isinstance(error, OSError) else "") or str(error) or "it does not answer"
                self._failed(stored, mark.file, f"can't be read: {why}")
                if self.others is None:
                    raise DiskError(f"{mark.key} can't be read from the disk: {why}") from None
            else:
                self.read_bytes += length
                return summed
        others = self._elsewhere(mark)
        await others.chunks(mark)  # it holds these very bytes, or raises
        return await others.read_range(mark, offset, length, fd, urgent=urgent, retry_for_s=retry_for_s)

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        stored = self._find(mark)
        if stored is not None:
            self._failed(stored, mark.file, f"has other bytes than were stored, from byte {offset} on")
        elif self.others is not None:
            self.others.came_wrong(mark, offset)

    def tier_of(self, mark: StubMark) -> str:
        """As log lines and figures say it."""
        return "disk" if self.has(mark) else "object"

    def _find(self, mark: StubMark) -> DiskStep | None:
        stored = self._stored(mark.namespace, mark.step)
        file = stored.file(mark.file) if stored is not None else None
        if file is None or file.size_bytes != mark.size_bytes:
            return None
        is_that = file.mtime_ns == mark.mtime_ns if mark.checksum is None else file.checksum == mark.checksum
        return stored if is_that else None

    async def _read(self, path: Path, offset: int, length: int, fd: int, *, within_s: float) -> int:
        """A disk that hangs is given up in time; the thread then keeps the descriptor for as long as it takes."""
        own = os.dup(fd)

        def read() -> int:
            try:
                return copy_range(path, offset, length, own)
            finally:
                os.close(own)

        with trio.fail_after(within_s):
            return await trio.to_thread.run_sync(read, limiter=self._limiter, abandon_on_cancel=True)

    def _elsewhere(self, mark: StubMark) -> Source:
        if self.others is None:
            raise DiskError(
                f"the bytes of {mark.key} were on this node's disk, where they are no more (`tierfs status` says why)"
            )
        return self.others
