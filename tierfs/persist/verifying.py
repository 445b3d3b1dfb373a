"""Is what the object tier has of a step still what was committed there? Every byte is read back.

Changes nothing. A store that can't be asked is no damage: that is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierfs.checksum import to_text
from tierfs.errors import NotFound, ObjectCorrupt, ObjectMissing
from tierfs.objects.client import ObjectClient
from tierfs.persist.layout import file_key, manifest_key, step_prefix
from tierfs.persist.object_manifest import MAX_BYTES, ObjectFile, ObjectManifest, read_manifest
from tierfs.persist.reading_back import ReadBack
from tierfs.persist.reporting import Progress, all_of, reporting
from tierfs.persist.selection import select
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.persist")

FILES_AT_ONCE = 8


@dataclass
class Examined:
    """What was found of one step. `manifest` is None where the commit itself is missing or damaged, and then
    `manifest_reason` says so. `bad` says of files what is wrong with them."""

    manifest: ObjectManifest | None = None
    manifest_reason: str = ""
    bad: dict[str, str] = field(default_factory=dict)
    files: int = 0

    @property
    def is_good(self) -> bool:
        return self.manifest is not None and not self.bad


async def examine(client: ObjectClient, namespace: str, step: str, reader: ReadBack) -> Examined:
    """Read a committed step back and compare. Raises ObjectError where the store can't be asked."""
    try:
        data, _ = await client.get(manifest_key(namespace, step), most_bytes=MAX_BYTES)
        manifest = read_manifest(data, namespace, step)
    except ObjectMissing:
        return Examined(manifest_reason="is not committed in the object tier any more: its manifest is missing there")
    except ObjectCorrupt as error:
        return Examined(manifest_reason=f"has no good commit in the object tier: {error.message}")
    return await examine_files(client, manifest, reader)


async def examine_files(client: ObjectClient, manifest: ObjectManifest, reader: ReadBack) -> Examined:
    """The same for a manifest that is known. Raises ObjectError."""
    found = Examined(manifest)
    listing = await client.list_all(step_prefix(manifest.namespace, manifest.step))
    sizes = {info.key: info.size_bytes for info in listing.objects}
    jobs = [partial(_examine_file, reader, manifest, inner, sizes, found) for inner in sorted(manifest.files)]
    await all_of(jobs, at_once=FILES_AT_ONCE)
    return found


async def _examine_file(
    reader: ReadBack, manifest: ObjectManifest, inner: str, sizes: Mapping[str, int], found: Examined
) -> None:
    key = file_key(manifest.namespace, manifest.step, inner)
    reason = await _why_bad(reader, key, manifest.files[inner], sizes.get(key), manifest.chunk_bytes)
    if reason:
        found.bad[inner] = reason
    else:
        found.files += 1


async def _why_bad(reader: ReadBack, key: str, file: ObjectFile, size: int | None, chunk_bytes: int) -> str:
    if size is None:
        return "is missing in the object tier"
    if size != file.size_bytes:
        return f"has {size} bytes in the object tier, {file.size_bytes} were committed"
    try:
        read = await reader.checksum(key, size, chunk_bytes=chunk_bytes)
    except ObjectMissing:
        return "is missing in the object tier"
    except ObjectCorrupt as error:
        return f"can't be read back: {error.message}"
    wrong = [at for at, (is_, was) in enumerate(zip(read.chunks, file.chunks, strict=False)) if is_ != was]
    if wrong or len(read.chunks) != len(file.chunks):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        ranges = ", ".join(f"{at * chunk_bytes}-{min(size, (at + 1) * chunk_bytes) - 1}" for at in wrong[:3])
        return f"has other bytes in the object tier than were committed, in the range {ranges or 'of all'}{more}"
    if read.full != file.checksum:
        return f"has the checksum {read.text} in the object tier, {to_text(file.checksum)} was committed"
    return ""


async def verify(registry: StepRegistry, client: ObjectClient, rel: str, progress: Progress) -> dict[str, Any]:
    """Examine every persisted step below the path. `unsealed` counts the steps that are not in the object tier (yet).

    Raises NotFound where there is none at all, ObjectError where the store can't be asked.
    """
    found = [selected.record for selected in select(registry, rel)]
    records = [record for record in found if record.manifest.persisted is not None]
    if not records:
        raise NotFound(f"no step below {rel or 'the mount'} is in the object tier, so there is nothing to verify")
    result: dict[str, Any] = {"files": 0, "bytes": 0, "bad": [], "unsealed": len(found) - len(records)}
    reader = ReadBack(client)
    total = sum(record.manifest.persisted.bytes for record in records if record.manifest.persisted is not None)
    at: list[str] = [""]

    async def work() -> None:
        for record in records:
            at[0] = record.rel
            await _verify_step(registry, client, record, reader, result)

    def report() -> dict[str, Any]:
        return {"files": result["files"], "bytes": reader.passed_bytes, "bytes_total": total, "path": at[0]}

    await reporting(work, report, progress)
    result["bytes"] = reader.passed_bytes
    return result


async def _verify_step(
    registry: StepRegistry, client: ObjectClient, record: StepRecord, reader: ReadBack, result: dict[str, Any]
) -> None:
    before = record.manifest.persisted
    examined = await examine(client, *record.key, reader)
    if record.manifest.persisted != before or registry.records.get(record.key) is not record:
        result["unsealed"] += 1  # removed or sent again meanwhile
        return
    result["files"] += examined.files
    bad = {f"{record.rel}/{inner}": reason for inner, reason in examined.bad.items()}
    if examined.manifest_reason:
        bad[record.rel] = examined.manifest_reason
    for path, reason in sorted(bad.items()):
        result["bad"].append({"path": path, "reason": reason})
        registry.problem("error", f"{path} {reason}; `tierfs repair {record.rel}` says what can be done", record.rel)
        log.error("%s", reason, extra={**registry.extra(record, path[len(record.rel) + 1 :]), "tier": "object"})
