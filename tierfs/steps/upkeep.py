"""What goes on beside the requests: judging steps, checksums, overwrites given up, sweeping, freeing the trash.

None of it is in the way of a program: blocking work runs in threads, and checksums wait while anything is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import trio

from tierfs.checksum import ChecksumStopped, FileChecksum, checksum_fd
from tierfs.settings import StepSettings
from tierfs.steps import generations
from tierfs.steps.commits import commit_with_others
from tierfs.steps.completion import NO_MARKER, Verdict, judge
from tierfs.steps.manifest import FileEntry
from tierfs.steps.moves import MOVED_IN
from tierfs.steps.overwrite import remove_tree
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.steps")

#: How often time-outs are looked at.
TICK_S = 1.0
#: The same while no step is being written or changed: an idle mount should not keep a processor awake.
REST_S = 5.0
#: An overwrite is not given up within this after its last change, though its processes are gone: a script may
#: copy a step file by file, each by a process of its own.
SETTLE_S = 5.0
#: A step is judged at most one part in so many of the time: with its marker among the first of many files that are
#: copied in, each file that is closed asks for it.
JUDGE_SHARE = 10
#: A step with a marker for each rank has no last file: it is complete when no rank went on for so long.
PER_RANK_SETTLE_S = 1.0
#: A marker whose files are not all there is held against what other nodes have again after so long.
OTHERS_AFTER_S = 0.2
OTHERS_AFTER_MOST_S = 10.0
#: After a failure that nobody expected.
RETRY_S = 10.0
#: Checksums wait until nothing was open for writing for so long, but not longer than the second figure.
QUIET_S = 0.2
PATIENCE_S = 30.0


class Upkeep:
    """The background work on a registry."""

    def __init__(self, registry: StepRegistry) -> None:
        self.registry = registry
        self._limiter = trio.CapacityLimiter(2)
        # One thread of its own for checksums, since niceness belongs to a thread and can't always be taken back.
        self._patient = ThreadPoolExecutor(1, thread_name_prefix="checksum", initializer=_ask_for_little)
        self._stopping = False
        self._not_before: dict[Key, float] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._judging)
                nursery.start_soon(self._checksumming)
                nursery.start_soon(self._emptying_trash)
                nursery.start_soon(self._stop_checksum_when_cancelled)
                task_status.started()
        finally:
            self._patient.shutdown(wait=False, cancel_futures=True)

    # --- judging

    async def _judging(self) -> None:
        wait_s = TICK_S
        while True:
            with trio.move_on_after(wait_s):
                await self.registry.wake.wait()
            if self.registry.wake.is_set():  # else somebody waits for it: a new one would leave him waiting for good
                self.registry.wake = trio.Event()
            wait_s = await self._round()

    async def _round(self) -> float:
        """Look at every step once; returns after how many seconds something is due at the latest."""
        registry = self.registry
        for key in list(registry.to_judge):
            record = registry.records.get(key)
            if record is None or record.is_complete:
                registry.to_judge.discard(key)
                continue
            if time.monotonic() < record.judge_after or not self._may_try(record):
                continue
            registry.to_judge.discard(key)
            with self._tried_again(record):
                await self._judge(record)
        for record in list(registry.records.values()):
            if registry.records.get(record.key) is record and self._may_try(record):
                with self._tried_again(record):
                    await self._time_out(record)
                    due = record.unsaved and time.monotonic() >= record.save_after
                    if due and registry.records.get(record.key) is record:
                        registry.save_or_later(record)
        registry.sweep_latest()
        now = time.monotonic()
        judged = [registry.records[key].judge_after for key in registry.to_judge if key in registry.records]
        saved = [record.save_after for record in registry.records.values() if record.unsaved]
        tick_s = TICK_S if registry.has_pending() else REST_S
        return min([tick_s, *(at - now for at in judged + saved if at > now)])

    def _may_try(self, record: StepRecord) -> bool:
        return time.monotonic() >= self._not_before.get(record.key, 0.0)

    @contextlib.contextmanager
    def _tried_again(self, record: StepRecord) -> Iterator[None]:
        """What fails for one step is logged and tried again later; the others and the mount go on."""
        try:
            yield
        except Exception:
            self._not_before[record.key] = time.monotonic() + RETRY_S
            self.registry.judge_soon(record)
            log.exception(
                "looking after a step failed; tried again in %.0f s", RETRY_S, extra=self.registry.extra(record)
            )
        else:
            self._not_before.pop(record.key, None)

    async def _judge(self, record: StepRecord) -> None:
        manifest = record.manifest
        if self.registry.cluster.shares:
            await self.registry.cluster.show_listing(record.rel)  # what other nodes wrote counts
        changes, began = record.changes, time.monotonic()
        verdict = await trio.to_thread.run_sync(self._verdict, record, limiter=self._limiter)
        ended = time.monotonic()
        record.judge_after = max(record.judge_after, ended + JUDGE_SHARE * (ended - began))
        if self.registry.records.get(record.key) is not record or record.is_complete:
            return
        if record.changes != changes:
            self.registry.judge_soon(record)  # judged while it changed: once more
        elif verdict.marker is not None:
            marker = self.registry.rules.match(verdict.marker)
            settle_s = self._per_rank_settle_s()
            if marker is not None and marker.kind == "dcp-per-rank" and record.idle_s < settle_s:
                self._judge_later(record, settle_s - record.idle_s)
            elif not await commit_with_others(self.registry, record, marker=verdict.marker, named=verdict.named):
                self._judge_later(record, self._look_at_others_in_s(record))
        elif manifest.note == MOVED_IN and not await self._is_dcp(record) and record.changes == changes:
            if self.registry.handles_in(record):
                self._judge_later(record, TICK_S)
            else:
                await commit_with_others(self.registry, record, marker=None, named=frozenset(), note=MOVED_IN)
        elif self.registry.cluster.shares and verdict.why_not != NO_MARKER:
            # What is lacking may be another node's, which tells nobody here when it is sealed.
            self._judge_later(record, self._look_at_others_in_s(record))

    def _verdict(self, record: StepRecord) -> Verdict:
        """In a thread: by the number of files."""
        if not any(self.registry.rules.match(inner) for inner in list(record.manifest.files)):
            return Verdict(why_not=NO_MARKER)
        return judge(record, self.registry.rules)

    def _per_rank_settle_s(self) -> float:
        """Of other nodes only closed files are known, so a rank that still writes has to be waited for longer."""
        return self.registry.settings.cluster.wait_s if self.registry.cluster.shares else PER_RANK_SETTLE_S

    def _look_at_others_in_s(self, record: StepRecord) -> float:
        """Soon at first, then seldom: a save that nobody ends is looked at as long as it is kept."""
        return min(max(OTHERS_AFTER_S, record.idle_s / 4), OTHERS_AFTER_MOST_S)

    def _judge_later(self, record: StepRecord, seconds: float) -> None:
        record.judge_after = time.monotonic() + seconds
        self.registry.to_judge.add(record.key)

    async def _is_dcp(self, record: StepRecord) -> bool:
        return await trio.to_thread.run_sync(record.is_written_by_dcp, limiter=self._limiter)

    # --- time-outs

    async def _time_out(self, record: StepRecord) -> None:
        settings = self.registry.settings.for_namespace(record.manifest.namespace).steps
        idle_s = record.idle_s
        if record.writers or record.lock.locked():
            return
        current = record.manifest.overwrite
        if current is not None:
            if idle_s >= TICK_S and self._nothing_changed(record):
                generations.give_up(self.registry, record, "nothing was changed")
            elif idle_s >= SETTLE_S and record.is_left_by_all():
                generations.give_up(self.registry, record, "every process that wrote is gone")
            elif idle_s >= settings.overwrite_idle_s:
                generations.give_up(self.registry, record, f"nothing changed for {idle_s:.0f} s")
        elif record.manifest.state != "complete" and record.manifest.files:
            await self._time_out_incomplete(record, settings, idle_s)

    async def _time_out_incomplete(self, record: StepRecord, settings: StepSettings, idle_s: float) -> None:
        if 0 < settings.complete_when_idle_s <= idle_s and not record.is_written_by_dcp():
            await commit_with_others(
                self.registry, record, marker=None, named=frozenset(), note=f"complete by being idle for {idle_s:.0f} s"
            )
        elif idle_s >= settings.sweep_after_s and self._may_be_swept(record):
            log.warning("a step that was never completed is removed", extra=self.registry.extra(record))
            self.registry.lines.write(
                record.manifest.namespace,
                f"removed: never completed, last change {idle_s:.0f} s ago",
                level="WARNING",
                step=record.manifest.number,
            )
            self.registry.cluster.removed(record)
            self.registry.remove(record)

    def _may_be_swept(self, record: StepRecord) -> bool:
        """Only what a framework with a marker left behind, and only once training has gone on past it."""
        newest = self.registry.newest_complete(record.manifest.namespace)
        return (
            newest is not None
            and (newest.manifest.completed_at or 0.0) > record.manifest.changed_at
            and not record.manifest.pinned
            and record.manifest.generation == 1
            and record.manifest.marker is None
            and record.is_written_by_dcp()
        )

    def _nothing_changed(self, record: StepRecord) -> bool:
        """A file was opened for writing and closed as it was: every file has its old size and time."""
        current = record.manifest.overwrite
        if current is None:
            return False
        for inner, old in current.old_files.items():
            if self.registry.rules.match(inner) is not None:
                # A hidden marker says nothing; one that a program removed or replaced does.
                if current.removed_only and not record.is_of_old_generation(inner):
                    return False
                continue
            try:
                info = os.lstat(record.directory / inner)
            except FileNotFoundError:
                return False
            if (info.st_size, info.st_mtime_ns) != (old.size_bytes, old.mtime_ns):
                return False
        return True

    # --- checksums

    async def _stop_checksum_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._stopping = True

    async def _checksumming(self) -> None:
        while True:
            wake = self.registry.wake
            key = next((key for key, names in self.registry.to_checksum.items() if names), None)
            if key is None:
                self.registry.to_checksum.clear()
                await wake.wait()
                continue
            await self._wait_for_quiet()
            record = self.registry.records.get(key)
            names = self.registry.to_checksum.get(key)
            if record is None or not names:
                self.registry.to_checksum.pop(key, None)
                continue
            await self._checksum(record, names.pop())

    async def _wait_for_quiet(self) -> None:
        began = quiet_since = time.monotonic()
        while (now := time.monotonic()) - quiet_since < QUIET_S and now - began < PATIENCE_S:
            if any(record.writers for record in self.registry.records.values()):
                quiet_since = now
            await trio.sleep(QUIET_S / 4)

    async def _checksum(self, record: StepRecord, inner: str) -> None:
        entry = record.manifest.files.get(inner)
        if entry is None or not entry.sealed or entry.checksum is not None:
            return
        if self.registry.object_tier.is_stub(entry.ino):
            return  # its mark has the checksum, and its holes are no data
        path = record.directory / inner

        def is_vain() -> bool:
            """Of a step that left RAM meanwhile the open file would hold the room, and a save may wait for it."""
            is_there = self.registry.records.get(record.key) is record and record.manifest.files.get(inner) == entry
            return self._stopping or not is_there

        try:
            summed = await trio.to_thread.run_sync(
                self._patient.submit(checksum_path, path, entry, is_vain).result, limiter=self._limiter
            )
        except (OSError, ChecksumStopped):
            return
        if summed is None or self.registry.records.get(record.key) is not record:
            return
        if record.manifest.files.get(inner) == entry:
            record.manifest.files[inner] = FileEntry(entry.size_bytes, entry.mtime_ns, entry.ino, summed.text, True)
            record.unsaved = True

    # --- trash

    async def _emptying_trash(self) -> None:
        trash = self.registry.tier.trash
        while True:
            # Its own event, and made anew before looking: a save may wait for this room.
            self.registry.trash_filled = trio.Event()
            for path in list(trash.iterdir()):
                with contextlib.suppress(OSError):
                    await self.registry.before_freeing(path)
                    await trio.to_thread.run_sync(remove_tree, path, limiter=self._limiter)
                    self.registry.freed(path.name)
            with trio.move_on_after(REST_S):
                await self.registry.trash_filled.wait()
            await trio.sleep(0.01)


def checksum_path(path: Path, entry: FileEntry, should_stop: Callable[[], bool]) -> FileChecksum | None:
    """The checksum of a sealed file, or None where it is no longer the one that was sealed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not _is_still(fd, entry):
            return None
        summed = checksum_fd(fd, should_stop=should_stop)
        return summed if _is_still(fd, entry) else None
    finally:
        os.close(fd)


def _is_still(fd: int, entry: FileEntry) -> bool:
    info = os.fstat(fd)
    return (info.st_ino, info.st_size, info.st_mtime_ns) == (entry.ino, entry.size_bytes, entry.mtime_ns)


def _ask_for_little() -> None:
    """The calling thread takes the processor only when nobody else wants it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
