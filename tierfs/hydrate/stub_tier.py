"""Stubs without an object tier: the other nodes of a cluster have their bytes."""

from __future__ import annotations

from tierfs.hydrate.hydration import Hydration
from tierfs.steps.object_tier import NoObjectTier
from tierfs.steps.record import StepRecord


class StubTier(NoObjectTier):
    """What steps ask of the object tier, where there is none and stubs all the same."""

    def __init__(self, hydration: Hydration) -> None:
        self._hydration = hydration

    def is_stub(self, ino: int) -> bool:
        return self._hydration.is_stub(ino)

    def ram_bytes(self, record: StepRecord) -> int:
        return self._hydration.ram_bytes(record)

    def evict(self, record: StepRecord) -> bool:
        return self._hydration.evict(record)

    async def populate(self, record: StepRecord) -> None:
        await self._hydration.populate(record)

    async def hydrate(self, ino: int) -> None:
        await self._hydration.hydrate(ino)
