"""The local-disk tier of a node, put together. It stands before the object tier, if there is one: what steps tell that
and ask of it goes through here (`tierfs.steps.object_tier.ObjectTier`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from tierfs.disk.attending import Attendance
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.index import DiskIndex
from tierfs.disk.keeping import Keeping
from tierfs.disk.source import DiskFirst
from tierfs.disk.store import DiskStore
from tierfs.errors import DiskError, TierfsError
from tierfs.hydrate.hydration import Hydration
from tierfs.persist.object_manifest import ObjectManifest
from tierfs.steps.manifest import FileEntry
from tierfs.steps.object_tier import ObjectTier
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.disk")

#: What nobody tells of is looked at so often.
TICK_S = 1.0


class DiskTier:
    """Implements `ObjectTier`. `below` is the object tier, or what stands in its place; `hydration` is whoever made
    it's to run, and made here where there is none."""

    def __init__(self, registry: StepRegistry, *, node: str, hydration: Hydration | None = None) -> None:
        path = registry.settings.disk.path
        if path is None:
            raise DiskError("no disk tier: mount with -o disk.path=DIRECTORY")
        self.registry = registry
        self.store = DiskStore(path)
        self.index = DiskIndex(registry)
        self.source = DiskFirst(self.index.readable, self._failed)
        self._runs_hydration = hydration is None
        self.hydration = hydration or Hydration(registry, self.source)
        self.hydration.tier_of = self.source.tier_of
        self.hydration.is_on_disk = self._holds_file
        self.keeping = Keeping(registry, self.store, self.index, node=node, is_stub=self.hydration.is_stub)
        self.keeping.on_dropped = self._lost
        self.index.is_stub = self.hydration.is_stub
        self.attendance = Attendance(registry, self.store, self.index, self.keeping.removed)
        self.attendance.shown = self._shown
        self.attendance.opened = self._opened
        self.attendance.unreadable = self.damaged
        self._below: ObjectTier | None = None
        self._to_owe: list[tuple[StepRecord, str]] = []
        self._manifest_below: Callable[[str, str], Awaitable[ObjectManifest]] | None = None

    def stand_before(
        self, below: ObjectTier, manifest_of: Callable[[str, str], Awaitable[ObjectManifest]] | None = None
    ) -> None:
        """What else there is. `manifest_of` gives the object tier's manifest of a step."""
        self._below = below
        self._manifest_below = manifest_of
        self.hydration.serve_objects(self.manifest_of)

    @property
    def below(self) -> ObjectTier:
        assert self._below is not None, "stand_before comes first"
        return self._below

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started once the disk was read and its steps are shown, or that takes too long."""
        async with trio.open_nursery() as nursery:
            if self._runs_hydration:
                await nursery.start(self.hydration.run)
            await nursery.start(self.attendance.run)
            await nursery.start(self.keeping.run)
            nursery.start_soon(self._owe_again)
            task_status.started()

    async def manifest_of(self, namespace: str, step: str) -> ObjectManifest:
        """What a step that nobody looked into yet is made of. DiskError, ObjectError."""
        record = self.registry.records.get((namespace, step))
        stored = self.index.readable(namespace, step)
        if stored is not None and (record is None or self.index.holds(record)):
            await trio.lowlevel.checkpoint()
            return stored.step
        if self._manifest_below is None:
            why = self.index.away or "it is not there any more"
            raise DiskError(f"{namespace}/{step} was on this node's disk, and can't be read: {why}")
        return await self._manifest_below(namespace, step)

    # --- told by steps

    def completed(self, record: StepRecord) -> None:
        self.below.completed(record)
        self.owe_if_chosen(record)

    def owe_if_chosen(self, record: StepRecord) -> None:
        """The step is complete now."""
        self.index.forget_inodes(record.key)
        if self.registry.is_shared(record) and self.index.holds(record):
            return  # it came back from the catalogue, and its bytes are on the disk
        if self.keeping.policy.completed(record) or self.index.get(record.key) is not None:
            self.keeping.owe(record)

    def asked_for(self, record: StepRecord) -> None:
        self.below.asked_for(record)

    def changed(self, record: StepRecord) -> None:
        self.below.changed(record)
        self.index.forget_inodes(record.key)
        if record.key in self.keeping.owed or self.index.get(record.key) is not None:
            self.keeping.owe(record)

    def removed(self, record: StepRecord) -> None:
        self.below.removed(record)
        self.keeping.remove(record.key)

    def moved(self, namespace: str, step: str, record: StepRecord | None) -> None:
        self.below.moved(namespace, step, record)
        known = (namespace, step) in self.keeping.owed or self.index.get((namespace, step)) is not None
        self.keeping.remove((namespace, step))
        if known and record is not None and record.is_complete:
            self.keeping.owe(record)

    # --- asked by steps

    def is_stub(self, ino: int) -> bool:
        return self.hydration.is_stub(ino)

    def on_disk(self, record: StepRecord) -> bool:
        return self.index.holds(record) or self._waits_for_disk(record)

    def _waits_for_disk(self, record: StepRecord) -> bool:
        """It can't be read before the disk is back, and then it is there: RAM need not hold what it has of it."""
        return bool(self.index.away) and self._has_stubs(record) and self.index.knows(record)

    def _holds_file(self, record: StepRecord, inner: str, entry: FileEntry) -> bool:
        return (not self.index.away or self._waits_for_disk(record)) and self.index.holds_file(record, inner, entry)

    def may_come_back(self, key: tuple[str, str]) -> bool:
        return self.index.get(key) is not None

    def is_readable(self, record: StepRecord) -> bool:
        """What RAM lacks of it is on the disk, or elsewhere."""
        if record.is_persisted or self.registry.is_shared(record):
            return True
        if not (self.index.is_open or self.index.away):
            return True  # it is just being read
        return self.index.holds(record) or not self._has_stubs(record)

    def _has_stubs(self, record: StepRecord) -> bool:
        manifest = record.manifest
        return not manifest.populated or any(self.hydration.is_stub(entry.ino) for entry in manifest.files.values())

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        """Also what is owed to the object tier, which reads it from the disk; what is owed to the disk itself only in
        need: a disk that is too slow must not stop a training."""
        if self.index.holds(record):
            return True
        if not record.is_persisted and not self.registry.is_shared(record) and self._has_stubs(record):
            return self._waits_for_disk(record)  # not to be gone for the little that RAM has of it
        return self.below.may_leave_ram(record, in_need=in_need) and (in_need or not self.keeping.is_awaited(record))

    def ram_bytes(self, record: StepRecord) -> int:
        return self.hydration.ram_bytes(record)

    def evict(self, record: StepRecord) -> bool:
        return self.hydration.evict(record)

    async def populate(self, record: StepRecord) -> None:
        await self.hydration.populate(record)

    async def hydrate(self, ino: int) -> None:
        await self.hydration.hydrate(ino)

    async def wait_persisted(self, record: StepRecord) -> None:
        await self.below.wait_persisted(record)

    async def wait_on_disk(self, record: StepRecord) -> None:
        key, generation = record.key, record.manifest.generation
        while not self.index.holds(record):
            if (
                self.registry.records.get(key) is not record
                or not record.is_complete
                or record.manifest.generation != generation
                or key not in self.keeping.owed
            ):
                return
            await self.keeping.wait_for_news(TICK_S)

    def describe(self, record: StepRecord) -> dict[str, Any]:
        described = self.below.describe(record)
        holds = self.index.holds(record)
        if self.index.holds_whole(record) and described["level"] == "ram":
            described["level"] = "disk"
        stubs = [entry for entry in record.manifest.files.values() if self.hydration.is_stub(entry.ino)]
        described |= {"ram_bytes": self.hydration.ram_bytes(record), "stubs": len(stubs)}
        stored = self.index.get(record.key)
        if not record.manifest.populated and stored is not None and holds:
            described |= {
                "files": len(stored.step.files), "bytes": stored.size_bytes, "ram_bytes": 0,
                "stubs": len(stored.step.files),
            }  # fmt: skip
        return {**described, "disk": self._on_disk(record, stored if holds else None)}

    def _on_disk(self, record: StepRecord, stored: DiskStep | None) -> dict[str, Any]:
        refusal = self.keeping.refused.get(record.key)
        error = refusal.message if refusal is not None else ""
        if stored is not None:
            state, done, total = "stored", stored.size_bytes, stored.size_bytes
        elif (progress := self.keeping.progress(record.key)) is not None:
            state, (done, total) = "copying", progress
        elif record.key in self.keeping.owed and record.is_complete:
            error = error or self.index.away or self.keeping.trouble
            state, done, total = "waiting" if error else "owed", 0, record.manifest.bytes
        else:
            state, done, total = "none", 0, 0
        return {
            "state": state,
            "bytes_done": done,
            "bytes": total,
            "at": stored.stored_at if stored is not None else None,
            "error": error,
        }

    # --- what happens on the disk

    def _failed(self, stored: DiskStep, inner: str, why: str) -> None:
        if why.startswith("can't"):
            self.attendance.suspect(stored, inner, why)  # the file is to blame only where the disk is there
            return
        self.index.failed(stored, inner, why, at_once=False)
        self._owe_anew(stored)

    def damaged(self, stored: DiskStep, inner: str, why: str) -> None:
        """Reading it all found so."""
        self.index.failed(stored, inner, why, at_once=True)
        self._owe_anew(stored)

    def _owe_anew(self, stored: DiskStep) -> None:
        """What was lost on the disk goes there again where RAM has it all."""
        record = self.registry.records.get(stored.key)
        is_lost = record is not None and record.is_complete and self.index.get(stored.key) is None
        if is_lost and record is not None and (self.registry.is_shared(record) or not self._has_stubs(record)):
            self.keeping.owe(record)
        self.keeping.look_again()

    def _shown(self, record: StepRecord, stored: DiskStep) -> None:
        """The step came back from the disk. What it was owed then it may be owed still."""
        if stored.owed:
            self._to_owe.append((record, stored.owed))

    def _opened(self) -> None:
        """What is complete, and was not copied before an earlier daemon ended."""
        self.keeping.disk_was_read()
        for record in self.registry.records.values():
            is_here = record.manifest.populated or self.registry.is_shared(record)
            if record.is_complete and is_here and not self.index.holds(record):
                is_known = self.index.get(record.key) is not None
                if is_known or (not record.is_persisted and self.keeping.policy.was_chosen(record)):
                    self.keeping.owe(record)
        self.keeping.look_again()

    async def _owe_again(self) -> None:
        """Steps that came back from the disk go on to the object tier, unless they are found to be there."""
        for record, owed in self._to_owe:
            try:
                await self.hydration.populate(record)
            except (TierfsError, OSError) as error:
                log.warning("a step of the disk can't be shown: %s", error, extra=self.registry.extra(record))
                continue
            is_known = self.registry.records.get(record.key) is record and record.is_complete
            if is_known and self.registry.settings.object and not record.is_persisted:
                record.manifest.owed = record.manifest.owed or owed
                self.registry.save_or_later(record)
                self.below.changed(record)
        self._to_owe.clear()

    def _lost(self, record: StepRecord) -> None:
        """The disk dropped the step, and RAM lacks bytes of it: it is gone, or other nodes have it."""
        if self.registry.is_shared(record) and not self.registry.cluster.retire(record):
            return
        self.registry.lines.write(
            record.manifest.namespace, "removed: newer steps need its room on the disk", step=record.manifest.number
        )
        self.registry.remove(record)

    # --- told to people

    def status(self) -> dict[str, Any]:
        settings, owed = self.registry.settings.disk, self._owed_records()
        return {
            "path": str(self.store.path),
            "state": "away" if self.index.away else "opening" if not self.index.is_open else "ok",
            "size_bytes": settings.size or None,
            "used_bytes": self.index.used_bytes,
            "steps": len(self.index),
            "steps_owed": len(owed),
            "bytes_owed": sum(record.manifest.bytes for record in owed),
            "bytes_written": self.keeping.written_bytes,
            "bytes_read": self.source.read_bytes,
            "problem": self.index.away or self.keeping.trouble,
        }

    def _owed_records(self) -> list[StepRecord]:
        found = [self.registry.records.get(key) for key in self.keeping.owed]
        return [record for record in found if record is not None and record.is_complete]

    def problems(self) -> list[dict[str, str]]:
        found = []
        if self.index.away:
            found.append(_problem("error", f"the disk tier can't be used: {self.index.away}"))
        elif self.keeping.trouble:
            found.append(_problem("error", f"the disk tier fails, and is tried again: {self.keeping.trouble}"))
        if self.keeping.untidy and not self.index.away:
            found.append(_problem("warning", self.keeping.untidy, str(self.store.path)))
        for directory, (why, _) in self.index.damaged.items():
            if directory.is_relative_to(self.store.path):
                found.append(_problem("warning", f"a step on the disk is damaged and not shown: {why}", str(directory)))
        strange = [each for each in self.index if each.key not in self.registry.records and self.keeping.is_spare(each)]
        strange = [each for each in strange if not self.keeping.is_gone(each)]
        if strange:
            message = (
                f"{len(strange)} steps on the disk are of another catalogue than this one, and not shown, such as "
                f"{strange[0].directory}; they go when newer ones need the room"
            )
            found.append(_problem("warning", message))
        for key, refusal in self.keeping.refused.items():
            if key in self.keeping.owed:
                found.append(_problem("warning", f"not on the disk: {refusal.message}", "/".join(key)))
        return found


def _problem(severity: str, message: str, path: str = "") -> dict[str, str]:
    return {"severity": severity, "message": message, "path": path}
