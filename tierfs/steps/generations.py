"""Generations: a complete step that is written again keeps its old self until the new one is whole."""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import PurePosixPath

import trio

from tierfs.steps import overwrite
from tierfs.steps.manifest import FileEntry, Overwrite
from tierfs.steps.record import SHARD_SUFFIXES, StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.steps")


def begin(registry: StepRegistry, record: StepRecord, pid: int) -> None:
    """Set the complete generation aside, before `pid` makes the first change in it.

    The old markers stay in sight until something is written (`hide_markers`): a program that removes the step file
    by file expects to find them. Raises OSError (ENOSPC) with the step as it was.
    """
    manifest = record.manifest
    # A step that is renamed meanwhile keeps its old generation, so the next one of its name needs another place.
    name = f"{manifest.step}.{manifest.generation}.{uuid.uuid4().hex[:12]}"
    old_directory = registry.tier.generations / name
    try:
        links = overwrite.set_aside(record.directory, old_directory)
    except OSError:
        overwrite.remove_tree(old_directory.with_name(name + overwrite.BUILDING))
        raise
    registry.crash("overwrite:set-aside")
    changed_at = manifest.changed_at
    manifest.overwrite = Overwrite(
        generation=manifest.generation + 1,
        started_at=time.time(),
        participants=record.participants_with(pid),
        old_directory=str(old_directory.relative_to(registry.tier.path)),
        old_files={
            inner: _with_checksum(link, manifest.files.get(inner), is_stub=registry.object_tier.is_stub(link.ino))
            for inner, link in links.items()
        },
        removed_only=True,
    )
    record.touch()
    try:
        registry.save(record)
    except OSError:
        manifest.overwrite, manifest.changed_at = None, changed_at
        registry.discard(old_directory)
        raise
    record.first_write_at = time.monotonic()
    registry.crash("overwrite:recorded")
    registry.update_latest(manifest.namespace)
    registry.wake.set()
    log.info("a complete step is being changed; its old generation is kept", extra=registry.extra(record))


def hide_markers(registry: StepRegistry, record: StepRecord) -> None:
    """Take the old markers away, so that a load fails rather than mixes generations. Done before the first write.

    Raises OSError (ENOSPC) with the markers in place.
    """
    current = record.manifest.overwrite
    if current is None or not current.removed_only:
        return
    current.removed_only = False
    try:
        registry.save(record)
    except OSError:
        current.removed_only = True
        raise
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
        if registry.rules.match(inner) is not None:
            if record.is_of_old_generation(inner):
                with overwrite.keeping_times((record.directory / inner).parent):
                    (record.directory / inner).unlink()
            # Also what is gone already: a daemon that died may have removed it and not said so.
            registry.invalidate_inside(record, inner)


def drop_stale_markers(registry: StepRegistry, record: StepRecord, inner: str) -> None:
    """A step that was complete once and lost files since has its marker still. Called before `inner` is written.

    The marker would vouch for new files beside old ones, so it goes with the first shard that is written.
    """
    manifest = record.manifest
    if manifest.state == "complete" or manifest.marker is None or PurePosixPath(inner).suffix not in SHARD_SUFFIXES:
        return
    for name in list(manifest.files):
        if registry.rules.match(name) is not None:
            (record.directory / name).unlink(missing_ok=True)
            registry.invalidate_inside(record, name)
            del manifest.files[name]
    manifest.marker = None
    manifest.generation += 1
    registry.save_or_later(record)


async def renew(registry: StepRegistry, record: StepRecord, inner: str, *, truncate: bool) -> bool:
    """Give a name that stands for a file of the old generation a new inode: empty, or with the same bytes.

    False when it does not stand for one (any more). The old inode stays with whoever holds it.
    """
    current = record.manifest.overwrite
    if current is None or not _is_to_renew(registry, record, inner):
        return False
    async with record.lock:
        old_directory = registry.old_directory(record)
        if record.manifest.overwrite is not current or old_directory is None:
            return False
        if not _is_to_renew(registry, record, inner):
            return True  # by another request, while this one waited
        scratch = old_directory.with_name(f"{old_directory.name}.{uuid.uuid4().hex[:12]}.new")
        if truncate:
            overwrite.make_empty(old_directory / inner, scratch)
        else:
            await trio.to_thread.run_sync(overwrite.make_copy, old_directory / inner, scratch)
        # A program may have removed or replaced the name during the copy, and that counts.
        if record.manifest.overwrite is current and _is_to_renew(registry, record, inner):
            if not truncate:
                current.copied[inner] = scratch.lstat().st_ino
                registry.save_or_later(record)
            overwrite.put_in_place(scratch, record.directory / inner)
            registry.crash("overwrite:replaced")
        else:
            scratch.unlink(missing_ok=True)
    registry.invalidate_inside(record, inner)
    return True


def _is_to_renew(registry: StepRegistry, record: StepRecord, inner: str) -> bool:
    """The name stands for a file of the old generation, or for a marker of it that was hidden."""
    return record.is_of_old_generation(inner) or is_hidden(registry, record, inner)


def is_hidden(registry: StepRegistry, record: StepRecord, inner: str) -> bool:
    """The old generation's marker of that name was taken out of sight, and there is no other yet."""
    current = record.manifest.overwrite
    return (
        current is not None
        and inner in current.old_files
        and registry.rules.match(inner) is not None
        and not os.path.lexists(record.directory / inner)
    )


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
        manifest.added.clear()
        manifest.note = f"no longer complete: {', '.join(removed[:4])}{more} removed by a program"
    else:
        markers = frozenset(inner for inner in current.old_files if registry.rules.match(inner) is not None)
        for inner in overwrite.put_back(record.directory, old_directory, current.old_files, markers):
            registry.invalidate_inside(record, inner)
        regular = record.scan()
        manifest.files = {inner: entry for inner, entry in current.old_files.items() if inner in regular}
        manifest.added &= manifest.files.keys()
        manifest.note = f"an overwrite was given up ({why}) and generation {manifest.generation} put back"
    manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
    manifest.overwrite = None
    record.first_write_at = None
    record.only_looked.clear()
    registry.crash("put-back:done")
    record.superseded.append(old_directory)
    registry.save_or_later(record)
    log.warning("%s", manifest.note, extra=registry.extra(record))
    registry.lines.write(manifest.namespace, manifest.note, level="WARNING", step=manifest.number)
    registry.update_latest(manifest.namespace)
    registry.cluster.changed(record)


def _with_checksum(link: FileEntry, known: FileEntry | None, *, is_stub: bool) -> FileEntry:
    """The kept inode, with the checksum that is known of it."""
    if known is None or known.ino != link.ino:
        return FileEntry(link.size_bytes, link.mtime_ns, link.ino, None, True)
    mtime_ns = known.mtime_ns if is_stub else link.mtime_ns  # bringing bytes moves that of the inode
    return FileEntry(link.size_bytes, mtime_ns, link.ino, known.checksum, True)
