"""The object tier of a node, put together: what steps tell it and ask of it (`tierfs.steps.object_tier.ObjectTier`)."""

from __future__ import annotations

from typing import Any

import trio

from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import ObjectSource
from tierfs.objects.client import ObjectClient
from tierfs.persist.archiver import Archiver
from tierfs.persist.deletions import Deletions
from tierfs.persist.index import ObjectIndex
from tierfs.persist.persister import Persister
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry


class ObjectSteps:
    """Implements `ObjectTier`. `run` is to be started before requests are served, and cancelled last.

    `hydration` is of a node that also has other sources of bytes than the object tier (`source`), and whoever made it
    runs it; without it there are only the object tier's stubs.
    """

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        *,
        node: str,
        hydration: Hydration | None = None,
        archive: ObjectClient | None = None,
    ) -> None:
        self.client = client
        self.registry = registry
        self.deletions = Deletions(registry, client)
        self.index = ObjectIndex(registry, client, self.deletions)
        self.source = ObjectSource(client, self.index.manifest)
        self._runs_hydration = hydration is None
        self.hydration = hydration or Hydration(registry, self.source)
        self.hydration.serve_objects(self.index.manifest, self.index.kept)
        self.archiver = Archiver(registry, client, archive, self.index, self.deletions) if archive is not None else None
        self.persister = Persister(
            registry,
            client,
            self.index,
            self.deletions,
            node=node,
            hydrate=self.hydration.hydrate,
            is_stub=self.hydration.is_stub,
            archiver=self.archiver,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The background work, until cancelled. Started once the tier was listed, or that takes too long."""
        async with trio.open_nursery() as nursery:
            if self._runs_hydration:
                await nursery.start(self.hydration.run)
            await nursery.start(self.index.run)
            await nursery.start(self.persister.run)
            if self.archiver is not None:
                await nursery.start(self.archiver.run)
            task_status.started()

    # --- told by steps

    def completed(self, record: StepRecord) -> None:
        self.persister.completed(record)

    def asked_for(self, record: StepRecord) -> None:
        self.persister.owe(record, "demand")

    def changed(self, record: StepRecord) -> None:
        self.persister.changed(record)

    def removed(self, record: StepRecord) -> None:
        self.persister.removed(record)

    def moved(self, namespace: str, step: str, record: StepRecord | None) -> None:
        self.persister.moved(namespace, step, record)

    # --- asked by steps

    def is_stub(self, ino: int) -> bool:
        return self.hydration.is_stub(ino)

    def on_disk(self, record: StepRecord) -> bool:
        return False

    def may_come_back(self, key: tuple[str, str]) -> bool:
        return False

    def is_readable(self, record: StepRecord) -> bool:
        return True

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        return not record.manifest.owed and (in_need or not self.persister.parts.owes(record))

    def ram_bytes(self, record: StepRecord) -> int:
        return self.hydration.ram_bytes(record)

    def evict(self, record: StepRecord) -> bool:
        return self.hydration.evict(record)

    async def populate(self, record: StepRecord) -> None:
        await self.hydration.populate(record)

    async def hydrate(self, ino: int) -> None:
        await self.hydration.hydrate(ino)

    async def wait_persisted(self, record: StepRecord) -> None:
        await self.persister.wait_persisted(record)

    async def wait_on_disk(self, record: StepRecord) -> None:
        pass

    def describe(self, record: StepRecord) -> dict[str, Any]:
        progress = self.persister.progress(record)
        persisted = record.manifest.persisted
        level = "object" if record.is_persisted else "ram"
        state = progress.state if progress is not None else "persisted" if record.is_persisted else "none"
        return {
            "level": level,
            "object": {
                "state": state,
                "bytes_sent": progress.bytes_sent if progress is not None else 0,
                "bytes": progress.bytes_total if progress is not None else (persisted.bytes if persisted else 0),
                "at": persisted.at if persisted is not None else None,
                "error": progress.error if progress is not None else "",
            },
            "part": self.persister.parts.describe(record),
            "archive": self.archiver.describe(record.key) if self.archiver is not None else None,
            "ram_bytes": self.hydration.ram_bytes(record),
            "stubs": self._stubs(record),
        }

    def _stubs(self, record: StepRecord) -> int:
        manifest = record.manifest
        if not manifest.populated and manifest.persisted is not None:
            return manifest.persisted.files  # none has a name here before somebody looks into the step
        return sum(self.hydration.is_stub(entry.ino) for entry in manifest.files.values())

    def problems(self) -> list[dict[str, str]]:
        """What is wrong now, for `status`."""
        return [*self.persister.problems(), *self.index.problems()]
