"""What goes over a connection between two nodes: frames, each of a fixed head, a JSON object, and raw bytes.

    3 bytes  "tfp"           1 byte  version of the format      1 byte  kind
    4 bytes  bytes of JSON   8 bytes bytes of the body          (big-endian)
    JSON, body, and on connections with keys a tag of 16 bytes

The tag is HMAC-SHA256 with a key of this connection and direction over the frame's number and all before it, so that
on a connection without TLS nothing can be changed, left out or played again. BULK is the exception: its tag comes ahead
of the body and does not cover it, since the body goes from file to socket without being seen. Whoever asked for it
compares checksums, and those came in a frame with a tag.

Pure: this knows no socket.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tierfs.errors import PeerRefused
from tierfs.json_fields import refuse_constant

FORMAT = 1
#: An offer's three names, each character escaped, take 30 KiB at most.
MOST_JSON_BYTES = 64 << 10
TAG_BYTES = 16

_MAGIC = b"tfp"
_HEAD = struct.Struct("!3sBBIQ")
HEAD_BYTES = _HEAD.size
_NUMBER = struct.Struct("!Q")


class Kind(IntEnum):
    """`beat` says that the other side is still there and at it; it may come before any answer, and between offers."""

    hello = 1
    proof = 2
    request = 3
    answer = 4
    bulk = 5
    error = 6
    offer = 7
    beat = 8


@dataclass(frozen=True)
class Head:
    kind: Kind
    json_bytes: int
    body_bytes: int


@dataclass(frozen=True)
class Frame:
    """`text` is the JSON as it came, which proofs are of. The body of BULK is not in it: `body_bytes` of it follow."""

    kind: Kind
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    body_bytes: int = 0
    text: bytes = b""


class Tags:
    """Makes or checks the tags of one direction of a connection; frames are counted."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, *pieces: bytes) -> bytes:
        mac = hmac.new(self._key, _NUMBER.pack(self._number), hashlib.sha256)
        self._number += 1
        for piece in pieces:
            mac.update(piece)
        return mac.digest()[:TAG_BYTES]

    def check(self, tag: bytes, *pieces: bytes) -> None:
        if not hmac.compare_digest(self.next(*pieces), tag):
            raise PeerRefused("a frame does not carry the tag of this connection: it was changed on its way")


def to_json(head: dict[str, Any]) -> bytes:
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(text) > MOST_JSON_BYTES:
        raise ValueError(f"{len(text)} bytes of JSON are too many for a frame")
    return text


def encode(
    kind: Kind, head: dict[str, Any], body: bytes = b"", *, bulk_bytes: int = 0, tags: Tags | None = None
) -> bytes:
    """The whole frame; of BULK, with a body of `bulk_bytes`, all that comes before the body."""
    text = to_json(head)
    start = _HEAD.pack(_MAGIC, FORMAT, kind, len(text), bulk_bytes if kind is Kind.bulk else len(body))
    pieces = (start, text, body)
    return b"".join(pieces if tags is None else (*pieces, tags.next(*pieces)))


def decode_head(data: bytes, *, most_body_bytes: int, most_bulk_bytes: int) -> Head:
    """Of the first HEAD_BYTES. PeerRefused for what is no frame, or larger than the reader is ready for."""
    magic, version, number, json_bytes, body_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise PeerRefused("what came is not the protocol of tierfs's nodes")
    if version != FORMAT:
        raise PeerRefused(f"the other node speaks version {version} of the protocol, this one {FORMAT}")
    try:
        kind = Kind(number)
    except ValueError:
        raise PeerRefused(f"a frame is of the unknown kind {number}") from None
    most_bytes = most_bulk_bytes if kind is Kind.bulk else most_body_bytes
    if json_bytes > MOST_JSON_BYTES or body_bytes > most_bytes:
        raise PeerRefused(f"a frame says that it is {json_bytes} + {body_bytes} bytes long")
    return Head(kind, json_bytes, body_bytes)


def decode_json(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise PeerRefused("a frame's JSON is damaged") from None
    if not isinstance(value, dict):
        raise PeerRefused("a frame's JSON is no object")
    return value
