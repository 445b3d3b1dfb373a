"""All nodes' files of one generation of a step, merged from the parts in the catalogue. Pure.

A part's page never vanishes while its step lives: what is given up, and a page that is needed no longer, is **put
empty** (a Part without files), so that whoever reads only what is newer than he knows sees it. Pages go away with the
whole generation, once a newer one is complete, or with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from tierfs.catalog.records import FileRecord
from tierfs.steps.record import SHARD_SUFFIXES
from tierfs.steps.registry import Key
from tierfs.transport.peers import SMALL_FILE_BYTES


@dataclass(frozen=True)
class StepFiles:
    """`revision` is the catalogue's at which the parts were read: no part below it is newer than what is here."""

    key: Key
    generation: int
    revision: int
    #: By the node that the part is of, without its ending; then by the path inside the step.
    parts: dict[str, dict[str, FileRecord]]
    #: The same of what was added to the complete generation (NODE+ in the catalogue).
    added: dict[str, dict[str, FileRecord]]
    #: What the step holds: one file a name.
    files: dict[str, FileRecord]

    @cached_property
    def parts_of_version(self) -> Mapping[str, tuple[str, ...]]:
        """By version, whose parts list it: who holds such a part whole holds these bytes. Additions are not among
        them, since they may still change."""
        found: dict[str, tuple[str, ...]] = {}
        for node in sorted(self.parts):
            for file in self.parts[node].values():
                listed = found.get(file.version, ())
                if node not in listed:
                    found[file.version] = (*listed, node)
        return found


def merge(
    key: Key,
    generation: int,
    revision: int,
    parts: Mapping[str, Mapping[str, FileRecord]],
    added: Mapping[str, Mapping[str, FileRecord]],
    *,
    is_protected: Callable[[str, FileRecord], bool] = lambda inner, file: False,
) -> StepFiles:
    """One view of all parts, the same in whatever order they come.

    Of several files under one name the one that was opened last wins (`opened_at`, then the node's name, then the
    version). An addition wins over a part's file, unless that one is protected (`is_protected(inner, file)`).
    """
    files: dict[str, FileRecord] = {}
    for part in parts.values():
        for inner, file in part.items():
            other = files.get(inner)
            if other is None or _age(file) > _age(other):
                files[inner] = file
    additions: dict[str, FileRecord] = {}
    for part in added.values():
        for inner, file in part.items():
            other = additions.get(inner)
            if other is None or _age(file) > _age(other):
                additions[inner] = file
    for inner, file in additions.items():
        stands = files.get(inner)
        if stands is None or not is_protected(inner, stands):
            files[inner] = file
    return StepFiles(
        key=key,
        generation=generation,
        revision=revision,
        parts={node: dict(parts[node]) for node in sorted(parts)},
        added={node: dict(added[node]) for node in sorted(added)},
        files=dict(sorted(files.items())),
    )


def is_shard(inner: str, file: FileRecord) -> bool:
    """A file whose change makes the step another one, whatever its name: as `StepRecord.is_protected` judges."""
    return PurePosixPath(inner).suffix in SHARD_SUFFIXES or file.size_bytes >= SMALL_FILE_BYTES


def _age(file: FileRecord) -> tuple[object, ...]:
    # All fields, so that even records that never should be there at once have one order.
    checksum, rest = file.checksum or "", (file.size_bytes, file.mtime_ns, file.mode, file.uid, file.gid)
    return (file.opened_at, file.node, file.version, checksum, *rest)
