"""Copies the steps that are owed to the disk, newest first, and lets older ones go for them.

Newest first: what comes back after a reboot should be the last one. Nothing here is in the way of a save, and what
fails is tried again later and said.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.disk.copying import NotHere, StepCopy
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.index import DiskIndex
from tierfs.disk.policy import DiskPolicy
from tierfs.disk.retention import StoredFacts, choose_for_room, choose_surplus
from tierfs.disk.store import DiskStore
from tierfs.disk.tombstones import Tombstones
from tierfs.errors import ChecksumMismatch, DiskError, PathRefused, TierfsError
from tierfs.objects.bandwidth import Bandwidth
from tierfs.persist.local_step import Superseded
from tierfs.steps.news import reached
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_rate, format_size

log = logging.getLogger("tierfs.disk")

T = TypeVar("T")

#: A step is copied once nothing changed in it for so long: frameworks add files after their marker.
SETTLE_S = 1.0
#: What nobody tells of (a program closes its last file, another one removes a step) is looked at so often.
TICK_S = 1.0
REST_S = 5.0
#: After a failure of the disk, doubled up to the second figure.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
#: A step that has no room is looked at again after so long: others may have removed something from the disk.
ROOM_AGAIN_S = 30.0
#: So is what can't be removed.
TIDY_AGAIN_S = 30.0
#: Part of the file system that is left to others.
RESERVE_SHARE = 20


@dataclass(frozen=True)
class Refusal:
    """Why a step that is owed is not copied. `lacks_room`: it is tried again; else somebody has to change the step."""

    message: str
    lacks_room: bool = False


class Keeping:
    """`is_gone` says of a step on the disk that this node's tree does not have whether it was removed."""

    def __init__(
        self, registry: StepRegistry, store: DiskStore, index: DiskIndex, *, node: str, is_stub: Callable[[int], bool]
    ) -> None:
        self.registry, self.store, self.index = registry, store, index
        self.policy = DiskPolicy(registry)
        self.owed: set[Key] = set()
        self.refused: dict[Key, Refusal] = {}
        #: "" or how the disk failed last; nobody waits for it until it works again.
        self.trouble = ""
        #: "" or why something can't be taken off the disk.
        self.untidy = ""
        self.written_bytes = 0
        self.removed = Tombstones(registry.tier.meta)
        self.is_gone: Callable[[DiskStep], bool] = lambda stored: True
        #: The same, or nobody knows of the step any more: it may go for room.
        self.is_spare: Callable[[DiskStep], bool] = lambda stored: True
        #: Among several nodes: the catalogue that has the step, "" for none; all its names are to be made here; whether
        #: it can be removed everywhere now; what is to be done before each look at what is owed.
        self.cluster_of: Callable[[StepRecord], str] = lambda record: ""
        self.show_names: Callable[[StepRecord], Awaitable[None]] = _nothing
        self.can_retire: Callable[[], bool] = lambda: True
        self.before_round: Callable[[], None] = lambda: None
        #: The step was dropped from the disk, where a stub had its bytes.
        self.on_dropped: Callable[[StepRecord], None] = lambda record: None
        self._node = node
        self._is_stub = is_stub
        self._bandwidth = Bandwidth(registry.settings.disk.write_bytes_s)
        self._threads = trio.CapacityLimiter(4)
        self._running: tuple[Key, StepCopy, trio.CancelScope] | None = None
        self._next_try = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._not_before: dict[Key, float] = {}
        self._wake = trio.Event()
        self._news = trio.Event()
        self._is_draining = False
        self._to_discard: list[Path] = []
        self._tidy_again = 0.0
        #: An earlier daemon, or a copy that was broken off, may have left something there.
        self._is_trash_left = True
        self._gone: set[Key] = set()

    # --- told

    def owe(self, record: StepRecord) -> None:
        self.removed.clear(record.key)
        self.owed.add(record.key)
        self.refused.pop(record.key, None)
        self._not_before.pop(record.key, None)
        self.look_again()

    def remove(self, key: Key) -> None:
        """The step is removed, or gets another name: its copy goes from the disk, if not now then once that is back."""
        if not self.index.is_open or self.index.get(key) is not None:
            self.removed.put(key)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """The step is gone, or another one now."""
        self.owed.discard(key)
        self.refused.pop(key, None)
        self._not_before.pop(key, None)
        if self._running is not None and self._running[0] == key:
            self._running[2].cancel()
        self.look_again()

    def disk_was_read(self) -> None:
        """What was to be taken off the disk, and is there again, is known again: it goes if it has to, as all do."""
        self._to_discard.clear()
        self._is_trash_left = True

    def look_again(self) -> None:
        self._wake.set()
        news, self._news = self._news, trio.Event()
        news.set()

    # --- asked

    def is_awaited(self, record: StepRecord) -> bool:
        """The step will be on the disk soon, unless that fails."""
        return record.key in self.owed and record.key not in self.refused and not (self.trouble or self.index.away)

    def progress(self, key: Key) -> tuple[int, int] | None:
        """Bytes copied and to be copied of the step that is on its way now."""
        if self._running is None or self._running[0] != key:
            return None
        return self._running[1].bytes_done, self._running[1].bytes_total

    async def drain(self) -> None:
        """Until all that is owed is there, or can't be for now. Steps do not wait to settle meanwhile."""
        self._is_draining = True
        self.look_again()
        try:
            while any(self.is_awaited(record) for record in self._in_order()):
                await self.wait_for_news(TICK_S)
        finally:
            self._is_draining = False

    async def wait_for_news(self, within_s: float) -> None:
        news = self._news
        with trio.move_on_after(within_s):
            await news.wait()

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; only while the disk was read."""
        task_status.started()
        while True:
            wake = self._wake = trio.Event()
            try:
                wait_s = await self._round()
            except Exception:
                log.exception("looking after the disk failed; tried again later", extra={"tier": "disk"})
                wait_s = FIRST_PAUSE_S
            with trio.move_on_after(wait_s):
                await wake.wait()

    async def _round(self) -> float:
        """Do what is due; in how many seconds to look again at the latest."""
        if not self.index.is_open or self.index.away:
            return REST_S
        self.before_round()
        self._drop_gone()
        self._drop_surplus()
        await self._tidy()
        if (wait_s := self._next_try - time.monotonic()) > 0:
            return min(wait_s, REST_S)
        wait_s = REST_S
        for record in self._in_order():
            due_s = self._due_in_s(record)
            if due_s > 0:
                wait_s = min(wait_s, due_s)
                continue
            await self._copy(record)
            return 0.0
        return wait_s

    def _in_order(self) -> list[StepRecord]:
        final = {key for key, refusal in self.refused.items() if not refusal.lacks_room}
        records = [self.registry.records.get(key) for key in self.owed - final]
        found = [record for record in records if record is not None and record.is_complete]
        return sorted(found, key=lambda record: record.manifest.completed_at or 0.0, reverse=True)

    def _due_in_s(self, record: StepRecord) -> float:
        if record.writers or record.lock.locked() or any(not entry.sealed for entry in record.manifest.files.values()):
            return TICK_S
        not_before = self._not_before.get(record.key, 0.0) - time.monotonic()
        return max(not_before, 0.0 if self._is_draining else SETTLE_S - record.idle_s)

    async def _copy(self, record: StepRecord) -> None:
        key = record.key
        copy = StepCopy(
            self.registry,
            self.store,
            record,
            self.index.readable(*key),
            node=self._node,
            bandwidth=self._bandwidth,
            threads=self._threads,
            is_stub=self._is_stub,
            cluster=self.cluster_of(record),
            version_of=self.index.version_of,
            is_there=lambda stored: self.index.readable(*key) is stored,
        )
        scope = trio.CancelScope()
        self._running = key, copy, scope
        began = time.monotonic()
        try:
            with scope:
                if copy.cluster:
                    await self.show_names(record)
                    if not record.manifest.populated:
                        raise Superseded  # the catalogue is away: later
                needed = await copy.prepare()
                if await self._has_room(record, needed):
                    stored, old = await copy.run()
                    self._record(record, copy, stored, time.monotonic() - began)
                    if old is not None:
                        self._to_discard.append(old)
        except Superseded:
            self._not_before[key] = time.monotonic() + TICK_S
        except NotHere:
            self.owed.discard(key)  # its bytes are elsewhere, and nobody asked for them to be here
        except (ChecksumMismatch, PathRefused) as error:
            self._refuse(record, error)
        except OSError as error:
            self._failed(f"{record.rel} can't be copied to the disk: {error.strerror or error}")
        except TierfsError as error:
            self._refuse(record, error)
        finally:
            self._running = None
            self._is_trash_left = True
            self.look_again()

    def _record(self, record: StepRecord, copy: StepCopy, stored: DiskStep, took_s: float) -> None:
        self.index.put(stored)
        self.trouble, self._pause_s = "", FIRST_PAUSE_S
        self.written_bytes += copy.bytes_done
        # A stub that became whole meanwhile is the same file, and not on the disk yet.
        if copy.local.is_current() and (not copy.cluster or self.index.holds(record)):
            self.owed.discard(record.key)
            self.refused.pop(record.key, None)
        else:
            self._not_before[record.key] = time.monotonic() + TICK_S
        self._room_changed()  # another step is the newest of its namespace now
        self.registry.crash("disk:recorded")
        size = format_size(stored.size_bytes)
        self.registry.lines.write(
            stored.key[0],
            f"on the disk: {len(stored.step.files)} files, {size}, {format_size(copy.bytes_done)} written "
            f"({format_rate(copy.bytes_done, took_s)})",
            step=stored.step.number,
        )
        log.info("step is on the disk", extra=self._extra(record.key))
        completed_at = record.manifest.completed_at
        self.registry.news.tell(
            reached(
                *record.key,
                "disk",
                generation=stored.step.generation,
                size_bytes=stored.size_bytes,
                files=len(stored.step.files),
                seconds=stored.stored_at - completed_at if completed_at else None,
            )
        )
        self.registry.make_room(0)

    def _failed(self, message: str) -> None:
        """The disk failed: it is left alone for a while."""
        self.trouble = message
        self._next_try = time.monotonic() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        log.warning("%s", message, extra={"tier": "disk"})

    def _refuse(self, record: StepRecord, error: TierfsError) -> None:
        lacks_room = isinstance(error, DiskError) and error.is_full
        if record.key not in self.refused:
            level = logging.ERROR if isinstance(error, ChecksumMismatch) else logging.WARNING
            log.log(level, "not copied to the disk: %s", error.message, extra=self._extra(record.key))
        self.refused[record.key] = Refusal(error.message, lacks_room)
        if lacks_room:
            self._not_before[record.key] = time.monotonic() + ROOM_AGAIN_S

    def _room_changed(self) -> None:
        for key, refusal in self.refused.items():
            if refusal.lacks_room:
                self._not_before.pop(key, None)

    # --- room

    async def _has_room(self, record: StepRecord, needed: int) -> bool:
        """Room for so many bytes of the step, others dropped for it. False where it is too old to be kept there;
        DiskError where the disk is too small for it, OSError."""
        completed_at = record.manifest.completed_at or 0.0
        most = self._most(record.key[0])
        newer = [
            stored
            for stored in self.index
            if stored.key[0] == record.key[0] and stored.key != record.key and stored.step.completed_at > completed_at
        ]
        if 0 < most <= len(newer):
            self.owed.discard(record.key)
            return False
        lacking = needed - await self._free_bytes()
        if lacking > 0:
            for directory, (_, size) in list(self.index.damaged.items()):
                if not size:
                    continue  # it frees nothing, or nobody knows what it is
                del self.index.damaged[directory]
                self._to_discard.append(directory)
                lacking -= size
            facts = [self._facts(stored) for stored in self.index if stored.key != record.key]
            chosen = choose_for_room(facts, lacking, completed_at=completed_at)
            for fact in chosen or ():
                self._drop((fact.namespace, fact.step), "newer steps need the room")
            await self._tidy()
            lacking = needed - await self._free_bytes()
        if lacking <= 0:
            return True
        if newer:
            self.owed.discard(record.key)  # what is there is worth more
            return False
        raise DiskError(
            f"{record.rel} does not fit on the disk: it needs {format_size(needed)}, which is {format_size(lacking)} "
            f"more than {self.store.path} has once all is gone that may go; a namespace's newest step there stays "
            f"until a newer one is whole, so disk.size has to be two steps at the least",
            is_full=True,
        )

    async def _free_bytes(self) -> int:
        """For steps. OSError."""
        free, size = await self._in_thread(self.store.free_bytes)
        free -= size // RESERVE_SHARE
        most = self.registry.settings.disk.size
        return min(free, most - self.index.used_bytes) if most > 0 else free

    def _facts(self, stored: DiskStep) -> StoredFacts:
        return StoredFacts(
            *stored.key, stored.step.number, stored.step.completed_at, stored.size_bytes, self._may_go(stored)
        )

    def _may_go(self, stored: DiskStep) -> bool:
        record = self.registry.records.get(stored.key)
        if record is None:
            return self.is_spare(stored)
        if record.manifest.pinned or (self._running is not None and self._running[0] == stored.key):
            return False
        if not self._has_stubs(record) or record.is_persisted:
            return True
        if not record.is_complete:
            return False  # a file of it is just being written anew, the others' bytes are here
        # Its bytes are here only: not while a program reads them, nor before the object tier has what it is owed.
        if self.registry.is_shared(record) and not self.can_retire():
            return False
        return not (record.manifest.owed or self.registry.is_used(record))

    def _has_stubs(self, record: StepRecord) -> bool:
        manifest = record.manifest
        return not manifest.populated or any(self._is_stub(entry.ino) for entry in manifest.files.values())

    # --- dropping

    def _drop_gone(self) -> None:
        """Steps that were removed, and copies of what is complete otherwise now and not wanted here."""
        for stored in self.index:
            record = self.registry.records.get(stored.key)
            if record is None:
                if self.is_gone(stored):
                    self._gone.add(stored.key)
                    self._drop(stored.key, "")
            elif record.is_complete and stored.key not in self.owed:
                age = record.manifest.generation, record.manifest.completed_at or 0.0
                if age == stored.step.age:
                    continue
                if self.registry.is_shared(record) and age[0] == stored.step.generation:
                    self.owe(record)  # the catalogue has another time for it
                else:
                    self._drop(stored.key, "another save took its place")

    def _drop_surplus(self) -> None:
        counts = Counter(stored.key[0] for stored in self.index)
        over = {namespace for namespace, count in counts.items() if 0 < self._most(namespace) < count}
        facts = [self._facts(stored) for stored in self.index if stored.key[0] in over]
        for fact in choose_surplus(facts, self._most):
            self._drop((fact.namespace, fact.step), "retention.disk_steps newer ones are there")

    def _most(self, namespace: str) -> int:
        return self.registry.settings.for_namespace(namespace).retention.disk_steps

    def _drop(self, key: Key, why: str) -> None:
        stored = self.index.get(key)
        if stored is None or not self.index.drop(stored):
            return
        self._to_discard.append(stored.directory)
        if why:
            self.registry.lines.write(key[0], f"dropped from the disk: {why}", step=stored.step.number)
        record = self.registry.records.get(key)
        if record is not None and record.is_complete and self._has_stubs(record) and not record.is_persisted:
            self.on_dropped(record)

    async def _tidy(self) -> None:
        """Take what was dropped off the disk. What can't be removed is not in the way of what can be copied."""
        if time.monotonic() < self._tidy_again:
            return
        try:
            await self._discard()
            self.untidy = ""
        except OSError as error:
            self._tidy_again = time.monotonic() + TIDY_AGAIN_S
            message = f"what is not needed can't be removed from the disk: {error.strerror}"
            if message != self.untidy:
                log.warning("%s", message, extra={"tier": "disk", "file": str(error.filename or "")})
            self.untidy = message

    async def _discard(self) -> None:
        """OSError."""
        while self.index.condemned:
            directory = self.index.condemned[-1]
            await self._in_thread(partial(self.store.condemn, directory))
            with contextlib.suppress(ValueError):  # it was copied anew meanwhile
                self.index.condemned.remove(directory)
        if self._to_discard or self._is_trash_left:
            failed: OSError | None = None
            for directory in list(self._to_discard):
                try:
                    await self._in_thread(partial(self.store.discard, directory))
                except OSError as error:
                    failed = error
                    continue
                with contextlib.suppress(ValueError):  # the disk was read anew meanwhile
                    self._to_discard.remove(directory)
            if failed is not None:
                raise failed
            for key in [key for key in self._gone if self.index.get(key) is None]:
                self.removed.clear(key)
            self._gone.clear()
            await self._in_thread(self.store.empty_trash)
            self._is_trash_left = False
            self._room_changed()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._threads)

    def _extra(self, key: Key) -> dict[str, str]:
        return {"namespace": key[0], "step": key[1], "tier": "disk"}


async def _nothing(record: StepRecord) -> None:
    pass
