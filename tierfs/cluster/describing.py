"""What is told of a step in a cluster: how many nodes hold it, and what of it is in this node's RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierfs.catalog.records import StepState
from tierfs.steps.record import StepRecord

if TYPE_CHECKING:
    from tierfs.cluster.tier import ClusterTier


def describe(tier: ClusterTier, record: StepRecord) -> dict[str, Any]:
    """The cluster's part of what `status` and `ls` tell of the step; see docs/cli.md."""
    seen = tier.view.states.get(record.key)
    is_this = seen is not None and seen.record.generation == record.manifest.generation
    state = seen.record if seen is not None and is_this and record.is_complete else None
    return {**_here(tier, record, state), "replica": _copies(tier, record, state)}


def _here(tier: ClusterTier, record: StepRecord, state: StepState | None) -> dict[str, Any]:
    manifest = record.manifest
    if not manifest.joined or not record.is_complete:
        return {}
    if manifest.populated or state is None:
        stubs = sum(tier.hydration.is_stub(entry.ino) for entry in manifest.files.values())
        return {"ram_bytes": tier.hydration.ram_bytes(record), "stubs": stubs}
    # Names of other nodes' files are made when somebody looks. Until then only the catalogue knows of them.
    return {"files": state.files, "bytes": state.bytes, "ram_bytes": tier.ram_bytes(record) or 0, "stubs": state.files}


def _copies(tier: ClusterTier, record: StepRecord, state: StepState | None) -> dict[str, Any]:
    replicas = tier.settings.for_namespace(record.manifest.namespace).replication.replicas
    wanted = replicas
    if not record.is_complete:
        return {"state": "none", "wanted": wanted, "copies": 0}
    is_believed = state is None or state.level != "replicated" or tier.stewardship.is_believed(record.key)
    if state is not None and state.level != "complete" and is_believed:
        return {"state": state.level, "wanted": wanted, "copies": wanted if state.level == "replicated" else 0}
    return {"state": "copying" if replicas > 1 else "none", "wanted": wanted, "copies": 1}
