"""Stubs of a step that got another name: their marks say by which step's parts a holder is found."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace

import trio

from tierfs.hydrate.stubs import restore_times, write_mark
from tierfs.hydrate.table import StubTable
from tierfs.steps.record import StepRecord

log = logging.getLogger("tierfs.cluster")

#: Marks that are written before others have their turn: some 60 µs each.
_AT_ONCE = 8


async def mark_anew(table: StubTable, record: StepRecord) -> None:
    """Every stub of the step whose bytes other nodes hold is marked as the step's. What can't be is logged."""
    namespace, step = record.key
    for at, (inner, entry) in enumerate(list(record.manifest.files.items())):
        if at % _AT_ONCE == _AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
        part = table.get(entry.ino)
        if part is None or part.mark is None or not part.mark.version:
            continue  # what only the object tier has keeps the key that it has there
        mark = replace(part.mark, namespace=namespace, step=step)
        if mark == part.mark:
            continue
        try:
            fd = table.open(part)
        except FileNotFoundError:
            continue
        try:
            write_mark(fd, mark)
            part.mark = mark
            with suppress(OSError):
                restore_times(fd, mark)
        except OSError as error:
            log.error(
                "a stub of a renamed step can't be marked: %s",
                error,
                extra={"namespace": namespace, "step": step, "file": inner},
            )
        finally:
            os.close(fd)
