"""Which complete steps are owed to the object tier.

`every` counts the complete steps of a namespace since the last owed one. The count lies in the RAM tier: it goes on
after a crash, and begins anew with the RAM tier.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.local_state import namespace_path
from tierfs.settings_turns import Turn
from tierfs.steps import wishes
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

_KIND = "policy"
_SUFFIX = ".json"


@dataclass(frozen=True)
class Count:
    """How far `every` is: complete steps since the last owed one, when that completed, and what was counted last."""

    steps: int = 0
    owed_at: float | None = None
    last: tuple[str, int] = ("", 0)
    last_was_owed: bool = False


def counted(count: Count, turn: Turn, step: tuple[str, int], completed_at: float) -> Count:
    """The count after this step (its name and generation) completed; `last_was_owed` is the decision. Pure.

    The same step again is not counted again: after a crash a step may be told of twice.
    """
    if step == count.last:
        return count
    steps = count.steps + 1
    by_count = 0 < turn.every_steps <= steps
    by_time = turn.every_s > 0 and (count.owed_at is None or completed_at - count.owed_at >= turn.every_s)
    if by_count or by_time:
        return Count(0, completed_at, step, True)
    return Count(steps, count.owed_at, step, False)


def count_to_json(count: Count) -> dict[str, Any]:
    return {
        "steps": count.steps,
        "owed_at": count.owed_at,
        "step": count.last[0],
        "generation": count.last[1],
        "last_was_owed": count.last_was_owed,
    }


def count_from(fields: Fields) -> Count:
    """What `count_to_json` wrote. Wrong."""
    return Count(
        steps=fields.integer("steps"),
        owed_at=fields.seconds_or_none("owed_at"),
        last=(fields.text("step"), fields.integer("generation")),
        last_was_owed=fields.flag("last_was_owed"),
    )


class Policy:
    """Decides by the settings of the step's namespace."""

    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry
        self._counts: dict[str, Count] = {}

    def why_owed(self, record: StepRecord) -> str:
        """`policy` where a step that is complete now is owed, else ""."""
        manifest = record.manifest
        settings = self._registry.settings.for_namespace(manifest.namespace)
        again = manifest.persisted is not None or bool(manifest.owed)
        if settings.persist.policy == "none":
            return ""
        wished = wishes.tiers_of(record.directory)
        if wished is not None and not again:
            return "policy" if "object" in wished else ""
        if settings.persist.policy == "all" or settings.durability.commit == "object":
            return "policy"
        if settings.persist.policy == "every" and not again:
            count = counted(
                self._count(manifest.namespace),
                Turn(settings.persist.every_steps, settings.persist.every_s),
                (manifest.step, manifest.generation),
                manifest.completed_at or 0.0,
            )
            self._keep(manifest.namespace, count)
            return "policy" if count.last_was_owed else ""
        return "policy" if again else ""

    def _count(self, namespace: str) -> Count:
        known = self._counts.get(namespace)
        if known is None:
            known = self._load(namespace) or Count(owed_at=self._newest_persisted_at(namespace))
        return known

    def _newest_persisted_at(self, namespace: str) -> float | None:
        """What the object tier itself tells, where the RAM tier was lost."""
        times = [
            record.manifest.completed_at
            for record in self._registry.of_namespace(namespace)
            if record.manifest.persisted is not None and record.manifest.completed_at is not None
        ]
        return max(times, default=None)

    def _load(self, namespace: str) -> Count | None:
        path = namespace_path(self._registry.tier.meta, _KIND, namespace, _SUFFIX)
        with contextlib.suppress(OSError, Wrong, ValueError, RecursionError):
            return count_from(Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), str(path)))
        return None

    def _keep(self, namespace: str, count: Count) -> None:
        self._counts[namespace] = count
        value = count_to_json(count)
        path = namespace_path(self._registry.tier.meta, _KIND, namespace, _SUFFIX)
        try:
            write_whole(path, os.fsencode(json.dumps(value)))
        except OSError as error:
            log.warning("the count of steps can't be kept: %s", error, extra={"namespace": namespace, "tier": "object"})
