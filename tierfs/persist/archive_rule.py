"""Which persisted steps of a namespace are archived: each so many-th, and each that completed so long after the last.

How far that is lies in the RAM tier. With that lost it begins after the newest step that the archive has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.local_state import namespace_path
from tierfs.settings_archive import ArchiveSettings
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

_KIND = "archive-rule"
_SUFFIX = ".json"


@dataclass(frozen=True)
class Persisted:
    """A save that the object tier holds."""

    step: str
    generation: int
    completed_at: float


@dataclass(frozen=True)
class Counted:
    """Steps that completed at `floor` or before are not looked at. `seen` (step, generation) completed since, and were
    counted. `picked_at` is when the last one that was picked completed; None where none was."""

    floor: float = 0.0
    picked_at: float | None = None
    seen: frozenset[tuple[str, int]] = frozenset()


def pick(counted: Counted, rule: ArchiveSettings, there: Iterable[Persisted]) -> tuple[Counted, list[str]]:
    """The steps that are to be archived of those that are there now, in the order of their completion. Pure."""
    picked: list[str] = []
    for save in sorted(there, key=lambda save: (save.completed_at, save.step)):
        name = (save.step, save.generation)
        if save.completed_at <= counted.floor or name in counted.seen:
            continue
        by_count = 0 < rule.every_steps <= len(counted.seen) + 1
        since_s = save.completed_at - counted.picked_at if counted.picked_at is not None else float("inf")
        if by_count or 0 < rule.every_s <= since_s:
            picked.append(save.step)
            counted = Counted(save.completed_at, save.completed_at)
        else:
            counted = replace(counted, seen=counted.seen | {name})
    return counted, picked


class Counts:
    """By namespace, below the RAM tier's `meta`."""

    def __init__(self, meta: Path) -> None:
        self._meta = meta
        self._counts: dict[str, Counted | None] = {}

    def of(self, namespace: str) -> Counted | None:
        """None where nothing is known yet."""
        if namespace not in self._counts:
            self._counts[namespace] = self._load(namespace)
        return self._counts[namespace]

    def keep(self, namespace: str, counted: Counted) -> None:
        if self._counts.get(namespace) == counted:
            return
        self._counts[namespace] = counted
        value = {"floor": counted.floor, "picked_at": counted.picked_at, "seen": sorted(counted.seen)}
        try:
            write_whole(self._path(namespace), os.fsencode(json.dumps(value)))
        except OSError as error:
            log.warning("the count of steps can't be kept: %s", error, extra={"namespace": namespace, "tier": "object"})

    def _load(self, namespace: str) -> Counted | None:
        path = self._path(namespace)
        with contextlib.suppress(OSError, Wrong, ValueError, RecursionError, TypeError):
            fields = Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), str(path))
            seen = fields.any("seen")
            if isinstance(seen, list):
                names = frozenset((str(step), int(generation)) for step, generation in seen)
                return Counted(fields.seconds("floor"), fields.seconds_or_none("picked_at"), names)
        return None

    def _path(self, namespace: str) -> Path:
        return namespace_path(self._meta, _KIND, namespace, _SUFFIX)
