"""What the transport by RDMA needs of a device: a `Port`, links to other nodes' ports, and registered memory.

One-sided: the node that wants bytes READs them from memory that the holder registered, and the holder's processor has
no part in it. Reliable connections (InfiniBand, RoCE) and EFA's SRD differ behind this interface only
(`tierfs.transport.verbs_device`). What every user of it keeps to is what the weaker of both allows:

- READs complete in any order; a link orders nothing.
- Every READ is signalled, and at most `Capabilities.queue_depth` are outstanding on a port.
- The target of a READ must know the asker's address: both sides `connect` before the first one.
- A READ that was posted may write into its region until it completes or its link is closed, whoever waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["rc", "srd"]


@dataclass(frozen=True)
class Capabilities:
    """What a device says of itself."""

    device: str
    kind: Kind
    can_read: bool
    #: Of one READ, bytes.
    most_read_bytes: int
    #: READs that may be outstanding at a time, of all links together.
    queue_depth: int
    #: -1 where the device does not say.
    numa_node: int = -1


@dataclass(frozen=True)
class LinkAddress:
    """One end of a link, as the other end has to know it. All of it comes from the wire: `connect`
    checks it."""

    gid: str
    queue_pair: int
    #: Of the first packet (RC).
    sequence: int = 0
    #: The queue pair's key (SRD), or what the path takes (RC): the other side's port alone reads it.
    key: int = 0


@dataclass(frozen=True)
class Remote:
    """Memory that another node lets this one READ."""

    address: int
    length: int
    key: int


@dataclass(frozen=True)
class Completion:
    """`error` is "" where all bytes of the READ are in their place."""

    work: int
    error: str = ""


class QueueFull(Exception):
    """There is no place for another READ until one completes."""


class Region(Protocol):
    """Registered memory of this node. Its pages are locked until `close`."""

    @property
    def address(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def remote_key(self) -> int:
        """What another node needs to READ it, where it was registered `remote`."""
        ...

    def close(self) -> None:
        """Deregister. Blocks: in a thread. Whoever READs it afterwards gets an error."""
        ...


class Link(Protocol):
    """One way to one port of one other node."""

    @property
    def address(self) -> LinkAddress: ...

    @property
    def is_broken(self) -> bool:
        """After an error it carries nothing any more (RC); a new one has to be made."""
        ...

    def connect(self, peer: LinkAddress) -> None:
        """To be called once, on both sides before either READs. PeerUnavailable; PeerRefused: that is no address."""
        ...

    def read(self, work: int, into: Region, at: int, length: int, remote_address: int, remote_key: int) -> None:
        """Post a READ of `length` bytes into the region from its byte `at` on. `work` names its completion; it is no
        other READ's of the port. QueueFull; PeerUnavailable where the link is broken or closed."""
        ...

    def close(self) -> None:
        """After it no READ of the link writes anything; those outstanding may have no completion any more. May be
        called again, and raises nothing where the device is gone."""
        ...


class Port(Protocol):
    """A device of this node. Used from the trio thread, but for `register` and `Region.close`."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def fd(self) -> int:
        """Readable when there is something to be had by `completions` since the last `arm`."""
        ...

    def register(self, address: int, length: int, *, remote: bool) -> Region:
        """Lock this memory of the process, mapped for reading and writing, and let others READ it if `remote`.
        Blocks: in a thread. OSError (ENOMEM where RLIMIT_MEMLOCK or the device's table is too small)."""
        ...

    def link(self) -> Link:
        """A new one. OSError where the device has no more."""
        ...

    def arm(self) -> None:
        """The next completion makes `fd` readable. What came before does not: look by `completions` afterwards."""
        ...

    def completions(self) -> list[Completion]:
        """Those that are there, without waiting; takes the event from `fd` before it looks, or a wake-up would be lost.
        PeerUnavailable: the device is gone."""
        ...

    def close(self) -> None: ...
