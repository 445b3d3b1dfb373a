"""Evicting a persisted step: each large file is replaced by a stub, and its old inode freed in the background.

An inode never turns from a file into a stub: the stub is another one, renamed over it, so whoever holds the old one has
all its bytes. A file that a program has open stays, since its room would not come back. So do small files and markers:
they cost little, and a step without its marker at hand could not be judged.

In a cluster other nodes may have the bytes as well as the object tier: then a file goes whose version they hold.
"""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.checksum import from_text, to_text
from tierfs.errors import TierfsError
from tierfs.hydrate.stubs import StubMark, make_stub
from tierfs.steps.manifest import FileEntry
from tierfs.steps.overwrite import keeping_times
from tierfs.steps.record import StepRecord

if TYPE_CHECKING:
    from tierfs.hydrate.hydration import Hydration

log = logging.getLogger("tierfs.hydrate")

#: Files below this stay in RAM.
LEAST_BYTES = 1 << 20


def ram_bytes(hydration: Hydration, record: StepRecord) -> int:
    """What evicting the step would free: of one that is elsewhere too the large files, of any other all that it
    holds."""
    files = record.manifest.files
    if _is_elsewhere(hydration, record):
        return sum(size for _, _, size in _evictable(hydration, record))
    return sum(
        hydration.hydrated_bytes(entry.ino) if hydration.is_stub(entry.ino) else entry.size_bytes
        for entry in files.values()
    )


def evict(hydration: Hydration, record: StepRecord) -> bool:
    """See `tierfs.steps.object_tier.ObjectTier.evict`. Takes some 50 µs a file; frees nothing itself."""
    if not _is_elsewhere(hydration, record):
        return False
    registry, manifest = hydration.registry, record.manifest
    away = registry.tier.generations / f"{uuid.uuid4().hex}.evicted"
    freed_bytes = 0
    try:
        for at, (inner, entry, size) in enumerate(list(_evictable(hydration, record))):
            if registry.open_handles(entry.ino) or not _is_there(hydration, record, inner, entry):
                continue
            if not freed_bytes:
                away.mkdir(mode=0o700, exist_ok=True)
            new = _replace(hydration, record, inner, entry, away / str(at))
            if new is not None:
                manifest.files[inner] = new
                record.unsaved = True
                freed_bytes += size
                registry.invalidate_inside(record, inner)
                hydration.on_replaced(entry.ino)
                if version := hydration.version_of(entry.ino):
                    hydration.on_version_left(entry.ino, version)
    except (OSError, TierfsError) as error:
        # No inode, or no attributes: what is left stays in RAM, whole.
        log.error("a step can't be evicted (further): %s", error, extra=registry.extra(record))
    finally:
        if away.exists():
            registry.discard(away, size_bytes=freed_bytes)
            registry.save_or_later(record)
    return True


def _is_elsewhere(hydration: Hydration, record: StepRecord) -> bool:
    """Something else than this node's RAM holds the step as it is now."""
    if not hydration.registry.is_shared(record):
        return hydration.registry.is_elsewhere(record)
    return record.is_complete and hydration.registry.cluster.may_leave_ram(record)


def _is_there(hydration: Hydration, record: StepRecord, inner: str, entry: FileEntry) -> bool:
    """The object, or the disk, holds just these bytes, as far as it can be told at once."""
    if hydration.is_on_disk(record, inner, entry):
        return True
    if not record.is_persisted and hydration.registry.object_tier.on_disk(record):
        return False  # the disk is why the step may leave, and it has this file not, or otherwise
    kept = hydration.kept_manifest(*record.key) if record.is_persisted and entry.checksum is not None else None
    if kept is None:
        return True  # the step's own manifest says that it is persisted as it is, or the cluster holds it
    file = kept.files.get(inner)
    if file is not None and (file.size_bytes, to_text(file.checksum)) == (entry.size_bytes, entry.checksum):
        return True
    if entry.ino not in hydration.not_evictable:
        hydration.not_evictable.add(entry.ino)
        log.error(
            "not evicted: its object is another one than the file here", extra=hydration.registry.extra(record, inner)
        )
    return False


def _evictable(hydration: Hydration, record: StepRecord) -> Iterator[tuple[str, FileEntry, int]]:
    """(path inside the step, entry, bytes in RAM) of the files that may become stubs, or emptier ones."""
    is_shared = hydration.registry.is_shared(record)
    for inner, entry in record.manifest.files.items():
        if entry.size_bytes < LEAST_BYTES or not entry.sealed or (entry.checksum is None and not is_shared):
            continue
        if entry.ino in hydration.not_evictable:
            continue
        part = hydration.table.get(entry.ino)
        if part is None:
            if is_shared and hydration.version_of(entry.ino) is None:
                continue  # the cluster does not know of these bytes (yet)
            if hydration.registry.rules.match(inner) is None and inner != record.manifest.marker:
                yield inner, entry, entry.size_bytes
        elif part.here_bytes >= LEAST_BYTES and not (part.is_open or part.users or part.wants):
            yield inner, entry, part.here_bytes


def _replace(hydration: Hydration, record: StepRecord, inner: str, entry: FileEntry, old: Path) -> FileEntry | None:
    """Put a stub in the file's place, and its old inode at `old`. None where the file is not what was sealed."""
    path = record.directory / inner
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    part = hydration.table.get(entry.ino)
    if not stat.S_ISREG(info.st_mode) or (info.st_ino, info.st_size) != (entry.ino, entry.size_bytes):
        return None
    if part is None and info.st_mtime_ns != entry.mtime_ns:
        # Its time was set by another name, or bytes came by a mapping: only its checksum tells.
        record.manifest.files[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, None, True)
        record.unsaved = True
        hydration.registry.checksum_soon(record, {inner})
        return None
    if part is not None:
        mark = part.mark
        if mark is None:
            return None
    else:
        manifest = record.manifest
        mark = StubMark(
            namespace=manifest.namespace,
            step=manifest.step,
            file=inner,
            size_bytes=entry.size_bytes,
            checksum=from_text(entry.checksum) if entry.checksum is not None else None,
            mtime_ns=entry.mtime_ns,
            version=(hydration.version_of(entry.ino) or "") if hydration.registry.is_shared(record) else "",
        )
    scratch = old.with_name(f"{old.name}.stub")
    ino = make_stub(scratch, mark, mode=info.st_mode, uid=info.st_uid, gid=info.st_gid, atime_ns=info.st_atime_ns)
    hydration.registry.crash("evict:made")
    os.link(path, old, follow_symlinks=False)
    with keeping_times(path.parent):
        hydration.table.add(ino, mark, path)
        scratch.rename(path)
    hydration.registry.crash("evict:replaced")
    if part is not None:
        hydration.table.drop(part)
    return FileEntry(entry.size_bytes, mark.mtime_ns, ino, entry.checksum, True)
