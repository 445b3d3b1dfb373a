"""What this node knows of the catalogue: nodes, directories, complete steps by a watch; parts and holdings on demand.

Everything is in one process and one thread (trio's). Listeners are told every change in the order in which it was
made, and after a lost watch the differences; a `reset` then says that all was read again.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, Holding, StepState
from tierfs.catalog.store import Batch, Compare, Event, KeyStore, KeyValue, Put
from tierfs.cluster.counting import Holders
from tierfs.cluster.parts import Parts
from tierfs.cluster.sharing import SharedQuestions
from tierfs.cluster.step_files import StepFiles
from tierfs.cluster.tables import AT_ONCE, Change, Seen, Tables
from tierfs.cluster.watched import Reader
from tierfs.errors import CatalogCompacted, CatalogError, CatalogUnavailable, PathRefused
from tierfs.steps.names import safe_component
from tierfs.steps.registry import Key

__all__ = ["Change", "Seen", "View"]

log = logging.getLogger("tierfs.cluster")

#: Between two attempts to reach the catalogue, at most.
MOST_PAUSE_S = 2.0
LEAST_PAUSE_S = 0.05
#: A watch that lasted so long was a good one: the next attempt after it comes at once.
GOOD_WATCH_S = 5.0
#: How often the watch is asked about without a reason: a connection may be dead without anybody having said so.
PROBE_S = 30.0
#: What the catalogue has has to be told by the watch within this, or the watch is taken for dead.
LAG_S = 5.0
_T = TypeVar("_T")


class View:
    """`connected`: the watch is there and calls are answered. `revision`: every change of what is watched up to it is
    here and was told. `cluster_id` names the catalogue itself; one that was lost, or put back to an earlier state, gets
    another. `damaged` are keys whose values can't be read; what they held before stays in force."""

    def __init__(self, store: KeyStore, *, clock: Callable[[], float] = trio.current_time) -> None:
        self.store = store
        self.connected = False
        self.revision = 0
        self.cluster_id = ""
        self._clock = clock
        self._reader = Reader()
        self._tables = Tables(self._reader)
        self.nodes, self.tree = self._tables.nodes, self._tables.tree
        self.states, self.operations = self._tables.states, self._tables.operations
        self.damaged = self._tables.damaged
        self._parts = Parts(store, self._reader)
        self._shared = SharedQuestions()
        self._listeners: list[Callable[[Change], None]] = []
        self._waiting = trio.lowlevel.ParkingLot()
        self._doubted = trio.Event()
        #: Up to where each kind was read the last time: what a watch tells of before is older than what is here.
        self._read_at: dict[str, int] = {}
        self._told_loss = False
        #: A revision that the catalogue was seen to have, so the watch has to tell it.
        self._owed = 0

    # --- following the catalogue

    def listen(self, told: Callable[[Change], None]) -> None:
        """`told` is called in the trio thread, for one change after the other, and must not raise."""
        self._listeners.append(told)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started after the first attempt to read everything, whether or not it succeeded."""
        failures, started = 0, False
        while True:
            watched_since: float | None = None
            try:
                await self._read_all()
                if not started:
                    task_status.started()
                    started = True
                watched_since = self._clock()
                await self._follow()
            except CatalogError as error:
                self._lost(error)
            if watched_since is not None and self._clock() - watched_since >= GOOD_WATCH_S:
                failures = 0
            if not started:
                task_status.started()
                started = True
            failures += 1
            longest_s = min(MOST_PAUSE_S, LEAST_PAUSE_S * 2.0 ** min(failures, 10))
            # Many nodes lose the same server at the same moment; they shall not come back at one.
            await trio.sleep(random.uniform(longest_s / 2, longest_s))

    def doubt(self) -> None:
        """A call to the catalogue failed or took too long: not connected until it was seen to answer again."""
        if self.connected:
            self.connected = False
            self._doubted.set()
            self._waiting.unpark_all()

    async def caught_up(self, keys: Sequence[str] = (), prefixes: Sequence[str] = (), *, within_s: float = 2.0) -> bool:
        """Until everything that the catalogue has now of these is here; False: it is away, or too slow.

        Only of what is watched: parts and holdings are left out, since `files` and `holdings` ask for themselves. While
        not connected it is False at once.
        """
        watched = tuple(sorted({key for key in keys if _is_watched(key)}))
        below = tuple(sorted({prefix for prefix in prefixes if _is_watched(prefix)}))
        if not self.connected or not (watched or below):
            await trio.lowlevel.checkpoint()
            return self.connected
        with trio.move_on_after(within_s):
            try:
                newest = await self._shared.ask((watched, below), lambda: self._newest(watched, below))
            except CatalogError:
                self.doubt()
                return False
            self._owed = max(self._owed, newest)
            while self.connected and self.revision < newest:
                await self._waiting.park()
            return self.connected
        self.doubt()
        return False

    async def until(self, condition: Callable[[], bool], *, within_s: float) -> bool:
        """Whether the condition became true in time; asked again after each change, and when connected changes."""
        with trio.move_on_after(within_s):
            while not condition():
                await self._waiting.park()
            return True
        return condition()

    # --- parts and holdings

    async def files(self, key: Key, generation: int, *, fresh: bool = False) -> StepFiles:
        """All nodes' files of the generation. Of one that is written, as of now; of a complete one, as of when its
        state changed last, and with `fresh` as of now (additions come later). CatalogUnavailable."""
        current = self._complete(key, generation)
        if current is not None and not fresh:
            settled = self._parts.settled(key, generation, current.mod_revision)
            if settled is not None:
                return settled
        self._check_connected(key)

        async def read() -> StepFiles:
            now = self._complete(key, generation)
            settled_at, marker = (now.mod_revision, now.record.marker) if now is not None else (0, None)
            return await self._parts.read(key, generation, settled_at=settled_at, marker=marker)

        return await self._asked(("files", key, generation), read)

    def known_files(self, key: Key, generation: int) -> StepFiles | None:
        """What was read last, without asking."""
        return self._parts.known(key, generation)

    def forget_files(self, key: Key) -> None:
        """Read all of the step's parts anew the next time."""
        self._parts.forget(key)

    def use_markers(self, is_marker: Callable[[str], bool]) -> None:
        """Which paths inside a step are frameworks' markers: an addition never takes the place of one."""
        self._parts.is_marker = is_marker
        self._parts.clear()

    async def holdings(self, key: Key) -> dict[str, Holding]:
        """By node, as of now; also of nodes that are not there. CatalogUnavailable."""
        self._check_connected(key)
        return await self._asked(("holdings", key), lambda: self._read_holdings(key))

    def holders(self, files: StepFiles, holdings: Mapping[str, Holding], file: FileRecord) -> list[str]:
        """Live nodes with the bytes of `file`. For many files of a step make one `counting.Holders`."""
        return sorted(Holders(files, holdings, self.nodes).of(file))

    def path_below(self, directory: str) -> Iterator[str]:
        """Names (last components) of what is in the tree directly below the directory; "" is the mount's root."""
        yield from self._tables.below(directory)

    # --- reading all of it

    async def _read_all(self) -> None:
        """Tables and differences. Reads states first and the tree after them: a step whose directory is gone already
        is harmless, and operations last, so that a rename is known before its directory is seen to be gone."""
        identity = await self._identity()
        values: dict[str, list[KeyValue]] = {}
        read_at: dict[str, int] = {}
        for kind, prefix in _READ_IN_ORDER:
            values[kind], read_at[kind] = await self.store.range(prefix)
            if kind == "state" and read_at[kind] < self.revision and identity.value.decode() == self.cluster_id:
                await self._rename_catalogue(identity)
        now = await self.store.get(keys.CLUSTER)
        if now != identity or sorted(read_at.values()) != list(read_at.values()):
            raise CatalogUnavailable("the catalogue became another one while it was read")
        cluster_id = identity.value.decode()
        if cluster_id != self.cluster_id:
            if self.cluster_id:
                log.warning("the catalogue is another one than before: %s, was %s", cluster_id, self.cluster_id)
            self._empty(cluster_id)
        changes = await self._tables.differences(values)
        self._read_at = read_at
        self._apply(changes)
        self.connected, self._told_loss, self._owed = True, False, 0
        self._doubted = trio.Event()
        await self._tell(changes)
        self.revision = read_at["state"]
        await self._tell([Change("reset", "", None, None)])
        self._waiting.unpark_all()

    async def _identity(self) -> KeyValue:
        """The catalogue's own name, made by whoever comes first."""
        found = await self.store.get(keys.CLUSTER)
        if found is not None and _is_identity(found.value):
            return found
        created = Compare(keys.CLUSTER, "mod", "equal", found.mod_revision if found is not None else 0)
        await self.store.txn([created], [Put(keys.CLUSTER, uuid.uuid4().hex.encode())])
        found = await self.store.get(keys.CLUSTER)
        if found is None or not _is_identity(found.value):
            raise CatalogUnavailable("the catalogue does not keep its own name")
        return found

    async def _rename_catalogue(self, identity: KeyValue) -> NoReturn:
        """It went back to an earlier state (a backup was restored): what it lacks was not deleted by anybody, so it has
        to be another catalogue for all nodes."""
        log.warning("the catalogue went back to an earlier state; it gets another name, and all is published anew")
        unchanged = Compare(keys.CLUSTER, "mod", "equal", identity.mod_revision)
        await self.store.txn([unchanged], [Put(keys.CLUSTER, uuid.uuid4().hex.encode())])
        raise CatalogUnavailable("the catalogue went back to an earlier state; it is read again")

    def _empty(self, cluster_id: str) -> None:
        """Begin with another catalogue."""
        self.cluster_id = cluster_id
        self.revision = 0
        self._tables.clear()
        self._parts.clear()

    # --- the watch

    async def _follow(self) -> None:
        failure: list[CatalogError] = []
        async with trio.open_nursery() as nursery:

            async def until_it_fails(work: Callable[[], Awaitable[None]]) -> None:
                try:
                    await work()
                except CatalogError as error:
                    failure.append(error)
                    nursery.cancel_scope.cancel()

            nursery.start_soon(until_it_fails, self._watch)
            nursery.start_soon(until_it_fails, self._probe)
        raise failure[0] if failure else CatalogUnavailable("the watch of the catalogue ended")

    async def _watch(self) -> None:
        async with self.store.watch(keys.WATCHED, from_revision=self.revision + 1) as batches:
            async for batch in batches:
                await self._take(batch)
        raise CatalogUnavailable("the watch of the catalogue ended")

    async def _take(self, batch: Batch) -> None:
        last: dict[str, Event] = {}
        put: dict[str, KeyValue] = {}
        for event in batch.events:
            last.pop(event.key, None)
            if event.value is not None:
                put[event.key] = event.value
            last[event.key] = event
        identity = last.get(keys.CLUSTER)
        if identity is not None and (identity.value is None or identity.value.value != self.cluster_id.encode()):
            # Nothing of this may be told: what goes with a catalogue that is emptied was not deleted.
            raise CatalogCompacted("the catalogue became another one")
        changes: list[Change] = []
        for at, event in enumerate(last.values()):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            place = self._reader.place(event.key, batch.revision)
            if place is None:
                continue
            read_at = self._read_at.get(place.kind, 0)
            if event.value is not None:
                change = self._tables.compared(place, event.value) if event.value.mod_revision > read_at else None
                changes += [change] if change is not None else []
                continue
            old = self._tables.seen(place)
            if old is not None and batch.revision > read_at and old.mod_revision <= batch.revision:
                # What it was at last is told too: a node says that it leaves before it does.
                before = self._tables.compared(place, put[event.key]) if event.key in put else None
                if before is not None and before.new is not None and before.new.mod_revision > read_at:
                    changes.append(before)
                    old = before.new
                changes.append(Change(place.kind, place.name, old, None, place.step))
            self.damaged.discard(event.key)
        self._apply(changes)
        await self._tell(changes)
        self.revision = max(self.revision, batch.revision)
        self._waiting.unpark_all()

    async def _probe(self) -> None:
        """Sees to it that a watch which tells nothing is one that has nothing to tell."""
        while True:
            with trio.move_on_after(random.uniform(PROBE_S / 2, PROBE_S)):
                await self._doubted.wait()
            self._doubted = trio.Event()
            newest = max(self._owed, await self._newest((keys.CLUSTER,), (keys.NODES, keys.STATES)))
            with trio.move_on_after(LAG_S):
                while self.revision < newest:
                    await self._waiting.park()
            if self.revision < newest:
                raise CatalogUnavailable(
                    f"the watch of the catalogue tells nothing: it has {newest}, told is {self.revision}"
                )
            if not self.connected and not self._doubted.is_set():
                self.connected, self._told_loss = True, False
                self._waiting.unpark_all()

    def _lost(self, error: CatalogError) -> None:
        self.connected = False
        if isinstance(error, CatalogCompacted):
            log.info("reading the catalogue again: %s", error.message)
        elif not self._told_loss:
            self._told_loss = True
            log.warning("the catalogue can't be reached; work goes on, and is published later: %s", error.message)
        self._waiting.unpark_all()

    def _apply(self, changes: Sequence[Change]) -> None:
        self._tables.apply(changes)
        for change in changes:
            old, new = change.old, change.new
            if change.step is not None and new is not None:
                self._parts.forget(change.step, before=new.record.generation)
            elif (
                change.kind == "tree"
                and old is not None
                and (new is None or new.create_revision != old.create_revision)
            ):
                # If it is a step: another one may have that name now.
                namespace, _, step = change.key.rpartition("/")
                self._parts.forget((namespace, step))

    async def _tell(self, changes: Sequence[Change]) -> None:
        for at, change in enumerate(changes):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            for listener in self._listeners:
                try:
                    listener(change)
                except Exception:
                    log.exception("a change of the catalogue was not taken: %s", change)

    # --- asking

    async def _newest(self, watched: Sequence[str], below: Sequence[str]) -> int:
        return await self.store.newest(watched, below, newer_than=self.revision)

    async def _asked(self, about: Hashable, question: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await self._shared.ask(about, question)
        except CatalogUnavailable:
            self.doubt()
            raise

    def _complete(self, key: Key, generation: int) -> Seen[StepState] | None:
        state = self.states.get(key)
        return state if state is not None and state.record.generation == generation else None

    def _check_connected(self, key: Key) -> None:
        if not self.connected:
            raise CatalogUnavailable(f"{'/'.join(key)}: the catalogue can't be reached, so other nodes are not known")

    async def _read_holdings(self, key: Key) -> dict[str, Holding]:
        prefix = keys.holdings_prefix(*key)
        values, _ = await self.store.range(prefix)
        found: dict[str, Holding] = {}
        for at, value in enumerate(values):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            try:
                node = safe_component(value.key.removeprefix(prefix))
            except PathRefused as error:
                self._reader.tell(value.key, value.mod_revision, error.message)
                continue
            holding = self._reader.record(Holding, value)
            if holding is not None:
                found[node] = holding
        return found


_READ_IN_ORDER = (
    ("state", keys.STATES),
    ("node", keys.NODES),
    ("tree", keys.TREE),
    ("operation", keys.OPERATIONS),
)


def _is_watched(key: str) -> bool:
    return key == keys.CLUSTER or key.startswith((keys.NODES, keys.TREE, keys.STATES, keys.OPERATIONS))


def _is_identity(value: bytes) -> bool:
    return len(value) == 32 and all(each in b"0123456789abcdef" for each in value)
