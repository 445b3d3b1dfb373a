"""Which complete steps are to be copied to the disk; with the policy `every`, which of them are owed and not there yet.

The count lies in the RAM tier: it goes on after a crash, and begins anew with the RAM tier.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.settings_disk import DiskSettings
from tierfs.steps.names import escape_namespace
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.disk")

#: Chosen steps that are remembered: those that a daemon which starts anew may still have to copy.
_CHOSEN_KEPT = 16


@dataclass(frozen=True)
class Count:
    """How many steps completed since the last chosen one, which was counted last, and those chosen lately; a step by
    its name and generation."""

    steps: int = 0
    last: tuple[str, int] = ("", 0)
    chosen: tuple[tuple[str, int], ...] = ()


def counted(count: Count, every_steps: int, step: tuple[str, int]) -> Count:
    """The count after this step completed. Pure; the same step again is not counted again."""
    if step == count.last:
        return count
    if count.steps + 1 < every_steps:
        return Count(count.steps + 1, step, count.chosen)
    return Count(0, step, (*count.chosen, step)[-_CHOSEN_KEPT:])


class DiskPolicy:
    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry
        self._counts: dict[str, Count] = {}

    def of(self, record: StepRecord) -> DiskSettings:
        return self._registry.settings.for_namespace(record.manifest.namespace).disk

    def completed(self, record: StepRecord) -> bool:
        """The step is complete now: whether it is to be copied."""
        settings = self.of(record)
        if settings.policy != "every":
            return settings.policy == "all"
        namespace = record.manifest.namespace
        before = self._count(namespace)
        count = counted(before, settings.every_steps, _step(record))
        if count != before:
            self._keep(namespace, count)
        return _step(record) in count.chosen

    def was_chosen(self, record: StepRecord) -> bool:
        """The same of one that was complete when this daemon began."""
        settings = self.of(record)
        if settings.policy != "every":
            return settings.policy == "all"
        return _step(record) in self._count(record.manifest.namespace).chosen

    def _count(self, namespace: str) -> Count:
        if namespace not in self._counts:
            self._counts[namespace] = self._load(namespace)
        return self._counts[namespace]

    def _load(self, namespace: str) -> Count:
        path = self._path(namespace)
        with contextlib.suppress(OSError, Wrong, ValueError, RecursionError):
            fields = Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), str(path))
            chosen = fields.any("chosen")
            steps, last = fields.integer("steps"), _named(fields.any("last"))
            return Count(steps, last, tuple(_named(each) for each in chosen) if isinstance(chosen, list) else ())
        return Count()

    def _keep(self, namespace: str, count: Count) -> None:
        self._counts[namespace] = count
        value = {"steps": count.steps, "last": count.last, "chosen": count.chosen}
        try:
            write_whole(self._path(namespace), json.dumps(value).encode("ascii"))
        except OSError as error:
            log.warning("the count of steps can't be kept: %s", error, extra={"namespace": namespace, "tier": "disk"})

    def _path(self, namespace: str) -> Path:
        return self._registry.tier.meta / "%disk" / "counts" / f"{escape_namespace(namespace)}.json"


def _step(record: StepRecord) -> tuple[str, int]:
    return record.manifest.step, record.manifest.generation


def _named(value: object) -> tuple[str, int]:
    match value:
        case [str(step), int(generation)]:
            return step, generation
    raise Wrong("a step of the count is none")
