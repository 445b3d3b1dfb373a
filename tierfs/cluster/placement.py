"""Which nodes hold whose copies. Pure: each node computes it alone from the members that it sees.

Nodes form groups of `replicas` nodes across failure domains; within a group everyone holds everyone's shards. Groups
survive more failures at once than a ring or random peers do (GEMINI, SOSP 2023, "mixed placement"). What is one copy
short goes to the node that wins a rendezvous hash, so few things move when nodes come and go.

Groups themselves are made anew from the members there are: of pairs without domains all change when one of 16 nodes
goes, of 64 nodes in 8 domains three of four. That costs little, and exact sizes and domains are worth more. Copies of
complete steps stay where they are, since only what is missing is made. What is being written is copied to its end by
the partners it had, and counts; the new partners fetch it too, once: at most one part for each node of the one step
that is written just then. A save that a node was lost from is not completed at all.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from tierfs.catalog.records import NodeRecord
from tierfs.steps.registry import Key

SERVING = "serving"


def groups(nodes: Sequence[NodeRecord], replicas: int) -> list[tuple[str, ...]]:
    """Every node in one group of `replicas` nodes, the last one larger where that does not divide the nodes.

    Members of a group are of different domains wherever any grouping can do that. A node without a domain is one of
    its own.
    """
    size = max(1, replicas)
    domains = _by_domain(nodes)
    if len(nodes) < size:
        return [tuple(sorted(node.node for node in nodes))] if nodes else []
    rest = len(nodes) % size
    # The larger group is the hardest to keep apart, so it takes first, from the largest domains (Gale and Ryser).
    larger = _one_of_each(domains, size + rest) if rest else ()
    # The others lie domain after domain in a row, and group k of n takes each n-th from the k-th on. Two of one domain
    # are then in one group only where the domain has more than n nodes, which no grouping avoids.
    row = [node for domain in sorted(domains) for node in domains[domain]]
    count = len(row) // size
    made = [tuple(sorted(row[first::count])) for first in range(count)]
    return [*made, larger] if larger else made


def partners(node: str, nodes: Sequence[NodeRecord], replicas: int) -> tuple[str, ...]:
    """The others of the node's group, by name; none where it is no member."""
    for group in groups(nodes, replicas):
        if node in group:
            return tuple(other for other in group if other != node)
    return ()


def candidates(
    key: Key, part: str, nodes: Sequence[NodeRecord], holders: Collection[str], *, needed_bytes: int
) -> list[str]:
    """Who should make the next copy of a part, best first: not who holds it, is about to go, or has no room for it.

    Those in a domain without a copy come first, then the rendezvous hash decides.
    """
    taken = {_domain(node) for node in nodes if node.node in holders}
    able = [
        node for node in nodes if node.node not in holders and node.state == SERVING and node.free_bytes >= needed_bytes
    ]
    able.sort(key=lambda node: (_domain(node) in taken, -score(node.node, *key, part), node.node))
    return [node.node for node in able]


def steward(key: Key, nodes: Sequence[NodeRecord]) -> str:
    """The node that looks after a complete step: one that stays, where there is any. "" without nodes."""
    return winner(key, staying(nodes))


def staying(nodes: Iterable[NodeRecord]) -> list[str]:
    """Who may be a steward: those that are not about to go, unless all are."""
    nodes = list(nodes)
    return [node.node for node in nodes if node.state == SERVING] or [node.node for node in nodes]


def winner(key: Key, names: Iterable[str]) -> str:
    """Of these nodes the one that the rendezvous hash chooses for the step."""
    return max(names, key=lambda name: (score(name, *key), name), default="")


def score(node: str, *about: str) -> int:
    """The rendezvous hash: the node with the highest wins, evenly spread, and independent of who else is there."""
    text = "\0".join((node, *about)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _domain(node: NodeRecord) -> str:
    return node.domain or f"\0{node.node}"


def _by_domain(nodes: Sequence[NodeRecord]) -> dict[str, list[str]]:
    domains: dict[str, list[str]] = defaultdict(list)
    for node in sorted(nodes, key=lambda node: node.node):
        domains[_domain(node)].append(node.node)
    return domains


def _one_of_each(domains: dict[str, list[str]], count: int) -> tuple[str, ...]:
    """Takes so many nodes away, each of another domain, from the largest on; again from the first where there are too
    few domains."""
    taken: list[str] = []
    while len(taken) < count:
        largest = sorted(
            (domain for domain in domains if domains[domain]), key=lambda each: (-len(domains[each]), each)
        )
        taken += [domains[domain].pop() for domain in largest[: count - len(taken)]]
    return tuple(sorted(taken))
