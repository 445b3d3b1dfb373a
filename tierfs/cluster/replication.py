"""Copies of other nodes' files in this node's RAM: fetched as they are written, kept as long as their step needs them.

This node listens to the offers of those whose files it is to hold (`Groups`), and fetches what they write into the
shelf (`FilePull`). What no offer brought of complete steps is planned by `MissingParts`. What is here of a complete
step is told by `Holdings`; the way from the last byte to that record has no wait in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from tierfs.catalog.records import StepState, check_version
from tierfs.checksum import FileChecksum
from tierfs.cluster.copies import Copies
from tierfs.cluster.grouping import Groups
from tierfs.cluster.holdings import Holdings
from tierfs.cluster.missing_parts import Missing, MissingParts
from tierfs.cluster.part_files import PartFiles
from tierfs.cluster.pulling import FilePull, Means, Streams
from tierfs.cluster.replica_room import ReplicaRoom
from tierfs.cluster.shelf_sweeping import Brought, ShelfSweep, author_of
from tierfs.cluster.taking_over import TakingOver
from tierfs.cluster.view import Change, View
from tierfs.cluster.waiting import CopyWaits
from tierfs.errors import CatalogError, NoRoom, PathRefused, PeerError, RecordDamaged, TierfsError
from tierfs.steps.names import safe_component, safe_relative
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import Offer, Peers

log = logging.getLogger("tierfs.cluster")

#: Files of complete steps that are fetched at the same time.
MISSING_AT_ONCE = 8
#: After a lost subscription, a failed reading, a refusal for want of room.
PAUSE_S = 0.1
MOST_PAUSE_S = 3.0
NO_ROOM_PAUSE_S = 1.0
_BOUND_S = 3600.0

#: A file's place: its step, the node it comes from, the path in the step.
_Place = tuple[Key, str, str]


@dataclass(frozen=True)
class ReplicationState:
    """For `status`: files on their way, bytes that their nodes have and this one has not, files without room."""

    pulling: int
    missing_bytes: int
    without_room: int


class Replicator:
    def __init__(
        self,
        registry: StepRegistry,
        view: View,
        peers: Peers,
        copies: Copies,
        holdings: Holdings,
        parts: PartFiles,
        node: str,
    ) -> None:
        self._registry = registry
        self._view = view
        self._peers = peers
        self._copies = copies
        self._holdings = holdings
        self._node = node
        self._parts = parts
        settings = registry.settings
        self.groups = Groups(view, settings, node)
        self.room = ReplicaRoom(registry)
        self.waits = CopyWaits(view, peers, copies, self.groups, node)
        copies.arrived = self._arrived
        #: A copy of the step's file of that name is on the shelf: (step, path in the step, version).
        self.on_arrived: Callable[[Key, str, str], None] = lambda key, inner, version: None
        self._missing = MissingParts(
            view, self.groups, parts, copies, node, after_s=settings.replication.after_s, wake=self._plan_soon
        )
        self._missing.is_persisted = self._is_persisted
        self._missing.on_untold = holdings.copied
        self._means = Means(peers, copies, self.room, Streams(settings.peer.streams), registry.tier.trim)
        self.taking_over = TakingOver(view, copies, self.groups, self._means, node)
        self._pulls: dict[_Place, FilePull] = {}
        self._sealed: dict[str, FilePull] = {}  # those of sealed files, by version
        self._sweep = ShelfSweep(registry, view, copies, parts)
        self._brought = self._sweep.brought
        self._wanted: dict[_Place, Missing] = {}
        self._not_before: dict[_Place, float] = {}  # there was no room
        self._planned: dict[_Place, Missing] = {}  # of which a pull is on its way
        self._planning = trio.Event()
        self._regrouped = trio.Event()
        self._nursery: trio.Nursery | None = None
        holdings.interesting = lambda key, state: {
            *self.groups.authors(key[0]),
            *(author for author, _ in self._brought.get(key, {})),
        }
        holdings.singles = lambda key: [each.version for each in self._brought.get(key, {}).values()]

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. To be started before the view has read everything, or after it."""
        self._view.listen(self._seen)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self._view.connected:
                self._missing.begin()
            self._sweep.all_later()
            nursery.start_soon(self._keep_subscribed)
            nursery.start_soon(self._keep_planning)
            nursery.start_soon(self.taking_over.run)
            task_status.started()

    def _seen(self, change: Change) -> None:
        if self.groups.seen(change):
            self._regrouped.set()
        self._missing.seen(change)
        self.taking_over.seen(change)
        if change.kind == "state" and change.step is not None:
            if change.new is not None:
                self._committed(change.step, change.new.record)
        elif change.kind == "tree" and change.old is not None:
            is_gone = change.new is None or change.new.create_revision != change.old.create_revision
            where = self._registry.names.locate(change.key) if is_gone else None
            if where is None or where.inner:
                return
            key = where.namespace, where.step
            if self._is_being_renamed(change.key):  # `Copies.step_moved` takes its copies along
                self._sweep.later(key)
            else:
                self.forget(key)
        elif change.kind == "reset":
            self._sweep.all_later()
            self._plan_soon()

    # --- subscriptions

    async def _keep_subscribed(self) -> None:
        subscribed: dict[str, trio.CancelScope] = {}
        async with trio.open_nursery() as nursery:
            while True:
                self._regrouped = trio.Event()
                if self.groups.is_draining(self._node):  # it takes nothing more, and hears of no seal
                    for place in [place for place, pull in self._pulls.items() if not pull.pieces.sealed]:
                        self._stop(place)
                wanted = self.groups.all_authors() | self._growing_authors()
                for author in sorted(subscribed.keys() - wanted):
                    subscribed.pop(author).cancel()
                for author in sorted(wanted - subscribed.keys()):
                    subscribed[author] = trio.CancelScope()
                    nursery.start_soon(self._subscribe, author, subscribed[author])
                await self._regrouped.wait()

    async def _subscribe(self, author: str, scope: trio.CancelScope) -> None:
        pause = PAUSE_S
        with scope:
            while True:
                began = trio.current_time()
                try:
                    async with self._peers.offers(author) as offers:
                        async for offer in offers:
                            self._offered(author, offer)
                except PeerError as error:
                    log.debug("no news of what %s writes: %s", author, error)
                if trio.current_time() - began > MOST_PAUSE_S:
                    pause = PAUSE_S
                await trio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_S)

    def _growing_authors(self) -> set[str]:
        """What was begun is copied to its end, whoever holds the author's next files: so no step is later replicated
        for a node that came or went while it was written. What a node that is lost was writing ends by itself."""
        return {place[1] for place, pull in self._pulls.items() if not pull.pieces.sealed}

    def _offered(self, author: str, offer: Offer) -> None:
        try:
            key = self._checked(author, offer)
        except (PathRefused, RecordDamaged) as error:
            log.warning("%s offers what can't be: %s", author, error)
            return
        place = key, author, offer.inner
        is_of_partner = author in self.groups.authors(key[0]) or place in self._pulls
        if not is_of_partner or self.groups.is_draining(self._node):
            return
        state = self._view.states.get(key)
        if state is not None and state.record.generation > offer.generation:
            return
        pull = self._pulls.get(place)
        if pull is not None and pull.version not in (offer.version, offer.growing):
            self._stop(place)  # written again
            pull = None
        if place in self._wanted and self._wanted[place].version != offer.version:
            del self._wanted[place]
        if offer.sealed:
            if offer.version in self._sealed and self._sealed[offer.version] is not pull:
                self._sealed[offer.version].inner = offer.inner  # it got another name: one copy does
            elif pull is not None:
                self._seal(pull, offer.version, offer.size_bytes)
            elif self._copies.has(offer.version):
                self._came(place, offer.version, offer.generation)
            else:
                self._seal(self._begin(place, offer.version, offer.generation), offer.version, offer.size_bytes)
        elif pull is not None:
            pull.grew(offer.size_bytes)
        elif offer.size_bytes and self._not_before.get(place, 0.0) <= trio.current_time():
            self._begin(place, offer.version, offer.generation).grew(offer.size_bytes)

    def _checked(self, author: str, offer: Offer) -> Key:
        """What comes from the wire names paths here. PathRefused, RecordDamaged."""
        namespace, step = safe_relative(offer.namespace), safe_component(offer.step)
        safe_relative(offer.inner)
        where = self._registry.names.locate(f"{namespace}/{step}")
        if where is None or (where.namespace, where.step) != (namespace, step):
            raise PathRefused(f"{namespace}/{step} is no step")
        for version in (offer.version, offer.growing):
            if version and author_of(check_version(version)) != author:
                raise RecordDamaged(f"{version[:80]} is not of {author}")
        if not 0 <= offer.size_bytes < 1 << 63 or offer.generation < 1 or not offer.version:
            raise RecordDamaged(f"size, generation or version of {offer.inner[:80]!r} is none")
        return namespace, step

    # --- pulls

    def _begin(
        self, place: _Place, version: str, generation: int, holders: Sequence[str] = (), *, may_evict: bool = True
    ) -> FilePull:
        key, author, inner = place

        def may_have(pull: FilePull) -> list[str]:
            nodes = [author, *holders]
            if pull.pieces.sealed:
                nodes += self.groups.partners(author, self.groups.replicas(key[0]))
            return [node for node in dict.fromkeys(nodes) if node in self._view.nodes and node != self._node]

        pull = self._pulls[place] = FilePull(self._means, key, inner, version, may_have, may_evict=may_evict)
        assert self._nursery is not None
        self._nursery.start_soon(self._bring, place, pull, generation, holders)
        return pull

    def _seal(self, pull: FilePull, version: str, size_bytes: int) -> None:
        pull.seal(version, size_bytes)
        self._sealed[version] = pull
        self._regrouped.set()  # its author may have been listened to for this alone

    async def _bring(self, place: _Place, pull: FilePull, generation: int, holders: Sequence[str]) -> None:
        key, author, inner = place
        is_whole = lacks_room = False
        try:
            is_whole = await pull.run()
        except NoRoom as error:
            lacks_room = True
            self._no_room(place, error, until_sealed=not pull.pieces.sealed)
        except (OSError, TierfsError) as error:
            log.error("copying %s failed: %s", pull.shown, error, extra=self._extra(key, inner))
        finally:
            is_current = self._pulls.get(place) is pull
            if self._sealed.get(pull.version) is pull:
                del self._sealed[pull.version]
            if is_current:
                del self._pulls[place]
                self._planned.pop(place, None)
                self._regrouped.set()
        if is_whole:
            self._came(place, pull.version, generation)
            self.on_arrived(key, pull.inner, pull.version)
        elif is_current and lacks_room and pull.pieces.sealed:
            size = pull.pieces.size_bytes
            self._wanted[place] = Missing(
                key, author, inner, pull.version, size, generation, tuple(holders), pull.may_evict
            )
        elif is_current:
            self._missing.again(key, NO_ROOM_PAUSE_S)
        self._plan_soon()

    def _came(self, place: _Place, version: str, generation: int) -> None:
        key, author, inner = place
        self._not_before.pop(place, None)
        of_step = self._brought.setdefault(key, {})
        before = of_step.get((author, inner))
        of_step[author, inner] = Brought(version, generation)
        if before is not None and before.version != version:
            self._sweep_soon(key)
        if key in self._view.states:
            self._holdings.changed(key)
        if not any(other[0] == key for other in self._not_before):
            self._registry.clear_problems("/".join(key))

    def _no_room(self, place: _Place, error: NoRoom, *, until_sealed: bool) -> None:
        """A growing file is not begun again before its size is known: it would be fetched in vain, over and over."""
        key, author, inner = place
        is_known = place in self._not_before
        self._not_before[place] = math.inf if until_sealed else trio.current_time() + NO_ROOM_PAUSE_S
        if not is_known:
            message = f"{inner} of {author} is not copied here: {error.message}"
            # A first time may pass by itself: room is being made, or a growing file was given more than it will need.
            log.info("%s", message, extra=self._extra(key, inner))
            self._registry.problem("warning", message, "/".join(key))

    # --- what is missing of complete steps

    def _plan_soon(self) -> None:
        self._planning.set()

    async def _keep_planning(self) -> None:
        pause = PAUSE_S
        while True:
            self._planning = trio.Event()
            failed = False
            for key in self._missing.due():
                try:
                    for missing in await self._missing.plan(key):
                        self._want(missing)
                except CatalogError as error:
                    log.debug("what is missing here of %s can't be told yet: %s", "/".join(key), error)
                    failed = True
                self._start_wanted()
            failed = not await self._sweep.sweep(self.forget) or failed
            if failed:
                await trio.sleep(pause)
                self._plan_soon()
            pause = min(2 * pause, MOST_PAUSE_S) if failed else PAUSE_S
            self._start_wanted()
            with trio.move_on_at(self._plan_at()):
                await self._planning.wait()

    def _plan_at(self) -> float:
        waiting = [self._not_before.get(place, math.inf) for place in self._wanted]
        return min(self._missing.next_at(), *waiting, self._sweep.next_at(), trio.current_time() + _BOUND_S)

    def _want(self, missing: Missing) -> None:
        pull = self._pulls.get(missing.place)
        if self._not_before.get(missing.place) == math.inf:
            del self._not_before[missing.place]  # its size is known now, whether or not the offer came that says so
        if pull is not None and not pull.pieces.sealed and author_of(pull.version) == author_of(missing.version):
            self._seal(pull, missing.version, missing.size_bytes)  # the offer that says so was lost, or comes late
        elif pull is None or pull.version != missing.version:
            self._wanted[missing.place] = missing

    def _start_wanted(self) -> None:
        now = trio.current_time()
        for missing in sorted(self._wanted.values(), key=self._newest_first):
            if len(self._planned) >= MISSING_AT_ONCE:
                return
            place = missing.place
            if self._not_before.get(place, 0.0) > now or missing.version in self._sealed:
                continue
            del self._wanted[place]
            if self._copies.has(missing.version):
                self._came(place, missing.version, missing.generation)
                continue
            self._stop(place)
            self._planned[place] = missing
            pull = self._begin(
                place, missing.version, missing.generation, missing.holders, may_evict=missing.is_of_newest
            )
            self._seal(pull, missing.version, missing.size_bytes)

    def _newest_first(self, missing: Missing) -> tuple[float, int, str]:
        where = self._registry.names.locate("/".join(missing.key))
        return -(where.number if where is not None else 0), -missing.generation, missing.inner

    def bring(self, missing: Missing) -> None:
        """Fetch it, whoever else may hold it: a damaged copy of it was dropped here."""
        self._want(missing)
        self._plan_soon()

    # --- what is not needed any more

    def forget(self, key: Key) -> None:
        """The step is gone, or leaves this node's RAM: so do its copies."""
        for place in [place for place in self._pulls if place[0] == key]:
            self._stop(place)
        for place in [place for place in self._wanted if place[0] == key]:
            del self._wanted[place]
        for place in [place for place in self._not_before if place[0] == key]:
            del self._not_before[place]
        self._sweep.forget(key)
        if key in self._view.states:
            self._holdings.changed(key)

    def _committed(self, key: Key, state: StepState) -> None:
        for place, missing in list(self._wanted.items()):
            if place[0] == key and missing.generation < state.generation:
                del self._wanted[place]
        if any(each.generation < state.generation for each in self._brought.get(key, {}).values()):
            self._sweep_soon(key)

    def _sweep_soon(self, key: Key) -> None:
        self._sweep.soon(key)
        self._plan_soon()

    def _stop(self, place: _Place) -> None:
        """The pull there, if any, is not wanted any more."""
        pull = self._pulls.pop(place, None)
        self._planned.pop(place, None)
        if pull is not None:
            pull.drop()
            if self._sealed.get(pull.version) is pull:
                del self._sealed[pull.version]

    def _is_being_renamed(self, path: str) -> bool:
        moves = (seen.record for seen in self._view.operations.values() if seen.record.kind == "rename")
        return any(path == move.path or path.startswith(f"{move.path}/") for move in moves)

    # --- accounting

    def room_needed_for_replicas(self, namespace: str) -> int:
        """Bytes that the partners' next step of the namespace will need here, as large as their last one was."""
        return self._missing.expected_bytes(namespace, self.groups.authors(namespace))

    def state(self) -> ReplicationState:
        pulls = self._pulls.values()
        missing = sum(pull.pieces.missing_bytes for pull in pulls)
        missing += sum(each.size_bytes for each in self._wanted.values())
        return ReplicationState(len(pulls), missing, len(self._not_before))

    def _is_persisted(self, key: Key) -> bool:
        record = self._registry.records.get(key)
        return record is not None and record.is_persisted

    def _arrived(self, growing: str) -> FileChecksum | None:
        pulls = (pull for pull in self._pulls.values() if pull.version == growing and not pull.pieces.sealed)
        return next((pull.pieces.arrived() for pull in pulls), None)

    def _extra(self, key: Key, inner: str = "") -> dict[str, Any]:
        return {"namespace": key[0], "step": key[1], "file": inner, "tier": "ram"}
