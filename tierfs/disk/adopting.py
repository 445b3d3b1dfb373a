"""Steps of the disk become steps of this node's tree: after RAM was lost, they are shown at once, stubs to be made."""

from __future__ import annotations

import logging
from dataclasses import replace

from tierfs.disk.disk_step import DiskStep
from tierfs.persist.adoption import adopt
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.disk")


def show(registry: StepRegistry, stored: DiskStep) -> StepRecord | None:
    """Make the step a name in the tree. None where something else has the name. OSError (ENOSPC)."""
    where = registry.names.locate("/".join(stored.key))
    if where is None or (where.namespace, where.step, where.inner) != (*stored.key, ""):
        log.warning("%s on the disk is no step by steps.patterns; it is not shown", "/".join(stored.key))
        return None
    record = adopt(registry, replace(stored.step, marker=stored.marker), None)
    if record is not None:
        registry.lines.write(stored.key[0], "shown from the local disk", step=stored.step.number)
    return record
