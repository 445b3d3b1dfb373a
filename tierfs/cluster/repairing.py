"""Repair of this node's copies in a cluster: what is damaged here and whole elsewhere is dropped, and fetched again.

Each node looks at what lies in its own RAM: its own files, and copies of others' with and without a name. Other nodes
read theirs only where one here is damaged, and nothing is dropped before a good copy was seen.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import trio

from tierfs.catalog.records import FileRecord
from tierfs.checksum import CHUNK_BYTES, from_text
from tierfs.cluster.comparing import LEAST_READ_BYTES_S, Comparing
from tierfs.cluster.counting import Holders
from tierfs.cluster.making import version_at
from tierfs.cluster.missing_parts import Missing
from tierfs.errors import CatalogError, ObjectError, TierfsError
from tierfs.hydrate.stubs import StubMark
from tierfs.persist.reporting import Progress, reporting
from tierfs.persist.selection import Selected, select
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key

if TYPE_CHECKING:
    from tierfs.cluster.step_files import StepFiles
    from tierfs.cluster.tier import ClusterTier

log = logging.getLogger("tierfs.cluster")

#: A copy without a name comes back by replication, which tells nobody.
LOOK_S = 0.1
BROUGHT_WITHIN_S = 60.0
#: The object tier is asked as long as this for a file.
OBJECT_RETRY_S = 5.0

Action = Literal["fetched again", "lost", "left"]


class ClusterRepair:
    """One run of the command. `actions` are for its answer."""

    def __init__(self, tier: ClusterTier) -> None:
        self._tier = tier
        self._registry = tier.registry
        self._comparing = Comparing(tier.copies, tier.peers)
        self._at = ""
        self._bytes = 0
        self.checked = 0
        self.actions: list[dict[str, str]] = []

    async def run(self, rel: str, progress: Progress, *, dry_run: bool) -> dict[str, Any]:
        """Every complete step below the path. NotFound; TierfsError where the catalogue can't be asked."""
        chosen: dict[Key, list[Selected]] = {}
        for found in select(self._registry, rel):
            if found.record.is_complete and found.record.manifest.joined:
                chosen.setdefault(found.record.key, []).append(found)
        records = [each[0].record for each in chosen.values()]
        total = sum(record.manifest.bytes for record in records)

        async def work() -> None:
            with self._registry.using(records):
                for selected in chosen.values():
                    self._at = selected[0].record.rel
                    await self._step(selected, dry_run=dry_run)
                    self.checked += 1

        def report() -> dict[str, Any]:
            done = {"steps": self.checked, "steps_total": len(chosen)}
            return {**done, "bytes": self._bytes, "bytes_total": total, "path": self._at}

        await reporting(work, report, progress)
        return {"checked": self.checked, "actions": self.actions}

    async def _step(self, selected: list[Selected], *, dry_run: bool) -> None:
        record, view = selected[0].record, self._tier.view
        generation = record.manifest.generation
        try:
            files = await view.files(record.key, generation, fresh=True)
            holders = Holders(files, await view.holdings(record.key), view.nodes)
        except CatalogError as error:
            raise TierfsError(f"{record.rel} can't be held against other nodes: {error.message}") from None
        before = len(self.actions)
        for inner, file in files.files.items():
            if not any(each.holds(inner) for each in selected) or not file.size_bytes:
                continue
            if self._registry.records.get(record.key) is not record or record.manifest.generation != generation:
                return  # removed or written again meanwhile
            if self._tier.copies.has(file.version):
                await self._file(record, inner, file, files, holders, dry_run=dry_run)
                self._bytes += file.size_bytes
        if len(self.actions) == before and not dry_run:
            self._registry.clear_problems(record.rel)

    async def _file(
        self,
        record: StepRecord,
        inner: str,
        file: FileRecord,
        files: StepFiles,
        holders: Holders,
        *,
        dry_run: bool,
    ) -> None:
        node = self._tier.node
        here = await self._comparing.now(file, [node])
        others = sorted(holders.of(file) - {node}, key=lambda other: other != file.node)
        own = here.found.get(node)
        if own is not None and own == self._comparing.written_down(record, inner, file):
            return
        expected = await self._comparing.sealed(record, inner, file, [node, *others], here)
        if own is not None and own == expected:
            return
        if not self._tier.copies.has(file.version):
            return  # it went meanwhile
        has = f"has the checksum {own}" if own is not None else here.failed[node]
        if expected is None:
            self._tell(record, inner, "left", f"the copy here {has}, others differ, and nobody knows which is right")
            return
        reason = f"the copy here {has}, {expected} was sealed"
        there = await self._comparing.now(file, others)
        is_good = any(found == expected for found in there.found.values())
        if not is_good and not await self._object_tier_has(record, inner, file, expected):
            if there.silent:
                silent = ", ".join(f"{other} {there.failed[other]}" for other in sorted(there.silent))
                self._tell(record, inner, "left", f"{reason}; {silent}")
                return
            self._tell(record, inner, "lost", f"{reason}; no node and no object tier has a good one")
            if not dry_run:
                await self._drop(record, inner, file)
            return
        if inner in record.open_names():
            self._tell(record, inner, "left", f"{reason}; it is open for writing: close it, and repair again")
            return
        if dry_run:
            self._tell(record, inner, "fetched again", reason)
            return
        try:
            await self._fetch_again(record, inner, replace(file, checksum=expected), files, tuple(others))
        except (TierfsError, OSError) as error:
            message = error.message if isinstance(error, TierfsError) else str(error)
            self._tell(record, inner, "left", f"{reason}; it was dropped, and can't be fetched now: {message}")
        else:
            self._tell(record, inner, "fetched again", reason)

    def _tell(self, record: StepRecord, inner: str, action: Action, reason: str) -> None:
        path = f"{record.rel}/{inner}"
        self.actions.append({"path": path, "action": action, "reason": reason})
        log.warning("repair: %s: %s", action, reason, extra=self._registry.extra(record, inner))
        if action != "fetched again":
            self._registry.problem("error", f"{path}: {reason}", record.rel)

    # --- mending

    async def _drop(self, record: StepRecord, inner: str, file: FileRecord) -> bool:
        """It is no copy any more; True where a stub stands under its name now."""
        tier, path = self._tier, record.directory / inner
        async with tier.showing.lock(record.key):
            tier.copies.forget(record.key, file.version)
            try:
                has_name = version_at(path) == (file.version, None)
            except OSError:
                has_name = False
            if has_name and not tier.showing.place_file(record, file, inner, None):
                raise TierfsError(f"{record.rel}/{inner} can't be replaced by a stub; see the log")
        tier.gave_up(record.key)
        self._registry.save_or_later(record)
        return has_name

    async def _fetch_again(
        self, record: StepRecord, inner: str, file: FileRecord, files: StepFiles, others: tuple[str, ...]
    ) -> None:
        tier = self._tier
        if await self._drop(record, inner, file):
            await tier.hydration.hydrate(record.manifest.files[inner].ino)
        else:
            part = next(iter(files.parts_of_version.get(file.version, ())), file.node)
            tier.replicator.bring(
                Missing(record.key, part, inner, file.version, file.size_bytes, files.generation, others)
            )
            within_s = BROUGHT_WITHIN_S + file.size_bytes / LEAST_READ_BYTES_S
            await _until(lambda: tier.copies.has(file.version), within_s, "nobody sent it in time")
        tier.holdings.changed(record.key)

    async def _object_tier_has(self, record: StepRecord, inner: str, file: FileRecord, expected: str) -> bool:
        """Read back from there, each byte."""
        objects = self._tier.sources.objects
        if objects is None or not record.is_persisted:
            return False
        namespace, step = record.key
        mark = StubMark(namespace, step, inner, file.size_bytes, from_text(expected), file.mtime_ns)
        fd = os.memfd_create("tierfs-repair")
        try:
            for chunk, wanted in enumerate(await objects.chunks(mark)):
                offset = chunk * CHUNK_BYTES
                length = min(CHUNK_BYTES, file.size_bytes - offset)
                os.ftruncate(fd, offset + length)
                found = await objects.read_range(mark, offset, length, fd, urgent=False, retry_for_s=OBJECT_RETRY_S)
                if found != wanted:
                    return False
                os.ftruncate(fd, 0)
        except (ObjectError, OSError) as error:
            log.info("the object tier does not give %s: %s", mark.key, error, extra=self._registry.extra(record, inner))
            return False
        finally:
            os.close(fd)
        return True


async def _until(claim: Callable[[], bool], within_s: float, what: str) -> None:
    with trio.move_on_after(within_s):
        while not claim():  # noqa: ASYNC110 - what brings it tells nobody
            await trio.sleep(LOOK_S)
        return
    raise TierfsError(what)
