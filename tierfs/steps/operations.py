"""What a person asks of steps: commit, pin, evict, remove, verify."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from tierfs.checksum import checksum_fd
from tierfs.errors import CommitRefused, NotAStep, NotFound, PathRefused, StepBusy, TierfsError
from tierfs.steps.commits import commit_with_others
from tierfs.steps.completion import judge
from tierfs.steps.manifest import FileEntry
from tierfs.steps.names import safe_relative
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.steps.report import describe_step

log = logging.getLogger("tierfs.steps")

Progress = Callable[[dict[str, Any]], Awaitable[None]]

#: How often something is looked at that tells nobody when it changes.
LOOK_S = 0.2


class StepOperations:
    """Each takes a path relative to the mount's root, and answers what the command line prints with `--json`."""

    def __init__(self, registry: StepRegistry) -> None:
        self.registry = registry

    def step_at(self, rel: str) -> StepRecord:
        """The step that the path is of. Raises PathRefused, NotAStep, NotFound."""
        where = self.registry.names.locate(safe_relative(rel))
        if where is None:
            raise NotAStep(
                f"{rel} is not in a step; a step is a directory below a namespace, such as run1/step_100 "
                f"(see steps.patterns in `tierfs config show`)"
            )
        record = self.registry.at_or_new(where)
        if record is None:
            raise NotFound(f"there is no step {where.step_rel}; `tierfs ls` lists those there are")
        return record

    async def commit(self, rel: str) -> dict[str, Any]:
        """Declare a step complete by hand. Refused where its marker says that files are missing, or one is open."""
        record = self.step_at(rel)
        if record.is_complete:
            return describe_step(self.registry, record)
        if record.writers:
            names = ", ".join(sorted(record.open_names())[:4])
            raise StepBusy(f"{record.rel} can't be committed: {names} is open for writing; close it first")
        await self.registry.cluster.show_listing(record.rel)
        verdict = await trio.to_thread.run_sync(judge, record, self.registry.rules)
        if verdict.marker is None and await trio.to_thread.run_sync(record.is_written_by_dcp):
            raise CommitRefused(
                f"{record.rel} can't be committed: {verdict.why_not}. Its files are DCP's, which can't be loaded so"
            )
        if not record.scan():
            raise CommitRefused(f"{record.rel} can't be committed: it holds no file")
        done = await commit_with_others(
            self.registry, record, marker=verdict.marker, named=verdict.named, note="committed by hand"
        )
        if not done:
            raise CommitRefused(
                f"{record.rel} can't be committed: {record.manifest.note or 'the node that wrote its marker decides'}"
            )
        return describe_step(self.registry, record)

    async def pin(self, rel: str, *, pinned: bool) -> dict[str, Any]:
        """Keep retention from ever evicting the step, or let it again."""
        record = self.step_at(rel)
        record.manifest.pinned = pinned
        self.registry.save(record)
        if not pinned:
            self.registry.make_room(0)
        return describe_step(self.registry, record)

    async def evict(self, rel: str, *, force: bool) -> dict[str, Any]:
        """Drop the RAM copy of a complete step. Where it is the only copy, that has to be said twice."""
        record = self.step_at(rel)
        if not force and not self.registry.is_elsewhere(record):
            raise TierfsError(
                f"{record.rel} has no copy but the one in RAM, so evicting it would lose it; `tierfs flush` it first "
                f"where there is an object tier, use --force to lose it, or `tierfs rm`"
            )
        if record.manifest.pinned:
            raise StepBusy(f"{record.rel} is pinned; `tierfs unpin` it first")
        self._refuse_if_written(record)
        freed = self.registry.object_tier.ram_bytes(record)
        self.registry.evict(record)
        if self.registry.records.get(record.key) is record:
            freed -= self.registry.object_tier.ram_bytes(record)  # of files that a program has open
        log.info("step evicted by command", extra=self.registry.extra(record))
        return {"steps": 1, "bytes": freed}

    async def remove(self, rel: str, *, recursive: bool) -> dict[str, Any]:
        """Remove a step, or with `recursive` a whole namespace."""
        where = self.registry.names.locate(safe_relative(rel))
        await self.registry.cluster.show(rel)
        if where is not None and where.inner == "":
            return self._remove(self.step_at(rel))
        path = self.registry.root / rel
        if where is not None or not path.is_dir() or path.is_symlink():
            raise PathRefused(f"{rel} is neither a step nor a namespace; remove single files with rm")
        if not recursive:
            raise PathRefused(f"{rel} is a namespace; --recursive removes it with all its steps")
        await self.registry.cluster.show_listing(rel)
        removed = {"steps": 0, "bytes": 0}
        records = [
            record
            for record in self.registry.records.values()
            if record.manifest.namespace == rel or record.manifest.namespace.startswith(rel + "/")
        ]
        for record in records:
            self._refuse_if_written(record)  # all of it or nothing
        for record in records:
            freed = self._remove(record)
            removed = {key: removed[key] + freed[key] for key in removed}
        names = await trio.to_thread.run_sync(self._names_below, path)
        self.registry.discard(path)
        for name in (*names, rel):
            self.registry.cluster.gone(name)
        self.registry.latest.removed_below(rel)
        directory, _, name = rel.rpartition("/")
        self.registry.invalidate(directory, name)
        return removed

    def _names_below(self, path: Path) -> list[str]:
        """What lies in a directory, what is in a directory before the directory itself; paths from the root."""
        root = self.registry.root
        return [
            (Path(directory) / name).relative_to(root).as_posix()
            for directory, directories, files in os.walk(path, topdown=False)
            for name in (*files, *directories)
        ]

    def _refuse_if_written(self, record: StepRecord) -> None:
        if record.writers:
            names = ", ".join(sorted(record.open_names())[:4])
            raise StepBusy(f"{record.rel} is being written ({names} is open); stop the writer first")

    def _remove(self, record: StepRecord) -> dict[str, Any]:
        self._refuse_if_written(record)
        size = sum(entry.size_bytes for entry in record.scan().values())
        self.registry.object_tier.removed(record)
        self.registry.cluster.removed(record)
        self.registry.remove(record)
        log.info("step removed by command", extra=self.registry.extra(record))
        return {"steps": 1, "bytes": size}

    async def wait(self, rel: str, progress: Progress, *, timeout_s: float | None) -> dict[str, Any]:
        """Until the step is complete. `reached` is False when time ran out. NotAStep, NotFound."""
        await self.registry.cluster.show(safe_relative(rel))
        record = self.step_at(rel)
        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")) as scope:
            while not record.is_complete:
                await progress({"steps_done": 0, "steps_total": 1, "path": record.rel})
                await trio.sleep(LOOK_S)
                if self.registry.records.get(record.key) is not record:
                    raise NotFound(f"{record.rel} was removed")
        return {"path": record.rel, "level": "ram", "reached": not scope.cancelled_caught}

    async def verify(self, rel: str, progress: Progress) -> dict[str, Any]:
        """Sum up every file below the path again and compare with what was sealed; `stubs` have no bytes to sum up."""
        records = self._records_below(rel)
        files = size = unsealed = stubs = 0
        bad: list[dict[str, str]] = []
        total = sum(entry.size_bytes for record in records for entry in record.manifest.files.values())
        last_told = 0.0
        for record in records:
            for inner, entry in sorted(record.manifest.files.items()):
                if not record.manifest.populated or self.registry.object_tier.is_stub(entry.ino):
                    stubs += 1
                    continue
                if entry.checksum is None or not entry.sealed:
                    unsealed += 1
                    reason = None
                else:
                    reason = await trio.to_thread.run_sync(_compare, record, inner, entry)
                    if record.manifest.files.get(inner) is not entry or _is_being_replaced(record, inner, entry):
                        unsealed += 1  # written again meanwhile
                        continue
                    files += 1
                    size += entry.size_bytes
                if reason is not None:
                    path = f"{record.rel}/{inner}"
                    bad.append({"path": path, "reason": reason})
                    self.registry.problem("error", f"{path}: {reason}", record.rel)
                    log.error("%s", reason, extra=self.registry.extra(record, inner))
                if time.monotonic() - last_told > 0.1:
                    last_told = time.monotonic()
                    await progress({"files": files, "bytes": size, "bytes_total": total})
        return {"files": files, "bytes": size, "bad": bad, "unsealed": unsealed, "stubs": stubs}

    def _records_below(self, rel: str) -> list[StepRecord]:
        if rel:
            safe_relative(rel)
            if self.registry.names.locate(rel) is not None:
                return [self.step_at(rel)]
        found = [
            record
            for record in self.registry.records.values()
            if not rel or record.manifest.namespace == rel or record.manifest.namespace.startswith(rel + "/")
        ]
        if not found:
            raise NotFound(f"there is no step below {rel or 'the mount'}; `tierfs ls` shows what there is")
        return sorted(found, key=lambda record: record.rel)


def _is_being_replaced(record: StepRecord, inner: str, entry: FileEntry) -> bool:
    """The step is being overwritten, and the name has another inode than the sealed one."""
    if record.manifest.overwrite is None:
        return False
    try:
        return os.lstat(record.directory / inner).st_ino != entry.ino
    except FileNotFoundError:
        return True


def _compare(record: StepRecord, inner: str, entry: FileEntry) -> str | None:
    """What is wrong with a file that was sealed so; None when nothing is."""
    path = record.directory / inner
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return f"can't be read: {error.strerror}"
    try:
        info = os.fstat(fd)
        if info.st_size != entry.size_bytes:
            return f"has {info.st_size} bytes, {entry.size_bytes} were sealed"
        found = checksum_fd(fd).text
    except OSError as error:
        return f"can't be read: {error.strerror}"
    finally:
        os.close(fd)
    return None if found == entry.checksum else f"has the checksum {found}, {entry.checksum} was sealed"
