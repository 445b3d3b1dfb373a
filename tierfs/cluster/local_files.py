"""This node's files of a step, as the catalogue has them: a pure function of what lies in the tree.

A file counts once it is sealed and has a version (`tierfs.cluster.copies`). When it was opened for writing, in
revisions of the catalogue, is an attribute of its inode too: it decides which of two nodes' files is the newer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Protocol

import trio

from tierfs.catalog.records import FileRecord
from tierfs.cluster.versions import read_version
from tierfs.hydrate.stubs import MarkDamaged, read_mark
from tierfs.steps.manifest import FileEntry, Manifest
from tierfs.steps.record import StepRecord

OPENED, JOINED = "tierfs.opened", "tierfs.joined"
_SPACES = ("trusted.", "user.")
_ABSENT = (errno.ENODATA, errno.ENOTSUP, errno.EPERM)
#: So many files are looked at in one go; about 15 µs each.
_AT_ONCE = 32
#: A file that was withdrawn to be written, and then was not (the open failed), counts again after so long.
WRITTEN_WITHIN_S = 5.0


class Sealing(Protocol):
    """Of `tierfs.cluster.copies.Copies`."""

    def seal(self, path: Path, ino: int) -> str: ...


class LocalFiles:
    """Used from the trio thread."""

    def __init__(self, copies: Sealing, node: str) -> None:
        self.node = node
        self._copies = copies
        self._withdrawn: dict[int, float] = {}  # until when, by trio.current_time

    # --- files being written

    def withdrawn(self, ino: int) -> None:
        """It is about to be written: not sealed again before `sealed`, whatever the manifest says of it yet."""
        self._withdrawn[ino] = trio.current_time() + WRITTEN_WITHIN_S

    def sealed(self, ino: int) -> None:
        self._withdrawn.pop(ino, None)

    def is_being_written(self, ino: int, record: StepRecord | None = None) -> bool:
        if record is not None and ino in record.writers:
            return True
        until = self._withdrawn.get(ino)
        if until is None:
            return False
        if trio.current_time() < until:
            return True
        del self._withdrawn[ino]
        return False

    # --- what is published

    async def own(self, record: StepRecord) -> dict[str, FileRecord]:
        """What this node wrote into the generation that is being written (or, of a complete step, into that one)."""
        return {inner: file for inner, file in (await self.every(record)).items() if file.node == self.node}

    async def every(self, record: StepRecord, *, old: bool = False) -> dict[str, FileRecord]:
        """Every sealed file with a version, whoever wrote it, but those of the generation that was set aside; with
        `old` only those of them that still stand under their names."""
        found: dict[str, FileRecord] = {}
        is_open = record.open_names()
        for at, (inner, entry) in enumerate(list(record.manifest.files.items())):
            if at % _AT_ONCE == _AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if not entry.sealed or inner in is_open or record.is_of_old_generation(inner) != old:
                continue
            file = self.describe(record.directory / inner, entry, record)
            if file is not None:
                found[inner] = file
        return found

    def describe(self, path: Path, entry: FileEntry | None, record: StepRecord | None = None) -> FileRecord | None:
        """The file at `path`; None where it is not (any more) what `entry` says, or is being written."""
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or (entry is not None and info.st_ino != entry.ino):
                return None
            if self.is_being_written(info.st_ino, record):
                return None
            mark = read_mark(path)
            version = mark.version if mark is not None else (read_version(path) or self._copies.seal(path, info.st_ino))
            opened_at = read_opened(path)
        except (FileNotFoundError, NotADirectoryError, MarkDamaged):
            return None
        if not version:
            return None  # only the object tier has it
        same = entry is not None and entry.size_bytes == info.st_size
        return FileRecord(
            size_bytes=info.st_size,
            mtime_ns=mark.mtime_ns if mark is not None else info.st_mtime_ns,
            mode=stat.S_IMODE(info.st_mode) & 0o777,
            uid=info.st_uid,
            gid=info.st_gid,
            version=version,
            checksum=entry.checksum if entry is not None and same else None,
            opened_at=opened_at,
        )


def read_opened(path: Path) -> int:
    """The catalogue's revision when it was opened for writing; 0 where that is not known. FileNotFoundError."""
    return _read_number(path, OPENED)


def write_opened(path: Path, ino: int, revision: int) -> None:
    """Where it can't be noted (no room, gone already) the file counts as older than others."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == ino:
            _write_number(path, OPENED, revision)


def writing_generation(manifest: Manifest) -> int:
    """The generation that new files of the step belong to; of a complete one, that one."""
    return manifest.overwrite.generation if manifest.overwrite is not None else manifest.generation


def read_joined(path: Path) -> int:
    """The revision at which a name outside of steps came into the catalogue; 0 where it did not. FileNotFoundError."""
    return _read_number(path, JOINED)


def write_joined(path: Path, revision: int) -> None:
    """Without it (a symbolic link of who is not root) the name is published again where the catalogue lacks it."""
    with contextlib.suppress(OSError):
        if _read_number(path, JOINED) != revision:
            _write_number(path, JOINED, revision)


def _read_number(path: Path, attribute: str) -> int:
    for space in _SPACES:
        try:
            data = os.getxattr(path, space + attribute, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise
        return int(data) if data.isdigit() and len(data) < 20 else 0
    return 0


def _write_number(path: Path, attribute: str, value: int) -> None:
    space = _SPACES[0] if os.geteuid() == 0 else _SPACES[1]
    os.setxattr(path, space + attribute, str(value).encode("ascii"), follow_symlinks=False)
