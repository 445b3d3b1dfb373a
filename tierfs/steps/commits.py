"""Commit: the one moment when a step becomes whole."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import trio

from tierfs.errors import CommitRefused, MarkerUnreadable
from tierfs.steps.completion import Shortfall, shortfall
from tierfs.steps.markers import Marker, MarkerContent, is_data_file_name, read_dcp_marker
from tierfs.steps.news import reached
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.units import format_duration, format_size

log = logging.getLogger("tierfs.steps")

#: close(2) returns before the kernel's RELEASE is handled, so a marker may come a moment before the last file is
#: known to be closed. A file that is open for longer than this really is.
CLOSE_GRACE_S = 5.0
WAITS_FOR_OTHERS = "waits for files of nodes, or for the catalogue, that can't be reached now"


async def check_commit(
    registry: StepRegistry, record: StepRecord, marker: Marker, path: Path, *, completes: bool
) -> frozenset[str] | None:
    """Read the marker at `path`, about to be renamed into place, and hold it against what the step has.

    Returns the files it names (paths inside the step), or None when the marker can't be read, or other nodes' files
    are not known to be there: then the rename may go on, but the step doesn't become complete. Where it `completes` the
    step, it is complete for all nodes once this returns. Raises CommitRefused where files are missing, short, stale or
    open, the marker among them: of two programs that save one step, the other may be about to write it.
    """
    being_renamed = str(path.relative_to(record.directory))
    if not await _closed(record, frozenset({being_renamed})):
        raise _refused(registry, record, marker, Shortfall(still_open=(being_renamed,)))
    try:
        content = await trio.to_thread.run_sync(read_dcp_marker, path)
    except MarkerUnreadable as error:
        record.manifest.note = error.message
        registry.problem("warning", f"{error.message}; the step stays incomplete", record.rel)
        log.warning("%s", error.message, extra=registry.extra(record, marker.name))
        return None
    directory = f"{marker.directory}/" if marker.directory else ""
    named = frozenset(directory + name for name in content.files)
    await _closed(record, named)
    lacking = shortfall(record, marker, content)
    if registry.cluster.shares:
        # What is not here may be on other nodes, and what is here of an older generation may be newer there.
        lacking = Shortfall(still_open=lacking.still_open)
    if lacking:
        raise _refused(registry, record, marker, lacking)
    if completes:
        content = MarkerContent({directory + name: least for name, least in content.files.items()})
        if await _agree(registry, record, marker.name_inside, content, str(path.relative_to(record.directory))) is None:
            return None
    registry.crash("commit:checked")
    return named


async def _closed(record: StepRecord, names: frozenset[str]) -> bool:
    """Whether nobody has one of these files open for writing, once whoever just closed them is known to have."""
    with trio.move_on_after(CLOSE_GRACE_S):
        while not names.isdisjoint(record.open_names()):
            await record.writer_left.wait()
        return True
    return False


async def commit_with_others(
    registry: StepRegistry, record: StepRecord, *, marker: str | None, named: frozenset[str], note: str = ""
) -> bool:
    """`commit`, for a step that is whole as it lies here. False where other nodes have a say and it is not (yet)."""
    if registry.cluster.shares:
        if marker is not None and not registry.cluster.owns(record, marker):
            return False  # the node that wrote the marker judges
        content = MarkerContent(dict.fromkeys(named, 0)) if named else None
        try:
            if await _agree(registry, record, marker, content, marker, patient=False) is None:
                return False
        except CommitRefused as error:
            if record.manifest.note != error.message:
                log.info("%s", error.message, extra=registry.extra(record))
            record.manifest.note = error.message
            return False
        if registry.records.get(record.key) is not record:
            return False
    if not record.is_complete:
        commit(registry, record, marker=marker, named=named, note=note)
    return True


async def _agree(
    registry: StepRegistry,
    record: StepRecord,
    marker: str | None,
    content: MarkerContent | None,
    at: str | None,
    *,
    patient: bool = True,
) -> str | None:
    """How the commit came about; None where it has to wait for other nodes."""
    agreement = await registry.cluster.agree(record, marker, content, at, patient=patient)
    if agreement != "pending":
        return agreement
    if record.manifest.note == WAITS_FOR_OTHERS:
        return None
    record.manifest.note = WAITS_FOR_OTHERS
    record.unsaved = True
    log.warning("a step is not complete yet: it %s", record.manifest.note, extra=registry.extra(record))
    registry.lines.write(
        record.manifest.namespace, f"not complete yet: {record.manifest.note}", level="WARNING",
        step=record.manifest.number,
    )  # fmt: skip
    return None


def _refused(registry: StepRegistry, record: StepRecord, marker: Marker, lacking: Shortfall) -> CommitRefused:
    """Says it to people; the error is for the program."""
    sentence = lacking.sentence()
    message = (
        f"commit of {record.rel} refused: {sentence}. The step stays incomplete, older steps stay whole; save it again"
    )
    record.manifest.note = f"commit refused: {sentence}"
    record.unsaved = True
    log.error("%s", message, extra=registry.extra(record, marker.name))
    registry.lines.write(
        record.manifest.namespace, f"commit refused: {sentence}", level="ERROR", step=record.manifest.number
    )
    registry.problem("error", message, record.rel)
    return CommitRefused(
        message,
        missing=lacking.missing + lacking.stale + lacking.still_open,
        short={name: (has, least) for name, has, least in lacking.short},
    )


def commit(
    registry: StepRegistry, record: StepRecord, *, marker: str | None, named: frozenset[str], note: str = ""
) -> None:
    """The step is whole: say so in the manifest, let go of the old generation, and move `latest`.

    Doesn't fail: what made the step whole has happened. Where the manifest can't be saved (ENOSPC), the old generation
    goes first, which makes room; where a daemon dies just then, its successor finds the step whole by its marker.
    """
    manifest = record.manifest
    current = manifest.overwrite
    old_directory = registry.old_directory(record)
    old_bytes = sum(entry.size_bytes for entry in current.old_files.values()) if current is not None else 0
    manifest.files = {
        inner: entry
        for inner, entry in record.scan().items()
        # Left over from an earlier save by more ranks: it lies there, but is no part of this step.
        if not (named and is_data_file_name(inner.rpartition("/")[2]) is not None and inner not in named)
    }
    manifest.added.clear()
    manifest.populated = True
    manifest.bytes = sum(entry.size_bytes for entry in manifest.files.values())
    manifest.marker = marker
    manifest.state = "complete"
    manifest.generation = current.generation if current is not None else manifest.generation
    manifest.completed_at = time.time()
    manifest.overwrite = None
    manifest.note = note
    record.only_looked.clear()
    registry.crash("commit:renamed")
    registry.object_tier.completed(record)
    registry.cluster.completed(record)
    registry.save_or_later(record)
    registry.crash("commit:saved")
    if old_directory is not None:
        registry.discard(old_directory, size_bytes=old_bytes)
    registry.checksum_soon(
        record, {inner for inner, entry in manifest.files.items() if entry.sealed and entry.checksum is None}
    )
    registry.clear_problems(record.rel)
    took, seconds = "", None
    if record.first_write_at is not None:
        seconds = time.monotonic() - record.first_write_at
        took = f" in {format_duration(seconds)}"
        record.first_write_at = None
    registry.lines.write(
        manifest.namespace,
        f"complete: {len(manifest.files)} files, {format_size(manifest.bytes)}{took}, generation {manifest.generation}",
        step=manifest.number,
    )
    log.info("step is complete", extra=registry.extra(record))
    registry.news.tell(
        reached(
            *record.key,
            "ram",
            generation=manifest.generation,
            size_bytes=manifest.bytes,
            files=len(manifest.files),
            seconds=seconds,
        )
    )
    registry.update_latest(manifest.namespace)
    registry.make_room(0)
    registry.wake.set()
