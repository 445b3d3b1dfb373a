"""What lies on the disk, in memory: asked by eviction, by readers of stubs, and by whoever tells people."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tierfs.checksum import FileChecksum, from_text
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.store import Found
from tierfs.persist.layout import is_own
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.disk")

#: Wrong bytes of one file are read once more, since bits flip on the way too, before its step is given up.
STRIKES = 2


class DiskIndex:
    """`is_open` once the disk was read, `away` is "" or why it can't be used now. Used from the trio thread."""

    def __init__(self, registry: StepRegistry) -> None:
        self.registry = registry
        self.is_open = False
        self.away = ""
        self.disk_id = ""
        self.damaged: dict[Path, tuple[str, int]] = {}
        #: Directories of steps that turned out to be damaged; whoever runs notes that on the disk.
        self.condemned: list[Path] = []
        self._steps: dict[Key, DiskStep] = {}
        #: The steps that were found to be just what is stored, by what they were then.
        self._same: dict[Key, tuple[StepRecord, int, DiskStep]] = {}
        self._strikes: Counter[tuple[Path, str]] = Counter()
        #: Among several nodes: the version of an inode's bytes, whole or of a stub; None for none (yet).
        self.version_of: Callable[[int], str | None] = lambda ino: None
        self.is_stub: Callable[[int], bool] = lambda ino: False
        #: What the disk holds of the step is another.
        self.on_change: Callable[[Key], None] = lambda key: None
        self._by_version: dict[str, tuple[DiskStep, str]] = {}
        #: Inodes that were found to be what is stored of them; a number is never used twice.
        self._stored_inos: dict[Key, dict[str, int]] = {}

    def fill(self, found: Found) -> None:
        """The disk was read. What was said of it before, and could not be noted there, may have been the disk's own
        trouble: each read is compared with checksums anyway."""
        self.condemned.clear()
        self._strikes.clear()
        self._steps = {stored.key: stored for stored in found.steps}
        self._same.clear()
        self._stored_inos.clear()
        self._by_version = {
            version: (stored, inner) for stored in found.steps for inner, version in stored.versions.items()
        }
        self.damaged = dict(found.damaged)
        self.disk_id = found.disk_id
        self.is_open, self.away = True, ""
        self.changed_all()

    def changed_all(self) -> None:
        """The disk came or went."""
        for key in list(self._steps):
            self.on_change(key)

    def forget_inodes(self, key: Key) -> None:
        """Files of the step may be others by now."""
        self._stored_inos.pop(key, None)

    def __iter__(self) -> Iterator[DiskStep]:
        return iter(list(self._steps.values()))

    def __len__(self) -> int:
        return len(self._steps)

    def get(self, key: Key) -> DiskStep | None:
        """Also while the disk is away."""
        return self._steps.get(key)

    def readable(self, namespace: str, step: str) -> DiskStep | None:
        """The same where the disk can be read."""
        return None if self.away else self._steps.get((namespace, step))

    @property
    def used_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self._steps.values()) + sum(
            size for _, size in self.damaged.values()
        )

    # --- changing

    def put(self, stored: DiskStep) -> None:
        before = self._steps.get(stored.key)
        if before is not None:
            self.drop(before)
        self._steps[stored.key] = stored
        self._by_version.update({version: (stored, inner) for inner, version in stored.versions.items()})
        self.on_change(stored.key)
        self.damaged.pop(stored.directory, None)
        self.damaged.pop(stored.directory.parent, None)
        self.condemned = [each for each in self.condemned if each != stored.directory]
        self.registry.clear_problems(_path(stored))

    def drop(self, stored: DiskStep) -> bool:
        """False where it is there no more."""
        if self._steps.get(stored.key) is not stored:
            return False
        del self._steps[stored.key]
        self._same.pop(stored.key, None)
        self._stored_inos.pop(stored.key, None)
        for version in stored.versions.values():
            if self._by_version.get(version, (None, ""))[0] is stored:
                del self._by_version[version]
        self.on_change(stored.key)
        return True

    def failed(self, stored: DiskStep, inner: str, why: str, *, at_once: bool) -> None:
        """A file can't be read, or is wrong: its step is not whole, and no longer shown as such."""
        self._strikes[stored.directory, inner] += 1
        if not at_once and self._strikes[stored.directory, inner] < STRIKES:
            return
        if not self.drop(stored):
            return
        message = f"{'/'.join(stored.key)}/{inner} on the disk {why}"
        log.error("%s", message, extra={"namespace": stored.key[0], "step": stored.key[1], "tier": "disk"})
        self.registry.problem("error", message, _path(stored))
        self.damaged[stored.directory] = (message, stored.size_bytes)
        self.condemned.append(stored.directory)
        self.registry.update_latest(stored.key[0])

    # --- asked

    def holds(self, record: StepRecord) -> bool:
        """The disk has all of the complete step as it is now, and can be read."""
        return not self.away and self.knows(record)

    def knows(self, record: StepRecord) -> bool:
        """The same as far as is known while the disk is away."""
        stored = self._steps.get(record.key)
        if stored is None or not record.is_complete:
            return False
        local = record.manifest
        if self.registry.is_shared(record):
            is_that = local.generation == stored.step.generation
            return is_that and (not local.populated or self._holds_what_is_here(stored, record))
        if (local.generation, local.completed_at or 0.0) != stored.step.age:
            return False
        if not local.populated:
            return True
        known = self._same.get(record.key)
        if known is not None and known == (record, record.changes, stored):
            return True
        is_same = {inner for inner in local.files if not is_own(inner)} == stored.step.files.keys() and all(
            self._has(stored, inner, entry) for inner, entry in local.files.items() if not is_own(inner)
        )
        if is_same:
            self._same[record.key] = record, record.changes, stored
        return is_same

    def holds_file(self, record: StepRecord, inner: str, entry: FileEntry) -> bool:
        """The disk has the file as it is now, also while it is away."""
        stored = self._steps.get(record.key)
        if stored is None:
            return False
        if self.registry.is_shared(record):
            return self._has_version(stored, inner, entry)
        return self._has(stored, inner, entry)

    def holds_whole(self, record: StepRecord) -> bool:
        """The disk has all files of the step; of a step of several nodes it may hold those that this node has, only."""
        stored = self._steps.get(record.key)
        if stored is None or not self.holds(record):
            return False
        if not self.registry.is_shared(record):
            return True
        return record.manifest.populated and stored.step.files.keys() >= record.manifest.files.keys()

    def path_of_version(self, version: str) -> Path | None:
        """Where the disk has these bytes; None where it has not, or can't be read."""
        stored, inner = self._by_version.get(version, (None, ""))
        return stored.directory / inner if stored is not None and not self.away else None

    def summed(self, version: str) -> FileChecksum | None:
        """What these bytes were summed up to when they were stored."""
        stored, inner = self._by_version.get(version, (None, ""))
        file = stored.file(inner) if stored is not None else None
        return FileChecksum(file.size_bytes, file.checksum, file.chunks) if file is not None else None

    def forget_version(self, version: str) -> None:
        """The file of that version is damaged, or can't be read."""
        stored, inner = self._by_version.get(version, (None, ""))
        if stored is not None and not self.away:
            self.failed(stored, inner, "is damaged, or can't be read", at_once=True)

    def _holds_what_is_here(self, stored: DiskStep, record: StepRecord) -> bool:
        return all(
            self.is_stub(entry.ino) or self._has_version(stored, inner, entry)
            for inner, entry in record.manifest.files.items()
            if not is_own(inner)
        )

    def _has_version(self, stored: DiskStep, inner: str, entry: FileEntry) -> bool:
        known = self._stored_inos.setdefault(stored.key, {})
        if known.get(inner) == entry.ino:
            return True
        version = self.version_of(entry.ino)
        if version is None or stored.versions.get(inner) != version:
            return False
        known[inner] = entry.ino
        return True

    def _has(self, stored: DiskStep, inner: str, entry: FileEntry) -> bool:
        file = stored.file(inner)
        if file is None or entry.checksum is None:
            return False
        return (file.size_bytes, file.checksum) == (entry.size_bytes, from_text(entry.checksum))


def _path(stored: DiskStep) -> str:
    """What `status` names as the path of a problem of a copy: not the step itself, which may be whole elsewhere."""
    return f"disk:{'/'.join(stored.key)}"
