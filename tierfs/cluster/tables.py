"""The tables of what every node watches, and what makes of them what the catalogue says. It only computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import NodeRecord, Operation, StepState, TreeRecord
from tierfs.catalog.store import KeyValue
from tierfs.cluster.watched import Place, Reader, Watched
from tierfs.steps.registry import Key

#: So many records are read, or changes told, before others have their turn: about 1 ms.
AT_ONCE = 16

ChangeKind = Literal["node", "tree", "state", "operation", "reset"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Seen(Generic[_T]):
    """A record, when its key was made (again) and when it was put last."""

    record: _T
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Change:
    """What became of a key: `old` or `new` is None where it was or is not there.

    `key` is a node's id, a path, NAMESPACE/STEP as in the catalogue, or an operation's id; `step` is for states.
    Several changes of one key may be told as one: with another `create_revision` it was deleted and made again.
    After everything was read again the differences are told, then `reset` with neither; where the catalogue itself
    is another one (`View.cluster_id`), what it lacks is not told as deleted.
    """

    kind: ChangeKind
    key: str
    old: Seen[Any] | None
    new: Seen[Any] | None
    step: Key | None = None


class Tables:
    """`damaged` are keys whose values can't be read; what they held before stays in force."""

    def __init__(self, reader: Reader) -> None:
        self.nodes: dict[str, Seen[NodeRecord]] = {}
        self.tree: dict[str, Seen[TreeRecord]] = {}
        self.states: dict[Key, Seen[StepState]] = {}
        self.operations: dict[str, Seen[Operation]] = {}
        self.damaged: set[str] = set()
        self._reader = reader
        self._below: dict[str, set[str]] = {}

    def clear(self) -> None:
        for kind in ("node", "tree", "state", "operation"):
            self._table(kind).clear()
        self._below.clear()
        self.damaged.clear()

    def below(self, directory: str) -> list[str]:
        """Names directly below it."""
        return sorted(self._below.get(directory, ()))

    async def differences(self, values: Mapping[str, Sequence[KeyValue]]) -> list[Change]:
        """Operations as they were made, what is gone from the deepest up, then what is new from the top down; states
        after their directories."""
        found: dict[Place, KeyValue] = {}
        self.damaged.intersection_update({value.key for each in values.values() for value in each})
        # The tree first: it tells what namespaces with cut names are called.
        for kind in ("operation", "node", "tree", "state"):
            ordered = sorted(values[kind], key=_made_at) if kind == "operation" else values[kind]
            for at, value in enumerate(ordered):
                if at % AT_ONCE == AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                place = self._reader.place(value.key, value.mod_revision)
                if place is not None:
                    found[place] = value
        gone: list[Change] = []
        for at, (place, seen) in enumerate(self._places()):
            if at % (8 * AT_ONCE) == 0:
                await trio.lowlevel.checkpoint()
            if place not in found:
                gone.append(Change(place.kind, place.name, seen, None, place.step))
        told: list[Change] = []
        new: list[Change] = []
        for at, (place, value) in enumerate(found.items()):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            change = self.compared(place, value)
            if change is not None:
                (told if place.kind == "operation" else new).append(change)
        return told + gone + new

    def _places(self) -> Iterator[tuple[Place, Seen[Any]]]:
        """All that is here, what lies deepest first."""
        for node, seen in self.nodes.items():
            yield Place("node", node), seen
        for key, state in self.states.items():
            yield Place("state", keys.step_part(*key), key), state
        for path, name in sorted(self.tree.items(), reverse=True):
            yield Place("tree", path), name
        for operation, made in self.operations.items():
            yield Place("operation", operation), made

    def compared(self, place: Place, value: KeyValue) -> Change | None:
        """The change that makes `value` what is here; reads it only where it is another one."""
        old = self.seen(place)
        if old is not None and (old.create_revision, old.mod_revision) == (value.create_revision, value.mod_revision):
            return None
        record = self._reader.watched(place, value)
        if record is None:
            self.damaged.add(value.key)
            # What can't be read is no reason to remove anything, unless the readable one is known to be gone.
            gone = old is not None and old.create_revision != value.create_revision
            return Change(place.kind, place.name, old, None, place.step) if gone else None
        self.damaged.discard(value.key)
        new: Seen[Watched] = Seen(record, value.create_revision, value.mod_revision)
        return Change(place.kind, place.name, old, new, place.step)

    def seen(self, place: Place) -> Seen[Any] | None:
        return self._table(place.kind).get(place.step if place.step is not None else place.name)

    def _table(self, kind: str) -> dict[Any, Any]:
        tables: dict[str, dict[Any, Any]] = {
            "node": self.nodes,
            "tree": self.tree,
            "state": self.states,
            "operation": self.operations,
        }
        return tables[kind]

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            table, name = self._table(change.kind), change.step if change.step is not None else change.key
            if change.new is None:
                table.pop(name, None)
            else:
                table[name] = change.new
            if change.kind == "tree":
                self._apply_tree(change)

    def _apply_tree(self, change: Change) -> None:
        parent, _, name = change.key.rpartition("/")
        if change.new is None:
            names = self._below.get(parent, set())
            names.discard(name)
            if not names:
                self._below.pop(parent, None)
        elif change.old is None:
            self._below.setdefault(parent, set()).add(name)


def _made_at(value: KeyValue) -> int:
    return value.mod_revision
