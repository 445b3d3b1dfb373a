"""Whose files this node holds copies of, as the members stand now. Computed once for each change among them."""

from __future__ import annotations

from functools import lru_cache

from tierfs.catalog.records import NodeRecord
from tierfs.cluster import placement
from tierfs.cluster.view import Change, View
from tierfs.settings import Settings

#: The state of a node that hands over what only it holds, and takes nothing more.
DRAINING = "draining"


class Groups:
    """Told of changes by `seen`. A node that drains gets no copies any more; what it writes is copied to the end."""

    def __init__(self, view: View, settings: Settings, node: str) -> None:
        self._view = view
        self._settings = settings
        self._node = node
        self._authors: dict[int, frozenset[str]] = {}
        self._partners: dict[tuple[str, int], tuple[str, ...]] = {}
        self.replicas = lru_cache(maxsize=1024)(self._replicas)

    def seen(self, change: Change) -> bool:
        """True when who holds what may be another now."""
        if change.kind == "node":
            old, new = change.old, change.new
            if old is not None and new is not None and _facts(old.record) == _facts(new.record):
                return False
        elif change.kind != "reset":
            return False
        self._authors.clear()
        self._partners.clear()
        return True

    def serving(self) -> list[NodeRecord]:
        """The members that are there to stay."""
        return [seen.record for seen in self._view.nodes.values() if seen.record.state == placement.SERVING]

    def is_draining(self, node: str) -> bool:
        """It is a member, and about to go."""
        seen = self._view.nodes.get(node)
        return seen is not None and seen.record.state != placement.SERVING

    def partners(self, author: str, replicas: int) -> tuple[str, ...]:
        """The nodes that are to hold copies of what the author writes."""
        if (author, replicas) not in self._partners:
            members = self.serving()
            seen = self._view.nodes.get(author)
            if seen is not None and self.is_draining(author):
                members.append(seen.record)
            found = placement.partners(author, members, replicas) if seen is not None else ()
            self._partners[author, replicas] = tuple(found)
        return self._partners[author, replicas]

    def authors(self, namespace: str) -> frozenset[str]:
        """The nodes whose files of this namespace this node is to hold."""
        return self._authors_by(self.replicas(namespace))

    def all_authors(self) -> frozenset[str]:
        """Those of any namespace."""
        counts = {self._settings.replication.replicas}
        for sections in self._settings.namespaces.values():
            count = sections.get("replication", {}).get("replicas")
            if isinstance(count, int):
                counts.add(count)
        return frozenset().union(*map(self._authors_by, counts))

    def _authors_by(self, replicas: int) -> frozenset[str]:
        if replicas not in self._authors:
            found: set[str] = set()
            if self._node in self._view.nodes and not self.is_draining(self._node):
                # Among those that stay it goes both ways; each of those that leave has its own.
                found.update(self.partners(self._node, replicas))
                for node in self._view.nodes:
                    if self.is_draining(node) and self._node in self.partners(node, replicas):
                        found.add(node)
            self._authors[replicas] = frozenset(found)
        return self._authors[replicas]

    def _replicas(self, namespace: str) -> int:
        return self._settings.for_namespace(namespace).replication.replicas


def _facts(record: NodeRecord) -> tuple[str, ...]:
    return record.node, record.tier, record.domain, record.state
