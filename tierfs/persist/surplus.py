"""Retention in the object tier: steps that newer ones made superfluous go from it, and so do parts of old steps.

Never a step that the archive is still to get, or whose only bytes a program is just reading.
"""

from __future__ import annotations

from collections.abc import Callable

from tierfs.persist.archiver import Archiver
from tierfs.persist.deletions import Deletions
from tierfs.persist.index import ObjectIndex
from tierfs.persist.object_retention import StoredFacts, choose_deletions, choose_old_parts
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry


class Surplus:
    """`is_stub` is of inodes, `is_busy` of steps that this node is sending, or owes."""

    def __init__(
        self,
        registry: StepRegistry,
        index: ObjectIndex,
        deletions: Deletions,
        archiver: Archiver | None,
        *,
        is_stub: Callable[[int], bool],
        is_busy: Callable[[Key], bool],
    ) -> None:
        self.registry = registry
        self.index = index
        self.deletions = deletions
        self.archiver = archiver
        self._is_stub = is_stub
        self._is_busy = is_busy

    def delete(self, namespace: str) -> None:
        """Let retention delete what is to go now."""
        records = {
            record.key[1]: record
            for record in self.registry.of_namespace(namespace)
            if record.manifest.persisted is not None and not self.deletions.is_owed(record.key)
        }
        facts = [
            StoredFacts(
                step=step,
                number=record.manifest.number,
                completed_at=record.manifest.completed_at or 0.0,
                may_go=record.is_persisted and not record.manifest.pinned and not self._is_used_there(record),
            )
            for step, record in records.items()
        ]
        policy = self.registry.settings.for_namespace(namespace).retention
        for fact in choose_deletions(facts, policy):
            record = records[fact.step]
            if not self.index.leads(record):
                continue
            self.deletions.owe(record.key, "retention", marker=record.manifest.marker)
            self.lose(record)
        newest = max(records.values(), key=lambda record: record.manifest.completed_at or 0.0, default=None)
        if newest is not None and self.index.leads(newest):
            found = [self._part(key) for key in self.index.parts if key[0] == namespace]
            for part in choose_old_parts([part for part in found if part is not None], facts, policy):
                self.deletions.owe((namespace, part.step), "retention")

    def lose(self, record: StepRecord) -> None:
        """The step's copy in the object tier is about to go: what is not whole in RAM goes from the tree."""
        cluster = self.registry.cluster
        record.manifest.persisted = None
        if self.registry.is_shared(record):  # other nodes may have what is not here
            is_gone = not cluster.is_readable(record) and cluster.retire(record)
        else:
            is_gone = self._has_stubs(record) and not self.registry.object_tier.on_disk(record)
        if is_gone:
            self.registry.remove(record)
        else:
            self.registry.save_or_later(record)

    def _part(self, key: Key) -> StoredFacts | None:
        """None for one that a whole step is taking the place of, or that is going already."""
        record, where = self.registry.records.get(key), self.registry.names.locate("/".join(key))
        if (
            where is None
            or self.deletions.is_owed(key)
            or (record is not None and record.manifest.persisted is not None)
        ):
            return None
        may_go = not self._is_busy(key) and not (record is not None and record.manifest.pinned)
        return StoredFacts(key[1], where.number, self.index.parts[key], may_go)

    def _is_used_there(self, record: StepRecord) -> bool:
        """The archive is still to get it, or a program has a file open whose bytes are only in the object tier."""
        if self.archiver is not None and self.archiver.holds(record):
            return True
        return self._has_stubs(record) and self.registry.handles_in(record) > 0

    def _has_stubs(self, record: StepRecord) -> bool:
        manifest = record.manifest
        return not manifest.populated or any(self._is_stub(entry.ino) for entry in manifest.files.values())
