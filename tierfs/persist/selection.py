"""Which steps a command's path means. Paths are relative to the mount's root, "" is everything."""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.errors import NotFound
from tierfs.steps.names import safe_relative
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry


@dataclass(frozen=True)
class Selected:
    """A step that a path means. `is_named`: the path is in this very step, at `inner` ("" is the step itself)."""

    record: StepRecord
    is_named: bool = False
    inner: str = ""

    def holds(self, inner: str) -> bool:
        """The file of that path inside the step is meant."""
        return not self.inner or inner == self.inner or inner.startswith(self.inner + "/")


def select(registry: StepRegistry, rel: str) -> list[Selected]:
    """The step of a path in one, or all steps below a namespace, by number. Raises PathRefused, NotFound; of
    everything there may be none."""
    where = registry.names.locate(safe_relative(rel)) if rel else None
    if where is not None:
        record = registry.at_or_new(where)
        if record is None:
            raise NotFound(f"there is no step {where.step_rel}; `tierfs ls` lists those there are")
        return [Selected(record, True, where.inner)]
    found = [
        record
        for record in registry.records.values()
        if not rel or record.manifest.namespace == rel or record.manifest.namespace.startswith(rel + "/")
    ]
    if rel and not found:
        raise NotFound(f"there is no step below {rel}; `tierfs ls` shows what there is")
    found.sort(key=lambda record: (record.manifest.namespace, record.manifest.number, record.manifest.step))
    return [Selected(record) for record in found]
