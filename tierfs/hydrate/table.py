"""Every stub of the tier, by inode number: filled by a scan at start, exact from then on, since only the daemon makes
stubs and makes them whole.

An inode that is gone leaves its entry behind until somebody asks for it or the table has grown much: on a tmpfs a
number is never used twice, and elsewhere the mark is looked at before anything is believed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tierfs.hydrate.partial import PartialFile, find_data
from tierfs.hydrate.stubs import MarkDamaged, StubMark, read_mark, restore_times
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.hydrate")

_SWEEP_FROM = 1024


class StubTable:
    """Used from the trio thread."""

    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry
        self._tier = registry.tier
        self._by_ino: dict[int, PartialFile] = {}
        self._sweep_at = _SWEEP_FROM

    def __contains__(self, ino: int) -> bool:
        return ino in self._by_ino

    def __iter__(self) -> Iterator[PartialFile]:
        return iter(list(self._by_ino.values()))

    def __len__(self) -> int:
        return len(self._by_ino)

    def get(self, ino: int) -> PartialFile | None:
        return self._by_ino.get(ino)

    def add(self, ino: int, mark: StubMark | None, path: Path) -> PartialFile:
        """A stub at `path` is known now; one that is known already keeps its state."""
        part = self._by_ino.get(ino)
        if part is None:
            part = self._by_ino[ino] = PartialFile(ino, mark, str(path.relative_to(self._tier.path)))
        return part

    def drop(self, part: PartialFile) -> None:
        """It is whole, or gone."""
        if self._by_ino.get(part.ino) is part:
            del self._by_ino[part.ino]

    def scan(self) -> None:
        """Fill the table from what lies in the tier. Blocking; some 3 ms a thousand files."""
        for path, info in self._files():
            try:
                mark = read_mark(path)
            except FileNotFoundError:
                continue
            except MarkDamaged as error:
                log.error("%s: %s; reading it fails", path, error.message)
                self.add(info.st_ino, None, path)
                continue
            if mark is None:
                continue
            if mark.size_bytes != info.st_size:
                log.error("%s is a stub of another size than its mark says; reading it fails", path)
                self.add(info.st_ino, None, path)
                continue
            part = self.add(info.st_ino, mark, path)
            if info.st_blocks or info.st_mtime_ns != mark.mtime_ns:
                with contextlib.suppress(OSError):
                    fd = self.open(part)
                    try:
                        find_data(fd, part)
                        restore_times(fd, mark)  # a daemon may have died while it brought bytes
                    finally:
                        os.close(fd)

    def open(self, part: PartialFile) -> int:
        """A descriptor for reading and writing, the caller's. FileNotFoundError when there is no such stub any more."""
        for path in self._places(part):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, MarkDamaged):
                if path.lstat().st_ino != part.ino:
                    continue
                fd = _open_writable(path)
                if os.fstat(fd).st_ino == part.ino and (part.mark is None or read_mark(fd) is not None):
                    part.where = str(path.relative_to(self._tier.path))
                    return fd
                os.close(fd)
        self.drop(part)
        raise FileNotFoundError(f"the stub with inode {part.ino}, last seen as {part.where}, is gone")

    def sweep(self) -> None:
        """Drop what is gone, when the table has doubled since the last time. Blocking for as long as `scan`."""
        if len(self._by_ino) < self._sweep_at:
            return
        here = {info.st_ino for _, info in self._files()}
        for part in self:
            if part.ino not in here and not part.users and not part.is_open:
                self.drop(part)
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self._by_ino))

    def _places(self, part: PartialFile) -> Iterator[Path]:
        """Where the inode may have a name: the likely places first, and then everywhere."""
        yield self._tier.path / part.where
        yield self._tier.path / "unlinked" / str(part.ino)
        for record in list(self._registry.records.values()):
            for inner, entry in record.manifest.files.items():
                if entry.ino == part.ino:
                    yield record.directory / inner
            current, old = record.manifest.overwrite, self._registry.old_directory(record)
            if current is not None and old is not None:
                yield from (old / inner for inner, entry in current.old_files.items() if entry.ino == part.ino)
        yield from (path for path, info in self._files() if info.st_ino == part.ino)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The regular files that have bytes, of the mount, of old generations, and unlinked ones that are open."""
        tops = (self._tier.root, self._tier.generations, self._tier.path / "unlinked")
        pending = [str(top) for top in tops if top.is_dir()]
        while pending:
            directory = pending.pop()
            with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode) and info.st_size:
                            yield Path(entry.path), info


def _open_writable(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except PermissionError:  # not root, and a file that its owner may not write: ours all the same
        mode = stat.S_IMODE(path.lstat().st_mode)
        path.chmod(mode | stat.S_IWUSR | stat.S_IRUSR)
        try:
            return os.open(path, flags)
        finally:
            path.chmod(mode)
