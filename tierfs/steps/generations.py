"""Generations: a complete step that is written again keeps its old self until the new one is whole."""

from __future__ import annotations

import logging
import os
import time

from tierfs.steps import overwrite
from tierfs.steps.manifest import FileEntry, Overwrite
from tierfs.steps.names import escape_namespace
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.steps")


def begin(registry: StepRegistry, record: StepRecord, pid: int) -> None:
    """Set the complete generation aside, before `pid` makes the first change in it.

    The old markers stay in sight until something is written (`hide_markers`): a program that removes the step file
    by file expects to find them.
    """
    manifest = record.manifest
    name = f"{manifest.step}.{manifest.generation}"
    old_directory = registry.tier.generations / escape_namespace(manifest.namespace) / name
    old_directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    links = overwrite.set_aside(record.directory, old_directory)
    registry.crash("overwrite:set-aside")
    manifest.overwrite = Overwrite(
        generation=manifest.generation + 1,
        started_at=time.time(),
        participants=record.participants_with(pid),
        old_directory=str(old_directory.relative_to(registry.tier.path)),
        old_files={inner: _with_checksum(link, manifest.files.get(inner)) for inner, link in links.items()},
        removed_only=True,
    )
    manifest.changed_at = time.time()
    record.first_write_at = time.monotonic()
    registry.save(record)
    registry.crash("overwrite:recorded")
    registry.update_latest(manifest.namespace)
    registry.wake.set()
    log.info("a complete step is being changed; its old generation is kept", extra=registry.extra(record))


def hide_markers(registry: StepRegistry, record: StepRecord) -> None:
    """Take the old markers away, so that a load fails rather than mixes generations. Done before the first write."""
    current = record.manifest.overwrite
    if current is None or not current.removed_only:
        return
    current.removed_only = False
    registry.save(record)
    registry.crash("overwrite:hiding")
    remove_old_markers(registry, record)
    registry.crash("overwrite:hidden")
    registry.make_room_for_next(record.manifest.namespace, sparing=record)


def remove_old_markers(registry: StepRegistry, record: StepRecord) -> None:
    """The removal itself, done again after a crash."""
    current = record.manifest.overwrite
    if current is None or current.removed_only:
        return
    for inner in current.old_files:
        if registry.rules.match(inner) is not None and record.is_of_old_generation(inner):
            (record.directory / inner).unlink()
            registry.invalidate_inside(record, inner)


def give_up(registry: StepRegistry, record: StepRecord, why: str) -> None:
    """End an overwrite that will not be completed: the old generation is put back.

    Where files were only removed, that was somebody's wish: it is accepted, and the step is no longer complete. A
    marker alone that was removed is put back, since DCP removes it just before it renames the next one into place.
    """
    manifest = record.manifest
    current = manifest.overwrite
    old_directory = registry.old_directory(record)
    if current is None or old_directory is None:
        return
    registry.crash("put-back:begun")
    removed = sorted(inner for inner in current.old_files if not os.path.lexists(record.directory / inner))
    if current.removed_only and any(registry.rules.match(inner) is None for inner in removed):
        manifest.state = "writing"
        manifest.completed_at = None
        manifest.files = record.scan()
        more = f" and {len(removed) - 4} more" if len(removed) > 4 else ""
        manifest.note = f"no longer complete: {', '.join(removed[:4])}{more} removed by a program"
    else:
        markers = frozenset(inner for inner in current.old_files if registry.rules.match(inner) is not None)
        for inner in overwrite.put_back(record.directory, old_directory, current.old_files, markers):
            registry.invalidate_inside(record, inner)
        regular = record.scan()
        manifest.files = {inner: entry for inner, entry in current.old_files.items() if inner in regular}
        manifest.note = f"an overwrite was given up ({why}) and generation {manifest.generation} put back"
    manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
    manifest.overwrite = None
    record.first_write_at = None
    registry.crash("put-back:done")
    registry.save(record)
    registry.discard(old_directory)
    log.warning("%s", manifest.note, extra=registry.extra(record))
    registry.lines.write(manifest.namespace, manifest.note, level="WARNING", step=manifest.number)
    registry.update_latest(manifest.namespace)


def _with_checksum(link: FileEntry, known: FileEntry | None) -> FileEntry:
    """The kept inode, with the checksum that is known of it."""
    checksum = known.checksum if known is not None and known.ino == link.ino else None
    return FileEntry(link.size_bytes, link.mtime_ns, link.ino, checksum, True)
