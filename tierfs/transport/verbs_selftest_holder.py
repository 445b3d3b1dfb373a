"""The holding side of the RDMA self-test: memory that the other side READs, and links to READ it by.

In the same process (`Holding`), or at the other end of a connection (`tierfs.transport.verbs_selftest_peer`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import trio
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import READ_BYTES
from tierfs.errors import PeerError, PeerUnavailable
from tierfs.transport.verbs_messages import Links, Proposal
from tierfs.transport.verbs_port import Link, Port, Region, Remote

PAGE_BYTES = 4096
SMALL_BYTES = 4096
MIDDLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Held:
    """Registered memory: where, for each link, and the CRC64NVME of its first bytes, by how many."""

    remotes: tuple[Remote | None, ...]
    sums: dict[int, int]


class Holder(Protocol):
    """Each call raises PeerError where it fails."""

    async def link(self, first: int, proposals: Sequence[Proposal]) -> Links:
        """Ends for these, each connected; the first by the port `first` (of those there are, around). Links of an
        earlier call end."""
        ...

    async def hold(self, size_bytes: int) -> Held:
        """Memory of so many bytes, registered with the ports of the links there are now. Whole MiB."""
        ...

    async def let_go(self) -> None:
        """What is held can't be READ any more; it stays mapped, so that a READ which is let through finds bytes."""
        ...


class Memory:
    """Anonymous memory of this process, of whole pages."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._map = mmap.mmap(-1, size_bytes)
        self._pinned: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._pinned)

    def fill(self) -> None:
        """No page is like another, nor is a page like itself moved by some bytes. Takes long: in a thread."""
        block = os.urandom(READ_BYTES)
        for at in range(0, self.size_bytes, READ_BYTES):
            self._map[at : at + READ_BYTES] = block[: self.size_bytes - at]
        pages = memoryview(array("Q", range(self.size_bytes // PAGE_BYTES)))
        with memoryview(self._map) as whole, whole.cast("Q") as words:
            words[:: PAGE_BYTES // 8] = pages

    def clear(self, length: int) -> None:
        """The first bytes. In a thread."""
        ctypes.memset(self.address, 0, length)

    def checksum(self, length: int) -> int:
        """CRC64NVME of the first bytes. In a thread."""
        summed = 0
        with memoryview(self._map) as whole:
            for at in range(0, length, READ_BYTES):
                with whole[at : min(length, at + READ_BYTES)] as piece:
                    summed = int(crc64nvme(piece, summed))
        return summed

    def close(self) -> None:
        """Registrations of it come first."""
        self._pinned = None
        self._map.close()


class Holding:
    """`Holder` (see there) with ports of this process, which stay the caller's."""

    def __init__(self, ports: Sequence[Port], threads: trio.CapacityLimiter) -> None:
        self._ports = ports
        self._threads = threads
        self._links: list[tuple[Link, Port] | None] = []
        self._regions: dict[Port, Region] = {}
        self._memory: Memory | None = None
        self._sums: dict[int, int] = {}

    async def link(self, first: int, proposals: Sequence[Proposal]) -> Links:
        self._close_links()
        for index, proposal in enumerate(proposals, start=first):
            self._links.append(self._linked(index, proposal))
        addresses = tuple(None if each is None else each[0].address for each in self._links)
        if any(addresses):
            return Links(addresses)
        kinds = " and ".join(sorted({port.capabilities.kind for port in self._ports})) or "none"
        return Links(addresses, f"the devices there are of another kind than this one: {kinds}")

    def _linked(self, index: int, proposal: Proposal) -> tuple[Link, Port] | None:
        same = [port for port in self._ports if port.capabilities.kind == proposal.kind]
        if not same:
            return None
        port = same[index % len(same)]
        try:
            link = port.link()
        except OSError as error:
            raise PeerUnavailable(str(error)) from error
        try:
            link.connect(proposal.address)
        except PeerError:
            link.close()
            raise
        return link, port

    async def hold(self, size_bytes: int) -> Held:
        await self.let_go()
        if self._memory is None or self._memory.size_bytes != size_bytes:
            self._drop_memory()
            try:
                self._memory = Memory(size_bytes)
            except OSError as error:
                raise PeerUnavailable(f"no memory of {size_bytes} bytes: {error}") from error
            await trio.to_thread.run_sync(self._memory.fill, limiter=self._threads)
            for length in sorted({SMALL_BYTES, MIDDLE_BYTES, size_bytes}):
                if length <= size_bytes:
                    self._sums[length] = await trio.to_thread.run_sync(
                        self._memory.checksum, length, limiter=self._threads
                    )
        for each in self._links:
            if each is not None and each[1] not in self._regions:
                self._regions[each[1]] = await self._registered(each[1], self._memory)
        remotes = tuple(
            None if each is None else Remote(self._memory.address, size_bytes, self._regions[each[1]].remote_key)
            for each in self._links
        )
        return Held(remotes, dict(self._sums))

    async def _registered(self, port: Port, memory: Memory) -> Region:
        def register() -> Region:
            return port.register(memory.address, memory.size_bytes, remote=True)

        try:
            return await trio.to_thread.run_sync(register, limiter=self._threads)
        except OSError as error:
            raise PeerUnavailable(str(error)) from error

    async def let_go(self) -> None:
        while self._regions:
            _, region = self._regions.popitem()
            with trio.CancelScope(shield=True):  # a region that nobody has any more would stay registered
                await trio.to_thread.run_sync(region.close, limiter=self._threads)

    def close(self) -> None:
        """All of it, but the ports."""
        with ExitStack() as each_of_them:
            each_of_them.callback(self._drop_memory)
            while self._regions:
                each_of_them.callback(self._regions.popitem()[1].close)
            each_of_them.callback(self._close_links)

    def _drop_memory(self) -> None:
        memory, self._memory = self._memory, None
        self._sums.clear()
        if memory is not None:
            memory.close()

    def _close_links(self) -> None:
        links, self._links = self._links, []
        for each in links:
            if each is not None:
                each[0].close()
