"""Part of a file as memory that other nodes READ: mapped once, and registered with some of this node's ports.

The daemon never touches such a mapping, so a file that is cut under it does the daemon no harm. Its memory stays what
it was, though: a removed file keeps its room, and a cut one its old bytes. Whoever cuts or frees a file sees to it that
its windows are closed before (`tierfs.transport.verbs_exports`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from tierfs.objects.mapped_ranges import has_hole
from tierfs.ram.syscalls import populate, shared_mapping
from tierfs.transport.verbs_fabric import OpenPort
from tierfs.transport.verbs_port import Region, Remote

log = logging.getLogger("tierfs.transport")

#: Of a sealed file, and on this grid: registering so much holds the interpreter lock for some 5 ms.
WINDOW_BYTES = 64 << 20
PAGE_BYTES = mmap.PAGESIZE


class HasHole(Exception):
    """Part of the range was never written: to lock it would take memory for it."""


class Window:
    """`length` bytes of a file from `start` on, a whole page. Who owns it calls one method at a time."""

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        #: Who may read it, and by what. The owner adds what `register` made.
        self.regions: dict[OpenPort, Region] = {}
        self._mapping = ExitStack()
        self._address: int | None = None

    def register(
        self, fd: int, ports: Sequence[OpenPort], *, keep_time: bool
    ) -> tuple[dict[OpenPort, Region], dict[OpenPort, OSError]]:
        """With these ports as well: the new regions, and why there are none. Blocks: in a thread.

        `fd` is open for reading and writing; `keep_time`: nobody else changes the file meanwhile. HasHole; OSError: it
        can't be mapped.
        """
        before = os.fstat(fd)
        if self._address is None:
            if has_hole(fd, self.start, self.length):
                raise HasHole
            self._address = self._mapping.enter_context(shared_mapping(fd, self.start, self.length))
        try:
            # Locking a page is a write to it, and one to a page that isn't mapped yet sets the file's time
            # (fault_dirty_shared_page in mm/memory.c). Reading maps the pages of a tmpfs for writing as well, and does
            # not. It is also done without the interpreter lock, and leaves little to do for those who hold it.
            _populate(self._address, self.length)
            return self._register(self._address, ports)
        finally:
            if keep_time and os.fstat(fd).st_mtime_ns != before.st_mtime_ns:  # pages went to swap meanwhile, say
                try:
                    os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
                except OSError as error:  # nobody may lose what was registered by it
                    log.warning("a file's time was changed by registering its memory: %s", error)

    def _register(
        self, address: int, ports: Sequence[OpenPort]
    ) -> tuple[dict[OpenPort, Region], dict[OpenPort, OSError]]:
        made: dict[OpenPort, Region] = {}
        failed: dict[OpenPort, OSError] = {}
        for each in ports:
            try:
                made[each] = each.port.register(address, self.length, remote=True)
            except OSError as error:
                failed[each] = error
            except Exception as error:
                # Of a pyverbs that nobody tried. What others made must not be lost: it would stay registered.
                failed[each] = OSError(errno.EIO, f"{type(error).__name__}: {error}")
                failed[each].__cause__ = error
        return made, failed

    def remote(self, port: OpenPort, offset: int, length: int) -> Remote | None:
        """Where this range of the file is for whoever reads by the port; None where the port does not have it."""
        region = self.regions.get(port)
        if region is None:
            return None
        return Remote(region.address + offset - self.start, length, region.remote_key)

    def deregister(self, ports: Iterable[OpenPort]) -> None:
        """Nobody reads it by these ports any more. The owner takes the regions out. Blocks: in a thread."""
        for each in ports:
            try:
                self.regions[each].close()
            except Exception:
                # Of a device that is gone, say. What is left must be closed all the same.
                log.exception("memory is perhaps still registered with %s", each.name)

    def close(self) -> None:
        """No port has it and it is mapped no longer. Blocks: in a thread."""
        self.deregister(self.regions)
        self._mapping.close()
        self._address = None


def _populate(address: int, length: int) -> None:
    """OSError (EFAULT: the file was cut)."""
    try:
        populate(address, length, writing=False)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.14: it takes longer, and may set the file's time
            raise
