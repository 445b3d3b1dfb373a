"""Ports without a device, over plain memory of this process, that are as unkind as SRD and reliable connections may be.

READs complete in random order, some bytes earlier than others, and their bytes are copied as late as that, so a READ
that somebody gave up too early is seen as wrong bytes. Memory is registered and let go of in threads, as with a device:
none is let go of, and so unmapped, while bytes of a READ are being copied. A completion makes the descriptor readable
only if the port was armed before it. A failed READ leaves garbage in its place. `Fabric.misuse` lists what no device
would have let pass.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import threading
from contextlib import suppress
from dataclasses import dataclass

import trio

from tierfs.errors import PeerUnavailable
from tierfs.transport.verbs_port import Capabilities, Completion, Kind, LinkAddress, QueueFull, Region, Remote

FLUSHED = "flushed: the link is broken"


def memory(content: bytes) -> tuple[bytearray, int]:
    """A buffer and its address, which stays where it is."""
    buffer = bytearray(content)
    return buffer, ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer)) if buffer else 0


@dataclass(eq=False)
class Read:
    link: DoubleLink
    work: int
    into: DoubleRegion
    at: int
    length: int
    remote_address: int
    remote_key: int
    #: Bytes of it that are there already.
    copied: int = 0


class Fabric:
    """What joins the ports. `run` carries the READs, in an order that `seed` decides."""

    def __init__(self, seed: int, *, slowest_s: float = 0.01) -> None:
        self.random = random.Random(seed)
        self.slowest_s = slowest_s
        self.ports: dict[str, DoublePort] = {}
        self.regions: dict[int, DoubleRegion] = {}  # by remote key
        self.links: dict[int, DoubleLink] = {}  # by queue pair
        self.registered = 0
        self.open_links = 0
        self.misuse: list[str] = []
        #: Of what threads change: the regions, and the bytes that move between them.
        self.lock = threading.Lock()
        self._next_name = 1
        self._posted = trio.Event()

    def next_name(self) -> int:
        self._next_name += self.random.randint(1, 9)
        return self._next_name

    def port(self, gid: str, kind: Kind, *, queue_depth: int = 16, most_read_bytes: int = 1 << 30) -> DoublePort:
        self.ports[gid] = DoublePort(self, Capabilities(gid, kind, True, most_read_bytes, queue_depth), gid)
        return self.ports[gid]

    @property
    def outstanding(self) -> list[Read]:
        return [read for port in list(self.ports.values()) for read in port.posted if not read.link.is_closed]

    def posted(self) -> None:
        self._posted.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            self._posted = trio.Event()
            movable = self._movable()
            if not movable:
                await self._posted.wait()
                continue
            if self.random.random() < 0.7:
                await trio.sleep(self.random.random() * self.slowest_s / 4)
            else:
                await trio.lowlevel.checkpoint()
            for read in self.random.sample(movable, self.random.randint(1, len(movable))):
                if read in read.link.port.posted and not read.link.is_stalled:
                    self._move(read)

    def carry(self, read: Read) -> None:
        """To its end, also where its link is stalled."""
        while read in read.link.port.posted:
            self._move(read)

    def meanwhile(self) -> None:
        """A device works on while it is asked, too."""
        for read in self._movable():
            if self.random.random() < 0.1 and read in read.link.port.posted:
                self._move(read)

    def _movable(self) -> list[Read]:
        return [read for port in self.ports.values() for read in port.posted if not read.link.is_stalled]

    def _move(self, read: Read) -> None:
        with self.lock:
            self._carry_some(read)

    def _carry_some(self, read: Read) -> None:
        error = self._error(read)
        if error:
            if read.into.is_open and read.at + read.length <= read.into.length and not read.link.is_closed:
                garbage = self.random.randbytes(self.random.randint(0, read.length))
                ctypes.memmove(read.into.address + read.at, garbage, len(garbage))
            read.link.port.complete(read, error)
            if read.link.port.capabilities.kind == "rc":
                read.link.break_down()
            return
        more = read.length - read.copied
        if self.random.random() < 0.3:
            more = self.random.randint(0, more)
        target = read.into.address + read.at + read.copied
        ctypes.memmove(target, read.remote_address + read.copied, more)
        read.copied += more
        if read.copied == read.length:
            read.link.port.complete(read, "")

    def _error(self, read: Read) -> str:
        link, region = read.link, self.regions.get(read.remote_key)
        if link.is_closed or link.has_failed:
            return FLUSHED
        other = self.links.get(link.peer.queue_pair) if link.peer else None
        if other is None or other.is_closed or other.peer != link.address or other.port.is_removed:
            return "the target does not know this node"
        if region is None or not region.is_open or not region.remote or region.port is not other.port:
            return "remote access error"
        if not region.address <= read.remote_address <= region.address + region.length - read.length:
            return "remote access error"
        if not read.into.is_open or read.at < 0 or read.at + read.length > read.into.length:
            return "local protection error"
        if read.length > link.port.capabilities.most_read_bytes:
            self.misuse.append(f"a READ of {read.length} bytes")
            return "too long"
        return ""


class DoubleRegion:
    def __init__(self, port: DoublePort, address: int, length: int, remote: bool) -> None:
        self.port, self.address, self.length, self.remote = port, address, length, remote
        self.is_open = True
        fabric = port.fabric
        with fabric.lock:
            self.remote_key = fabric.next_name()
            fabric.regions[self.remote_key] = self
            fabric.registered += 1

    def close(self) -> None:
        fabric = self.port.fabric
        with fabric.lock:
            if not self.is_open:
                return
            self.is_open = False
            fabric.registered -= 1
            if any(read.into is self for read in fabric.outstanding):
                fabric.misuse.append("memory was let go of while READs into it are outstanding")


class DoubleLink:
    def __init__(self, port: DoublePort) -> None:
        self.port = port
        self.address = LinkAddress(port.gid, port.fabric.next_name())
        self.peer: LinkAddress | None = None
        self.is_broken = self.is_closed = False
        #: What is posted completes with an error only; `is_broken` when somebody took notice.
        self.has_failed = False
        #: READs stay where they are.
        self.is_stalled = False
        port.fabric.links[self.address.queue_pair] = self
        port.fabric.open_links += 1

    def connect(self, peer: LinkAddress) -> None:
        assert self.peer is None, "connected twice"
        self.peer = peer

    def read(self, work: int, into: Region, at: int, length: int, remote_address: int, remote_key: int) -> None:
        assert isinstance(into, DoubleRegion)
        if self.port.is_removed or self.is_broken or self.is_closed:
            raise PeerUnavailable("the link carries nothing any more")
        port, fabric = self.port, self.port.fabric
        if len(port.posted) >= port.capabilities.queue_depth:
            port.refused += 1
            raise QueueFull
        if any(read.work == work for read in port.posted):
            fabric.misuse.append(f"two READs have the number {work}")
        first = into.address + at
        for other in fabric.outstanding:
            start = other.into.address + other.at
            if first < start + other.length and start < first + length:
                fabric.misuse.append(f"two READs into the same place at {at}")
        port.posted.append(Read(self, work, into, at, length, remote_address, remote_key))
        port.most_posted = max(port.most_posted, len(port.posted))
        port.posted_reads += 1
        fabric.posted()

    def break_down(self) -> None:
        """As after a retry count that ran out."""
        self.has_failed = True
        self.is_stalled = False
        self.port.fabric.posted()

    def stall(self) -> None:
        self.is_stalled = True

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.is_stalled = False
        fabric = self.port.fabric
        fabric.open_links -= 1
        for read in [read for read in self.port.posted if read.link is self]:
            if fabric.random.random() < 0.5:  # else it completes some time, and has its place until then
                self.port.posted.remove(read)
        fabric.posted()


class DoublePort:
    def __init__(self, fabric: Fabric, capabilities: Capabilities, gid: str) -> None:
        self.fabric, self.capabilities, self.gid = fabric, capabilities, gid
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.posted: list[Read] = []
        self.is_removed = self.is_closed = False
        self.most_posted = self.posted_reads = self.refused = 0
        self._is_armed = False
        self._completed: list[tuple[Completion, DoubleLink]] = []

    def register(self, address: int, length: int, *, remote: bool) -> DoubleRegion:
        return DoubleRegion(self, address, length, remote)

    def link(self) -> DoubleLink:
        return DoubleLink(self)

    def arm(self) -> None:
        self.fabric.meanwhile()
        self._is_armed = True
        self.fabric.meanwhile()

    def complete(self, read: Read, error: str) -> None:
        self.posted.remove(read)
        self._completed.append((Completion(read.work, error), read.link))
        if self._is_armed:
            self._is_armed = False
            os.eventfd_write(self.fd, 1)

    def completions(self) -> list[Completion]:
        if self.is_removed:
            raise PeerUnavailable(f"{self.gid} was removed")
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self.fabric.meanwhile()
        most = self.fabric.random.choice([1, 4, math.inf])
        count = int(min(most, len(self._completed)))
        taken, self._completed = self._completed[:count], self._completed[count:]
        for _, link in taken:
            link.is_broken |= link.has_failed
        self.fabric.meanwhile()
        return [completion for completion, _ in taken]

    def remove(self) -> None:
        """The device goes, as by hot removal; nothing of it writes any more."""
        self.is_removed = True
        self.posted.clear()
        os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Its regions come first, or their memory stays locked."""
        if not self.is_closed and any(each.port is self and each.is_open for each in self.fabric.regions.values()):
            self.fabric.misuse.append(f"{self.gid} was closed before its regions")
        if not self.is_closed:
            os.close(self.fd)
        self.is_closed = True


def joined(here: DoublePort, there: DoublePort) -> tuple[DoubleLink, DoubleLink]:
    ours, theirs = here.link(), there.link()
    ours.connect(theirs.address)
    theirs.connect(ours.address)
    return ours, theirs


def remote_of(region: DoubleRegion) -> Remote:
    return Remote(region.address, region.length, region.remote_key)
