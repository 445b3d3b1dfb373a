"""Room for other nodes' files: what is free, less what saves need at once and what is promised already.

A replica never takes the room of this node's own saves: before it is fetched its room is asked for, old steps that
retention lets go make way for it, and nothing else does. Where that is not enough the replica has to wait.
"""

from __future__ import annotations

from collections.abc import Hashable

import trio

from tierfs.errors import NoRoom
from tierfs.hydrate.room import FORGOTTEN_WITHIN_S, FREED_WITHIN_S, MARGIN_BYTES, MARGIN_SHARE
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_size

_LOOK_AGAIN_S = 0.005


class ReplicaRoom:
    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry
        self._tier = registry.tier
        self._promised: dict[Hashable, int] = {}

    @property
    def free_bytes(self) -> int:
        """May be below 0."""
        usage = self._tier.usage()
        margin = min(MARGIN_BYTES, usage.size_bytes // MARGIN_SHARE)
        return usage.free_bytes - margin - self.promised_bytes

    @property
    def promised_bytes(self) -> int:
        """Not taken yet, but good as taken."""
        return sum(self._promised.values())

    def promised_to(self, owner: Hashable) -> int:
        return self._promised.get(owner, 0)

    async def promise(self, owner: Hashable, needed_bytes: int, *, for_step: Key, may_evict: bool = True) -> None:
        """`owner` needs so many bytes from now on, in all. NoRoom: what it had promised before stays so.

        An old step's replica shall not evict another old step: it takes free room only (`may_evict` is False).
        """
        more = needed_bytes - self._promised.get(owner, 0)
        if more > 0 and self.free_bytes < more:
            await self._make_room(more, for_step, may_evict=may_evict)
            # What was promised to others meanwhile counts too; to this owner nothing was.
            free = self.free_bytes
            if free < more:
                raise NoRoom(
                    f"a replica of {'/'.join(for_step)} needs {format_size(more)} more, and the RAM tier has "
                    f"{format_size(max(0, free))} for it; keep fewer steps, or mount with a larger size",
                    needed_bytes=more,
                    free_bytes=max(0, free),
                )
        self._promised[owner] = needed_bytes

    async def give(self, owner: Hashable, fd: int, start: int, end: int) -> None:
        """Memory for a range of the owner's file. NoRoom where it was promised and is gone all the same."""
        try:
            await self._tier.give_room(fd, start, end)
        except OSError as error:
            free = max(0, self._tier.usage().free_bytes)
            raise NoRoom(
                f"{format_size(end - start)} for a replica can't be had: {error.strerror}",
                needed_bytes=end - start,
                free_bytes=free,
            ) from error
        if owner in self._promised:
            self._promised[owner] = max(0, self._promised[owner] - (end - start))

    def release(self, owner: Hashable) -> None:
        self._promised.pop(owner, None)

    async def _make_room(self, more: int, for_step: Key, *, may_evict: bool) -> None:
        def lacking() -> int:
            return more - self.free_bytes

        sparing = self._registry.records.get(for_step)
        if not may_evict or not self._registry.make_room(lacking(), sparing=sparing):
            return
        began = trio.current_time()
        while lacking() > 0:
            waited_s = trio.current_time() - began
            if waited_s > (FREED_WITHIN_S if self._registry.is_freeing else FORGOTTEN_WITHIN_S):
                return
            await trio.sleep(_LOOK_AGAIN_S)
