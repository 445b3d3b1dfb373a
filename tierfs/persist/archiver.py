"""Copies the persisted steps that the rule picks to the archive, oldest first, each until it is there.

What fails is put off and tried again. Nothing here is in the way of persisting: it only holds back retention, which
must not delete what the archive is still to get. In a cluster each node counts, and the one that leads a step (see
`ObjectIndex.leads`) copies it; the others look whether that is done, and take over where that one is lost.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import trio

from tierfs.errors import ObjectCorrupt, ObjectError, ObjectMissing, ObjectStoreMissing, TierfsError
from tierfs.json_fields import Fields, Wrong
from tierfs.objects.client import ObjectClient
from tierfs.persist.archive_copy import ArchiveCopy, OlderThanArchived, SourceChanged
from tierfs.persist.archive_rule import Counted, Counts, Persisted, pick
from tierfs.persist.deletions import Deletions
from tierfs.persist.endpoint import Endpoint
from tierfs.persist.identity import KEY, TierIdentity
from tierfs.persist.index import ObjectIndex
from tierfs.persist.layout import manifest_key
from tierfs.persist.object_manifest import MAX_BYTES, read_manifest
from tierfs.persist.putting_off import PutOff
from tierfs.persist.step_notes import StepNotes
from tierfs.persist.walking import StepDirectory, step_directories
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_duration, format_size

log = logging.getLogger("tierfs.persist")

#: A step that is being sent anew, or that another node has to copy, is looked at again after so long.
LOOK_AGAIN_S = 5.0
#: How often what was copied of a step is noted.
SAVE_EVERY_S = 2.0
#: What other nodes persisted is seen with the index; it is looked at so often at least.
LONGEST_WAIT_S = 60.0


@dataclass
class Note:
    """`etag` is of the manifest in the object tier that is archived, "" while it is not; `age` of that save."""

    etag: str = ""
    age: tuple[int, float] = (0, 0.0)
    at: float = 0.0
    copied: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.at > 0


class Archiver:
    """`client` speaks to the object tier, `archive` to the archive."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        archive: ObjectClient,
        index: ObjectIndex,
        deletions: Deletions,
    ) -> None:
        self.registry = registry
        self.archive = archive
        self._client = client
        self._index = index
        self._deletions = deletions
        self._identity = TierIdentity(registry.tier.meta, archive, "archive-id.json")
        self._endpoint = Endpoint(archive, self._identity, "the archive")
        self._is_another_place = False
        #: The archive is not the reason any more to keep a step of the namespace in the object tier.
        self.settled: Callable[[str], None] = lambda namespace: None
        self._counts = Counts(registry.tier.meta)
        self._kept = StepNotes(registry.tier.meta, "archive")
        self._notes = self._load()
        self._put_off = PutOff("archived", "the archive")
        self._copying: Key | None = None
        self._saved_at = float("-inf")
        self._began = time.time()
        #: Why nothing is known of the archive yet.
        self._unknown = ""
        self._wake = trio.Event()

    # --- told

    def persisted(self, namespace: str) -> None:
        """Steps of the namespace were committed: some may be owed to the archive now."""
        if self._pick(namespace):
            self._wake.set()

    def removed(self, key: Key) -> None:
        """By somebody's wish, and so from the object tier. What the archive has stays there."""
        note = self._notes.get(key)
        if note is not None:
            if not note.is_done:
                log.info("not archived: it was removed", extra=_extra(key))
            self._drop(key)

    def moved(self, key: Key, record: StepRecord) -> None:
        """It is persisted anew under its new name, and archived under that."""
        note = self._notes.get(key)
        if note is not None:
            self._drop(key)
            if not note.is_done:
                self._owe(record.key)

    # --- asked

    def holds(self, record: StepRecord) -> bool:
        """The step has to stay in the object tier, since the archive is still to get it, or may be."""
        note = self._notes.get(record.key)
        if note is not None and not note.is_done:
            return True
        return self._has_rule(record.key[0]) and self._counts.of(record.key[0]) is None

    def owed(self) -> list[Key]:
        """In the order in which they go."""
        return sorted((key for key, note in self._notes.items() if not note.is_done), key=self._order)

    def describe(self, key: Key) -> dict[str, Any]:
        """`state` is none, owed, copying, waiting (to be tried again, because of `error`) or done (`at`, Unix time)."""
        note, failure = self._notes.get(key), self._put_off.failure(key)
        error = failure.message if failure is not None else ""
        if note is None:
            return {"state": "none", "at": None, "error": ""}
        if note.is_done:
            return {"state": "done", "at": note.at, "error": ""}
        return {
            "state": "copying" if key == self._copying else "waiting" if error else "owed",
            "at": None,
            "error": error,
        }

    def status(self) -> dict[str, Any]:
        return {
            "url": self.archive.url,
            "steps_owed": len(self.owed()),
            "steps_done": sum(note.is_done for note in self._notes.values()),
            "problem": self._unknown or self.archive.stats.last_error,
        }

    def problems(self) -> list[dict[str, str]]:
        found = self._put_off.problems()
        if self._unknown and not found:
            found = [{"severity": "warning", "message": self._unknown, "path": ""}]
        return found

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Copy what is owed, until cancelled."""
        task_status.started()
        await self._endpoint.probe_at_start()
        while True:
            wake = self._wake = trio.Event()
            try:
                wait_s = await self._round()
            except Exception:
                log.exception("archiving failed; tried again later", extra={"tier": "object"})
                wait_s = LONGEST_WAIT_S
            with trio.move_on_after(wait_s * random.uniform(0.9, 1.1)):
                await wake.wait()

    async def _round(self) -> float:
        """Everything that can be done now; returns in how many seconds to look again."""
        wait_s = LONGEST_WAIT_S
        try:
            await self._check_place()
            await self._learn_counts()
            self._unknown = ""
        except TierfsError as error:
            self._unknown = f"the archive can't be looked at: {error.message}"
            wait_s = LOOK_AGAIN_S
        for namespace in {key[0] for key in self.registry.records}:
            self._pick(namespace)
        self._forget_removed()
        for key in self.owed():
            wait_s = min(wait_s, await self._try(key))
        return max(wait_s, 0.01)

    async def _check_place(self) -> None:
        """By a link, or another name of the bucket, it may be the object tier: all would look archived there, and
        retention would delete it."""
        if self._is_another_place:
            return
        archive, tier = await self._identity.found(), await self._index.identity.found()
        if archive and archive == tier:
            raise ObjectStoreMissing(
                f"{self.archive.url} is the object tier itself, or a copy of it with its {KEY}: nothing is archived. "
                f"Set archive.object to another place; in a copy, remove that file"
            )
        self._is_another_place = bool(archive and tier)

    async def _learn_counts(self) -> None:
        """Where the rule begins, of namespaces of which nobody here knows: after the newest step that is archived."""
        namespaces = {
            record.key[0]
            for record in self.registry.records.values()
            if record.is_persisted and self._has_rule(record.key[0]) and self._counts.of(record.key[0]) is None
        }
        if not namespaces:
            return
        there: dict[str, list[StepDirectory]] = {}
        for found in await step_directories(self.archive, self.registry.names):
            if found.manifest is not None:
                there.setdefault(found.key[0], []).append(found)
        for namespace in namespaces:
            archived = there.get(namespace, [])
            at = await self._newest_archived(archived)
            if at is not None:
                counted = Counted(at, at)
            else:
                # Of an old tier that gets an archive now, its newest step and those that come.
                saves = sorted(save.completed_at for save in self._saves(namespace))
                old = [at for at in saves if at < self._began]
                counted = Counted(old[-2] if len(old) > 1 else 0.0)
            for found in archived:
                if found.key in self.registry.records and found.key not in self._notes and found.manifest is not None:
                    self._finish(found.key, Note(at=found.manifest.modified))
            self._counts.keep(namespace, counted)
            self._pick(namespace)
            self.settled(namespace)

    async def _newest_archived(self, archived: list[StepDirectory]) -> float | None:
        """When the newest of these steps completed. One whose manifest can't be read counts for nothing."""
        for found in sorted(archived, key=lambda found: (found.where.number, found.key), reverse=True):
            try:
                data, _ = await self.archive.get(manifest_key(*found.key), most_bytes=MAX_BYTES)
                return read_manifest(data, *found.key).completed_at
            except ObjectCorrupt as error:
                log.warning("in the archive: %s", error.message, extra=_extra(found.key))
        return None

    def _saves(self, namespace: str) -> list[Persisted]:
        return [
            Persisted(record.key[1], record.manifest.generation, record.manifest.completed_at or 0.0)
            for record in self.registry.of_namespace(namespace)
            if record.is_persisted and not self._deletions.is_owed(record.key)
        ]

    def _pick(self, namespace: str) -> bool:
        """True where a step is owed now that was not before."""
        counted = self._counts.of(namespace) if self._has_rule(namespace) else None
        if counted is None:
            return self._has_rule(namespace)
        counted, picked = pick(counted, self.registry.settings.for_namespace(namespace).archive, self._saves(namespace))
        picked += [key[1] for key in self._notes if key[0] == namespace and self._was_added_to(key)]
        for step in picked:
            self._owe((namespace, step))
        self._counts.keep(namespace, counted)
        return bool(picked)

    def _was_added_to(self, key: Key) -> bool:
        """The save that is archived was committed anew, with more files."""
        note, record = self._notes[key], self.registry.records.get(key)
        if not note.etag or record is None or not record.is_persisted or record.manifest.persisted is None:
            return False
        age = record.manifest.generation, record.manifest.completed_at or 0.0
        return age == note.age and record.manifest.persisted.etag != note.etag

    async def _try(self, key: Key) -> float:
        """One step. Returns in how many seconds to look at it again, if it is owed still."""
        record = self.registry.records.get(key)
        if record is None or not record.is_persisted or self._deletions.is_owed(key):
            return LOOK_AGAIN_S
        if not self._index.leads(record):
            await self._look_whether_done(key, record)
            return LONGEST_WAIT_S
        if (pause_s := self._put_off.pause_s(key)) > 0:
            return pause_s
        self._copying = key
        try:
            await self._copy(key, record)
        except SourceChanged as error:
            log.info("%s", error.message, extra=_extra(key))
            self._put_off.for_now(key, LOOK_AGAIN_S)
        except ObjectMissing:  # withdrawn or deleted: what becomes of it is seen soon
            self._put_off.for_now(key, LOOK_AGAIN_S)
        except OlderThanArchived as error:
            log.warning("not archived: %s", error.message, extra=_extra(key))
            self._finish(key, Note(at=time.time()))
        except TierfsError as error:
            self._put_off.failed(key, error)
        except Exception as error:
            log.exception("archiving a step failed; tried again later", extra=_extra(key))
            self._put_off.failed(key, error)
        finally:
            self._copying = None
            if key not in self._notes:  # it was removed meanwhile: nobody tries it again
                self._put_off.forget(key)
        return self._put_off.pause_s(key)

    async def _copy(self, key: Key, record: StepRecord) -> None:
        began, note = time.monotonic(), self._notes[key]
        await self._endpoint.probe_once()
        await self._check_place()
        copy = ArchiveCopy(
            self.registry,
            self._client,
            self.archive,
            key,
            note.copied,
            lambda: self._save_now_and_then(key),
            conditional_put=self._endpoint.conditional_put is not False,
        )
        persisted = record.manifest.persisted
        manifest = await copy.run()
        if self._notes.get(key) is not note:
            return  # removed meanwhile
        etag = persisted.etag if persisted is not None else ""
        self._finish(key, Note(etag=etag, age=manifest.age, at=time.time()))
        took_s = time.monotonic() - began
        files, size = len(manifest.files), format_size(manifest.size_bytes)
        self.registry.lines.write(
            key[0],
            f"archived: {files} files, {size}, {format_size(copy.bytes_copied)} copied in {format_duration(took_s)}",
            step=manifest.number,
        )
        log.info("step is archived", extra=_extra(key))

    async def _look_whether_done(self, key: Key, record: StepRecord) -> None:
        """Another node has to copy it. An older save of the name may still be there."""
        with suppress(ObjectError):
            data, _ = await self.archive.get(manifest_key(*key), most_bytes=MAX_BYTES)
            there = read_manifest(data, *key).completed_at
            if key in self._notes and there >= (record.manifest.completed_at or 0.0):
                self._finish(key, Note(at=time.time()))

    # --- notes

    def _has_rule(self, namespace: str) -> bool:
        rule = self.registry.settings.for_namespace(namespace).archive
        return rule.every_steps > 0 or rule.every_s > 0

    def _order(self, key: Key) -> tuple[float, Key]:
        record = self.registry.records.get(key)
        return (record.manifest.completed_at or 0.0) if record is not None else 0.0, key

    def _owe(self, key: Key) -> None:
        self._notes[key] = Note()
        self._save(key)

    def _finish(self, key: Key, note: Note) -> None:
        self._put_off.forget(key)
        self._notes[key] = note
        self._save(key)
        self.settled(key[0])

    def _forget_removed(self) -> None:
        for key in [key for key in self._notes if key not in self.registry.records]:
            if not self._index.problem and not self._index.generation_there(key):
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._put_off.forget(key)
        self._notes.pop(key, None)
        self._kept.drop(key)

    def _save_now_and_then(self, key: Key) -> None:
        """Each time would be work by the square of the files; a crash costs the copies of the time between."""
        if time.monotonic() >= self._saved_at + SAVE_EVERY_S:
            self._saved_at = time.monotonic()
            self._save(key)

    def _save(self, key: Key) -> None:
        note = self._notes.get(key)
        if note is not None:
            copied = {inner: list(facts) for inner, facts in note.copied.items()}
            age = {"generation": note.age[0], "completed_at": note.age[1]}
            self._kept.save(key, {"etag": note.etag, "at": note.at, "copied": copied, **age})

    def _load(self) -> dict[Key, Note]:
        notes: dict[Key, Note] = {}
        for key, fields in self._kept.load().items():
            with suppress(Wrong):
                notes[key] = _note(fields)
        return notes


def _note(fields: Fields) -> Note:
    copied: dict[str, tuple[str, str]] = {}
    for inner, facts in fields.mapping("copied").items():
        if not isinstance(facts, list) or len(facts) != 2 or not all(isinstance(fact, str) for fact in facts):
            raise Wrong(f"copied[{inner!r}] is no checksum and ETag")
        copied[inner] = facts[0], facts[1]
    age = fields.integer("generation"), fields.seconds("completed_at")
    return Note(fields.text("etag"), age, fields.seconds("at"), copied)


def _extra(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "step": key[1], "tier": "object"}
