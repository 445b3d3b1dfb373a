"""Which steps the object tier holds, and that the tree shows them.

The tier is listed at start and every `transfer.index_every_s`: other nodes, and people, put steps there and take them
away. Nothing is concluded from a listing that failed half way.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from tierfs.checksum import to_text
from tierfs.errors import ObjectCorrupt, ObjectError, ObjectMissing, TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.persist.adoption import adopt, describe_anew, is_copy, persisted_as
from tierfs.persist.deletions import Deletions
from tierfs.persist.identity import TierIdentity
from tierfs.persist.layout import manifest_key
from tierfs.persist.manifest_cache import ManifestCache
from tierfs.persist.object_manifest import MAX_BYTES, ObjectManifest, read_manifest
from tierfs.persist.reporting import all_of
from tierfs.persist.stored_step import look
from tierfs.persist.walking import StepDirectory, step_directories
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.persist")

#: The daemon waits so long for the first listing before it serves without.
INDEX_WITHIN_S = 10.0
#: After a refresh that failed.
RETRY_S = 5.0
#: Manifests that are fetched side by side.
AT_ONCE = 16


@dataclass
class _Seen:
    """What one look at the tier found: ETags of committed manifests, and what could not be read."""

    began: float
    etags: dict[Key, str] = field(default_factory=dict)
    fetched: dict[Key, tuple[ObjectManifest, str]] = field(default_factory=dict)
    broken: dict[Key, str] = field(default_factory=dict)
    #: Steps that a node has begun to send.
    begun: set[Key] = field(default_factory=set)
    #: When steps completed that are there in part.
    parts: dict[Key, float] = field(default_factory=dict)


class ObjectIndex:
    """`problem` is "" or why the tier can't be listed now."""

    def __init__(self, registry: StepRegistry, client: ObjectClient, deletions: Deletions) -> None:
        self.registry = registry
        self.client = client
        self.deletions = deletions
        self.cache = ManifestCache(registry.tier.meta)
        self.identity = TierIdentity(registry.tier.meta, client)
        self.problem = ""
        #: Another node has begun to persist a step of the cluster.
        self.begun_elsewhere: Callable[[StepRecord], None] = lambda record: None
        #: When the steps completed of which some files are there, and not all. They are no steps of the tier.
        self.parts: dict[Key, float] = {}
        self._broken: dict[Key, str] = {}
        #: When this node itself changed a step there (monotonic): a listing that began before is out of date.
        self._changed_at: dict[Key, float] = {}
        self._generations: dict[Key, int] = {}
        self._refreshing = trio.Lock()

    # --- asked

    async def manifest(self, namespace: str, step: str) -> ObjectManifest:
        """The committed manifest of a step: the copy kept here, else fetched. ObjectMissing, ObjectCorrupt."""
        return self.kept(namespace, step) or (await self._fetch((namespace, step)))[0]

    def kept(self, namespace: str, step: str) -> ObjectManifest | None:
        """The copy of a committed manifest that is kept here; None where there is none of what is committed now."""
        record = self.registry.records.get((namespace, step))
        persisted = record.manifest.persisted if record is not None else None
        kept = self.cache.load((namespace, step), persisted.etag if persisted is not None else None)
        return kept[1] if kept is not None else None

    def generation_there(self, key: Key) -> int:
        """The generation of the step that the object tier holds, as far as it is known; 0 for none."""
        return self._generations.get(key, 0)

    def problems(self) -> list[dict[str, str]]:
        """For `status`: manifests that are damaged. Their steps are not shown."""
        return [
            {"severity": "warning", "message": message, "path": "/".join(key)} for key, message in self._broken.items()
        ]

    # --- told by the persister

    def committed(self, manifest: ObjectManifest, etag: str) -> None:
        """This node committed the step, or found it committed."""
        key = (manifest.namespace, manifest.step)
        self.cache.save(manifest, etag)
        self._generations[key] = manifest.generation
        self._changed_at[key] = time.monotonic()
        self._broken.pop(key, None)
        self.parts.pop(key, None)

    def part_sent(self, key: Key, completed_at: float) -> None:
        """This node sent some files of a step that is not there as a whole."""
        self.parts[key] = completed_at
        self._changed_at[key] = time.monotonic()

    def parts_there(self, key: Key) -> bool:
        """Some files of the step are in the object tier, and not all."""
        return key in self.parts

    def forget(self, key: Key) -> None:
        """The step is gone from the object tier, or about to be written anew."""
        self.cache.drop(key)
        self._generations.pop(key, None)
        self._changed_at[key] = time.monotonic()
        self._broken.pop(key, None)
        self.parts.pop(key, None)

    # --- refreshing

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Refresh at start and then regularly, until cancelled; started after the first, or INDEX_WITHIN_S."""
        first = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._refresh_regularly, first)
            with trio.move_on_after(INDEX_WITHIN_S):
                await first.wait()
            task_status.started()

    async def _refresh_regularly(self, first: trio.Event) -> None:
        every_s = self.registry.settings.transfer.index_every_s
        while True:
            wait_s = every_s if every_s > 0 else float("inf")
            try:
                await self.refresh()
            except ObjectError as error:
                wait_s = min(wait_s, RETRY_S)
                log.warning("the object tier can't be listed: %s", error.message, extra={"tier": "object"})
            except Exception as error:
                self.problem = f"the object tier can't be listed: {error}"
                log.exception("looking at the object tier failed; tried again later", extra={"tier": "object"})
            first.set()
            await trio.sleep(wait_s * random.uniform(0.9, 1.1))

    async def refresh(self) -> None:
        """Look at the whole tier, then bring the tree in line with it. ObjectError: then nothing is changed."""
        async with self._refreshing:
            try:
                seen = await self._look()
                if not seen.etags:
                    await self.identity.check()
            except ObjectError as error:
                self.problem = f"the object tier can't be listed: {error.message}"
                raise
            self.problem = ""
            self._apply(seen)

    async def _look(self) -> _Seen:
        seen = _Seen(time.monotonic())
        found_steps = await step_directories(self.client, self.registry.names)
        committed = [found for found in found_steps if found.manifest]
        seen.begun = {found.key for found in found_steps if found.is_begun and not found.manifest}
        in_part = [found for found in found_steps if found.has_parts and not found.manifest]
        await all_of((partial(self._look_at, found, seen) for found in committed), at_once=AT_ONCE)
        await all_of((partial(self._look_at_part, found, seen) for found in in_part), at_once=AT_ONCE)
        return seen

    async def _look_at(self, found: StepDirectory, seen: _Seen) -> None:
        assert found.manifest is not None
        key, etag = found.key, found.manifest.etag
        seen.etags[key] = etag
        record = self.registry.records.get(key)
        is_known = (
            record is not None and record.manifest.persisted is not None and record.manifest.persisted.etag == etag
        )
        if is_known and key in self._generations:
            return
        try:
            kept = self.cache.load(key, etag)
            if kept is None:
                seen.fetched[key] = await self._fetch(key)
            else:
                seen.fetched[key] = kept[1], kept[0]
        except ObjectMissing:
            del seen.etags[key]  # deleted between the listing and this
        except ObjectCorrupt as error:
            seen.broken[key] = error.message
        if record is None and self.registry.cluster.shares:
            await self._show_what_the_cluster_has(key, seen)

    async def _look_at_part(self, found: StepDirectory, seen: _Seen) -> None:
        known = self.parts.get(found.key)
        if known is None:
            stored = await look(self.client, self.registry.names, *found.key)
            known = max((part.sent.completed_at for part in stored.parts.values() if part.sent.objects), default=None)
        if known is not None:
            seen.parts[found.key] = known

    async def _show_what_the_cluster_has(self, key: Key, seen: _Seen) -> None:
        """A step that the catalogue knows comes from there, and only one that it does not know from the object tier."""
        try:
            await self.registry.cluster.show("/".join(key))
        except (TierfsError, OSError) as error:
            log.info("not shown before the catalogue says what it has: %s", error, extra=_extra(key))
            seen.fetched.pop(key, None)

    async def _fetch(self, key: Key) -> tuple[ObjectManifest, str]:
        data, etag = await self.client.get(manifest_key(*key), most_bytes=MAX_BYTES)
        manifest = read_manifest(data, *key)
        where = self.registry.names.locate("/".join(key))
        if where is None or where.number != manifest.number:
            raise ObjectCorrupt(f"the manifest of {'/'.join(key)} in the object tier is of step {manifest.number}")
        self.cache.save(manifest, etag)
        return manifest, etag

    def _apply(self, seen: _Seen) -> None:
        """Without an await: what was seen is held against the records as they are now."""
        for key, message in seen.broken.items():
            if self._broken.get(key) != message:
                log.warning("%s", message, extra=_extra(key))
        self._broken = dict(seen.broken)
        touched: set[str] = set()
        for key, (manifest, etag) in seen.fetched.items():
            if self._is_out_of_date(key, seen):
                continue
            self._generations[key] = manifest.generation
            try:
                if self._take(key, manifest, etag):
                    touched.add(key[0])
            except OSError as error:
                self.problem = f"a step of the object tier can't be shown: {error}"
                log.warning("%s", self.problem, extra=_extra(key))
        for key in self._generations.keys() - seen.etags.keys():
            if not self._is_out_of_date(key, seen):
                del self._generations[key]
                self.cache.drop(key)
        own = {key: at for key, at in self.parts.items() if self._is_out_of_date(key, seen)}
        self.parts = {key: at for key, at in seen.parts.items() if not self._is_out_of_date(key, seen)} | own
        for key in seen.broken:
            if not self._is_out_of_date(key, seen):
                self._generations.pop(key, None)
                self._commit_is_broken(key)
        for record in list(self.registry.records.values()):
            if record.key not in seen.etags and not self._is_out_of_date(record.key, seen) and self._miss(record):
                touched.add(record.key[0])
        for key in seen.begun:
            begun = self.registry.records.get(key)
            if (
                begun is not None
                and self.registry.is_shared(begun)
                and begun.is_complete
                and not self._is_out_of_date(key, seen)
            ):
                self.begun_elsewhere(begun)
        for namespace in touched:
            self.registry.update_latest(namespace)

    def _is_out_of_date(self, key: Key, seen: _Seen) -> bool:
        """This node changed the step there since the listing began, or is about to."""
        changed_at = max(self._changed_at.get(key, 0.0), self.deletions.ended_at.get(key, 0.0))
        return self.deletions.is_owed(key) or changed_at >= seen.began

    def _take(self, key: Key, manifest: ObjectManifest, etag: str) -> bool:
        """The tier holds the step; True where that is news to the tree. Raises OSError."""
        record = self.registry.records.get(key)
        if record is None:
            return adopt(self.registry, manifest, etag) is not None
        if self.registry.is_shared(record):
            self._take_of_cluster(record, manifest, etag)
            return False
        if not record.is_complete or record.manifest.owed:
            return False  # being written, or on its way there: the persister decides
        persisted = record.manifest.persisted
        if persisted is not None and persisted.etag == etag:
            return False
        local = record.manifest
        if self.registry.object_tier.on_disk(record) and (local.generation, local.completed_at or 0.0) > manifest.age:
            return False  # it came back from this node's disk, which has the newer save
        if not record.manifest.populated:
            describe_anew(self.registry, record, manifest, etag)
            return True
        if _is_same(record, manifest):
            record.manifest.persisted = persisted_as(manifest, etag)
            self.registry.save_or_later(record)
            return False
        if self._has_stubs(record) or is_copy(record):
            if self.registry.handles_in(record):
                return False  # at the next look
            # It is of objects that another save replaced, and nodes that load the step must load the same.
            self.registry.remove(record)
            return adopt(self.registry, manifest, etag) is not None
        if persisted is not None:
            record.manifest.persisted = None  # another node's save is there now, and this one is whole here
            self.registry.save_or_later(record)
            message = (
                f"{record.rel} of this node is not what the object tier holds: another node committed a save of its "
                f"own since, so this one stays in RAM only; remove it here to see the other one"
            )
            self.registry.problem("warning", message, record.rel)
            log.warning("%s", message, extra=_extra(key))
        return False

    def _take_of_cluster(self, record: StepRecord, manifest: ObjectManifest, etag: str) -> None:
        """The catalogue says what the step is; the object tier only whether it holds that."""
        local = record.manifest
        if local.owed or not record.is_complete:
            return  # the persister looks for itself
        is_that_save = (local.generation, local.completed_at) == manifest.age
        if is_that_save and (not local.populated or _is_same(record, manifest)):
            local.persisted = persisted_as(manifest, etag)
        else:
            local.persisted = None
        self.registry.save_or_later(record)

    def leads(self, record: StepRecord) -> bool:
        """Of the nodes that share the step this one decides what becomes of its copy in the object tier."""
        manifest = record.manifest
        if not self.registry.is_shared(record):
            return True
        first = manifest.marker or min(manifest.files, default="")
        return os.path.lexists(record.directory / first) and self.registry.cluster.owns(record, first)

    def _commit_is_broken(self, key: Key) -> None:
        """A manifest lies there that nobody can read: no commit. What this node knows of the step makes a new one.

        Where policy does not want the step there, its stubs stay as they are: the manifest that is kept here has their
        checksums.
        """
        record = self.registry.records.get(key)
        if record is None or not record.is_persisted:
            return
        policy = self.registry.settings.for_namespace(key[0]).persist.policy
        if policy == "all" and record.manifest.populated and self.leads(record):
            record.manifest.persisted = None
            self.registry.object_tier.completed(record)
        elif self.registry.is_shared(record) or not self._has_stubs(record):
            record.manifest.persisted = None
        self.registry.save_or_later(record)

    def _miss(self, record: StepRecord) -> bool:
        """The tier does not hold the step (any more); True where it goes from the tree."""
        manifest = record.manifest
        if manifest.persisted is None or manifest.overwrite is not None or manifest.owed:
            return False
        is_here = self.registry.is_shared(record) or self.registry.object_tier.on_disk(record)
        if self._has_stubs(record) and not is_here:
            if self.registry.handles_in(record):
                return False
            self.registry.lines.write(
                manifest.namespace, "removed: it is gone from the object tier", level="WARNING", step=manifest.number
            )
            log.warning("a step is gone from the object tier", extra=_extra(record.key))
            self.registry.remove(record)
            return True
        manifest.persisted = None
        policy = self.registry.settings.for_namespace(record.key[0]).persist.policy
        if record.is_complete and policy == "all" and self.leads(record):
            self.registry.object_tier.completed(record)
        self.registry.save_or_later(record)
        return False

    def _has_stubs(self, record: StepRecord) -> bool:
        manifest = record.manifest
        return not manifest.populated or any(
            self.registry.object_tier.is_stub(entry.ino) for entry in manifest.files.values()
        )


def _is_same(record: StepRecord, manifest: ObjectManifest) -> bool:
    """The step in RAM is, for all that is known of it, the very save that the manifest describes."""
    local = record.manifest
    if local.files.keys() != manifest.files.keys():
        return False
    is_summed = all(entry.checksum is not None for entry in local.files.values())
    is_that_save = (local.generation, local.completed_at) == manifest.age
    return (is_summed or is_that_save) and all(
        entry.size_bytes == manifest.files[inner].size_bytes
        and entry.checksum in (None, to_text(manifest.files[inner].checksum))
        for inner, entry in local.files.items()
    )


def _extra(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "step": key[1], "tier": "object"}
