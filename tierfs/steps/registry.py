"""All steps of a mount: their records, where they lie, and what has to change with them (`latest`, room, problems).

Everything that decides about steps works on this one object. It is used from one thread only, so a change between
two awaits is atomic.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import trio

from tierfs.crash_points import CrashPoints
from tierfs.logs import NamespaceLog
from tierfs.ram.tier import RamTier
from tierfs.settings import RetentionSettings, Settings
from tierfs.steps import wishes
from tierfs.steps.cluster import Alone, Cluster
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.latest import LatestLink
from tierfs.steps.manifest import Manifest, delete_manifest, save_manifest
from tierfs.steps.markers import MarkerRules
from tierfs.steps.names import StepNames, StepPath
from tierfs.steps.news import News
from tierfs.steps.object_tier import NoObjectTier, ObjectTier
from tierfs.steps.record import StepRecord
from tierfs.steps.retention import StepFacts, choose_evictions
from tierfs.steps.walk_back import NewestSteps

log = logging.getLogger("tierfs.steps")

#: How long the making of a step's directory waits at most for room that comes back.
FREED_WITHIN_S = 2.0

Key = tuple[str, str]

#: What isn't urgent in a manifest is saved at most so often, and never takes more than one part in so many of the time.
SAVE_EVERY_S = 1.0
SHARE_OF_TIME = 20
SAVE_AGAIN_S = 5.0

#: Refusals and give-ups that `status` shows; the log has them all.
PROBLEMS_KEPT = 50
#: How long `latest` stays, seconds, when its namespace has no whole step any more: see `update_latest`.
LATEST_LINGERS_S = 5.0


class StepRegistry:
    """See the module. `invalidate` and `open_handles` are set by the file system; the defaults do nothing."""

    def __init__(self, tier: RamTier, settings: Settings, lines: NamespaceLog) -> None:
        self.tier = tier
        self.root = tier.root
        self.settings = settings
        self.lines = lines
        self.names = StepNames(settings.steps.patterns)
        self.rules = MarkerRules(settings.steps.markers)
        self._latest_goes_at: dict[str, float] = {}  # monotonic time, by namespace
        self.latest = LatestLink(tier.root, tier.meta, self.names, mode=settings.steps.latest)
        self.crash = CrashPoints(settings.debug_crash_at, tier.meta)
        self.records: dict[Key, StepRecord] = {}
        self.problems: list[dict[str, str]] = []
        #: (directory, name) changed without the kernel's knowing.
        self.invalidate: Callable[[str, str], None] = lambda directory, name: None
        #: How many handles are open on an inode.
        self.open_handles: Callable[[int], int] = lambda nodeid: 0
        #: What the background work looks at next, and what wakes it.
        self.to_judge: set[Key] = set()
        self.to_checksum: dict[Key, set[str]] = {}
        self.wake = trio.Event()
        self.trash_filled = trio.Event()
        #: Awaited before what lies in the trash at a path is freed: whoever has memory of its files mapped lets go.
        self.before_freeing: Callable[[Path], Awaitable[None]] = _at_once
        #: What a new daemon changed before it could tell the kernel; see `tell_untold`.
        self.untold: list[tuple[str, str]] = []
        self._being_freed: dict[str, int] = {}
        self._room_came = trio.Event()
        self._in_use: Counter[Key] = Counter()
        self.object_tier: ObjectTier = NoObjectTier()
        self.cluster: Cluster = Alone()
        #: What is told of steps, and to whom.
        self.news = News()
        self._newest = NewestSteps(self.news, self.records, self.latest)

    # --- finding

    def at(self, where: StepPath) -> StepRecord | None:
        """What is known of the step."""
        return self.records.get((where.namespace, where.step))

    def at_or_new(self, where: StepPath) -> StepRecord | None:
        """The same, with a record begun where there is a directory of that name."""
        record = self.at(where)
        if record is None:
            directory = self.root / where.step_rel
            if not directory.is_dir() or directory.is_symlink():
                return None
            now = time.time()
            manifest = Manifest(where.namespace, where.step, where.number, created_at=now, changed_at=now)
            record = StepRecord(manifest, directory, unsaved=True)
            self.records[record.key] = record
        return record

    def of_namespace(self, namespace: str) -> list[StepRecord]:
        return [record for (where, _), record in self.records.items() if where == namespace]

    def is_shared(self, record: StepRecord) -> bool:
        """The catalogue of the cluster that this node is in has the step: other nodes may have parts of it."""
        return self.cluster.shares and record.manifest.joined > 0

    def is_readable(self, record: StepRecord) -> bool:
        """Every file of the complete step can be read now, from wherever it is."""
        return self.cluster.is_readable(record) and self.object_tier.is_readable(record)

    def is_elsewhere(self, record: StepRecord) -> bool:
        """A slower tier of this node's own holds the step as it is now."""
        return record.is_persisted or self.object_tier.on_disk(record)

    def newest_complete(self, namespace: str, *, other_than: str | None = None) -> StepRecord | None:
        """The complete step with the highest number of which every file can be read now, from wherever it is."""
        found = [
            record
            for record in self.of_namespace(namespace)
            if record.is_complete and record.key[1] != other_than and self.is_readable(record)
        ]
        return max(
            found, key=lambda record: (record.manifest.number, record.manifest.completed_at or 0.0), default=None
        )

    # --- changing

    def save(self, record: StepRecord) -> None:
        """Raises OSError (ENOSPC); what was saved before stays."""
        record.unsaved = True
        began = time.monotonic()
        save_manifest(self.tier.meta, record.manifest)
        record.unsaved = False
        ended = time.monotonic()
        record.save_after = ended + max(SAVE_EVERY_S, SHARE_OF_TIME * (ended - began))
        while record.superseded:
            self.discard(record.superseded.pop())

    def save_or_later(self, record: StepRecord) -> bool:
        """Save what is done already, and so can't be refused; where there is no room it is tried again later."""
        try:
            self.save(record)
        except OSError as error:
            log.warning("a step's manifest can't be saved yet: %s", error, extra=self.extra(record))
            record.save_after = time.monotonic() + SAVE_AGAIN_S
            return False
        return True

    def move(self, moves: Sequence[tuple[StepRecord, StepPath | None]]) -> None:
        """Directories of steps were renamed: to other steps, or to what is none. The tree has it so already."""
        left = [record.key for record, _ in moves]
        waiting = {key: self.to_checksum.pop(key, set()) for key in left}
        for key in left:
            self.records.pop(key, None)
        for (record, where), key in zip(moves, left, strict=True):
            if where is None:
                self._discard_old_generation(record)
                continue
            replaced = self.at(where)
            if replaced is not None:
                self.forget(replaced)  # an empty directory had the name
            manifest = record.manifest
            manifest.namespace, manifest.step, manifest.number = where.namespace, where.step, where.number
            record.directory = self.root / where.step_rel
            self.records[record.key] = record
            self.checksum_soon(record, waiting[key])
            self.judge_soon(record)  # who asked for it before knew it by its old name
            self.save_or_later(record)
        for (record, where), key in zip(moves, left, strict=True):
            self.object_tier.moved(*key, record if where is not None else None)
        # Only now: a manifest must name an old generation at every moment, or a new daemon frees it.
        for key in left:
            if key not in self.records:
                delete_manifest(self.tier.meta, *key)

    def forget(self, record: StepRecord) -> None:
        """The step is gone from the tree: so is what we know of it."""
        self.records.pop(record.key, None)
        self.to_checksum.pop(record.key, None)
        self.to_judge.discard(record.key)
        delete_manifest(self.tier.meta, *record.key)
        self._discard_old_generation(record)
        while record.superseded:
            self.discard(record.superseded.pop())
        self.clear_problems(record.rel)
        self.tier.released_room()
        self.update_latest(record.manifest.namespace)

    def evict(self, record: StepRecord) -> None:
        """Free the step's room in RAM: it becomes stubs where the object tier has it, else it is gone.

        Of several nodes each holds a part of it, so then it is gone on all of them, or stays where that may not be.
        """
        if self.object_tier.evict(record):
            if record.is_persisted:
                self.cluster.evicted(record)
        elif self.cluster.retire(record):
            self.remove(record)

    def remove(self, record: StepRecord) -> None:
        """Take a step out of this node's tree at once; its bytes are freed in the background.

        Its copy in the object tier stays: whoever means that too calls `object_tier.removed` first.
        """
        self.discard(record.directory, size_bytes=record.manifest.bytes)
        self.invalidate(record.manifest.namespace, record.manifest.step)
        self.forget(record)

    def discard(self, path: Path, *, size_bytes: int = 0) -> None:
        """Move a tree to the trash; the background work frees it (`freed`). Gone already is fine."""
        name = uuid.uuid4().hex
        try:
            path.rename(self.tier.trash / name)
        except FileNotFoundError:
            return
        self._being_freed[name] = size_bytes
        self.trash_filled.set()

    def freed(self, name: str) -> None:
        """What lay in the trash under this name is gone."""
        self._being_freed.pop(name, None)
        self.tier.released_room()
        self._room_came.set()
        self._room_came = trio.Event()

    @property
    def is_freeing(self) -> bool:
        """Room will come back by itself soon."""
        return bool(self._being_freed)

    @property
    def freeing_bytes(self) -> int:
        return sum(self._being_freed.values())

    def old_directory(self, record: StepRecord) -> Path | None:
        """Where the generation lies that was set aside."""
        current = record.manifest.overwrite
        return self.tier.path / current.old_directory if current is not None else None

    def _discard_old_generation(self, record: StepRecord) -> None:
        old = self.old_directory(record)
        if old is not None:
            self.discard(old)

    def update_latest(self, namespace: str) -> None:
        """Make `latest` name the newest whole step. Where there is none left it goes a little later.

        A program that removes a namespace lists it first; the link must not vanish before it is removed too, or
        `shutil.rmtree` fails.
        """
        newest = self.newest_complete(namespace)
        if newest is None:
            self._latest_goes_at[namespace] = time.monotonic() + LATEST_LINGERS_S
            return
        self._latest_goes_at.pop(namespace, None)
        self._newest.seen(namespace, newest)
        if self.latest.update(namespace, newest.manifest):
            self.invalidate(namespace, LATEST)

    def sweep_latest(self) -> None:
        """Remove each `latest` that has named no whole step for long enough."""
        now = time.monotonic()
        for namespace in [name for name, goes_at in self._latest_goes_at.items() if goes_at <= now]:
            del self._latest_goes_at[namespace]
            if self.newest_complete(namespace) is None:
                self._newest.seen(namespace, None)
                if self.latest.update(namespace, None):
                    self.invalidate(namespace, LATEST)

    def tell_untold(self) -> None:
        """The kernel listens now: tell it what changed before."""
        for directory, name in self.untold:
            self.invalidate(directory, name)
        self.untold.clear()

    def invalidate_inside(self, record: StepRecord, inner: str) -> None:
        path = record.directory / inner
        self.invalidate(str(path.parent.relative_to(self.root)), path.name)

    # --- room

    def make_room(self, wanted_bytes: int, *, sparing: StepRecord | None = None) -> bool:
        """Evict what retention allows until so many bytes are free; True when something went, or is going already."""
        coming_bytes = self.freeing_bytes
        wanted_bytes = max(0, wanted_bytes - coming_bytes)
        chosen = self._evictable(wanted_bytes, sparing)
        for fact, record in chosen:
            self.lines.write(
                fact.namespace, f"evicted, {fact.bytes} bytes: newer steps need the room", step=fact.number
            )
            try:
                self.evict(record)
            except OSError as error:  # its removal can't be noted; the next look tries again
                log.warning("a step can't be evicted: %s", error, extra=self.extra(record))
                break
        return bool(chosen) or coming_bytes > 0

    def evictable_bytes(self) -> int:
        """How many bytes `make_room` could free at most, with what is being freed already."""
        return self.freeing_bytes + sum(fact.bytes for fact, _ in self._evictable(1 << 62, None))

    @contextmanager
    def using(self, records: Iterable[StepRecord]) -> Iterator[None]:
        """While a command works on these steps they are not evicted for room, as if a file of each were open."""
        keys = [record.key for record in records]
        self._in_use.update(keys)
        try:
            yield
        finally:
            self._in_use.subtract(keys)
            self._in_use += Counter()  # drops those that are at 0

    def is_used(self, record: StepRecord) -> bool:
        """A command works on the step, or a program has a file of it open."""
        return self._in_use[record.key] > 0 or self.handles_in(record) > 0

    def _evictable(self, wanted_bytes: int, sparing: StepRecord | None) -> list[tuple[StepFacts, StepRecord]]:
        """In need also what a slower tier would rather have first."""
        chosen = self._unused(wanted_bytes, sparing, in_need=False)
        if sum(fact.bytes for fact, _ in chosen) >= wanted_bytes:
            return chosen
        return self._unused(wanted_bytes, sparing, in_need=True)

    def _unused(
        self, wanted_bytes: int, sparing: StepRecord | None, *, in_need: bool
    ) -> list[tuple[StepFacts, StepRecord]]:
        busy: dict[Key, int] = {} if sparing is None else {sparing.key: 1}
        while True:
            chosen = self._choose(wanted_bytes, busy, in_need=in_need)
            # Counting handles takes time by the number of files, so it is done for those that would go.
            handles = {record.key: self._in_use[record.key] + self.handles_in(record) for _, record in chosen}
            if not any(handles.values()):
                return chosen
            busy |= {key: count for key, count in handles.items() if count}

    def _choose(
        self, wanted_bytes: int, handles: Mapping[Key, int], *, in_need: bool
    ) -> list[tuple[StepFacts, StepRecord]]:
        facts = {
            StepFacts(
                namespace=record.manifest.namespace,
                step=record.manifest.step,
                number=record.manifest.number,
                completed_at=record.manifest.completed_at,
                bytes=self.ram_bytes(record),
                pinned=record.manifest.pinned,
                open_handles=handles.get(record.key, 0),
                only_copy_owed=not self.object_tier.may_leave_ram(record, in_need=in_need),
                state="complete",
            ): record
            for record in self.records.values()
            # What a slower tier has and RAM does not has left already.
            if record.is_complete and not (self.is_elsewhere(record) and self.ram_bytes(record) == 0)
        }
        chosen = choose_evictions(list(facts), self._retention_of, wanted_bytes)
        return [(fact, facts[fact]) for fact in chosen]

    def _retention_of(self, namespace: str) -> RetentionSettings:
        """The settings, with the maximum that a program wished for where they have none."""
        policy = self.settings.for_namespace(namespace).retention
        if policy.ram_max_steps > 0 or not (wished := wishes.max_steps_of(self.root / namespace)):
            return policy
        return replace(policy, ram_max_steps=wished)

    def make_room_for_next(self, namespace: str, *, sparing: StepRecord | None = None) -> None:
        """Room for another step of the last one's size, before it is needed."""
        previous = sparing or self.newest_complete(namespace)
        if previous is None:
            return
        lacking = self.cluster.room_for_next(previous) - self.tier.usage().free_bytes
        if lacking > 0:
            self.make_room(lacking, sparing=sparing)

    async def room_for_new_step(self, rel: str) -> None:
        """Before a step's directory is made: its writer may be faster than what leaves RAM for it is freed."""
        where = self.names.locate(rel)
        if where is None or where.inner:
            return
        self.make_room_for_next(where.namespace)
        with trio.move_on_after(FREED_WITHIN_S):
            while self.is_freeing:
                await self._room_came.wait()

    def ram_bytes(self, record: StepRecord) -> int:
        """What the step holds in this node's RAM, and evicting it would free."""
        known = self.cluster.ram_bytes(record)
        return self.object_tier.ram_bytes(record) if known is None else known

    def handles_in(self, record: StepRecord) -> int:
        """How many handles are open on files of the step."""
        return len(record.writers) + sum(self.open_handles(entry.ino) for entry in record.manifest.files.values())

    # --- telling

    def problem(self, severity: str, message: str, path: str) -> None:
        """Something for `status`; it stays until the step at `path` is whole again or gone."""
        self.clear_problems(path)
        self.problems.append({"severity": severity, "message": message, "path": path})
        del self.problems[:-PROBLEMS_KEPT]

    def clear_problems(self, path: str) -> None:
        self.problems = [problem for problem in self.problems if problem["path"] != path]

    def judge_soon(self, record: StepRecord) -> None:
        self.to_judge.add(record.key)
        self.wake.set()

    def has_pending(self) -> bool:
        """Something may fall due by time alone: a step that is not complete or not saved, a `latest` that lingers."""
        return bool(self._latest_goes_at) or any(
            record.unsaved or not record.is_complete for record in self.records.values()
        )

    def checksum_soon(self, record: StepRecord, names: set[str]) -> None:
        if self.settings.steps.checksums and names:
            self.to_checksum.setdefault(record.key, set()).update(names)
            self.wake.set()

    def extra(self, record: StepRecord, inner: str = "") -> dict[str, str]:
        """The fields of a log line."""
        return {"namespace": record.manifest.namespace, "step": record.manifest.step, "file": inner, "tier": "ram"}


async def _at_once(path: Path) -> None:
    """Nobody has memory of files mapped."""
