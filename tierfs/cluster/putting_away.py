"""A marker that gets its name before its step is complete: what may be of another save goes out of sight.

The marker's writer is told that the rename was done, though files of other nodes are not known to be sealed. Under
their names there may be files of the older generation here, or copies of an earlier attempt; a load that found the
marker beside them would mix saves. Without them it fails, until the catalogue says which files belong to it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tierfs.cluster.versions import read_version, whole_version
from tierfs.hydrate.stubs import MarkDamaged, read_mark
from tierfs.steps.overwrite import keeping_times
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.copies import Copies

log = logging.getLogger("tierfs.cluster")


def put_away_others(registry: StepRegistry, copies: Copies, record: StepRecord, named: Iterable[str]) -> None:
    """Takes the names of what other nodes wrote, or an older generation holds. No bytes go: an old generation keeps
    its own, and whole copies of this one go to the shelf. Some 50 µs a file."""
    for inner in named:
        path = record.directory / inner
        try:
            if record.is_of_old_generation(inner):
                with keeping_times(path.parent):
                    path.unlink()
            else:
                version = whole_version(path)
                mark = None if version is not None else read_mark(path)
                if version is None and mark is None and read_version(path) is None:
                    continue  # being written here
                if version is not None and version.startswith(f"{copies.node}/"):
                    continue
                if version is not None:
                    place = copies.place(record.key, version)
                    path.replace(place)
                    copies.shelved(record.key, version, place)
                else:
                    path.unlink()
        except FileNotFoundError:
            continue
        except (OSError, MarkDamaged) as error:
            log.error("%s can't be put out of sight: %s", path, error, extra=registry.extra(record, inner))
            with contextlib.suppress(OSError):
                path.unlink()
        record.manifest.files.pop(inner, None)
        registry.invalidate_inside(record, inner)
    record.unsaved = True


def drop_marker(registry: StepRegistry, record: StepRecord, marker: str) -> bool:
    """The marker goes, unless it is the older generation's. OSError."""
    if record.is_of_old_generation(marker):
        return False
    (record.directory / marker).unlink(missing_ok=True)
    record.manifest.files.pop(marker, None)
    registry.invalidate_inside(record, marker)
    return True
