"""What two nodes tell each other about RDMA over their TCP connection, as values: strict both ways.

    link     the asker's ends of new links     -> the holder's ends, each connected already, or why there are none
    export   a range of a version              -> where the holder's memory of it lies, for each link, or why not

Links and exports belong to the connection: they end with it, and an export ends with the next one. Both sides have
connected a link before the first READ, as the holder has by the time it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from tierfs.errors import PeerRefused
from tierfs.json_fields import Fields, Wrong
from tierfs.transport.verbs_port import Kind, LinkAddress, Remote

#: Links of one connection, one for each device at the most.
MOST_LINKS = 32
_MOST_REASON = 500


@dataclass(frozen=True)
class Proposal:
    """One end of a link, to be answered by a port of the same kind."""

    kind: Kind
    address: LinkAddress


@dataclass(frozen=True)
class Links:
    """The holder's ends, in the order of the proposals; None where it has no port for one. `reason` says why there is
    none at all."""

    addresses: tuple[LinkAddress | None, ...]
    reason: str = ""


@dataclass(frozen=True)
class Exported:
    """`length` bytes from `offset` of a file that has `size_bytes` now: at most what was asked for. `remotes` are in
    the order of the connection's links, each as long as that, None for a link that is not. Where `reason` says that
    nothing of it can be READ, the bytes come by TCP."""

    size_bytes: int
    offset: int
    length: int
    remotes: tuple[Remote | None, ...]
    reason: str = ""


def proposals_head(proposals: Sequence[Proposal]) -> list[list[object]]:
    return [[each.kind, *_address_list(each.address)] for each in proposals]


def proposals_of(value: object) -> tuple[Proposal, ...]:
    """PeerRefused. The addresses are checked by whoever connects to them."""
    found = []
    for each in _items(value, "the proposed links"):
        if not isinstance(each, list) or len(each) != 5 or each[0] not in get_args(Kind):
            raise PeerRefused(f"a proposed link is none: {each!s:.80}")
        found.append(Proposal(cast("Kind", each[0]), _address_of(each[1:])))
    return tuple(found)


def links_head(links: Links) -> dict[str, Any]:
    addresses = [None if each is None else _address_list(each) for each in links.addresses]
    return {"links": addresses, "reason": links.reason[:_MOST_REASON]}


def links_of(head: Mapping[str, object], count: int) -> Links:
    """The answer to `count` proposals. PeerRefused."""
    try:
        fields = Fields(dict(head), "an answer about links")
        items, reason = _items(fields.any("links"), "the links"), fields.text("reason")
        fields.end()
    except Wrong as error:
        raise PeerRefused(f"{error}") from None
    addresses = tuple(None if each is None else _address_of(each) for each in items)
    if len(addresses) != count or (not reason and not any(addresses)):
        raise PeerRefused(f"{count} links were proposed, and the answer is about {len(addresses)}")
    return Links(addresses, _printable(reason))


def exported_head(exported: Exported) -> dict[str, Any]:
    return {
        "size_bytes": exported.size_bytes,
        "offset": exported.offset,
        "length": exported.length,
        "remotes": [None if each is None else [each.address, each.key] for each in exported.remotes],
        "reason": exported.reason[:_MOST_REASON],
    }


def exported_of(head: Mapping[str, object], *, offset: int, length: int, links: int) -> Exported:
    """The answer to a request of this range, on a connection of so many links. PeerRefused."""
    try:
        fields = Fields(dict(head), "an answer about memory")
        size_bytes, at, given = fields.integer("size_bytes"), fields.integer("offset"), fields.integer("length")
        items, reason = _items(fields.any("remotes"), "the remotes"), fields.text("reason")
        fields.end()
    except Wrong as error:
        raise PeerRefused(f"{error}") from None
    if at != offset or given > length:
        raise PeerRefused(f"{length} bytes at {offset} were asked for, and the answer is {given} at {at}")
    if len(items) != links and not reason:
        raise PeerRefused(f"memory for {links} links was asked for, and the answer is for {len(items)}")
    return Exported(size_bytes, at, given, tuple(_remote_of(each, given) for each in items), _printable(reason))


def _items(value: object, what: str) -> list[object]:
    if not isinstance(value, list) or len(value) > MOST_LINKS:
        raise PeerRefused(f"{what} are no list of at most {MOST_LINKS}")
    return value


def _address_list(address: LinkAddress) -> list[object]:
    return [address.gid, address.queue_pair, address.sequence, address.key]


def _address_of(value: object) -> LinkAddress:
    """Its form only: `Port.connect` checks what it says."""
    if not isinstance(value, list) or len(value) != 4 or not isinstance(value[0], str) or len(value[0]) > 80:
        raise PeerRefused(f"an address of a link is none: {value!s:.80}")
    if any(type(number) is not int or not 0 <= number < 1 << 32 for number in value[1:]):
        raise PeerRefused(f"an address of a link has a number that can't be: {value!s:.80}")
    return LinkAddress(*value)


def _remote_of(value: object, length: int) -> Remote | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(number) is not int for number in value):
        raise PeerRefused(f"the place of memory is none: {value!s:.80}")
    address, key = value
    if not 0 <= address <= (1 << 64) - length or not 0 <= key < 1 << 32:
        raise PeerRefused(f"no memory can be at {address} with the key {key}")
    return Remote(address, length, key)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:_MOST_REASON])
