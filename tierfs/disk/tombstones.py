"""Steps that were removed here while the disk may still have them: they are not to come back from it.

A note for each lies in the RAM tier, from before the step is gone until its copy on the disk is. After RAM was lost
there are none, and everything on the disk is shown.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from tierfs.steps.names import escape_namespace, safe_component
from tierfs.steps.registry import Key
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.disk")


class Tombstones:
    """Below `meta`. Blocking, but small; used from one thread."""

    def __init__(self, meta: Path) -> None:
        self._top = meta / "%disk" / "removed"

    def put(self, key: Key) -> None:
        """Never raises for lack of room."""
        try:
            write_whole(self._path(key), b"")
        except OSError as error:
            log.warning("it may come back from the disk after a crash: %s", error, extra=_extra(key))

    def __contains__(self, key: Key) -> bool:
        return os.path.lexists(self._path(key))

    def clear(self, key: Key) -> None:
        """Its copy is gone from the disk, or the name is another step's now."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()

    def _path(self, key: Key) -> Path:
        return self._top / escape_namespace(key[0]) / safe_component(key[1])


def _extra(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "step": key[1], "tier": "disk"}
