"""Memory into which other nodes' bytes are READ, registered once with each device in use, and used again and again.

Not the file itself: a file that is cut under a mapping kills the process that touches it there, its pages would be
zeroed before they are READ over, and registering takes longer than copying what comes from a buffer that the processor
still has in its cache.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakSet

import trio

from tierfs.transport.verbs_fabric import Fabric, OpenPort
from tierfs.transport.verbs_port import Region

log = logging.getLogger("tierfs.transport")

#: A pull takes two: one is READ into while the other is written from.
BUFFER_BYTES = 4 << 20


class NoBuffer(Exception):
    """No device lets memory be registered; the message says why."""


@dataclass(eq=False)
class Buffer:
    """`view` is its memory."""

    # Shared, though nobody shares it: a fork would otherwise let this process go on with another copy of a page than
    # the one that the device writes to.
    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, BUFFER_BYTES))
    regions: dict[OpenPort, Region] = field(default_factory=dict)
    idle_since: float = 0.0

    def __post_init__(self) -> None:
        self.view = memoryview(self._memory)
        self._pinned = ctypes.c_char.from_buffer(self._memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pinned)

    def free(self) -> None:
        self.view.release()
        del self._pinned
        # The traceback of a write that failed may have a piece of it still: it goes with that, then.
        with suppress(BufferError):
            self._memory.close()


class Buffers:
    """Those who take one bound how many there are. Used from the trio thread."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._idle: list[Buffer] = []
        self._is_closed = False
        #: Devices that took no memory when they were last asked: told once.
        self._troubled: WeakSet[OpenPort] = WeakSet()

    async def take(self, ports: Sequence[OpenPort]) -> Buffer:
        """One that is registered with all of the ports that have room for it, one at the least. NoBuffer."""
        buffer = self._idle.pop() if self._idle else Buffer()
        is_taken = False
        try:
            why = "the devices are gone"
            for port in ports:
                if port not in buffer.regions and not port.gone:
                    why = await self._register(buffer, port) or why
            if not any(port in buffer.regions for port in ports):
                raise NoBuffer(why)
            is_taken = True
            return buffer
        finally:
            if not is_taken:
                self.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Nothing is READ into it any more."""
        if self._is_closed:
            self._deregister(buffer, list(buffer.regions.values()))
            self._forget(buffer, list(buffer.regions))
            buffer.free()
        else:
            buffer.idle_since = trio.current_time()
            self._idle.append(buffer)

    async def let_go(self, idle_before: float) -> None:
        """Of those that nobody uses: those that are idle since then, and what is registered with devices that went."""
        for buffer in [each for each in self._idle if each.idle_since < idle_before or _gone(each)]:
            if buffer not in self._idle:
                continue  # it was taken meanwhile
            self._idle.remove(buffer)
            is_old = buffer.idle_since < idle_before
            ports = list(buffer.regions) if is_old else _gone(buffer)
            regions = [buffer.regions[port] for port in ports]
            try:
                # Nobody else closes them, so this has to come to its end.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._deregister, buffer, regions, limiter=self._fabric.threads)
            finally:
                self._forget(buffer, ports)
            if is_old:
                buffer.free()
            else:
                self._idle.append(buffer)

    async def close(self) -> None:
        """Those that are in use go when they are given back."""
        self._is_closed = True
        await self.let_go(float("inf"))

    async def _register(self, buffer: Buffer, port: OpenPort) -> str:
        """Why not."""
        self._fabric.keep(port)
        region: Region | None = None
        try:
            region = await trio.to_thread.run_sync(
                lambda: port.port.register(buffer.address, BUFFER_BYTES, remote=False), limiter=self._fabric.threads
            )
        except OSError as error:
            log.log(logging.DEBUG if port in self._troubled else logging.WARNING, "no memory to READ into: %s", error)
            self._troubled.add(port)
            return str(error)
        finally:
            if region is None:
                self._fabric.release(port)
            else:
                buffer.regions[port] = region
        self._troubled.discard(port)
        return ""

    def _deregister(self, buffer: Buffer, regions: Sequence[Region]) -> None:
        for region in regions:
            try:
                region.close()
            except Exception as error:  # pyverbs' own, where the device is gone: nothing is registered then
                log.warning("memory that was registered for READs can't be given back: %s", error)

    def _forget(self, buffer: Buffer, ports: Sequence[OpenPort]) -> None:
        for port in ports:
            del buffer.regions[port]
            self._fabric.release(port)


def _gone(buffer: Buffer) -> list[OpenPort]:
    return [port for port in buffer.regions if port.gone]
