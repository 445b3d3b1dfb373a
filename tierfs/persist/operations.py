"""What a person asks of the object tier: flush, wait, prefetch, drain and status.

Answers are the `--json` contract of the command line (docs/cli.md). Reading back, repairing and importing have
modules of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from tierfs.errors import NotFound, SettingsError, TierfsError
from tierfs.hydrate.prefetching import Prefetching
from tierfs.objects.client import ObjectClient
from tierfs.persist.importing import Importing
from tierfs.persist.repairing import Repair
from tierfs.persist.reporting import Progress, all_of, reporting
from tierfs.persist.selection import select
from tierfs.persist.verifying import verify
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.hydrate.hydration import Hydration
    from tierfs.persist.deletions import Deletions
    from tierfs.persist.index import ObjectIndex
    from tierfs.persist.persister import Persister

log = logging.getLogger("tierfs.persist")

#: How often something is looked at that tells nobody when it changes.
LOOK_S = 0.2

LEVELS = ("ram", "object")


class ObjectOperations:
    """Each takes paths relative to the mount's root, and answers what the command line prints with `--json`."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        index: ObjectIndex,
        persister: Persister,
        hydration: Hydration,
        deletions: Deletions,
    ) -> None:
        self.registry = registry
        self.client = client
        self.index = index
        self.persister = persister
        self.hydration = hydration
        self.deletions = deletions

    # --- to the object tier

    async def flush(self, paths: Sequence[str], *, wait: bool, progress: Progress) -> dict[str, Any]:
        """Owe steps to the object tier, and with `wait` return once they are there. No path is everything.

        A step that is named and can't be persisted is in `failed`; below a namespace such steps are passed over.
        `steps` and `bytes` count what had to be sent, `already` the steps that were there. Raises NotFound.
        """
        owed: dict[Key, StepRecord] = {}
        already: set[Key] = set()
        failed: list[dict[str, str]] = []
        for rel in paths or [""]:
            refused: list[dict[str, str]] = []
            meant = 0
            for found in select(self.registry, rel):
                record = found.record
                reason = self._why_not(record)
                if reason:
                    refused.append({"path": record.rel, "reason": reason})
                    continue
                meant += 1
                if record.is_persisted:
                    already.add(record.key)
                elif record.key not in owed:
                    self.persister.owe(record, "demand")
                    owed[record.key] = record
            if rel and not meant:
                failed += refused
        records = list(owed.values())
        if wait:
            await reporting(
                lambda: all_of(
                    (partial(self._persist, record, failed) for record in records), at_once=len(records) or 1
                ),
                lambda: self._sending(records),
                progress,
            )
        told = {failure["path"] for failure in failed}
        done = [record for record in records if record.rel not in told]
        return {
            "steps": len(done),
            "bytes": sum(record.manifest.bytes for record in done),
            "already": len(already),
            "failed": failed,
        }

    def _why_not(self, record: StepRecord) -> str:
        """Why the step can't be persisted, "" where it can."""
        if not record.is_complete:
            why = f" ({record.manifest.note})" if record.manifest.note else ""
            doing = "being written again" if record.manifest.overwrite is not None else "not complete"
            return f"{doing}{why}; only complete steps go to the object tier"
        if self.registry.settings.for_namespace(record.manifest.namespace).persist.policy == "none":
            return (
                f"its namespace {record.manifest.namespace} has persist.policy none, so nothing of it goes to the "
                f"object tier; with demand go those that are asked for"
            )
        return ""

    async def _persist(self, record: StepRecord, failed: list[dict[str, str]]) -> None:
        await self.persister.wait_persisted(record)
        if not record.is_persisted or self.registry.records.get(record.key) is not record:
            failed.append({"path": record.rel, "reason": "removed or written again meanwhile"})

    def _sending(self, records: Sequence[StepRecord]) -> dict[str, Any]:
        """How far these steps are on their way."""
        done = sent = total = 0
        path = waiting_for = ""
        for record in records:
            progress = self.persister.progress(record)
            if record.is_persisted:
                done += 1
            if record.is_persisted or progress is None:
                total += record.manifest.bytes
                sent += record.manifest.bytes if record.is_persisted else 0
                continue
            total += progress.bytes_total
            sent += progress.bytes_sent
            if progress.state == "sending":
                path = path or record.rel
            waiting_for = waiting_for or progress.error
        return {
            "steps_done": done,
            "steps_total": len(records),
            "bytes": sent,
            "bytes_total": total,
            "path": path,
            "waiting_for": waiting_for,
        }

    async def wait(self, rel: str, *, level: str, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
        """Until the step reached the level: `ram` is complete, `object` is persisted. `reached` is False when time ran
        out. Raises NotFound where it is removed, and where nobody owes it, so that waiting would never end."""
        if level not in LEVELS:
            raise SettingsError(f"{level!r} is no level to wait for; there are {', '.join(LEVELS)}")
        found = select(self.registry, rel)
        if len(found) != 1 or not found[0].is_named:
            raise NotFound(f"{rel or 'the mount'} is no step; wait for one, such as run1/step_100")
        record = found[0].record
        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")) as scope:
            await reporting(
                lambda: self._reach(record, level),
                lambda: self._sending([record]),
                progress,
            )
        return {"path": record.rel, "level": level, "reached": not scope.cancelled_caught}

    async def _reach(self, record: StepRecord, level: str) -> None:
        while True:
            if self.registry.records.get(record.key) is not record:
                raise NotFound(f"{record.rel} was removed")
            if record.is_complete and (level == "ram" or record.is_persisted):
                return
            if not record.is_complete:
                await trio.sleep(LOOK_S)
                continue
            if not record.manifest.owed:
                raise TierfsError(
                    f"{record.rel} is not owed to the object tier, so waiting would never end; `tierfs flush` it first"
                )
            await self.persister.wait_persisted(record)
            await trio.lowlevel.checkpoint()

    async def drain(self, progress: Progress, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Until nothing is owed any more, steps and deletions, or time ran out: then `left` names what is."""
        seen: dict[Key, StepRecord] = {}

        def report() -> dict[str, Any]:
            seen.update((record.key, record) for record in self.persister.owed_records())
            return self._sending(list(seen.values()))

        report()
        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")):
            await reporting(self.persister.drain, report, progress)
        done = [record for record in seen.values() if record.is_persisted]
        left = [record.rel for record in self.persister.owed_records()]
        left += [f"{namespace}/{step}" for namespace, step in self.deletions.owed()]
        return {"steps": len(done), "bytes": sum(record.manifest.bytes for record in done), "left": sorted(left)}

    # --- from the object tier

    async def prefetch(self, paths: Sequence[str], *, globs: Sequence[str] = (), progress: Progress) -> dict[str, Any]:
        """Bring the bytes of all stubs below the paths into RAM. See `tierfs.hydrate.prefetching`."""
        return await Prefetching(self.registry, self.hydration).run(paths, globs=globs, progress=progress)

    # --- is it good?

    async def verify(self, rel: str, progress: Progress) -> dict[str, Any]:
        """Read back what the object tier has of the steps below the path. See `tierfs.persist.verifying`."""
        return await verify(self.registry, self.client, rel, progress)

    async def repair(self, rel: str, *, dry_run: bool, progress: Progress) -> dict[str, Any]:
        """Make damaged copies good from good ones. See `tierfs.persist.repairing`. Of everything: sweep as well."""
        work = Repair(self.registry, self.client, self.index, self.persister, self.hydration)
        answer = await work.run(rel, dry_run=dry_run, progress=progress)
        if not rel and not dry_run:
            await self.persister.sweeper.sweep()
        return answer

    async def adopt(self, rel: str, progress: Progress, *, force: bool = False) -> dict[str, Any]:
        """Make a step of a checkpoint that other means put at its place. See `tierfs.persist.importing`."""
        importing = Importing(self.registry, self.client)
        manifest, etag = await importing.run(rel, force=force, progress=progress)
        self.index.committed(manifest, etag)
        await self.index.refresh()
        return {
            "path": rel,
            "files": len(manifest.files),
            "bytes": manifest.size_bytes,
            "marker": manifest.marker,
        }

    # --- telling

    async def status(self) -> dict[str, Any]:
        """The object tier's part of `tierfs status`; asks the store nothing."""
        stats = self.client.stats
        owed = self.persister.owed_records()
        problem = self.index.problem or stats.last_error
        return {
            "url": self.client.url,
            # A single success since, of many requests at a time, takes the last error back.
            "reachable": not problem,
            "problem": problem,
            "conditional_put": self.persister.endpoint.conditional_put,
            "concurrency": stats.concurrency,
            "requests": stats.requests,
            "retries": stats.retries,
            "throttled": stats.throttled,
            "bytes_sent": stats.bytes_sent,
            "bytes_received": stats.bytes_received,
            "last_error": stats.last_error,
            "steps_owed": len(owed),
            "bytes_owed": self.persister.bytes_owed(),
            "deletions_owed": len(self.deletions.owed()),
            "parts_owed": len(self.persister.parts.owed()),
            "archive": self.persister.archiver.status() if self.persister.archiver is not None else None,
            "sending": [self._describe_owed(record) for record in owed],
            "namespaces": self._namespaces(owed),
            "problems": [*self.persister.problems(), *self.index.problems()],
        }

    def _describe_owed(self, record: StepRecord) -> dict[str, Any]:
        progress = self.persister.progress(record)
        if progress is None:
            return {
                "path": record.rel,
                "bytes": 0,
                "bytes_total": record.manifest.bytes,
                "state": "owed",
                "error": "",
                "next_try_in_s": None,
            }
        return {
            "path": record.rel,
            "bytes": progress.bytes_sent,
            "bytes_total": progress.bytes_total,
            "state": progress.state,
            "error": progress.error,
            "next_try_in_s": max(0.0, progress.next_try_at - time.time()) if progress.state == "waiting" else None,
        }

    def _namespaces(self, owed: Sequence[StepRecord]) -> dict[str, Any]:
        now = time.time()
        described: dict[str, dict[str, Any]] = {}
        newest: dict[str, float] = {}
        for record in self.registry.records.values():
            manifest = record.manifest
            of_namespace = described.setdefault(
                manifest.namespace, {"newest_persisted": None, "newest_persisted_age_s": None, "bytes_owed": 0}
            )
            completed_at = manifest.completed_at or 0.0
            if record.is_persisted and completed_at >= newest.get(manifest.namespace, 0.0):
                newest[manifest.namespace] = completed_at
                of_namespace["newest_persisted"] = manifest.step
                of_namespace["newest_persisted_age_s"] = now - completed_at
        for record in owed:
            progress = self.persister.progress(record)
            left = record.manifest.bytes if progress is None else progress.bytes_total - progress.bytes_sent
            described[record.manifest.namespace]["bytes_owed"] += left
        return described
