"""What the catalogue still has to be told and the tree no longer says: removals, renames, commits made alone.

Everything else that is owed to the catalogue can be read from the tree again. One file in the tier's `meta`, a JSON
object a line: an entry, or `{"done": ID}`. A line is appended before the call that made it returns, so a crash forgets
none; what a crash cut off at the end was not answered yet.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from tierfs.errors import PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.ram.books import with_room
from tierfs.steps.names import safe_relative
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.cluster")

NAME = "%publishing.jsonl"
#: When so many lines are of what is done, the file is written anew.
_STALE_LINES = 2000

Kind = Literal["step", "path", "rename", "alone"]
KINDS = ("step", "path", "rename", "alone")


@dataclass(frozen=True)
class Owed:
    """step: the step at `path`, whose directory came at revision `created`, was removed here; `generation` is the one
    that was. path: the same of another name, `modified` its last change (0: whichever). rename: `path` became `target`.
    alone: the step's `generation` was completed while the catalogue was away."""

    id: int
    kind: Kind
    path: str
    target: str = ""
    created: int = 0
    modified: int = 0
    generation: int = 0


class Journal:
    """Used from one thread. A line costs some 20 µs."""

    def __init__(self, meta: Path) -> None:
        """Reads what an earlier daemon left. OSError."""
        self._path = meta / NAME
        self._entries: dict[int, Owed] = {}
        self._stale = 0
        self._next = 1
        self._read()

    def __iter__(self) -> Iterator[Owed]:
        """In the order in which they were added."""
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def at(self, path: str, *kinds: Kind) -> list[Owed]:
        return [entry for entry in self._entries.values() if entry.path == path and entry.kind in kinds]

    def holds(self, entry: Owed) -> bool:
        return entry.id in self._entries

    def add(
        self, kind: Kind, path: str, *, target: str = "", created: int = 0, modified: int = 0, generation: int = 0
    ) -> Owed:
        """OSError (ENOSPC) with nothing noted."""
        entry = Owed(self._next, kind, path, target, created, modified, generation)
        self._append(asdict(entry))
        self._next += 1
        self._entries[entry.id] = entry
        return entry

    def done(self, entry: Owed) -> None:
        """Doesn't fail: what is told twice does no harm."""
        if self._entries.pop(entry.id, None) is None:
            return
        self._stale += 2
        with contextlib.suppress(OSError):
            if not self._entries or self._stale > _STALE_LINES:
                self._rewrite()
            else:
                self._append({"done": entry.id})

    def _append(self, value: object) -> None:
        data = json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"
        with_room(self._path, len(data), lambda: self._append_line(data))

    def _append_line(self, data: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, data) != len(data):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        finally:
            os.close(fd)

    def _rewrite(self) -> None:
        lines = [json.dumps(asdict(entry), separators=(",", ":")) + "\n" for entry in self._entries.values()]
        write_whole(self._path, "".join(lines).encode("ascii"))
        self._stale = 0

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        for line in data.splitlines():
            try:
                value = json.loads(line, parse_constant=refuse_constant)
                if isinstance(value, dict) and set(value) == {"done"}:
                    self._entries.pop(Fields(value, "a line").integer("done"), None)
                    continue
                entry = _entry(value)
            except (ValueError, RecursionError, Wrong, PathRefused) as error:
                log.warning("a line of %s can't be read, and is left out: %s", self._path, error)
                continue
            self._entries[entry.id] = entry
            self._next = max(self._next, entry.id + 1)
        self._rewrite()


def _entry(value: object) -> Owed:
    fields = Fields(value, "a line")
    kind, target = fields.text("kind"), fields.text("target")
    if kind not in KINDS:
        raise Wrong(f"the kind {kind!r} is unknown")
    entry = Owed(
        id=fields.integer("id"),
        kind=cast("Kind", kind),
        path=safe_relative(fields.text("path")),
        target=safe_relative(target) if target else "",
        created=fields.integer("created"),
        modified=fields.integer("modified"),
        generation=fields.integer("generation"),
    )
    fields.end()
    return entry
