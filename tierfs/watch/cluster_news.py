"""Events of steps among several nodes: copied, too few copies, lost; and which node tells of what all of them see."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from tierfs.catalog.records import Level, StepState
from tierfs.cluster.view import Change
from tierfs.steps.news import Event, reached
from tierfs.steps.registry import Key

if TYPE_CHECKING:
    from tierfs.cluster.tier import ClusterTier

#: Steps that no news comes of are looked at so often, seconds: of copies that are not made nobody tells.
LOOK_EVERY_S = 5.0
_AT_ONCE = 64


class ClusterNews:
    """Tells the registry's `News` what the catalogue says of steps, and which events this node is the one to pass on.

    Every node sees each change. The one that completed the step tells of it; where that is gone, the first by name
    that wrote a part of it. Views differ for a moment, so an event may come from two nodes, or from none that died.
    """

    def __init__(self, tier: ClusterTier) -> None:
        self._tier = tier
        self._news = tier.registry.news
        self._levels: dict[Key, tuple[int, float, Level]] = {}
        self._is_read = False
        self._told_missing: set[Key] = set()
        tier.view.listen(self._seen)

    def is_told_here(self, event: Event) -> bool:
        """Whether this node passes the event on. What only this node can know (a commit, a drain) it always does."""
        if event.kind == "drain" or (event.kind == "level" and event.facts["level"] == "ram"):
            return True
        nodes = self._tier.view.nodes
        if not self._tier.view.connected or self._tier.node not in nodes:
            return True  # nobody else can be relied on to
        seen = self._tier.view.states.get((event.namespace, event.step))
        if event.kind == "walk-back" or seen is None:
            return self._tier.node == min(nodes)
        state = seen.record
        teller = state.node if state.node in nodes else min(nodes.keys() & state.parts.keys(), default=min(nodes))
        return self._tier.node == teller

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled: looks for steps that should have been copied by now."""
        task_status.started()
        while True:
            await trio.sleep(LOOK_EVERY_S)
            for at, key in enumerate(list(self._levels)):
                if at % _AT_ONCE == _AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                self._look_for_missing(key)

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            self._is_read = True
        elif change.kind == "state" and change.step is not None:
            key = change.step
            if change.new is None:
                self._levels.pop(key, None)
                self._told_missing.discard(key)
            else:
                self._changed(key, change.new.record)

    def _changed(self, key: Key, state: StepState) -> None:
        before = self._levels.get(key)
        self._levels[key] = state.generation, state.completed_at, state.level
        if before is not None and before[:2] != self._levels[key][:2]:
            self._told_missing.discard(key)
            before = None
        if before is not None and before[2] == state.level:
            return
        if before is None and not self._is_read:
            return  # it was so before this node looked
        if state.level == "replicated":
            self._told_missing.discard(key)
            seconds = max(0.0, time.time() - state.completed_at) if before is None or before[2] == "complete" else None
            self._news.tell(
                reached(
                    *key, "replica", generation=state.generation, size_bytes=state.bytes, files=state.files,
                    seconds=seconds,
                )
            )  # fmt: skip
        elif state.level == "lost":
            message = f"{'/'.join(key)} is lost: a file of it has no copy left"
            self._news.tell(Event("lost", message, *key, {"generation": state.generation}))
        elif before is not None:
            self._tell_missing(key, "a node that held a copy is gone")

    def _look_for_missing(self, key: Key) -> None:
        known = self._levels.get(key)
        if known is None or known[2] != "complete" or key in self._told_missing:
            return
        settings = self._tier.settings.for_namespace(key[0])
        age_s = time.time() - known[1]
        if settings.replication.replicas > 1 and age_s >= settings.durability.replica_timeout_s:
            self._tell_missing(key, f"they were not made within {age_s:.0f} s")

    def _tell_missing(self, key: Key, why: str) -> None:
        if key in self._told_missing:
            return
        self._told_missing.add(key)
        wanted = self._tier.settings.for_namespace(key[0]).replication.replicas
        if wanted < 2:
            return
        message = f"{'/'.join(key)} has fewer than {wanted} copies: {why}"
        self._news.tell(Event("under-replicated", message, *key, {"wanted": wanted, "reason": why}))
