"""What a person asks of the disk tier: wait, prefetch, verify and status."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from tierfs.checksum import CHUNK_BYTES
from tierfs.disk.direct_io import sum_range
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.tier import DiskTier
from tierfs.errors import NotFound
from tierfs.hydrate.prefetching import Prefetching
from tierfs.persist.object_manifest import ObjectFile
from tierfs.persist.reporting import Progress, reporting
from tierfs.persist.selection import select
from tierfs.steps.record import StepRecord


class DiskOperations:
    """Each takes paths relative to the mount's root, and answers what the command line prints with `--json`."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._threads = trio.CapacityLimiter(1)

    def status(self) -> dict[str, Any]:
        return self._tier.status()

    def problems(self) -> list[dict[str, str]]:
        return self._tier.problems()

    async def wait(self, rel: str, *, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
        """Until the complete steps below the path are on the disk. `reached` is False when time ran out, or one is not
        to be copied there. NotFound."""
        records = [found.record for found in select(self._tier.registry, rel)]

        async def wait() -> None:
            for record in records:
                while not record.is_complete and self._tier.registry.records.get(record.key) is record:
                    await self._tier.keeping.wait_for_news(0.2)
                await self._tier.wait_on_disk(record)

        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")):
            await reporting(wait, lambda: self._waiting(records), progress)
        reached = all(self._tier.on_disk(record) for record in records)
        return {"path": rel, "level": "disk", "reached": reached}

    def _waiting(self, records: Sequence[StepRecord]) -> dict[str, Any]:
        there = [record for record in records if self._tier.on_disk(record)]
        waiting = [record for record in records if record not in there]
        copied = [self._tier.keeping.progress(record.key) for record in waiting]
        return {
            "steps_done": len(there),
            "steps_total": len(records),
            "bytes": sum(record.manifest.bytes for record in there) + sum(each[0] for each in copied if each),
            "bytes_total": sum(record.manifest.bytes for record in records),
            "path": waiting[0].rel if waiting else "",
        }

    async def prefetch(self, paths: Sequence[str], *, globs: Sequence[str], progress: Progress) -> dict[str, Any]:
        return await Prefetching(self._tier.registry, self._tier.hydration).run(paths, globs=globs, progress=progress)

    async def verify(self, rel: str, progress: Progress) -> dict[str, Any]:
        """Read every file of the steps back from the disk. A step with a bad one is no longer taken for whole there;
        `unsealed` counts steps that are not on the disk."""
        records = [found.record for found in select(self._tier.registry, rel)]
        stored = {record.key: self._tier.index.get(record.key) for record in records}
        there = [each for each in stored.values() if each is not None]
        if rel and not there and self._tier.index.away:
            raise NotFound(f"the disk tier can't be used: {self._tier.index.away}")
        done = {"files": 0, "bytes": 0}
        bad: list[dict[str, str]] = []
        total = sum(each.size_bytes for each in there)

        async def verify() -> None:
            for each in there:
                for inner, file in sorted(each.step.files.items()):
                    reason = await self._wrong(each, inner, file)
                    if self._tier.index.get(each.key) is not each:
                        break  # dropped, or copied anew
                    done["files"] += 1
                    done["bytes"] += file.size_bytes
                    if reason:
                        bad.append({"path": f"{'/'.join(each.key)}/{inner}", "reason": reason})
                        self._tier.damaged(each, inner, reason)
                        break

        await reporting(verify, lambda: {**done, "bytes_total": total}, progress)
        return {**done, "bad": bad, "unsealed": len(records) - len(there), "stubs": 0}

    async def _wrong(self, stored: DiskStep, inner: str, file: ObjectFile) -> str:
        """Why the file is not what was stored; "" where it is."""
        path = stored.directory / inner
        for chunk, expected in enumerate(file.chunks):
            offset = chunk * CHUNK_BYTES
            length = min(CHUNK_BYTES, file.size_bytes - offset)
            try:
                found = await trio.to_thread.run_sync(partial(sum_range, path, offset, length), limiter=self._threads)
            except (OSError, EOFError) as error:
                return f"can't be read: {getattr(error, 'strerror', None) or error}"
            if found != expected:
                return f"has other bytes than were stored, from byte {offset} on"
        return ""
