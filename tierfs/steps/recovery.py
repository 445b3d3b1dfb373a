"""A new daemon finds the steps again: from their manifests, and from the tree, which is the truth."""

from __future__ import annotations

import logging
import os

from tierfs.steps import generations
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.manifest import FileEntry, delete_manifest, load_all, remove_unfinished
from tierfs.steps.names import StepPath
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.steps")


def recover(registry: StepRegistry) -> None:
    """Fill an empty registry. Blocking, before requests are served; a step of a thousand files takes milliseconds.

    What is done half is done again or undone: an overwrite goes on (its writers may live), old generations that no
    manifest names are freed, steps whose directory is gone are forgotten (or found under a new name, where a rename
    came through and nobody noted it). Every step that is not complete is judged. What the kernel may still remember
    differently is left in `registry.untold`.
    """
    tell, registry.invalidate = registry.invalidate, lambda directory, name: registry.untold.append((directory, name))
    try:
        _recover(registry)
    finally:
        registry.invalidate = tell


def _recover(registry: StepRegistry) -> None:
    remove_unfinished(registry.tier.meta)
    manifests, problems = load_all(registry.tier.meta)
    for problem in problems:
        # The tree still holds the files: the step is found again below, and judged by its marker.
        log.warning("%s; the step is judged anew by its marker", problem.message)
        problem.path.unlink(missing_ok=True)
    missed: list[StepRecord] = []
    for manifest in manifests:
        record = StepRecord(manifest, registry.root / manifest.namespace / manifest.step)
        if not record.directory.is_dir() or record.directory.is_symlink():
            missed.append(record)
        else:
            registry.records[record.key] = record
            _check(registry, record)
    for rel in _step_directories(registry):
        where = registry.names.locate(rel)
        if where is not None and registry.at(where) is None:
            found = registry.at_or_new(where)
            if found is not None:
                found.manifest.files = found.scan()
                _recognise(registry, found, where, missed)
    for record in missed:
        delete_manifest(registry.tier.meta, *record.key)
    _discard_unnamed(registry)
    for record in registry.records.values():
        if not record.is_complete:
            registry.judge_soon(record)
        registry.checksum_soon(
            record, {name for name, entry in record.manifest.files.items() if entry.sealed and entry.checksum is None}
        )
    for namespace in {namespace for namespace, _ in registry.records}:
        registry.update_latest(namespace)
        registry.invalidate(namespace, LATEST)


def _recognise(registry: StepRegistry, found: StepRecord, where: StepPath, missed: list[StepRecord]) -> None:
    """A step that nobody knows may be a known one under a new name: then it holds the same inodes."""
    inodes = {entry.ino for entry in found.manifest.files.values()}
    for record in missed:
        current = record.manifest.overwrite
        known = [*record.manifest.files.values(), *(current.old_files.values() if current is not None else ())]
        if any(entry.ino in inodes for entry in known):
            missed.remove(record)
            registry.move([(record, where)])
            _check(registry, record)
            return


def _check(registry: StepRegistry, record: StepRecord) -> None:
    manifest = record.manifest
    if not manifest.populated and manifest.overwrite is None:
        # A step of the object tier or of other nodes: its files are made when somebody looks into it. What is there was
        # made by an attempt that did not end; the next one goes on with it.
        return
    old_directory = registry.old_directory(record)
    if manifest.overwrite is not None and old_directory is not None:
        if old_directory.is_dir():
            generations.remove_old_markers(registry, record)
            for inner in manifest.overwrite.old_files:
                registry.invalidate_inside(record, inner)
        else:
            # The manifest says that a generation was set aside, and it is not there: nothing can be put back.
            manifest.overwrite = None
            manifest.state = "writing"
            manifest.note = "the generation set aside is gone; the step is judged anew"
            record.unsaved = True
    if manifest.state != "complete" or manifest.overwrite is not None:
        manifest.files = record.scan()
        return
    here = record.scan()
    lost = [
        name
        for name, entry in manifest.files.items()
        if record.is_protected(name, registry.rules) and not _is_still(entry, here.get(name))
    ]
    if not lost:
        # Other files may have come, gone and been replaced since the manifest was saved.
        manifest.added = (manifest.added | (here.keys() - manifest.files.keys())) & here.keys()
        manifest.files = here
        manifest.bytes = sum(entry.size_bytes for entry in here.values())
    else:
        manifest.state = "writing"
        manifest.completed_at = None
        manifest.note = f"no longer complete: {', '.join(sorted(lost)[:4])} changed while no daemon ran"
        manifest.files = here
        manifest.added.clear()
        record.unsaved = True
        log.warning("%s", manifest.note, extra=registry.extra(record))


def _is_still(entry: FileEntry, found: FileEntry | None) -> bool:
    """The file that was known; or a stub of the same bytes, which took its place just before the daemon died."""
    if found is None or found.size_bytes != entry.size_bytes:
        return found is not None and found.ino == entry.ino
    return found.ino == entry.ino or (found.checksum is not None and found.checksum == entry.checksum)


def _step_directories(registry: StepRegistry) -> list[str]:
    """Every directory of the tree that is a step, relative to the root; steps are not descended into."""
    found = []
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(registry.root / directory) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                rel = f"{directory}/{entry.name}" if directory else entry.name
                where = registry.names.locate(rel)
                if where is not None and where.inner == "":
                    found.append(rel)
                    # A name of digits may be a namespace of steps with better names (`2026/step_5`).
                    if not entry.name.isdigit():
                        continue
                pending.append(rel)
    return found


def _discard_unnamed(registry: StepRegistry) -> None:
    """Old generations, half-built ones and scratch files that no manifest names."""
    named = {old for record in registry.records.values() if (old := registry.old_directory(record)) is not None}
    for entry in list(registry.tier.generations.iterdir()):
        if entry not in named:
            registry.discard(entry)
