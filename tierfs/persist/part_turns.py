"""Which files of a complete step go to the object tier though the whole step's turn has not come (`persist.files`).

Each pattern has a count of its own, as the step's policy has (`tierfs.persist.policy`). A step that goes whole takes
all files along, and each count begins anew with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.local_state import namespace_path
from tierfs.persist.policy import Count, count_from, count_to_json, counted
from tierfs.settings_turns import parse_turn
from tierfs.steps import wishes
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

_KIND = "part-turns"
_SUFFIX = ".json"


class PartTurns:
    """Decides by the settings of the step's namespace."""

    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry
        self._counts: dict[str, dict[str, Count]] = {}

    def patterns(self, namespace: str) -> frozenset[str]:
        """Those by which parts of its steps may go at all."""
        persist = self._registry.settings.for_namespace(namespace).persist
        return frozenset(persist.files) if persist.policy != "none" else frozenset()

    def due(self, record: StepRecord, *, is_whole: bool) -> list[str]:
        """The patterns whose turn it is with this step, which is complete now; none where it goes whole."""
        manifest = record.manifest
        settings = self._registry.settings.for_namespace(manifest.namespace).persist
        wished = wishes.tiers_of(record.directory)
        if not settings.files or settings.policy == "none" or (wished is not None and not is_whole):
            return []
        known = self._known(manifest.namespace)
        step, at = (manifest.step, manifest.generation), manifest.completed_at or 0.0
        counts = {
            pattern: Count(0, at, step, True)
            if is_whole
            else counted(known.get(pattern, Count()), parse_turn(text), step, at)
            for pattern, text in settings.files.items()
        }
        self._keep(manifest.namespace, counts)
        return [] if is_whole else [pattern for pattern, count in counts.items() if count.last_was_owed]

    def _known(self, namespace: str) -> dict[str, Count]:
        if namespace not in self._counts:
            self._counts[namespace] = self._load(namespace)
        return self._counts[namespace]

    def _load(self, namespace: str) -> dict[str, Count]:
        path = namespace_path(self._registry.tier.meta, _KIND, namespace, _SUFFIX)
        with contextlib.suppress(OSError, Wrong, ValueError, RecursionError):
            value = json.loads(path.read_bytes(), parse_constant=refuse_constant)
            patterns = Fields(value, str(path)).mapping("patterns")
            return {pattern: count_from(Fields(each, str(path))) for pattern, each in patterns.items()}
        return {}

    def _keep(self, namespace: str, counts: dict[str, Count]) -> None:
        self._counts[namespace] = counts
        value = {"patterns": {pattern: count_to_json(count) for pattern, count in counts.items()}}
        path = namespace_path(self._registry.tier.meta, _KIND, namespace, _SUFFIX)
        try:
            write_whole(path, os.fsencode(json.dumps(value)))
        except OSError as error:
            log.warning("the count of steps can't be kept: %s", error, extra={"namespace": namespace, "tier": "object"})


def is_meant(inner: str, patterns: Iterable[str]) -> bool:
    """The file with this path inside a step is one of a part's."""
    return any(fnmatchcase(inner, pattern) for pattern in patterns)
