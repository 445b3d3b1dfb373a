"""What of a step's upload survives the daemon: one append-only file a step, one JSON line a fact.

It lies in the same RAM tier as the files that it tells of, so write(2) is all the durability it needs. A line that a
full tier cut short is passed over, as is what can't be written: then a crash costs that part's bytes again, no more.
Facts are of one inode as it was; those of a file that changed since are worth nothing, and its upload is abandoned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierfs.checksum import FileChecksum
from tierfs.errors import PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.objects.client import SentFile
from tierfs.objects.store import SentPart
from tierfs.persist.local_state import all_of_kind, state_path
from tierfs.steps.manifest import FileEntry
from tierfs.steps.names import safe_component, safe_relative

log = logging.getLogger("tierfs.persist")

_KIND = "journal"
_SUFFIX = ".jsonl"
#: The journal of a multi-TiB step has some ten MB; a larger file is not one of ours.
_MAX_BYTES = 1 << 30

Identity = tuple[int, int, int]


def identity_of(entry: FileEntry) -> Identity:
    return entry.ino, entry.size_bytes, entry.mtime_ns


@dataclass
class FileJournal:
    """The `PartJournal` of one file. `done` is what the store answered to all of it."""

    inner: str
    identity: Identity
    _lines: StepJournal
    upload_id: str = ""
    parts: dict[int, SentPart] = field(default_factory=dict)
    chunks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    done: SentFile | None = None

    def started(self, upload_id: str) -> None:
        self.upload_id = upload_id
        self._write(upload=upload_id)

    def sent(self, part: SentPart, chunks: tuple[int, ...]) -> None:
        self.parts[part.number] = part
        self.chunks[part.number] = chunks
        self._write(part=[part.number, part.size_bytes, part.etag, part.crc64nvme], chunks=list(chunks))

    def forget(self) -> None:
        self._clear()
        self._write(forget=True)

    def finished(self, sent: SentFile) -> None:
        """All of the file is an object now."""
        self._clear()
        self.done = sent
        self._write(etag=sent.etag, checksum=sent.checksum.full, chunks=list(sent.checksum.chunks))

    def _clear(self) -> None:
        self.upload_id = ""
        self.parts.clear()
        self.chunks.clear()
        self.done = None

    def _write(self, **facts: Any) -> None:
        self._lines.append({"file": self.inner, "of": list(self.identity), **facts})

    def take(self, fields: Fields) -> None:
        """One fact of the file, as `_write` wrote it. Raises Wrong."""
        value = fields.mapping("facts")
        facts = Fields(value, "a line")
        if "upload" in value:
            self._clear()
            self.upload_id = facts.text("upload")
        elif "forget" in value:
            self._clear()
        elif "part" in value:
            number, size, etag, part_sum = _part(facts.any("part"))
            self.parts[number] = SentPart(number, size, etag, part_sum)
            self.chunks[number] = _integers(facts.any("chunks"))
        else:
            etag = facts.text("etag")
            summed = FileChecksum(self.identity[1], facts.integer("checksum"), _integers(facts.any("chunks")))
            self._clear()
            self.done = SentFile(etag, summed)


class StepJournal:
    """The journal of one step. Used from one thread; closed with `close` or `drop`."""

    def __init__(self, path: Path, namespace: str, step: str) -> None:
        self.namespace = namespace
        self.step = step
        self._path = path
        self._fd = -1
        self._is_torn = False
        self._is_told = False
        self._files: dict[str, FileJournal] = {}
        #: Uploads of files that changed since: (path inside the step, upload id).
        self.abandoned: list[tuple[str, str]] = []

    @classmethod
    def open(cls, meta: Path, namespace: str, step: str) -> StepJournal:
        """The journal as a daemon before left it, or an empty one. Never raises for what is in the file."""
        path = state_path(meta, _KIND, namespace, step, _SUFFIX)
        journal = cls(path, namespace, step)
        with contextlib.suppress(OSError):
            journal._load()
        return journal

    def of_file(self, inner: str, entry: FileEntry) -> FileJournal:
        """What is known of the file as it is now; what is known of it as it was is abandoned."""
        found = self._files.get(inner)
        if found is None or found.identity != identity_of(entry):
            if found is not None and found.upload_id:
                self.abandoned.append((inner, found.upload_id))
            found = self._files[inner] = FileJournal(inner, identity_of(entry), self)
        return found

    def files(self) -> Iterator[FileJournal]:
        yield from self._files.values()

    def uploads(self) -> list[tuple[str, str]]:
        """(path inside the step, upload id) of those that are neither finished nor given up."""
        going = [(file.inner, file.upload_id) for file in self._files.values() if file.upload_id]
        return going + self.abandoned

    def abandon(self, inner: str) -> None:
        """The file is no part of the step any more."""
        found = self._files.pop(inner, None)
        if found is not None and found.upload_id:
            self.abandoned.append((inner, found.upload_id))

    def aborted(self, inner: str, upload_id: str) -> None:
        """The store was told to forget an abandoned upload."""
        self.abandoned = [found for found in self.abandoned if found != (inner, upload_id)]

    def drop(self) -> None:
        """Nothing in it is of use any more."""
        self.close()
        self._files.clear()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, facts: dict[str, Any]) -> None:
        """Write one line, as far as there is room."""
        line = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        try:
            if self._fd < 0:
                self._open()
            data = b"\n" + line if self._is_torn else line
            self._is_torn = True
            if os.write(self._fd, data) == len(data):
                self._is_torn = False
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                log.warning(
                    "the journal of an upload can't be written, so after a crash more is sent again: %s",
                    error,
                    extra={"namespace": self.namespace, "step": self.step, "tier": "object"},
                )

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path, flags, 0o600)
        except FileNotFoundError:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, flags, 0o600)
        if os.fstat(self._fd).st_size == 0:
            head = {"namespace": self.namespace, "step": self.step}
            os.write(self._fd, json.dumps(head).encode("ascii") + b"\n")
        else:
            self._is_torn = True  # maybe: an empty line costs nothing

    def _load(self) -> None:
        for line in _lines(self._path)[1:]:
            with contextlib.suppress(Wrong, PathRefused, ValueError, RecursionError):
                value = json.loads(line, parse_constant=refuse_constant)
                if not isinstance(value, dict):
                    continue
                fields = Fields(
                    {"file": value.pop("file", None), "of": value.pop("of", None), "facts": value}, "a line"
                )
                inner = safe_relative(fields.text("file"))
                ino, size, mtime_ns = _three(fields.any("of"))
                entry = FileEntry(size, mtime_ns, ino)
                self.of_file(inner, entry).take(fields)


def all_journals(meta: Path) -> Iterator[StepJournal]:
    """Of every step that has one."""
    for path in list(all_of_kind(meta, _KIND, _SUFFIX)):
        with contextlib.suppress(OSError, Wrong, PathRefused, ValueError, RecursionError):
            lines = _lines(path)
            head = Fields(json.loads(lines[0]) if lines else None, "the head")
            namespace, step = safe_relative(head.text("namespace")), safe_component(head.text("step"))
            if state_path(meta, _KIND, namespace, step, _SUFFIX) == path:
                yield StepJournal.open(meta, namespace, step)
                continue
        # What says of no step is of no use.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _lines(path: Path) -> list[bytes]:
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            return []
        return file.read().splitlines()


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 64 for each in value):
        raise Wrong("no list of whole numbers")
    return tuple(value)


def _three(value: object) -> Identity:
    if not isinstance(value, list) or len(value) != 3 or not all(type(each) is int for each in value):
        raise Wrong("no three whole numbers")
    return value[0], value[1], value[2]


def _part(value: object) -> tuple[int, int, str, int]:
    if not isinstance(value, list) or len(value) != 4 or not isinstance(value[2], str):
        raise Wrong("no part")
    number, size, checksum = _integers([value[0], value[1], value[3]])
    return number, size, value[2], checksum
