"""Reading from other nodes, and letting them read: what `tierfs.cluster` and `tierfs.hydrate` know of the transport.

A **pull** model: who wants bytes asks a holder for them by their version. `tierfs.transport.tcp` is the implementation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from tierfs.checksum import FileChecksum


@dataclass(frozen=True)
class Offer:
    """News of a file that a node has, or that grows there. `sealed` files have their final version; a growing one has
    a version of its own that names it until then (`growing` is the earlier name in the offer that seals it)."""

    version: str
    namespace: str
    step: str
    inner: str
    generation: int
    size_bytes: int
    sealed: bool
    growing: str = ""


@dataclass(frozen=True)
class Pulled:
    """`length` bytes were written at the place asked for; `crc64nvme` is of what was written there."""

    length: int
    crc64nvme: int


class Shelf(Protocol):
    """What this node lets others read: implemented by `tierfs.cluster.copies.Copies`. Called in the trio thread."""

    def open_version(self, version: str) -> int:
        """A descriptor for reading, the caller's. PeerLacks where the version is not (wholly) here."""
        ...

    def open_growing(self, version: str) -> int:
        """The same for a file that is still being written."""
        ...

    async def checksum(self, version: str) -> FileChecksum:
        """Of the sealed file, by chunks of 16 MiB; computed once, in a thread, and kept. PeerLacks."""
        ...

    async def verify(self, version: str) -> FileChecksum:
        """Of what lies here now, read again whatever is known of it. PeerLacks, OSError."""
        ...

    def offers(self) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        """Everything of steps that this node writes, from now on, as it grows and is sealed; also what grows now."""
        ...


class Peers(Protocol):
    """The other nodes by their ids. Each call is one attempt at one node: PeerUnavailable, PeerRefused, PeerLacks."""

    async def pull(
        self,
        node: str,
        version: str,
        offset: int,
        length: int,
        fd: int,
        *,
        growing: bool = False,
        urgent: bool = False,
    ) -> Pulled:
        """Fetch bytes of a file into `fd` (open for writing, stays the caller's) at the same offset. `length` is at
        most 64 MiB, and less comes only where a growing file ends sooner. Urgent ones are not held back by the
        bandwidth limit and go ahead of others."""
        ...

    async def fetch(self, node: str, version: str, *, most_bytes: int) -> bytes:
        """A small file, whole."""
        ...

    async def checksum(self, node: str, version: str) -> FileChecksum:
        """What the holder sealed; it may take as long as summing the file up takes."""
        ...

    async def verify(self, node: str, version: str) -> FileChecksum:
        """What the holder has now: it reads the file again."""
        ...

    def offers(self, node: str) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        """The node's offers, until the connection is lost (PeerUnavailable)."""
        ...

    async def ping(self, node: str) -> float:
        """The time of a round trip, seconds."""
        ...


#: One pull is at most so long.
MOST_PULL_BYTES = 64 << 20
#: Small files are on every node: those below this.
SMALL_FILE_BYTES = 64 << 10
