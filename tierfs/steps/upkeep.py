"""What goes on beside the requests: judging steps, checksums, overwrites given up, sweeping, freeing the trash.

None of it is in the way of a program: blocking work runs in threads, and checksums wait while anything is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import trio

from tierfs.checksum import ChecksumStopped, FileChecksum, checksum_fd
from tierfs.settings import StepSettings
from tierfs.steps import generations
from tierfs.steps.commits import commit
from tierfs.steps.completion import judge
from tierfs.steps.manifest import FileEntry
from tierfs.steps.moves import MOVED_IN
from tierfs.steps.overwrite import remove_tree
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.steps")

#: How often time-outs are looked at.
TICK_S = 1.0
#: An overwrite is not given up within this after its last change, though its processes are gone: a script may
#: copy a step file by file, each by a process of its own.
SETTLE_S = 5.0
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

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled. A failure in one round is logged and the next round tries again."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._judging)
                nursery.start_soon(self._checksumming)
                nursery.start_soon(self._emptying_trash)
                task_status.started()
        finally:
            self._stopping = True
            self._patient.shutdown(wait=False, cancel_futures=True)

    # --- judging

    async def _judging(self) -> None:
        while True:
            with trio.move_on_after(TICK_S):
                await self.registry.wake.wait()
            self.registry.wake = trio.Event()
            try:
                await self._round()
            except OSError:
                log.exception("upkeep of steps failed; it is tried again")
                await trio.sleep(TICK_S)

    async def _round(self) -> None:
        registry = self.registry
        while registry.to_judge:
            record = registry.records.get(registry.to_judge.pop())
            if record is not None and not record.is_complete:
                await self._judge(record)
        registry.sweep_latest()
        for record in list(registry.records.values()):
            if record.key not in registry.records:
                continue
            self._time_out(record)
            if record.unsaved and record.key in registry.records:
                registry.save(record)

    async def _judge(self, record: StepRecord) -> None:
        manifest = record.manifest
        if manifest.note != MOVED_IN and not any(self.registry.rules.match(inner) for inner in manifest.files):
            return  # nothing there that could complete it: no need to look at its files
        changed_at = manifest.changed_at
        verdict = await trio.to_thread.run_sync(judge, record, self.registry.rules, limiter=self._limiter)
        if self.registry.records.get(record.key) is not record or record.is_complete:
            return
        if manifest.changed_at != changed_at:
            self.registry.judge_soon(record)  # judged while it changed: once more
            await trio.sleep(0.01)
            return
        if verdict.marker is not None:
            commit(self.registry, record, marker=verdict.marker, named=verdict.named)
        elif record.manifest.note == MOVED_IN and not record.writers and not await self._is_dcp(record):
            commit(self.registry, record, marker=None, named=frozenset(), note=MOVED_IN)

    async def _is_dcp(self, record: StepRecord) -> bool:
        return await trio.to_thread.run_sync(record.is_written_by_dcp, limiter=self._limiter)

    # --- time-outs

    def _time_out(self, record: StepRecord) -> None:
        settings = self.registry.settings.for_namespace(record.manifest.namespace).steps
        idle_s = time.time() - record.manifest.changed_at
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
            self._time_out_incomplete(record, settings, idle_s)

    def _time_out_incomplete(self, record: StepRecord, settings: StepSettings, idle_s: float) -> None:
        if 0 < settings.complete_when_idle_s <= idle_s and not record.is_written_by_dcp():
            commit(
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
        if current is None or current.removed_only:
            return False
        for inner, old in current.old_files.items():
            if self.registry.rules.match(inner) is not None:
                continue
            try:
                info = os.lstat(record.directory / inner)
            except FileNotFoundError:
                return False
            if (info.st_size, info.st_mtime_ns) != (old.size_bytes, old.mtime_ns):
                return False
        return True

    # --- checksums

    async def _checksumming(self) -> None:
        while True:
            key = next((key for key, names in self.registry.to_checksum.items() if names), None)
            if key is None:
                self.registry.to_checksum.clear()
                await trio.sleep(QUIET_S)
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
        path = record.directory / inner
        try:
            summed = await trio.to_thread.run_sync(
                self._patient.submit(checksum_path, path, entry, lambda: self._stopping).result, limiter=self._limiter
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
            for path in list(trash.iterdir()):
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(remove_tree, path, limiter=self._limiter)
                self.registry.tier.released_room()
            with trio.move_on_after(TICK_S):
                await self.registry.wake.wait()
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
