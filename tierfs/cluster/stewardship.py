"""Whether complete steps have as many copies as they should: looked after by one node a step, its steward.

The steward counts who holds which part and puts what it finds into the step's state (`level`), by compare-and-put,
so that two nodes that both take themselves for the steward do no harm. It looks when the state or the members change,
when it is told to (`poke`), and again every few seconds as long as copies are missing; a replicated step costs nothing.
From the loss of a node on, a level that was told before is not believed until it was counted (`is_believed`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import Level, StepState, to_bytes
from tierfs.catalog.store import Compare, KeyStore, Put
from tierfs.cluster import placement
from tierfs.cluster.counting import Holders, missing_copies
from tierfs.cluster.placement import SERVING
from tierfs.cluster.step_files import StepFiles
from tierfs.cluster.view import Change, Seen, View
from tierfs.errors import CatalogError
from tierfs.steps.registry import Key

log = logging.getLogger("tierfs.cluster")

#: Copies that are just being made are looked for so often, each time half as often, up to the second.
FIRST_LOOK_S = 0.2
MOST_LOOK_S = 3.0
#: Nodes come and go together (a rack, a restart of all): their changes are counted at once.
SETTLE_S = 0.05
#: In steps of more parts than this only the steward counts: all holders reading all holdings is the square of them.
SMALL_STEP_PARTS = 64
#: A large step's steward has counted it so long after a node was lost.
COUNTED_WITHIN_S = 5.0
#: Steps with more files are counted in a thread: about 1 ms.
INLINE_FILES = 300


@dataclass
class _Duty:
    """When a step is looked at next, by the view's clock, and what was found the last time."""

    at: float
    pause_s: float = FIRST_LOOK_S
    incomplete_since: float | None = None


class Stewardship:
    """`replicas` says how many copies a namespace wants. `after_s`: so long parts that nobody published may be missing
    (all nodes publish anew what a lost catalogue had) before the step is taken for lost."""

    def __init__(
        self,
        store: KeyStore,
        view: View,
        node: str,
        replicas: Callable[[str], int],
        is_persisted: Callable[[Key], bool],
        after_s: float,
    ) -> None:
        self._store = store
        self._view = view
        self._node = node
        self._replicas = replicas
        self._is_persisted = is_persisted
        self._after_s = after_s
        self._most_look_s = min(MOST_LOOK_S, max(FIRST_LOOK_S, after_s / 5))
        self._members: frozenset[str] = frozenset()
        self._stewards: dict[Key, str] = {}
        self._duties: dict[Key, _Duty] = {}
        self._wanted: dict[Key, dict[str, int]] = {}
        self._members_changed = True
        #: Levels that were told before a node was lost, and when that was: nobody counted these steps here since.
        self._doubted: dict[Key, float] = {}
        self._to_check: set[Key] = set()
        self._to_recount: set[Key] = set()
        #: Other nodes' steps of which this node told that it holds something.
        self._held_for_others: set[Key] = set()
        self._news = trio.Event()
        view.listen(self._follow)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        self._members_changed = True
        task_status.started()
        while True:
            self._news = trio.Event()
            if self._members_changed:
                with trio.move_on_after(SETTLE_S):
                    await trio.sleep_forever()
                await self._choose_stewards()
            if not self._view.connected:
                await self._view.until(lambda: self._view.connected, within_s=60.0)
                continue
            if self._to_recount:
                await self._recount(self._to_recount.pop())
                continue
            if self._to_check:
                await self._check(self._to_check.pop())
                continue
            if self._held_for_others:
                await self._count_for_steward(self._held_for_others.pop())
                continue
            now = trio.current_time()
            due = [key for key, duty in self._duties.items() if duty.at <= now and key in self._view.states]
            if not due:
                with trio.move_on_at(min((duty.at for duty in self._duties.values()), default=math.inf)):
                    await self._news.wait()
                continue
            # The newest first: a trainer may wait for it.
            await self._attend(max(due, key=lambda key: (self._view.states[key].record.completed_at, key)))

    def poke(self, key: Key) -> None:
        """This node told that it made or lost copies: look again, if it is the steward. If not, that one does not know;
        so in a small step whoever made the last copy says that the step is replicated."""
        if key in self._duties:
            self._duties[key] = _Duty(-math.inf, incomplete_since=self._duties[key].incomplete_since)
            self._news.set()
        elif key in self._view.states and len(self._view.states[key].record.parts) <= SMALL_STEP_PARTS:
            self._held_for_others.add(key)
            self._news.set()

    def is_believed(self, key: Key) -> bool:
        """Whether the step's level is as its steward says, though nodes were lost since.

        What is not known is counted soon, so that it is known the next time that somebody asks; of a large step the
        steward alone does that.
        """
        doubted_at = self._doubted.get(key)
        if doubted_at is None or key not in self._view.states:
            return True
        if len(self._view.states[key].record.parts) > SMALL_STEP_PARTS:
            return trio.current_time() - doubted_at > COUNTED_WITHIN_S
        if key not in self._to_check:
            self._to_check.add(key)
            self._news.set()
        return False

    def is_steward(self, key: Key) -> bool:
        return self._stewards.get(key) == self._node

    def wanted(self, key: Key) -> dict[str, int]:
        """By part (additions as NODE+), how many copies are missing, as the steward found last; {} for other nodes."""
        return dict(self._wanted.get(key, {}))

    async def missing(self, key: Key) -> dict[str, int]:
        """The same as of now; any node may ask. {} for a step that is not complete. CatalogUnavailable."""
        seen = self._view.states.get(key)
        if seen is None:
            return {}
        _, missing, _ = await self._count(key, seen)
        return missing

    def recount_soon(self, key: Key) -> None:
        """As `recount`, as soon as the catalogue can be reached."""
        self._to_recount.add(key)
        self._news.set()

    async def recount(self, key: Key) -> None:
        """A copy was given up: a replicated step's steward, whoever that is, shall count again. CatalogUnavailable."""
        seen = self._view.states.get(key)
        if seen is not None and seen.record.level == "replicated":
            await self._put(key, seen, "complete")
        self.poke(key)

    # --- who is steward

    def _follow(self, change: Change) -> None:
        if change.kind == "node":
            old, new = change.old, change.new
            if old is not None and (new is None or old.record.tier != new.record.tier):
                now = trio.current_time()
                self._doubted.update((key, now) for key in self._view.states)
            if old is None or new is None or (old.record.state, old.record.tier) != (new.record.state, new.record.tier):
                self._members_changed = True
                self._news.set()
        elif change.kind == "reset":
            self._members_changed = True
            self._stewards.clear()
            self._news.set()
        elif change.kind == "state" and change.step is not None:
            self._state_changed(change.step, change)

    def _state_changed(self, key: Key, change: Change) -> None:
        if change.new is None:
            for table in (self._stewards, self._duties, self._wanted, self._doubted):
                table.pop(key, None)
            self._to_check.discard(key)
            return
        if key not in self._stewards:
            self._choose(key, placement.winner(key, self._members))
        elif key in self._duties:
            old = change.old.record if change.old is not None else None
            if old is not None and (old.generation, old.completed_at) != _which(change.new.record):
                self._duties[key] = _Duty(-math.inf)
            else:
                self._duties[key].at = -math.inf
        self._news.set()

    async def _choose_stewards(self) -> None:
        """Only what a node that came or went changes is computed again: with many steps and nodes that is little."""
        self._members_changed = False
        before, now = self._members, frozenset(placement.staying(seen.record for seen in self._view.nodes.values()))
        self._members = now
        came = now - before
        for key in list(self._view.states):
            await trio.lowlevel.checkpoint()
            if key not in self._view.states:
                continue
            current = self._stewards.get(key)
            known = current is not None and current in now and current in before
            self._choose(key, placement.winner(key, {current, *came} if known and current is not None else now))
        for key in [key for key in self._stewards if key not in self._view.states]:
            for table in (self._stewards, self._duties, self._wanted):
                table.pop(key, None)

    def _choose(self, key: Key, steward: str) -> None:
        self._stewards[key] = steward
        if steward == self._node:
            since = self._duties[key].incomplete_since if key in self._duties else None
            self._duties[key] = _Duty(-math.inf, incomplete_since=since)
        else:
            self._duties.pop(key, None)
            self._wanted.pop(key, None)

    # --- what the steward does

    async def _attend(self, key: Key) -> None:
        duty, seen = self._duties[key], self._view.states[key]
        duty.at = trio.current_time() + duty.pause_s
        duty.pause_s = min(self._most_look_s, 2 * duty.pause_s)
        try:
            level, missing, is_known = await self._count(key, seen)
            if not is_known:
                now = trio.current_time()
                duty.incomplete_since = now if duty.incomplete_since is None else duty.incomplete_since
                if now - duty.incomplete_since >= self._after_s and not self._is_persisted(key):
                    level = "lost"
            else:
                duty.incomplete_since = None
            if self._duties.get(key) is not duty or self._view.states.get(key) is not seen:
                return  # it became another one, or another's, while it was counted: it is due again where it is ours
            self._wanted[key] = missing
            if level != seen.record.level:
                await self._put(key, seen, level)
            elif is_known and not missing and level != "lost":
                # Nothing will change that is not told: by the state, by who is there, by whoever pokes.
                duty.at = math.inf
        except CatalogError as error:
            log.info("could not count the copies of %s: %s", "/".join(key), error.message)

    async def _recount(self, key: Key) -> None:
        try:
            await self.recount(key)
        except CatalogError as error:
            log.info("copies of %s are counted again later: %s", "/".join(key), error.message)
            self._view.doubt()
            self._to_recount.add(key)

    async def _check(self, key: Key) -> None:
        """For `is_believed`: what the steward would find."""
        seen, doubted_at = self._view.states.get(key), self._doubted.get(key)
        if seen is None or doubted_at is None:
            return
        try:
            level, _, _ = await self._count(key, seen)
        except CatalogError as error:
            log.info("could not count the copies of %s: %s", "/".join(key), error.message)
            return
        if level == "replicated" and self._doubted.get(key) == doubted_at:
            del self._doubted[key]

    async def _count_for_steward(self, key: Key) -> None:
        """Only upwards: what is lost or too few is for the steward to say."""
        seen = self._view.states.get(key)
        if seen is None or seen.record.level == "replicated":
            return
        try:
            level, _, _ = await self._count(key, seen)
            if level == "replicated" and self._view.states.get(key) is seen:
                await self._put(key, seen, level)
        except CatalogError as error:
            log.info("could not count the copies of %s: %s", "/".join(key), error.message)

    async def _put(self, key: Key, seen: Seen[StepState], level: Level) -> None:
        name = keys.state_key(*key)
        unchanged = Compare(name, "mod", "equal", seen.mod_revision)
        record = replace(seen.record, level=level)
        facts = {"namespace": key[0], "step": key[1]}
        try:
            if (await self._store.txn([unchanged], [Put(name, to_bytes(record))])).succeeded:
                say = log.warning if level == "lost" else log.info
                say("the step is %s now, was %s", level, seen.record.level, extra=facts)
        except CatalogError:
            self._view.doubt()
            raise

    async def _count(self, key: Key, seen: Seen[StepState]) -> tuple[Level, dict[str, int], bool]:
        """The level, what is missing, and whether all parts that the step is made of are known."""
        files = await self._view.files(key, seen.record.generation)
        holdings = await self._view.holdings(key)
        nodes = {name: each.record.state for name, each in self._view.nodes.items()}
        replicas = self._replicas(key[0])

        def count() -> tuple[Level, dict[str, int], bool]:
            holders = Holders(files, holdings, nodes)
            serving = [name for name, state in nodes.items() if state == SERVING] or list(nodes)
            missing = missing_copies(holders, serving=serving, replicas=replicas)
            is_known = _has_all(files, seen.record)
            # Alone, a node could meet what is possible; but a step that one failure takes is not replicated.
            enough = max(min(replicas, len(nodes)), min(replicas, 2))
            if is_known and all(len(copies) >= enough for copies in holders.copies().values()):
                return "replicated", missing, is_known
            return "lost" if holders.has_lost_file() else "complete", missing, is_known

        if len(files.files) <= INLINE_FILES:
            level, missing, is_known = count()
        else:
            level, missing, is_known = await trio.to_thread.run_sync(count)
        if level == "lost" and self._is_persisted(key):
            level = "complete"
        return level, missing, is_known


def _which(state: StepState) -> tuple[int, float]:
    return state.generation, state.completed_at


def _has_all(files: StepFiles, state: StepState) -> bool:
    counts = ((len(files.parts.get(node, ())), count) for node, count in state.parts.items())
    return len(files.files) >= state.files and all(there >= counted for there, counted in counts)
