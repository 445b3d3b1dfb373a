"""When a step is complete: its marker is there, and so is every file that the marker promises.

Reads markers and looks at files, decides nothing else and changes nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tierfs.errors import MarkerUnreadable
from tierfs.steps.manifest import FileEntry
from tierfs.steps.markers import (
    Marker,
    MarkerContent,
    MarkerRules,
    is_data_file_name,
    read_dcp_marker,
    read_index_marker,
)
from tierfs.steps.record import StepRecord

#: Frameworks whose marker-like file is not their last one: steps with such a name wait for this file.
#: HF Trainer (transformers/trainer.py, `_save_checkpoint`) and Lightning's FSDP strategy
#: (lightning/fabric/strategies/fsdp.py, `save_checkpoint`).
LAST_FILES = (
    (re.compile(r"checkpoint-\d+"), "trainer_state.json"),
    (re.compile(r".*\.ckpt"), "meta.pt"),
)


NO_MARKER = "no marker yet"


def waits_for_last_file(step: str) -> bool:
    """True for a step whose framework writes more after the file that otherwise is its marker."""
    return any(pattern.fullmatch(step) for pattern, _ in LAST_FILES)


@dataclass(frozen=True)
class Shortfall:
    """What a marker names and the step does not have (yet)."""

    missing: tuple[str, ...] = ()
    short: tuple[tuple[str, int, int], ...] = ()  # name, bytes it has, bytes it must have at least
    stale: tuple[str, ...] = ()  # still the old generation's
    still_open: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.short or self.stale or self.still_open)

    def sentence(self, most: int = 8) -> str:
        """For the log and for people: which files, and what is wrong with each."""
        parts = [f"{name} is missing" for name in self.missing]
        parts += [f"{name} has {has} bytes of at least {least}" for name, has, least in self.short]
        parts += [f"{name} was not written again and is the old generation's" for name in self.stale]
        parts += [f"{name} is still open for writing" for name in self.still_open]
        more = len(parts) - most
        return "; ".join(parts[:most]) + (f"; and {more} more" if more > 0 else "")


def shortfall(record: StepRecord, marker: Marker, content: MarkerContent) -> Shortfall:
    """Compare what the marker names with what is there now."""
    missing, short, stale, still_open = [], [], [], []
    is_open = record.open_names()
    for name, least in sorted(content.files.items()):
        inner = f"{marker.directory}/{name}" if marker.directory else name
        try:
            info = os.stat(record.directory / inner)
        except OSError:
            missing.append(inner)
            continue
        if info.st_size < least:
            short.append((inner, info.st_size, least))
        elif record.is_not_written_again(inner):
            stale.append(inner)
        elif inner in is_open:
            still_open.append(inner)
    return Shortfall(tuple(missing), tuple(short), tuple(stale), tuple(still_open))


@dataclass(frozen=True)
class Verdict:
    """`marker` (its path inside the step) makes the step complete, with these files named by it; or why not."""

    marker: str | None = None
    named: frozenset[str] = frozenset()
    why_not: str = ""


def judge(record: StepRecord, rules: MarkerRules) -> Verdict:
    """Is the step complete as it stands? Reads the markers, so call it in a thread. Never raises for what it reads."""
    here = record.scan()
    markers = {
        inner: marker
        for inner in here
        if (marker := rules.match(inner)) is not None
        and marker.directory == ""
        and not record.is_of_old_generation(inner)
    }
    last = next((name for pattern, name in LAST_FILES if pattern.fullmatch(record.manifest.step)), None)
    if last is not None:
        return _judge_by_last_file(record, rules, last, here)
    per_rank = {marker.rank: inner for inner, marker in markers.items() if marker.kind == "dcp-per-rank"}
    named: set[str] = set()
    why_not = NO_MARKER
    for inner, marker in sorted(markers.items()):
        if marker.kind == "dcp-per-rank":
            continue
        verdict = _check(record, inner, marker)
        if verdict.marker is not None:
            return verdict
        why_not = verdict.why_not
    if per_rank:
        ranks = {rank for name in here if (rank := is_data_file_name(PurePosixPath(name).name)) is not None}
        without = sorted(ranks - per_rank.keys())
        if without:
            return Verdict(why_not=f"ranks without a marker: {', '.join(map(str, without[:8]))}")
        if record.writers:
            return Verdict(why_not="files are open for writing")
        for inner in per_rank.values():
            verdict = _check(record, inner, markers[inner])
            if verdict.marker is None:
                return verdict
            named |= verdict.named
        return Verdict(per_rank[min(rank for rank in per_rank if rank is not None)], frozenset(named))
    return Verdict(why_not=why_not)


def _judge_by_last_file(record: StepRecord, rules: MarkerRules, last: str, here: dict[str, FileEntry]) -> Verdict:
    """Complete with its last file, unless a marker in it (also of a checkpoint inside the step) lacks something."""
    if last not in here:
        return Verdict(why_not=f"waits for {last}")
    if record.is_of_old_generation(last):
        return Verdict(why_not=f"waits for {last} to be written again")
    if record.writers:
        return Verdict(why_not="files are open for writing")
    for inner in here:
        marker = rules.match(inner)
        if marker is not None and not record.is_of_old_generation(inner):
            verdict = _check(record, inner, marker)
            if verdict.marker is None:
                return verdict
    return Verdict(last, frozenset(here))


def _check(record: StepRecord, inner: str, marker: Marker) -> Verdict:
    path = record.directory / inner
    if inner in record.open_names():
        return Verdict(why_not=f"{inner} is still open for writing")
    try:
        if marker.kind in ("dcp", "dcp-per-rank"):
            content = read_dcp_marker(path)
        elif inner.endswith(".index.json"):
            content = read_index_marker(path)
        elif record.writers:
            return Verdict(why_not="files are open for writing")
        else:
            return Verdict(inner, frozenset(record.scan()))
    except (MarkerUnreadable, OSError) as error:
        return Verdict(why_not=f"{inner} can't be read: {error}")
    lacking = shortfall(record, marker, content)
    if lacking:
        return Verdict(why_not=lacking.sentence())
    if marker.kind == "close" and record.writers:
        return Verdict(why_not="files are open for writing")
    directory = f"{marker.directory}/" if marker.directory else ""
    return Verdict(inner, frozenset(directory + name for name in content.files))
