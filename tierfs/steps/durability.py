"""What a program waits for when it completes a step: the setting `durability.commit`."""

from __future__ import annotations

import logging

import trio

from tierfs.errors import LevelNotReached
from tierfs.steps.registry import StepRegistry
from tierfs.units import format_duration

log = logging.getLogger("tierfs.steps")


async def wait_for_level(registry: StepRegistry, rel: str) -> None:
    """After the rename that put `rel` in place: until the step that it completed has the level that is asked for.

    Returns at once for any other rename, and for a step that no policy owes to the object tier. A level that is not
    reached in time is said in the log and in the step's note; with `durability.strict` it is raised as LevelNotReached
    (EIO), though the step is complete in RAM and goes on to be sent.
    """
    where = registry.names.locate(rel)
    record = registry.at(where) if where is not None else None
    if record is None or where is None or not record.is_complete or record.manifest.marker != where.inner:
        return
    durability = registry.settings.for_namespace(where.namespace).durability
    if durability.commit != "object" or not record.manifest.owed:
        return
    with trio.move_on_after(durability.timeout_s):
        await registry.object_tier.wait_persisted(record)
        return
    message = (
        f"{record.rel} is complete in RAM, but not in the object tier within {format_duration(durability.timeout_s)}; "
        f"it goes on being sent (`tierfs status` says what it waits for)"
    )
    log.warning("%s", message, extra=registry.extra(record))
    registry.lines.write(where.namespace, "not in the object tier in time", level="WARNING", step=where.number)
    if durability.strict:
        raise LevelNotReached(message)
