"""Which files of complete steps are to be copied to this node although no offer brought them.

Two reasons: a partner's step was just committed and something of it is not here (at once, without asking anybody what
others hold); or a part has too few copies: its holder was lost and did not come back in time, nodes joined,
one is leaving. Then every node computes alone whether it is among the first candidates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import trio

from tierfs.catalog.keys import ADDED
from tierfs.catalog.records import FileRecord, StepState
from tierfs.cluster import placement
from tierfs.cluster.counting import Holders, missing_copies
from tierfs.cluster.grouping import Groups
from tierfs.cluster.part_files import Files, PartFiles
from tierfs.cluster.placement import SERVING
from tierfs.cluster.pulling import ShelfPlaces
from tierfs.cluster.view import Change, View
from tierfs.steps.registry import Key

#: Who joins may be a daemon that was only started again: what it holds is told within this.
JOINED_FOR_S = 1.0
#: What was committed while a node drains, or is not yet copied from it, is looked at again after this, then half as
#: often each time.
DRAINED_AGAIN_S = 0.5
#: In a large cluster not all nodes ask at the same moment; per member, at most.
SPREAD_S = 0.005
MOST_SPREAD_S = 10.0
_CHECKPOINT_EVERY = 50


@dataclass(frozen=True)
class Missing:
    """A sealed file of the part of `author`. `holders` are nodes that have it, the best to ask first."""

    key: Key
    author: str
    inner: str
    version: str
    size_bytes: int
    generation: int
    holders: tuple[str, ...]
    is_of_newest: bool = True  # of the steps of its namespace

    @property
    def place(self) -> tuple[Key, str, str]:
        return self.key, self.author, self.inner


class MissingParts:
    """`plan` is asked whenever `due` says so; `wake` is called when that may have become sooner."""

    def __init__(
        self,
        view: View,
        groups: Groups,
        parts: PartFiles,
        shelf: ShelfPlaces,
        node: str,
        *,
        after_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._view = view
        self._groups = groups
        self._parts = parts
        self._shelf = shelf
        self._node = node
        self._after_s = after_s
        self._wake = wake
        self._has_begun = False
        #: The object tier has the step. Then only the newest gets its copies back: a restart would load that one.
        self.is_persisted: Callable[[Key], bool] = lambda key: False
        #: Parts are whole here, and the catalogue does not say so: told with the authors.
        self.on_untold: Callable[[Key, set[str]], None] = lambda key, authors: None
        #: How long was waited before a step was looked at again, of steps that are copied from nodes that drain.
        self._pauses: dict[Key, float] = {}
        #: Just committed: the partners whose parts have to be here.
        self._fresh: dict[Key, set[str]] = {}
        #: When the step's copies are counted, by trio.current_time().
        self._look_at: dict[Key, float] = {}
        #: Bytes of each author's part of the newest complete step, by namespace.
        self._bytes: dict[str, dict[str, int]] = {}

    def seen(self, change: Change) -> None:
        if change.kind == "state" and change.step is not None:
            self._state_seen(change.step, change)
        elif change.kind == "node":
            self._node_seen(change)
        elif change.kind == "reset":
            self.begin()

    def begin(self) -> None:
        """All is known: commits that are seen from now on are new ones."""
        self._has_begun = True
        for key, seen in self._view.states.items():
            if seen.record.level == "complete":
                self._look(key, JOINED_FOR_S)

    def due(self) -> list[Key]:
        """The steps to plan for now, the newest first."""
        now = trio.current_time()
        keys = {key for key, at in self._look_at.items() if at <= now} | {
            key for key, who in self._fresh.items() if who
        }
        found = [(self._view.states[key].record, key) for key in keys if key in self._view.states]
        return [key for state, key in sorted(found, key=lambda each: (-each[0].completed_at, each[1]))]

    def next_at(self) -> float:
        """When a step falls due by time alone."""
        return min(self._look_at.values(), default=math.inf)

    def expected_bytes(self, namespace: str, authors: Collection[str]) -> int:
        """What the authors' parts of the namespace's next step will need, if they are as large as the last ones."""
        sizes = self._bytes.get(namespace, {})
        newest = self._newest(namespace)
        total = 0
        for author in authors:
            if author in sizes:
                total += sizes[author]
            elif newest is not None and newest.files:
                total += newest.bytes * newest.parts.get(author, 0) // newest.files
        return total

    def _newest(self, namespace: str) -> StepState | None:
        return max(
            (seen.record for key, seen in self._view.states.items() if key[0] == namespace),
            key=lambda state: state.completed_at,
            default=None,
        )

    async def plan(self, key: Key) -> list[Missing]:
        """What is to be fetched. CatalogError: it stays due."""
        seen = self._view.states.get(key)
        if seen is None or self._groups.is_draining(self._node):
            self._fresh.pop(key, None)
            self._look_at.pop(key, None)
            return []
        state = seen.record
        found: dict[tuple[str, str], Missing] = {}
        fresh = set(self._fresh.get(key, ()))
        if fresh:
            parts = await self._parts.read(key, state, seen.create_revision, fresh)
            self._note_bytes(key, {author: parts[author] for author in fresh if author in parts})
            for author in fresh & parts.keys():
                for inner, file in await self._not_here(parts[author]):
                    found[author, inner] = _missing(key, state, author, inner, file, _ordered(file, author))
            if key in self._fresh:
                self._fresh[key] -= fresh
                if not self._fresh[key]:
                    del self._fresh[key]
        if self._look_at.get(key, math.inf) <= trio.current_time():
            for missing in await self._too_few(key, state):
                found.setdefault((missing.author, missing.inner), missing)
        return list(found.values())

    def again(self, key: Key, after_s: float) -> None:
        """Something of the step could not be fetched."""
        self._look(key, after_s)

    async def _too_few(self, key: Key, state: StepState) -> list[Missing]:
        self._look_at.pop(key, None)
        is_newest = self._newest(key[0]) is state
        if not is_newest and self.is_persisted(key):
            return []
        try:
            files = await self._view.files(key, state.generation)
            holdings = await self._view.holdings(key)
        except BaseException:
            self._look(key, JOINED_FOR_S)
            raise
        holders = Holders(files, holdings, self._view.nodes)
        serving = self._groups.serving()
        missing = missing_copies(
            holders, serving=[record.node for record in serving], replicas=self._groups.replicas(key[0])
        )
        if missing:
            self._look(key, self._again_after_s(key))
        else:
            self._pauses.pop(key, None)
        whole = holders.copies()
        found = []
        untold: set[str] = set()
        for part, count in sorted(missing.items()):
            author = part.removesuffix(ADDED)
            of_part = (files.added if part.endswith(ADDED) else files.parts)[author]
            shown = {inner: file for inner, file in of_part.items() if files.files.get(inner) == file}
            not_here = await self._not_here(shown)
            if not not_here:
                if self._node not in whole[part]:
                    untold.add(author)
                continue
            # The whole part, whatever of it is here: all nodes have to come to the same answer.
            needed = sum(file.size_bytes for file in shown.values())
            able = placement.candidates(key, part, serving, whole[part], needed_bytes=needed)
            if not able and is_newest:
                able = placement.candidates(key, part, serving, whole[part], needed_bytes=0)  # others go for it
            if self._node not in able[:count]:
                continue
            for inner, file in not_here:
                others = holders.of(file) - {self._node}
                if others:
                    nodes = _ordered(file, author, *sorted(others, key=self._groups.is_draining))
                    at = tuple(node for node in nodes if node in others)
                    found.append(_missing(key, state, author, inner, file, at, is_of_newest=is_newest))
        if untold:
            self.on_untold(key, untold)
        return found

    def _again_after_s(self, key: Key) -> float:
        """When a step that has too few copies is looked at again."""
        longest_s = max(JOINED_FOR_S, self._after_s)
        if not self._is_any_draining():
            return longest_s
        pause = self._pauses.get(key, DRAINED_AGAIN_S)
        self._pauses[key] = min(2 * pause, longest_s)
        return min(pause, longest_s)

    def _is_any_draining(self) -> bool:
        return any(map(self._groups.is_draining, self._view.nodes))

    async def _not_here(self, files: Files) -> list[tuple[str, FileRecord]]:
        found = []
        for at, (inner, file) in enumerate(files.items()):
            if at % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                await trio.lowlevel.checkpoint()
            if not self._shelf.has(file.version):
                found.append((inner, file))
        return found

    def _state_seen(self, key: Key, change: Change) -> None:
        old, new = change.old, change.new
        if new is None:
            for table in (self._fresh, self._look_at, self._pauses):
                table.pop(key, None)
            return
        state: StepState = new.record
        is_other = (
            old is None or old.create_revision != new.create_revision or old.record.generation != state.generation
        )
        if is_other and self._has_begun:
            # Those that were partners while it was written; what others hold needs no asking.
            self._fresh[key] = set(self._groups.authors(key[0])) & state.parts.keys()
            self._wake()
        if self._is_any_draining():
            # Replicated counts also the copies that are about to go.
            self._look(key, DRAINED_AGAIN_S)
        elif state.level == "complete" and (is_other or old is None or old.record.level != "complete"):
            self._look(key, self._after_s)
        elif state.level == "replicated" and not is_other:
            self._look_at.pop(key, None)

    def _node_seen(self, change: Change) -> None:
        if change.new is None:
            for key in self._view.states:
                self._look(key, self._after_s)
        elif self._groups.is_draining(change.key) and (change.old is None or change.old.record.state == SERVING):
            self._pauses.clear()
            for key in self._view.states:
                self._look(key, 0.0)
        elif change.old is None or change.old.record.state != change.new.record.state:
            for key, seen in self._view.states.items():
                if seen.record.level == "complete":
                    self._look(key, JOINED_FOR_S)

    def _look(self, key: Key, after_s: float) -> None:
        if key not in self._view.states:
            return
        if self._groups.replicas(key[0]) < 2 and not self._is_any_draining():
            return
        spread = random.uniform(0.0, min(MOST_SPREAD_S, SPREAD_S * len(self._view.nodes)))
        at = trio.current_time() + after_s + spread
        self._look_at[key] = min(at, self._look_at.get(key, math.inf))
        self._wake()

    def _note_bytes(self, key: Key, parts: Mapping[str, Files]) -> None:
        self._bytes[key[0]] = {
            author: sum(file.size_bytes for file in files.values()) for author, files in parts.items()
        }


def _missing(
    key: Key,
    state: StepState,
    author: str,
    inner: str,
    file: FileRecord,
    holders: tuple[str, ...],
    *,
    is_of_newest: bool = True,
) -> Missing:
    return Missing(key, author, inner, file.version, file.size_bytes, state.generation, holders, is_of_newest)


def _ordered(file: FileRecord, *nodes: str) -> tuple[str, ...]:
    """Each once; who wrote the file first."""
    return tuple(dict.fromkeys((file.node, *nodes)))
