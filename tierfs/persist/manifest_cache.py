"""The committed manifests of the object tier, kept in the RAM tier: hydration needs their chunk checksums at once.

A copy is as good as the original while the ETag is the same. What can't be kept (no room) or read is fetched again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from tierfs.errors import ObjectCorrupt
from tierfs.persist.local_state import state_path
from tierfs.persist.object_manifest import MAX_BYTES, ObjectManifest, read_manifest
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

Key = tuple[str, str]
_KIND = "manifests"
_SUFFIX = ".json"
#: Read ones kept in memory: a restore asks for the same one for each of its files.
KEPT = 4


class ManifestCache:
    """Below `meta`. Blocking, but small; used from one thread."""

    def __init__(self, meta: Path) -> None:
        self._meta = meta
        self._recent: dict[Key, tuple[str, ObjectManifest]] = {}

    def save(self, manifest: ObjectManifest, etag: str) -> None:
        """Keep a copy. Never raises for lack of room."""
        key = (manifest.namespace, manifest.step)
        self._remember(key, etag, manifest)
        head = json.dumps({"etag": etag}).encode("ascii")
        try:
            write_whole(self._path(key), head + b"\n" + manifest.to_bytes())
        except OSError as error:
            log.debug("a manifest can't be cached: %s", error, extra={"namespace": key[0], "step": key[1]})
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def load(self, key: Key, etag: str | None = None) -> tuple[str, ObjectManifest] | None:
        """The kept copy and its ETag; None where there is none, or one of another ETag than the given."""
        found = self._recent.get(key) or self._read(key)
        if found is None or (etag is not None and found[0] != etag):
            return None
        self._remember(key, *found)
        return found

    def drop(self, key: Key) -> None:
        self._recent.pop(key, None)
        path = self._path(key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def _read(self, key: Key) -> tuple[str, ObjectManifest] | None:
        try:
            with open(self._path(key), "rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_BYTES:
                    return None
                head, _, data = file.read().partition(b"\n")
            etag = json.loads(head)["etag"]
            if not isinstance(etag, str):
                return None
            return etag, read_manifest(data, *key)
        except (OSError, ValueError, KeyError, TypeError, ObjectCorrupt):
            return None

    def _remember(self, key: Key, etag: str, manifest: ObjectManifest) -> None:
        self._recent.pop(key, None)
        self._recent[key] = (etag, manifest)
        while len(self._recent) > KEPT:
            self._recent.pop(next(iter(self._recent)))

    def _path(self, key: Key) -> Path:
        return state_path(self._meta, _KIND, *key, _SUFFIX)
