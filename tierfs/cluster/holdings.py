"""What this node holds of each complete step, told to the catalogue: `h/NAMESPACE/STEP/NODE`.

A part counts once all of its files are whole here, however they came: written, copied, or read by a program. The
record is computed anew from what is here, never counted up,
so it is right again after whatever went wrong; it is put when it differs from what was put last. A
put compares that the step and its commit are the ones it was computed for: a holding never comes back after its step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import Holding, StepState, from_bytes, to_bytes
from tierfs.catalog.store import Compare, Delete, KeyStore, Put
from tierfs.cluster.part_files import SMALL_STEP_PARTS, PartFiles
from tierfs.cluster.pulling import ShelfPlaces
from tierfs.cluster.view import Change, Seen, View
from tierfs.errors import CatalogError, RecordDamaged
from tierfs.steps.registry import Key

log = logging.getLogger("tierfs.cluster")

#: Steps that are looked at and put at the same time.
_AT_ONCE = 8
#: Single versions that one record lists.
_MOST_VERSIONS = 4000
#: After a failure.
_PAUSE_S = 0.5
_MOST_PAUSE_S = 5.0
_NEWS_WITHIN_S = 2.0
#: Files that programs read here come one after the other: they are told together.
_TOLD_AFTER_S = 0.3
#: Of steps with more files only whole parts are told: to look at each of their files costs too much, again and again.
_SINGLES_OF_FILES = 2000
#: So many files are looked at before others get their turn.
_CHECKPOINT_EVERY = 50


class Holdings:
    """`interesting(key, state)` names the authors whose parts this node may hold; `singles(key)` the versions that it
    holds without their being in such a part (files added to a complete step). Of steps of few parts all parts are
    looked at anyway."""

    def __init__(self, store: KeyStore, view: View, shelf: ShelfPlaces, parts: PartFiles, node: str) -> None:
        self._store = store
        self._view = view
        self._shelf = shelf
        self._parts = parts
        self._node = node
        self.interesting: Callable[[Key, StepState], Iterable[str]] = lambda key, state: (node,)
        self.singles: Callable[[Key], Iterable[str]] = lambda key: ()
        #: Told when a record was put or deleted.
        self.on_put: Callable[[Key], None] = lambda key: None
        #: Told before that, where this node holds less than the catalogue said: whoever counted on it has to know.
        self.on_less: Callable[[Key], None] = lambda key: None
        self._dirty: set[Key] = set()
        self._soon: dict[Key, float] = {}
        #: Authors whose files came here although no rule brought them, by step.
        self._also: dict[Key, set[str]] = {}
        self._wake = trio.Event()
        self._cluster_id = view.cluster_id
        #: What the catalogue has, and for which create_revisions of the tree's and the state's key.
        self._put: dict[Key, tuple[Holding | None, int, int]] = {}

    def changed(self, key: Key) -> None:
        """Copies of the step's files came or went here."""
        self._dirty.add(key)
        self._wake.set()

    def copied(self, key: Key, authors: Iterable[str]) -> None:
        """A program read files of these authors as a whole, or they were found to be here: they are copies too."""
        self._also.setdefault(key, set()).update(authors)
        if key not in self._soon:
            self._soon[key] = trio.current_time() + _TOLD_AFTER_S
            self._wake.set()

    def put(self, key: Key) -> Holding | None:
        """What the catalogue has of this node, as far as this daemon put it."""
        return self._put[key][0] if key in self._put else None

    @property
    def pending(self) -> int:
        """Steps that are to be looked at."""
        return len(self._dirty | self._soon.keys())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._view.listen(self._seen)
        self._dirty.update(self._view.states)
        task_status.started()
        pause = _PAUSE_S
        while True:
            self._take_due()
            while not self._dirty:
                self._wake = trio.Event()
                with trio.move_on_at(min(self._soon.values(), default=math.inf)):
                    await self._wake.wait()
                self._take_due()
            # All at once: what changes while they are put waits for the next round.
            dirty, self._dirty = self._dirty, set()
            failed = await self._tell_all(sorted(dirty))
            if not failed:
                pause = _PAUSE_S
                continue
            self._dirty |= failed
            with trio.move_on_after(pause):
                self._wake = trio.Event()
                await self._wake.wait()
            pause = min(2 * pause, _MOST_PAUSE_S)

    def _take_due(self) -> None:
        now = trio.current_time()
        due = {key for key, at in self._soon.items() if at <= now}
        for key in due:
            del self._soon[key]
        self._dirty |= due

    async def _tell_all(self, dirty: list[Key]) -> set[Key]:
        failed: set[Key] = set()
        limiter = trio.CapacityLimiter(_AT_ONCE)

        async def tell(key: Key) -> None:
            async with limiter:
                try:
                    if not await self._tell(key):
                        failed.add(key)
                except CatalogError as error:
                    log.debug("what is held of %s can't be told yet: %s", "/".join(key), error)
                    failed.add(key)

        async with trio.open_nursery() as nursery:
            for key in dirty:
                nursery.start_soon(tell, key)
        return failed

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            if self._cluster_id != self._view.cluster_id:  # another catalogue: nothing of ours is there
                self._put.clear()
                self._cluster_id = self._view.cluster_id
            for key in self._view.states:
                self.changed(key)
        elif change.kind == "state" and change.step is not None:
            if change.new is None:
                self._put.pop(change.step, None)
                self._also.pop(change.step, None)
            elif change.old is None or _commit(change.old) != _commit(change.new):
                self.changed(change.step)
        elif change.kind == "tree" and change.new is not None:
            namespace, _, step = change.key.rpartition("/")
            if (namespace, step) in self._view.states:
                self.changed((namespace, step))

    async def _tell(self, key: Key) -> bool:
        """False where it has to be tried again. CatalogError."""
        seen = self._view.states.get(key)
        tree = self._view.tree.get("/".join(key))
        if seen is None:
            self._put.pop(key, None)
            return True
        if tree is None:
            return True  # being removed; or the news of its directory is on its way, see `_seen`
        holding = await self._held(key, seen)
        is_author = self._node in seen.record.parts
        # An author is taken for a holder unless its record says otherwise.
        wanted = holding if holding.parts or holding.versions or is_author else None
        known = wanted, tree.create_revision, seen.create_revision
        if self._put.get(key) == known:
            return True
        name = keys.holding_key(*key, self._node)
        before = self._put[key][0] if key in self._put else await self._told_before(key)
        result = await self._store.txn(
            [
                Compare(keys.tree_key("/".join(key)), "create", "equal", tree.create_revision),
                Compare(keys.state_key(*key), "create", "equal", seen.create_revision),
            ],
            [Put(name, to_bytes(wanted)) if wanted is not None else Delete(name)],
        )
        if result.succeeded:
            self._put[key] = known
            if _is_less(holding, before, self._node if is_author else ""):
                self.on_less(key)
            self.on_put(key)
            return True
        # The news of what changed is on its way.
        await self._view.until(
            lambda: self._view.states.get(key) is not seen or self._view.tree.get("/".join(key)) is not tree,
            within_s=_NEWS_WITHIN_S,
        )
        return False

    async def _held(self, key: Key, seen: Seen[StepState]) -> Holding:
        state = seen.record
        authors = {self._node, *self.interesting(key, state), *self._also.get(key, ())}
        if key not in self._put and len(state.parts) > SMALL_STEP_PARTS:
            told_before = await self._told_before(key)
            authors.update(told_before.parts if told_before is not None else ())
        parts = await self._parts.read(key, state, seen.create_revision, authors)
        whole: list[str] = []
        covered: set[str] = set()
        singles: set[str] = set()
        # Of a part that is being copied here the single files are not worth a record each.
        listed = self._also.get(key, set()) if sum(map(len, parts.values())) <= _SINGLES_OF_FILES else ()
        looked = 0
        for author, files in parts.items():
            here: set[str] = set()
            for file in files.values():
                looked += 1
                if looked % _CHECKPOINT_EVERY == 0:
                    await trio.lowlevel.checkpoint()
                if self._shelf.has(file.version):
                    here.add(file.version)
                elif author not in listed:
                    break
            versions = {file.version for file in files.values()}
            if len(here) == len(versions):
                whole.append(author)
                covered |= versions
            elif author in listed:
                singles |= here
        known = self._view.known_files(key, state.generation)
        added = [file.version for of in known.added.values() for file in of.values()] if known is not None else []
        singles.update(version for version in [*self.singles(key), *added] if self._shelf.has(version))
        singles -= covered
        return Holding(state.generation, tuple(sorted(whole)), tuple(sorted(singles)[:_MOST_VERSIONS]))

    async def _told_before(self, key: Key) -> Holding | None:
        """What an earlier daemon of this node told: it may have had reasons that this one does not know."""
        value = await self._store.get(keys.holding_key(*key, self._node))
        if value is None:
            return None
        try:
            return from_bytes(Holding, value.value)
        except RecordDamaged as error:
            log.warning("what this node is said to hold of %s is told anew: %s", "/".join(key), error)
            return None


def _is_less(now: Holding, before: Holding | None, author: str) -> bool:
    """Others may have counted what `now` does not have any more. `author` is the node where it wrote a part."""
    is_of_same = before is not None and before.generation == now.generation
    parts = before.parts if before is not None and is_of_same else (author,) if author else ()
    versions = before.versions if before is not None and is_of_same else ()
    grown = set(now.parts).difference(parts)  # a part that is whole now has what was told file by file
    return not set(parts) <= set(now.parts) or not (grown or set(versions) <= set(now.versions))


def _commit(seen: Seen[StepState]) -> tuple[int, int]:
    return seen.create_revision, seen.record.generation
