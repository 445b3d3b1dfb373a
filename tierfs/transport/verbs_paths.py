"""A path to another node: a connection of its own, over which links were proposed, and the ends of those links here.

What was agreed on belongs to the connection: with it the other node closes its ends and what it exported. One pull uses
a path at a time, so that a link which one pull has to close costs no other its READs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from tierfs.errors import PeerRefused, PeerUnavailable
from tierfs.transport.client import TcpPeers
from tierfs.transport.connection import Connection
from tierfs.transport.verbs_buffers import Buffer
from tierfs.transport.verbs_fabric import Fabric, OpenPort
from tierfs.transport.verbs_messages import MOST_LINKS, Exported, Proposal
from tierfs.transport.verbs_port import Link, Remote
from tierfs.transport.verbs_reading import MOST_PIECE_BYTES, PIECE_BYTES, Lane, read_range

log = logging.getLogger("tierfs.transport")


class NoPath(Exception):
    """The other node has nothing that this one can READ by; the message says why."""


@dataclass(eq=False)
class Way:
    """One link. `trouble` says why nothing comes by it."""

    port: OpenPort
    link: Link
    is_connected: bool = False
    trouble: str = ""

    @property
    def is_usable(self) -> bool:
        return self.is_connected and not self.trouble and not self.port.gone and not self.link.is_broken


@dataclass(eq=False)
class Path:
    """`ports` are those that were wanted when it was made; `ways` are in the order of the proposals."""

    fabric: Fabric
    node: str
    connection: Connection
    ports: tuple[OpenPort, ...]
    ways: list[Way] = field(default_factory=list)
    idle_since: float = 0.0

    @property
    def is_whole(self) -> bool:
        """All links that were there at first carry READs."""
        return all(way.is_usable for way in self.ways if way.is_connected)

    @property
    def usable_ports(self) -> list[OpenPort]:
        return [way.port for way in self.ways if way.is_usable]

    async def read(
        self, buffer: Buffer, exported: Exported, start: int, length: int, *, stall_s: float
    ) -> None:  # fmt: skip
        """READ this range of what was exported to the beginning of the buffer. PeerUnavailable, PeerRefused."""
        ways, lanes = [], []
        for way, remote in zip(self.ways, exported.remotes, strict=True):
            region = buffer.regions.get(way.port)
            if way.is_usable and remote is not None and region is not None:
                there = Remote(remote.address + start, length, remote.key)
                ways.append(way)
                lanes.append(Lane(way.port.reader, way.link, region, there, self.node))
        if not lanes:
            raise PeerUnavailable(f"none of the links to {self.node} leads to its memory: {self.troubles()}")
        # Few large READs cost less of the interpreter's time than many, as long as there is one for each lane.
        piece_bytes = max(PIECE_BYTES, min(MOST_PIECE_BYTES, -(-length // len(lanes))))
        try:
            await read_range(lanes, 0, length, piece_bytes=piece_bytes, stall_s=stall_s)
        finally:
            for way, lane in zip(ways, lanes, strict=True):
                way.trouble = way.trouble or lane.trouble

    def troubles(self) -> str:
        said = [f"{way.port.name}: {way.trouble or way.port.gone or 'no link'}" for way in self.ways]
        return "; ".join(said) or "there are none"

    def close(self) -> None:
        """The ends here first: the other node closes its own when the connection ends."""
        ways, self.ways = self.ways, []
        for way in ways:
            try:
                way.port.reader.close_link(way.link, "the path was closed")
            except Exception:  # the others must be closed all the same
                log.exception("a link of %s did not close", way.port.name)
            finally:
                self.fabric.release(way.port)
        self.connection.close()


async def open_path(
    peers: TcpPeers, fabric: Fabric, node: str, connection: Connection, ports: tuple[OpenPort, ...]
) -> Path:
    """The connection is the path's from now on, also where there is none. NoPath: the other node has no RDMA, or no
    device of the same kind. PeerUnavailable: the connection was lost."""
    path = Path(fabric, node, connection, ports)
    is_open = False
    try:
        for port in ports[:MOST_LINKS]:
            _add(path, port)
        if not path.ways:
            raise NoPath("the devices of this node give no link")
        await _connect(path, peers)
        is_open = True
        return path
    finally:
        if not is_open:
            path.close()


def _add(path: Path, port: OpenPort) -> None:
    if port.gone:
        return
    try:
        link = port.port.link()
    except OSError as error:
        log.warning("no link to %s by %s: %s", path.node, port.name, error)
        return
    path.fabric.keep(port)
    path.ways.append(Way(port, link))


async def _connect(path: Path, peers: TcpPeers) -> None:
    proposals = [Proposal(way.port.port.capabilities.kind, way.link.address) for way in path.ways]
    try:
        links = await peers.propose(path.connection, proposals)
    except PeerRefused as error:  # a node of before there was this says so, too
        raise NoPath(error.message) from error
    if links.reason:
        raise NoPath(links.reason)
    for way, address in zip(path.ways, links.addresses, strict=True):
        if address is None:
            continue
        try:
            way.link.connect(address)
            way.is_connected = True
        except (PeerRefused, PeerUnavailable) as error:
            way.trouble = error.message
    if not any(way.is_connected for way in path.ways):
        raise NoPath(f"no link to {path.node} can be made: {path.troubles()}")
