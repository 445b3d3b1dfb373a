"""Steps copied into a mount and out of it, by the process that asks for it.

Files go through the mount as any program's do, so that the daemon sees a save or a load like others. Markers come last
both ways: nobody takes a copy for whole that is not.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tierfs.errors import PathRefused, TierfsError
from tierfs.steps.markers import MarkerRules
from tierfs.steps.names import safe_relative

if TYPE_CHECKING:
    from tierfs.objects.store import ObjectStore

PIECE_BYTES = 8 << 20
RANGE_BYTES = 16 << 20
#: Ranges that are fetched at a time: one connection gives some 80-100 MB/s from Amazon S3.
RANGES_AT_ONCE = 8
OWN_FOLDER = ".tierfs"
"""What tierfs keeps beside a step's files in the object tier: no part of the step."""
_COMMIT, _PARTS = f"{OWN_FOLDER}/manifest.json", f"{OWN_FOLDER}/parts"
_UNFINISHED = ".tmp"

Passing = Callable[[int], None]
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SourceFile:
    """`inner` is its path inside the step; `mode` and `mtime_ns` are None where the source knows none."""

    inner: str
    size_bytes: int
    mtime_ns: int | None = None
    mode: int | None = None


class Source(Protocol):
    """Where a step is copied from. Raises OSError and TierfsError."""

    def files(self) -> Sequence[SourceFile]: ...

    def copy(self, file: SourceFile, fd: int, passing: Passing) -> None:
        """Writes the file's bytes to `fd`, which is empty; `passing` gets how many each time."""
        ...


class DirectorySource:
    """A directory; symbolic links in it count as what they point to."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def files(self) -> list[SourceFile]:
        if (self._root / _PARTS).is_dir() and not (self._root / _COMMIT).exists():
            raise _only_a_part()
        return list(self._walk(""))

    def _walk(self, below: str) -> Iterator[SourceFile]:
        with os.scandir(self._root / below) as entries:
            for entry in sorted(entries, key=lambda found: found.name):
                inner = f"{below}/{entry.name}" if below else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if inner != OWN_FOLDER:
                        yield from self._walk(inner)
                    continue
                info = entry.stat()
                if not stat.S_ISREG(info.st_mode):
                    raise PathRefused(
                        f"{self._root / inner} is no regular file; a step holds files and directories only"
                    )
                yield SourceFile(inner, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode))

    def copy(self, file: SourceFile, fd: int, passing: Passing) -> None:
        with open(self._root / file.inner, "rb", buffering=0) as reading:
            copied = copy_bytes(reading.fileno(), fd, passing)
        if copied != file.size_bytes:
            raise TierfsError(f"{self._root / file.inner} changed while it was copied; import it again")


class StoreSource:
    """What lies below an object store's prefix."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def files(self) -> list[SourceFile]:
        found, more = [], ""
        is_part = is_committed = False
        while True:
            page = self._store.list_page("", more=more)
            for each in page.objects:
                is_part |= each.key.startswith(f"{_PARTS}/")
                is_committed |= each.key == _COMMIT
                if each.key.endswith("/") or each.key.startswith(f"{OWN_FOLDER}/"):
                    continue  # consoles make empty objects to stand for folders
                found.append(SourceFile(safe_relative(each.key), each.size_bytes, int(each.modified * 1e9)))
            more = page.more
            if not more:
                break
        if is_part and not is_committed:
            raise _only_a_part()
        return found

    def copy(self, file: SourceFile, fd: int, passing: Passing) -> None:
        from tierfs.objects.probing import Unhindered

        def fetch(offset: int) -> None:
            length = min(RANGE_BYTES, file.size_bytes - offset)
            buffer = bytearray(length)
            self._store.read_range(file.inner, offset, memoryview(buffer), Unhindered())
            _write_at(fd, memoryview(buffer), offset)
            passing(length)

        with ThreadPoolExecutor(RANGES_AT_ONCE) as threads:
            for done in [threads.submit(fetch, offset) for offset in range(0, file.size_bytes, RANGE_BYTES)]:
                done.result()


def _only_a_part() -> TierfsError:
    return TierfsError(
        "the source has only some files of the step, which a node sent without the rest (persist.files); copy what you "
        "need of them with other means"
    )


def import_step(source: Source, directory: Path, rules: MarkerRules, tell: Tell) -> dict[str, Any]:
    """Copies a step into `directory`, which may hold an old one: then this is an overwrite as any trainer's.

    `marked` says whether a marker was among the files. TierfsError when there is nothing to copy, or the marker names
    files that are not there.
    """
    files = source.files()
    if not files:
        raise TierfsError("there is nothing to import: no file was found at the source")
    count = _Count(sum(file.size_bytes for file in files), tell)
    ordered = _markers_last(files, rules)
    names = {file.inner for file in files}
    leftover = [inner for inner in _names_below(directory) if inner not in names]
    marked = False
    for file in ordered:
        is_marker = rules.match(file.inner) is not None
        if is_marker and not marked:
            for inner in leftover:
                (directory / inner).unlink(missing_ok=True)
        marked = marked or is_marker
        target = directory / safe_relative(file.inner)
        target.parent.mkdir(parents=True, exist_ok=True)
        # As DCP does it: the file system checks what the marker names, and refuses the rename.
        renamed = is_marker and rules.commit_rename(file.inner + _UNFINISHED, file.inner) is not None
        written = target.with_name(target.name + _UNFINISHED) if renamed else target
        count.path = file.inner
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            source.copy(file, fd, count.passing)
            if file.mode is not None:
                os.fchmod(fd, file.mode & 0o777)
        finally:
            os.close(fd)
        if file.mtime_ns is not None:
            os.utime(written, ns=(file.mtime_ns, file.mtime_ns))
        if renamed:
            _commit(written, target)
    if not marked:
        for inner in leftover:
            (directory / inner).unlink(missing_ok=True)
    return {"files": len(files), "bytes": count.total, "marked": marked}


def _commit(written: Path, target: Path) -> None:
    try:
        written.rename(target)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise TierfsError(
            f"the source is not whole: its {target.name} names files that are missing or too short, so the step was "
            f"not completed ({error.strerror}); `tierfs stat {target.parent}` says which"
        ) from error


def export_files(
    source: Path,
    directory: Path,
    rules: MarkerRules,
    checksum_of: Callable[[str], str | None],
    tell: Tell,
) -> dict[str, Any]:
    """Copies what is below `source` (or the file itself) into `directory`, with times and modes, and reads it again.

    `checksum_of` gives what a file was sealed with, None where nobody knows. `bad` are the files that are not the same;
    `verified` counts those that were compared by checksum. After a bad file no marker is written.
    """
    if source.is_dir():
        reader = DirectorySource(source)
        files = reader.files()
    else:
        info = source.stat()
        files = [SourceFile(source.name, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode))]
        reader = DirectorySource(source.parent)
    directory.mkdir(parents=True, exist_ok=True)
    need, free = sum(file.size_bytes for file in files), shutil.disk_usage(directory).free
    if need > free:
        from tierfs.units import format_size

        raise TierfsError(f"{directory} has room for {format_size(free)} only, {format_size(need)} are to be written")
    count = _Count(need, tell)
    bad: list[dict[str, str]] = []
    verified = written = 0
    for file in _markers_last(files, rules):
        if bad and rules.match(file.inner) is not None:
            bad.append(
                {"path": file.inner, "reason": "left out, since files that it names are not as they were sealed"}
            )
            continue
        count.path = file.inner
        reason, compared = _export_file(reader, file, directory / file.inner, checksum_of(file.inner), count.passing)
        written += 1
        verified += compared
        if reason:
            bad.append({"path": file.inner, "reason": reason})
    return {"files": written, "bytes": need, "verified": verified, "bad": bad}


def _export_file(
    reader: DirectorySource, file: SourceFile, target: Path, checksum: str | None, passing: Passing
) -> tuple[str, bool]:
    """What is wrong with the copy ("" nothing), and whether it was compared by checksum."""
    from tierfs.checksum import checksum_fd

    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        reader.copy(file, fd, passing)
        os.fsync(fd)
        size = os.fstat(fd).st_size
        if size != file.size_bytes:
            return f"{size} bytes were written, it has {file.size_bytes}", False
        found = checksum_fd(fd).text if checksum else None
        if file.mode is not None:
            os.fchmod(fd, file.mode)
    finally:
        os.close(fd)
    if file.mtime_ns is not None:
        os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
    if found != checksum:
        return f"the copy has the checksum {found}, {checksum} was sealed", True
    return "", found is not None


def copy_bytes(reading: int, writing: int, passing: Passing) -> int:
    """Everything from one descriptor to another; returns how much."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    copied = 0
    while got := os.readv(reading, [buffer]):
        _write_at(writing, buffer[:got], copied)
        copied += got
        passing(got)
    return copied


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _names_below(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return [
        (Path(base) / name).relative_to(directory).as_posix() for base, _, names in os.walk(directory) for name in names
    ]


def _markers_last(files: Iterable[SourceFile], rules: MarkerRules) -> list[SourceFile]:
    return sorted(files, key=lambda file: (rules.match(file.inner) is not None, file.inner))


class _Count:
    """Bytes as they pass, from several threads."""

    def __init__(self, total: int, tell: Tell) -> None:
        self.total = total
        self.path = ""
        self._done = 0
        self._lock = threading.Lock()
        self._tell = tell

    def passing(self, size_bytes: int) -> None:
        with self._lock:
            self._done += size_bytes
            self._tell({"bytes": self._done, "bytes_total": self.total, "path": self.path})
