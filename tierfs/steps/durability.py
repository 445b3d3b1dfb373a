"""What a program waits for when it completes a step, or syncs a file: the settings `durability`."""

from __future__ import annotations

import logging

import trio

from tierfs.errors import LevelNotReached
from tierfs.steps import wishes
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.units import format_duration

log = logging.getLogger("tierfs.steps")


def level_wanted(registry: StepRegistry, record: StepRecord) -> str:
    """What the completing rename of this step waits for: ram, replica or object."""
    wished = wishes.durability_of(record.directory)
    wanted = wished or registry.settings.for_namespace(record.manifest.namespace).durability.commit
    if wanted == "auto":
        return "replica" if registry.cluster.has_peers() else "ram"
    return wanted


async def wait_for_level(registry: StepRegistry, rel: str) -> None:
    """After the rename that put `rel` in place: until the step that it completed has the level that is asked for.

    Returns at once for any other rename, and for a step that no policy owes to the object tier. A level that is not
    reached in time is said in the log and in the step's note; with `durability.strict` it is raised as LevelNotReached
    (EIO), though the step is complete in RAM and goes on to be copied or sent.
    """
    where = registry.names.locate(rel)
    record = registry.at(where) if where is not None else None
    if record is None or where is None or not record.is_complete or record.manifest.marker != where.inner:
        return
    durability = registry.settings.for_namespace(where.namespace).durability
    wanted = level_wanted(registry, record)
    within_s = durability.replica_timeout_s if wanted == "replica" else durability.timeout_s
    with trio.move_on_after(within_s):
        if wanted == "replica":
            await registry.cluster.wait_replicated(record)
        elif wanted == "object" and record.manifest.owed:
            await registry.object_tier.wait_persisted(record)
        return
    place, goes_on = ("on other nodes", "copied") if wanted == "replica" else ("in the object tier", "sent")
    message = (
        f"{record.rel} is complete in RAM, but not {place} within {format_duration(within_s)}; "
        f"it goes on being {goes_on} (`tierfs status` says what it waits for)"
    )
    log.warning("%s", message, extra=registry.extra(record))
    registry.lines.write(where.namespace, f"not {place} in time", level="WARNING", step=where.number)
    if durability.strict:
        raise LevelNotReached(message)


async def wait_for_file(registry: StepRegistry, rel: str, ino: int) -> None:
    """At an fsync of the file: until other nodes hold what is written of it, where `durability.fsync` is replica.

    Not reached in time is said in the log, and with `durability.strict` raised as LevelNotReached.
    """
    where = registry.names.locate(rel)
    if where is None or not where.inner or not registry.cluster.has_peers():
        return
    durability = registry.settings.for_namespace(where.namespace).durability
    if durability.fsync != "replica":
        return
    with trio.move_on_after(durability.replica_timeout_s):
        await registry.cluster.wait_file_replicated(rel, ino)
        return
    within = format_duration(durability.replica_timeout_s)
    message = f"{rel} is not on other nodes within {within}; it goes on being copied"
    log.warning("%s", message, extra={"namespace": where.namespace, "step": where.step, "file": where.inner})
    if durability.strict:
        raise LevelNotReached(message)
