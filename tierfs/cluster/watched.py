"""What the keys that every node watches mean, and reading their values: what is damaged is told once and left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeVar

from tierfs.catalog import keys
from tierfs.catalog.records import Holding, NodeRecord, Operation, Part, StepState, TreeRecord, from_bytes
from tierfs.catalog.store import KeyValue
from tierfs.errors import PathRefused, RecordDamaged
from tierfs.steps.names import escape_namespace, safe_component, unescape_namespace
from tierfs.steps.registry import Key

log = logging.getLogger("tierfs.cluster")

Kind = Literal["node", "tree", "state", "operation"]
Watched = NodeRecord | TreeRecord | StepState | Operation
_R = TypeVar("_R", NodeRecord, TreeRecord, StepState, Operation, Part, Holding)

#: So many damaged keys are remembered, so as to tell each only once.
MOST_TOLD = 10_000
#: A longer path may have an escaped name that can't be turned back (`escape_namespace`).
LONG_PATH = 60


@dataclass(frozen=True)
class Place:
    """What a key is about. `name` is a node's id, a path, NAMESPACE/STEP as in the key, or an operation's id."""

    kind: Kind
    name: str
    step: Key | None = None


class Reader:
    """Keys and values of the catalogue into places and records; None for what can't be used."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int]] = set()
        #: Namespaces whose escaped names were cut, by these: known once their directory was seen.
        self._long: dict[str, str] = {}

    def place(self, value_key: str, mod_revision: int = 0) -> Place | None:
        """None also for a key that is none of the four kinds, or whose name is unsafe."""
        try:
            if value_key.startswith(keys.TREE):
                path = keys.path_of_tree_key(value_key)
                if len(path) > LONG_PATH and "%~" in (flat := escape_namespace(path)):
                    self._long[flat] = path
                return Place("tree", path)
            if value_key.startswith(keys.STATES):
                name = value_key.removeprefix(keys.STATES)
                return Place("state", name, self._step(name))
            if value_key.startswith(keys.NODES):
                return Place("node", safe_component(value_key.removeprefix(keys.NODES)))
            if value_key.startswith(keys.OPERATIONS):
                return Place("operation", safe_component(value_key.removeprefix(keys.OPERATIONS)))
        except (PathRefused, RecordDamaged) as error:
            self.tell(value_key, mod_revision, error.message)
        return None

    def watched(self, place: Place, value: KeyValue) -> Watched | None:
        """The record of a place."""
        if place.kind == "node":
            node = self.record(NodeRecord, value)
            if node is not None and node.node != place.name:
                self.tell(value.key, value.mod_revision, f"it is of the node {node.node!r}")
                return None
            return node
        if place.kind == "tree":
            return self.record(TreeRecord, value)
        if place.kind == "state":
            return self.record(StepState, value)
        return self.record(Operation, value)

    def record(self, kind: type[_R], value: KeyValue) -> _R | None:
        try:
            return from_bytes(kind, value.value)
        except RecordDamaged as error:
            self.tell(value.key, value.mod_revision, error.message)
            return None

    def tell(self, key: str, mod_revision: int, why: str) -> None:
        """Log, once, that a key is left out."""
        if (key, mod_revision) in self._told:
            return
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told.add((key, mod_revision))
        log.warning("left out what the catalogue has under %r: %s", key[:300], why)

    def _step(self, name: str) -> Key:
        flat, slash, step = name.partition("/")
        if not slash:
            raise PathRefused(f"{name[:80]!r} names no step")
        namespace = self._long.get(flat) or unescape_namespace(flat)
        if escape_namespace(namespace) != flat:
            raise PathRefused(f"{flat[:80]!r} is not how a namespace is written")
        return namespace, safe_component(step)
