"""What people and programs are told about steps: the step parts of `status`, `ls` and `stat`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import trio

from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

#: A step that is being written and has more files is looked at in a thread: about 1 ms.
INLINE_FILES = 300


def describe_step(
    registry: StepRegistry, record: StepRecord, scanned: Mapping[str, FileEntry] | None = None
) -> dict[str, Any]:
    """One step as the `--json` contract has it. `scanned` is what lies in it, where that was looked at already."""
    manifest = record.manifest
    now = time.time()
    files = manifest.files if record.is_complete else record.scan() if scanned is None else scanned
    count, size = len(files), sum(entry.size_bytes for entry in files.values())
    if not manifest.populated and manifest.persisted is not None:
        count, size = manifest.persisted.files, manifest.persisted.bytes
    newest = registry.newest_complete(manifest.namespace)
    return {
        "namespace": manifest.namespace,
        "step": manifest.step,
        "number": manifest.number,
        "state": record.shown_state,
        "generation": manifest.generation,
        "overwriting": manifest.overwrite is not None,
        "files": count,
        "bytes": size,
        "checksummed": sum(entry.checksum is not None for entry in files.values()),
        "pinned": manifest.pinned,
        "latest": newest is record,
        "writers": len(record.writers),
        "completed_at": manifest.completed_at,
        "age_s": now - (manifest.completed_at or manifest.changed_at),
        "note": manifest.note,
        "ram_bytes": size,
        "stubs": 0,
        **describe_tiers(registry, record),
    }


def describe_tiers(registry: StepRegistry, record: StepRecord) -> dict[str, Any]:
    """Where the step's bytes are; `level` is how durable it is: ram, disk, replica or object."""
    described = {"disk": None, **registry.object_tier.describe(record), **registry.cluster.describe(record)}
    if described["level"] in ("ram", "disk") and (described.get("replica") or {}).get("state") == "replicated":
        described["level"] = "replica"
    return described


def step_tier(described: Mapping[str, Any]) -> str:
    """Where a step's bytes are: `ram`; `disk`, `object`, or `replica` on other nodes, where they have to be fetched
    from there; `ram+disk` and so on where some have to."""
    if not described.get("stubs"):
        return "ram"
    if (described.get("disk") or {}).get("state") == "stored":
        elsewhere = "disk"
    else:
        elsewhere = "replica" if described.get("replica") is not None and described["level"] != "object" else "object"
    return f"ram+{elsewhere}" if described.get("ram_bytes") else elsewhere


def step_bytes(record: StepRecord) -> int:
    """Of all its files as they are now, also of those that have no name here yet."""
    manifest = record.manifest
    if not manifest.populated and manifest.persisted is not None:
        return manifest.persisted.bytes
    return sum(entry.size_bytes for entry in record.scan().values())


async def describe_namespaces(registry: StepRegistry) -> list[dict[str, Any]]:
    """All namespaces with their steps, oldest number first. Requests are answered between one step and the next."""
    described: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(registry.records.values(), key=lambda found: (found.key[0], found.manifest.number)):
        scanned = None
        if not record.is_complete and len(record.manifest.files) > INLINE_FILES:
            scanned = await trio.to_thread.run_sync(record.scan)
        else:
            await trio.lowlevel.checkpoint()
        if registry.records.get(record.key) is record:
            described.setdefault(record.manifest.namespace, []).append(describe_step(registry, record, scanned))
    return [
        {
            "namespace": namespace,
            "latest": next((step["step"] for step in steps if step["latest"]), None),
            "steps": steps,
        }
        for namespace, steps in described.items()
    ]
