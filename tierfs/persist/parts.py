"""Sends some files of steps whose turn as a whole has not come (`persist.files`), one step at a time, oldest first.

A step that is there in part is not persisted: it is no step of the object tier, RAM may not let go of its files for it,
and `latest` never names it after a loss. A step that is owed as a whole is the persister's alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import trio

from tierfs.errors import TierfsError
from tierfs.json_fields import Wrong
from tierfs.objects.client import ObjectClient
from tierfs.persist.committing import Yielding
from tierfs.persist.deletions import Deletions
from tierfs.persist.endpoint import Endpoint
from tierfs.persist.index import ObjectIndex
from tierfs.persist.local_step import LocalStep, Superseded
from tierfs.persist.part_commit import NoPart, PartCommit
from tierfs.persist.part_turns import PartTurns
from tierfs.persist.putting_off import PutOff
from tierfs.persist.step_notes import StepNotes
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_duration, format_size

log = logging.getLogger("tierfs.persist")

#: What nobody tells of (a program closes its last file) is looked at so often.
TICK_S = 1.0


@dataclass(frozen=True)
class Note:
    """Which files of a save (its generation) are meant; `at` is when they were sent, 0 while they are owed. `files` of
    the step's `of` files, with `bytes`, were."""

    generation: int
    patterns: tuple[str, ...]
    at: float = 0.0
    files: int = 0
    of: int = 0
    bytes: int = 0


class Parts:
    """`is_whole` says of which steps the persister is sending, or owes, all. `hydrate` and `is_stub` are of inodes."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        index: ObjectIndex,
        deletions: Deletions,
        endpoint: Endpoint,
        *,
        node: str,
        hydrate: Callable[[int], Awaitable[None]],
        is_stub: Callable[[int], bool],
        is_whole: Callable[[Key], bool],
    ) -> None:
        self.registry = registry
        self.client = client
        self.index = index
        self.told: Callable[[], None] = lambda: None
        #: Some files of a step of the namespace are there now.
        self.sent: Callable[[str], None] = lambda namespace: None
        self.draining = False
        self._deletions = deletions
        self._endpoint = endpoint
        self._node = node
        self._hydrate = hydrate
        self._is_stub = is_stub
        self._is_whole = is_whole
        self._turns = PartTurns(registry)
        self._put_off = PutOff("sent in part")
        self._kept = StepNotes(registry.tier.meta, "part")
        self._notes = self._load()
        self._running: tuple[Key, trio.CancelScope, trio.Event] | None = None
        self._wake = trio.Event()

    # --- told

    def completed(self, record: StepRecord, *, is_whole: bool) -> None:
        """The step, or a new generation of it, is complete; with `is_whole` all of it is owed."""
        patterns = self._turns.due(record, is_whole=is_whole)
        if patterns and record.manifest.persisted is None:
            self._keep(record.key, Note(record.manifest.generation, tuple(patterns)))
            self.look_again()

    def changed(self, record: StepRecord) -> None:
        """Files were added to a complete step, or small ones changed or removed."""
        note = self._notes.get(record.key)
        if note is not None and note.at:
            self._keep(record.key, replace(note, at=0.0))
            self.look_again()

    def left(self, key: Key) -> None:
        """The step is gone from the tree or from its name, or is persisted as a whole."""
        self.stop(key)
        self._drop(key)

    def deleted(self, key: Key) -> None:
        """What was sent of the step is gone from the object tier; what is owed since then is still owed."""
        note = self._notes.get(key)
        if note is not None and note.at:
            self._drop(key)

    def moved(self, key: Key, record: StepRecord) -> None:
        note = self._notes.get(key)
        self.left(key)
        if note is not None and record.is_complete and not record.manifest.owed:
            allowed = self._turns.patterns(record.key[0])
            patterns = tuple(pattern for pattern in note.patterns if pattern in allowed)
            if patterns:
                self._keep(record.key, Note(record.manifest.generation, patterns))
                self.look_again()

    def stop(self, key: Key) -> None:
        """All of the step is to be sent."""
        if self._running is not None and self._running[0] == key:
            self._running[1].cancel()

    def look_again(self) -> None:
        self._wake.set()

    # --- asked

    def is_running(self, key: Key) -> bool:
        return self.finished(key) is not None

    def finished(self, key: Key) -> trio.Event | None:
        """Is set once nothing of the step is being sent any more; None where nothing is."""
        return self._running[2] if self._running is not None and self._running[0] == key else None

    def is_there(self, key: Key) -> bool:
        """The object tier has, or may have, some of the step's files."""
        return key in self._notes or key in self.index.parts

    def owes(self, record: StepRecord) -> bool:
        """Some files of the step, as it is now, are still to be sent."""
        note = self._notes.get(record.key)
        return note is not None and not note.at and note.generation == record.manifest.generation

    def owed(self) -> list[StepRecord]:
        """In the order in which they go."""
        records = (self.registry.records.get(key) for key in self._notes)
        found = [record for record in records if record is not None and record.is_complete and self.owes(record)]
        return sorted(found, key=lambda record: (record.manifest.completed_at or 0.0, record.key))

    def has_work(self) -> bool:
        """Something is owed that is not sent with the whole step."""
        return any(not self._is_whole(record.key) for record in self.owed())

    def describe(self, record: StepRecord) -> dict[str, Any] | None:
        """What of the step lies there, or is to, without the rest; None where nothing does. `state` is owed, sending,
        waiting (because of `error`) or sent."""
        note = self._notes.get(record.key)
        if note is None or record.manifest.persisted is not None or note.generation != record.manifest.generation:
            return None
        failure = self._put_off.failure(record.key)
        error = failure.message if failure is not None else ""
        is_running = self.is_running(record.key)
        state = "sent" if note.at else "sending" if is_running else "waiting" if error else "owed"
        return {
            "state": state,
            "files": note.files,
            "of": note.of,
            "bytes": note.bytes,
            "patterns": list(note.patterns),
            "at": note.at or None,
            "error": error,
        }

    def problems(self) -> list[dict[str, str]]:
        return self._put_off.problems()

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is owed, until cancelled."""
        task_status.started()
        while True:
            wake = self._wake = trio.Event()
            wait_s = float("inf")
            for record in self.owed():
                if self.owes(record) and not self._is_whole(record.key):
                    wait_s = min(wait_s, await self._try(record))
            self._forget_removed()
            with trio.move_on_after(wait_s):
                await wake.wait()

    def _due_in_s(self, record: StepRecord) -> float:
        if self._deletions.is_owed(record.key):
            return TICK_S
        if record.writers or record.lock.locked() or any(not entry.sealed for entry in record.manifest.files.values()):
            return TICK_S
        settle_s = self.registry.settings.for_namespace(record.key[0]).persist.settle_s
        return max(self._put_off.pause_s(record.key), 0.0 if self.draining else settle_s - record.idle_s)

    async def _try(self, record: StepRecord) -> float:
        """One step. Returns in how many seconds to look at it again, if it is owed still."""
        key = record.key
        if (due_s := self._due_in_s(record)) > 0:
            return due_s
        try:
            await self._send(record)
        except NoPart as error:
            log.info("not sent in part: %s", error.message, extra=_extra(key))
            self._drop(key)
        except (Superseded, Yielding):
            self._put_off.for_now(key, TICK_S)
        except TierfsError as error:
            self._put_off.failed(key, error)
        except Exception as error:
            log.exception("sending a part of a step failed; tried again later", extra=_extra(key))
            self._put_off.failed(key, error)
        finally:
            if self._running is not None:
                self._running[2].set()
            self._running = None
            if key not in self._notes:  # it was removed meanwhile: nobody tries it again
                self._put_off.forget(key)
            self.told()
        if not self.owes(record):
            self.sent(key[0])
        return max(self._put_off.pause_s(key), 0.01)

    async def _send(self, record: StepRecord) -> None:
        key, note, began = record.key, self._notes[record.key], time.monotonic()
        local = LocalStep(self.registry, record, hydrate=self._hydrate, is_stub=self._is_stub)
        commit = PartCommit(self.registry, self.client, local, self._node, patterns=note.patterns)
        with trio.CancelScope() as scope:
            self._running = key, scope, trio.Event()
            await self._endpoint.probe_once()
            part = await commit.send()
            self.index.part_sent(key, local.completed_at)
            if self._notes.get(key) is not note:
                return  # it was removed meanwhile
            if not local.is_current():
                self._put_off.for_now(key, TICK_S)  # files came or went since it was looked at: owed still
                return
            self._put_off.forget(key)
            files, size = len(part.sent.objects), sum(sent.file.size_bytes for sent in part.sent.objects.values())
            of = files + len(part.left_out)
            self._keep(key, replace(note, at=time.time(), files=files, of=of, bytes=size))
            sent, took = format_size(commit.sent_bytes), format_duration(time.monotonic() - began)
            message = f"sent in part: {files} of {of} files, {format_size(size)}, {sent} sent in {took}"
            self.registry.lines.write(key[0], message, step=record.manifest.number)
            log.info("%d of %d files of the step are in the object tier", files, of, extra=_extra(key))

    # --- notes

    def _forget_removed(self) -> None:
        for key in [key for key in self._notes if key not in self.registry.records]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._put_off.forget(key)
        if self._notes.pop(key, None) is not None:
            self._kept.drop(key)

    def _keep(self, key: Key, note: Note) -> None:
        self._notes[key] = note
        self._kept.save(key, {**vars(note), "patterns": list(note.patterns)})

    def _load(self) -> dict[Key, Note]:
        notes: dict[Key, Note] = {}
        for key, fields in self._kept.load().items():
            with suppress(Wrong):
                notes[key] = Note(
                    generation=fields.integer("generation"),
                    patterns=tuple(sorted(fields.texts("patterns"))),
                    at=fields.seconds("at"),
                    files=fields.integer("files"),
                    of=fields.integer("of"),
                    bytes=fields.integer("bytes"),
                )
        return notes


def _extra(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "step": key[1], "tier": "object"}
