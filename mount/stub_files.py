"""The file system's side of stubs: files whose bytes are (partly) only in the object tier.

A stub is never attached in the channel, so that its holes are never read as data: the kernel sends its READs here, as
direct I/O, and each waits for its own bytes. While a program has an inode open that way, all its opens stay so, since
the kernel does not mix direct I/O that is mapped with passthrough (fs/fuse/iomode.c); the channel sees to that. Once
the stub is whole its file is attached, and the channel answers the READs itself; after the last close the next open is
passthrough.

Who writes to a stub gets a whole file: its bytes are brought first, or it is replaced by an empty one where the writer
truncates it anyway.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pyfuse3

from tierfs.errors import ObjectError, TierfsError
from tierfs.steps import overwrite

if TYPE_CHECKING:
    from mount.channel import Channel
    from mount.nodes import NodeTable
    from mount.open_files import OpenFiles
    from tierfs.hydrate.hydration import Hydration
    from tierfs.ram.tier import RamTier


class StubFiles:
    """The stubs of one mount; without an object tier (`hydration` None) there are none."""

    def __init__(
        self,
        hydration: Hydration | None,
        nodes: NodeTable,
        files: OpenFiles,
        channel: Channel,
        tier: RamTier,
        log: logging.Logger,
    ) -> None:
        self._hydration = hydration
        self._nodes = nodes
        self._files = files
        self._channel = channel
        self._tier = tier
        self._log = log
        #: Inodes that the kernel knows and that a stub took the place of.
        self._replaced: set[int] = set()
        if hydration is not None:
            hydration.on_whole = self._became_whole
            hydration.on_replaced = self._was_replaced

    def is_stub(self, nodeid: int) -> bool:
        return self._hydration is not None and self._hydration.is_stub(nodeid)

    def mtime_ns(self, st: os.stat_result) -> int:
        """The modification time to show."""
        shown = self._hydration.mtime_ns(st.st_ino) if self._hydration is not None else None
        return st.st_mtime_ns if shown is None else shown

    def times_set(self, nodeid: int) -> None:
        """A program set the file's times."""
        if self._hydration is not None and self._hydration.is_stub(nodeid):
            self._hydration.times_set(nodeid, self._nodes.stat(nodeid).st_mtime_ns)

    def refuse_replaced(self, nodeid: int) -> None:
        """ESTALE for a file that was evicted behind the kernel's back: under its name there is a stub by now."""
        if nodeid in self._replaced:
            raise pyfuse3.FUSEError(errno.ESTALE)

    def has_name(self, nodeid: int) -> None:
        """It was just found under a name: that of another hard link than the one that a stub, or another file, took."""
        self._replaced.discard(nodeid)

    def forgotten(self, nodeid: int) -> None:
        self._replaced.discard(nodeid)

    # -- reading

    def open(self, nodeid: int) -> bool:
        """A program opens the file for reading. True where it is a stub, and is not to be attached."""
        if self._hydration is None or not self._hydration.is_stub(nodeid):
            return False
        self._nodes.fd(nodeid)  # ESTALE, if it is gone
        self._files.direct.add(nodeid)
        self._hydration.opened(nodeid)
        return True

    async def read(self, nodeid: int, offset: int, size: int) -> bytes:
        data = None
        if self._hydration is not None:
            try:
                data = await self._hydration.read(nodeid, offset, size)
            except TierfsError as error:
                self._log.warning("read: %s", error.message)
                # What the store said (no such object, access denied) is not what a program expects of read(2).
                raise pyfuse3.FUSEError(errno.EIO if isinstance(error, ObjectError) else error.errno) from None
        if data is None:
            with self._files.backing(nodeid) as fd:
                data = os.pread(fd, size, offset)
        return data

    def released(self, nodeid: int) -> None:
        """A handle was released."""
        if self._hydration is not None and not self._channel.handles(nodeid).opens:
            self._hydration.closed(nodeid)

    def resumed(self, nodeid: int) -> None:
        """After a takeover: a program has the stub open."""
        if self._hydration is not None:
            self._hydration.opened(nodeid)

    def _became_whole(self, nodeid: int) -> None:
        """The channel answers the READs of those who have it open from now on."""
        if not self._channel.handles(nodeid).opens or self._channel.fd(nodeid) is not None:
            return
        with suppress(OSError), self._files.backing(nodeid) as fd:
            # Without the file's handle, which tells a successor that the kernel has no passthrough for these opens.
            self._channel.attach(nodeid, fd, b"")

    def _was_replaced(self, nodeid: int) -> None:
        if self._nodes.knows(nodeid):
            self._replaced.add(nodeid)

    # -- changing

    async def before_change(self, nodeid: int) -> None:
        """The file is about to be changed, or linked from elsewhere: it has all its bytes once this returns."""
        if self._hydration is not None and self._hydration.is_stub(nodeid):
            await self._hydration.hydrate(nodeid)

    async def empty(self, nodeid: int, rel: str | None) -> None:
        """A stub is about to be truncated to nothing: an empty file takes its place, and the kernel looks again."""
        if not self.is_stub(nodeid):
            return
        if rel is None:  # it has no name that another could have
            await self.before_change(nodeid)
            return
        path, scratch = self._tier.root / rel, self._tier.generations / f"{uuid.uuid4().hex}.new"
        overwrite.make_empty(path, scratch)
        overwrite.put_in_place(scratch, path)
        self._nodes.check_name(nodeid)
        raise pyfuse3.FUSEError(errno.ESTALE)
