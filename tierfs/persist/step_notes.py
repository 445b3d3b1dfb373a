"""One small JSON file a step of what this node has to do for it, or did: it survives the daemon, not the RAM tier."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from tierfs.errors import PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.local_state import all_of_kind, state_path
from tierfs.steps.names import safe_component, safe_relative
from tierfs.steps.registry import Key
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

_SUFFIX = ".json"


class StepNotes:
    """Those of one kind, below the RAM tier's `meta`."""

    def __init__(self, meta: Path, kind: str) -> None:
        self._meta = meta
        self._kind = kind

    def load(self) -> dict[Key, Fields]:
        """What there is, by step; what can't be read is passed over. Whoever reads the fields gets Wrong from them."""
        found: dict[Key, Fields] = {}
        for path in list(all_of_kind(self._meta, self._kind, _SUFFIX)):
            with contextlib.suppress(OSError, Wrong, PathRefused, ValueError, RecursionError):
                fields = Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), str(path))
                key = safe_relative(fields.text("namespace")), safe_component(fields.text("step"))
                if self._path(key) == path:
                    found[key] = fields
        return found

    def save(self, key: Key, facts: dict[str, Any]) -> None:
        """Never raises for lack of room: it is said, and the note holds as long as the daemon."""
        value = {"namespace": key[0], "step": key[1], **facts}
        try:
            write_whole(self._path(key), json.dumps(value, allow_nan=False).encode("ascii"))
        except OSError as error:
            extra = {"namespace": key[0], "step": key[1], "tier": "object"}
            log.warning("a note of a step (%s) can't be kept: %s", self._kind, error, extra=extra)

    def drop(self, key: Key) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def _path(self, key: Key) -> Path:
        return state_path(self._meta, self._kind, *key, _SUFFIX)
