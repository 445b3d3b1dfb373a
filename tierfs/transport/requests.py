"""What nodes ask of each other, and what they answer, as values: strict both ways.

A file is named by its version and by nothing else; no path comes from the wire, and the names in an offer are checked
before anybody sees them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from tierfs.catalog.records import check_version
from tierfs.checksum import FileChecksum
from tierfs.errors import PathRefused, PeerError, PeerLacks, PeerRefused, PeerUnavailable, RecordDamaged
from tierfs.json_fields import Fields, Wrong
from tierfs.steps.names import safe_component, safe_relative
from tierfs.transport.frames import Frame, Kind
from tierfs.transport.peers import MOST_PULL_BYTES, Offer
from tierfs.transport.verbs_messages import Proposal, proposals_head, proposals_of

Operation = Literal["pull", "fetch", "checksum", "verify", "offers", "ping", "ticket", "link", "export"]

_OPERATIONS = get_args(Operation)
_ERRORS: dict[str, type[PeerError]] = {
    "lacks": PeerLacks,
    "refused": PeerRefused,
    "unavailable": PeerUnavailable,
}
_MOST_MESSAGE = 500
_MOST_BEAT_MS = 60_000


@dataclass(frozen=True)
class Request:
    """`length` is the most for a fetch. `beat_ms`: while there is no answer yet the asker wants a BEAT so often.
    `links` are a link's proposals; what has none is the same to a node that knows nothing of RDMA."""

    op: Operation
    beat_ms: int
    version: str = ""
    offset: int = 0
    length: int = 0
    growing: bool = False
    links: tuple[Proposal, ...] = ()

    def to_head(self) -> dict[str, Any]:
        head: dict[str, Any] = {
            "op": self.op,
            "beat_ms": self.beat_ms,
            "version": self.version,
            "offset": self.offset,
            "length": self.length,
            "growing": self.growing,
        }
        return head | {"links": proposals_head(self.links)} if self.links else head


def request_of(frame: Frame) -> Request:
    """PeerRefused for anything that `to_head` does not make."""
    if frame.kind is not Kind.request:
        raise PeerRefused(f"a request was expected, and {frame.kind.name} came")
    try:
        fields = Fields(frame.head, "a request")
        fields.add({"links": []})
        op = fields.text("op")
        if op not in _OPERATIONS:
            raise Wrong(f"nobody can be asked to {op[:40]!r}")
        request = Request(
            op=cast("Operation", op),
            beat_ms=fields.integer("beat_ms", least=10),
            version=fields.text("version"),
            offset=fields.integer("offset"),
            length=fields.integer("length"),
            growing=fields.flag("growing"),
            links=proposals_of(fields.any("links")),
        )
        fields.end()
        if op in ("pull", "fetch", "checksum", "verify", "export"):
            check_version(request.version)
        if bool(request.links) != (op == "link"):
            raise Wrong("links are proposed with a request of links, and with no other")
        if request.length > MOST_PULL_BYTES or request.offset >= 1 << 62 or request.beat_ms > _MOST_BEAT_MS:
            raise Wrong("a number is too large")
    except (Wrong, RecordDamaged) as error:
        raise PeerRefused(f"a request is damaged: {error}") from None
    return request


def error_head(error: PeerError) -> dict[str, Any]:
    kind = next((name for name, each in _ERRORS.items() if isinstance(error, each)), "unavailable")
    return {"kind": kind, "message": error.message[:_MOST_MESSAGE]}


def error_of(head: Mapping[str, object]) -> PeerError:
    """What an ERROR says, to be raised."""
    try:
        fields = Fields(dict(head), "an error")
        kind, message = fields.text("kind"), fields.text("message")
        fields.end()
    except Wrong as error:
        return PeerRefused(f"another node's error is damaged: {error}")
    printable = "".join(character if character.isprintable() else "?" for character in message[:_MOST_MESSAGE])
    return _ERRORS.get(kind, PeerRefused)(printable)


def offer_head(offer: Offer) -> dict[str, Any]:
    return asdict(offer)


def offer_of(head: Mapping[str, object], node: str) -> Offer:
    """An offer of `node`'s. PeerRefused where a name in it could not be one, or is another node's."""
    try:
        fields = Fields(dict(head), "an offer")
        offer = Offer(
            version=check_version(fields.text("version")),
            namespace=safe_relative(fields.text("namespace")),
            step=safe_component(fields.text("step")),
            inner=safe_relative(fields.text("inner")),
            generation=fields.integer("generation"),
            size_bytes=fields.integer("size_bytes"),
            sealed=fields.flag("sealed"),
            growing=fields.text("growing"),
        )
        fields.end()
        if offer.growing:
            check_version(offer.growing)
        if offer.size_bytes >= 1 << 63:
            raise Wrong("it is larger than any file")
        if any(version and version.partition("/")[0] != node for version in (offer.version, offer.growing)):
            raise Wrong(f"{node} offers what another node wrote")
    except (Wrong, RecordDamaged, PathRefused) as error:
        raise PeerRefused(f"an offer is damaged: {error}") from None
    return offer


def checksum_answer(checksum: FileChecksum) -> tuple[dict[str, Any], bytes]:
    """The JSON, and the chunks' as the body, 8 bytes each: a large file has many."""
    head = {"size_bytes": checksum.size_bytes, "full": checksum.full, "chunk_bytes": checksum.chunk_bytes}
    return head, struct.pack(f"!{len(checksum.chunks)}Q", *checksum.chunks)


def checksum_of(frame: Frame) -> FileChecksum:
    """The opposite. PeerRefused where the numbers contradict each other."""
    try:
        fields = Fields(frame.head, "a checksum")
        size_bytes, full = fields.integer("size_bytes"), fields.integer("full")
        chunk_bytes = fields.integer("chunk_bytes", least=1)
        fields.end()
        count = -(-size_bytes // chunk_bytes)
        if len(frame.body) != 8 * count:
            raise Wrong(f"{size_bytes} bytes have {count} chunks, and {len(frame.body) / 8:g} came")
    except Wrong as error:
        raise PeerRefused(f"a checksum is damaged: {error}") from None
    return FileChecksum(size_bytes, full, struct.unpack(f"!{count}Q", frame.body), chunk_bytes)
