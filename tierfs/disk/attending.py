"""The disk comes and goes: it is opened at start, looked at regularly, and read again when it is back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import trio

from tierfs.disk import adopting
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.index import DiskIndex
from tierfs.disk.store import DiskStore, Found
from tierfs.disk.tombstones import Tombstones
from tierfs.errors import DiskError
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.disk")

#: The daemon waits so long for the disk before it serves without.
OPENED_WITHIN_S = 20.0
#: The disk is looked at so often, and may take so long to answer.
LOOK_EVERY_S = 10.0
ANSWERS_WITHIN_S = 10.0
#: Steps that are shown before others have their turn.
_AT_ONCE = 8


class Attendance:
    """`shown` is told of each step that was made a name in the tree; `opened` once all are."""

    def __init__(self, registry: StepRegistry, store: DiskStore, index: DiskIndex, removed: Tombstones) -> None:
        self.shown: Callable[[StepRecord, DiskStep], None] = lambda record, stored: None
        self.opened: Callable[[], None] = lambda: None
        #: Told of a file that can't be read, though the disk is there.
        self.unreadable: Callable[[DiskStep, str, str], None] = lambda stored, inner, why: None
        #: Whether the disk's steps are this node's to show, or somebody else says what there is.
        self.shows_steps = True
        self._registry, self._store, self._index, self._removed = registry, store, index, removed
        self._threads = trio.CapacityLimiter(1)
        self._told = ""
        self._suspects: dict[tuple[Path, str], tuple[DiskStep, str, str]] = {}
        self._look_now = trio.Event()

    def suspect(self, stored: DiskStep, inner: str, why: str) -> None:
        """The file could not be read: it is damaged, or the disk is gone. That is looked at now."""
        self._suspects[stored.directory, inner] = stored, inner, why
        self._look_now.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started once the disk was read, or that takes too long."""
        first = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attend, first)
                with trio.move_on_after(OPENED_WITHIN_S):
                    await first.wait()
                task_status.started()
        finally:
            self._store.close()

    async def _attend(self, first: trio.Event) -> None:
        while True:
            look_now = self._look_now = trio.Event()
            suspects, self._suspects = self._suspects, {}
            try:
                if self._index.is_open and not self._index.away:
                    with trio.fail_after(ANSWERS_WITHIN_S):
                        await trio.to_thread.run_sync(
                            self._store.check, self._index.disk_id, limiter=self._threads, abandon_on_cancel=True
                        )
                    for stored, inner, why in suspects.values():
                        self.unreadable(stored, inner, why)
                else:
                    found = await trio.to_thread.run_sync(
                        self._store.open, limiter=self._threads, abandon_on_cancel=True
                    )
                    await self._take(found)
            except DiskError as error:
                self._is_away(error.message)
            except trio.TooSlowError:
                self._is_away(f"{self._store.path} does not answer")
            except OSError as error:
                self._is_away(f"steps of the disk can't be shown: {error.strerror}")
            except Exception as error:
                log.exception("the disk can't be read", extra={"tier": "disk"})
                self._is_away(f"{self._store.path} can't be read: {type(error).__name__}")
            first.set()
            with trio.move_on_after(LOOK_EVERY_S):
                await look_now.wait()

    def _is_away(self, why: str) -> None:
        if self._told != why:
            self._told = why
            log.error("the disk tier can't be used: %s", why, extra={"tier": "disk"})
        if why != self._index.away:
            self._index.away = why
            self._index.changed_all()
        self._update_latest()

    def _update_latest(self) -> None:
        """Also where only stubs tell of a disk that was never there since this daemon began, or is another one."""
        for namespace in {key[0] for key in self._registry.records}:
            self._registry.update_latest(namespace)

    async def _take(self, found: Found) -> None:
        """The disk was read: the tree shows what it holds. OSError (ENOSPC)."""
        self._index.fill(found)
        for directory, (why, _) in found.damaged.items():
            log.error("not shown: %s", why, extra={"tier": "disk", "file": str(directory)})
        if self.shows_steps:
            await self._show(found)
        if self._told:
            self._told = ""
            log.info("the disk tier is back", extra={"tier": "disk"})
        self._update_latest()
        self.opened()

    async def _show(self, found: Found) -> None:
        shown = 0
        for at, stored in enumerate(found.steps):
            if at % _AT_ONCE == _AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if stored.key in self._registry.records or stored.key in self._removed:
                continue
            record = adopting.show(self._registry, stored)
            if record is not None:
                shown += 1
                self.shown(record, stored)
        if shown:
            log.info("%d steps are shown from the disk", shown, extra={"tier": "disk"})
