"""Files that a program removes from a step, sending side: the other nodes hear of it, and a commit may be withdrawn.

A step that is removed file by file is one removal (`Publisher.removed`) once its directory goes; so what is removed
from it is told only when that does not follow soon.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from tierfs.catalog.keys import operation_key, parts_prefix, state_key
from tierfs.catalog.records import FileRecord, Operation, Part, StepState, from_bytes, to_bytes
from tierfs.catalog.store import Compare, Delete, KeyStore, Put
from tierfs.cluster.local_files import writing_generation
from tierfs.cluster.moving import Moving, put_operation
from tierfs.cluster.publishing import Publisher
from tierfs.cluster.step_files import is_shard
from tierfs.cluster.tree_names import TryAgain
from tierfs.cluster.versions import read_version
from tierfs.errors import CatalogError, CatalogUnavailable
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.tables import Seen
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

#: Removals are told after so long, seconds: the rest of the step may follow.
SETTLE_S = 0.3
#: How often it is looked whether removed names left the parts.
_LOOK_AGAIN_S = 2.0
#: After a request that failed.
_RETRY_S = 1.0
#: An operation stays so long for nodes that were away; who comes later compares its tree anyway.
OPERATION_LASTS_S = 600.0
_SWEEP_EVERY_S = 60.0
_OPERATIONS_AT_ONCE = 100
#: Pages that are put in one transaction: about 300 KiB each.
_PAGES_AT_ONCE = 3


class Removing:
    """Used from the trio thread."""

    def __init__(self, registry: StepRegistry, store: KeyStore, view: View, publisher: Publisher, node: str) -> None:
        self.registry, self.view, self.publisher = registry, view, publisher
        self.store, self.node = store, node
        self._moving = Moving(registry, view, publisher)
        self._owed = list[Operation]()
        publisher.is_removed_inside = self.is_removed
        self._removed: dict[Key, set[str]] = {}
        self._told: dict[Key, set[str]] = {}
        #: What they were removed from: the record, and its generation. Of another one of that name nothing was.
        self._of: dict[Key, tuple[StepRecord, int]] = {}
        self._due: dict[Key, float] = {}
        self._wake = trio.Event()

    def gone(self, rel: str) -> None:
        """A program removed the name; of a step's directory see `Publisher.removed`. OSError (the journal)."""
        self.publisher.gone(rel)
        where = self.registry.names.locate(rel)
        if where is None or not where.inner:
            return
        key = where.namespace, where.step
        record = self.registry.at(where)
        if record is None:
            return
        if not self._is_still(key):
            self._forget(key)
            self._of[key] = record, record.manifest.generation
        self._removed.setdefault(key, set()).add(where.inner)
        self._due[key] = trio.current_time() + SETTLE_S
        self._wake.set()

    async def before_move(self, old: str, new: str) -> None:
        """See `Cluster.before_move`."""
        await self._moving.before_move(old, new)

    def moved(self, old: str, new: str) -> None:
        """See `Cluster.moved`. OSError (the journal)."""
        path = self.registry.root / new
        try:
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                self._moving.moved(old, new)
                return
            version = read_version(path) if stat.S_ISREG(info.st_mode) else None
        except FileNotFoundError:
            return
        self.gone(old)  # a commit just then may list the file by its old name
        self.publisher.names.came(new)
        target = self.registry.names.locate(new)
        if version is not None and target is not None and not version.startswith(f"{self.node}/"):
            # Whoever wrote it lists it in his part of the step.
            self._owed.append(Operation("rename", self.node, old, new, version, time.time()))
            self._wake.set()
        self.publisher.tree_changed(new)
        if target is not None and target.inner:
            self.publisher.owes((target.namespace, target.step))

    def is_removed(self, key: Key, inner: str) -> bool:
        """The name was removed here, and the catalogue may not know yet: it is not to be shown again."""
        return inner in self._removed.get(key, ()) and self._is_still(key)

    def has_removed(self, key: Key) -> bool:
        """The same of any name in the step."""
        return bool(self._removed.get(key)) and self._is_still(key)

    def _is_still(self, key: Key) -> bool:
        record, generation = self._of.get(key, (None, 0))
        return (
            record is not None and self.registry.records.get(key) is record and record.manifest.generation == generation
        )

    def _forget(self, key: Key) -> None:
        for known in (self._removed, self._told, self._of, self._due):
            known.pop(key, None)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        sweep_at = 0.0
        while True:
            wake = self._wake = trio.Event()
            if not self.view.connected:
                await self.view.until(lambda: self.view.connected, within_s=60)
            else:
                await self._put_owed()
                for key in [key for key, due in self._due.items() if due <= trio.current_time()]:
                    await self._tell(key)
                if sweep_at <= trio.current_time():
                    sweep_at = trio.current_time() + _SWEEP_EVERY_S
                    await self._sweep()
            next_at = min([sweep_at, *self._due.values()])
            with trio.move_on_at(next_at):
                await wake.wait()

    async def _put_owed(self) -> None:
        try:
            for entry in self.publisher.journal:
                if entry.kind == "rename" and entry.id not in self._moving.begun:
                    await self._moving.finish(entry)
            while self._owed:
                await self.store.txn([], [put_operation(self._owed[0])])
                del self._owed[0]
        except (CatalogError, TryAgain, OSError) as error:
            log.info("what was renamed here is told to others later: %s", error)

    async def _tell(self, key: Key) -> None:
        del self._due[key]
        if not self._is_still(key):
            self._forget(key)
            return
        record = self.registry.records.get(key)
        again_s = 0.0
        try:
            if record is not None:
                async with self.publisher.alone_at(key):
                    # The names stay known as removed until no part lists them any more.
                    again_s = _LOOK_AGAIN_S if await self._tell_removed(record) else 0.0
        except (CatalogError, TryAgain) as error:
            log.debug("what was removed from %s is told later: %s", "/".join(key), error)
            if isinstance(error, CatalogUnavailable):
                self.view.doubt()
            again_s = _RETRY_S
        if again_s:
            self._due.setdefault(key, trio.current_time() + again_s)
        elif key not in self._due:
            self._forget(key)

    async def _tell_removed(self, record: StepRecord) -> bool:
        """False where the catalogue lists none of it (any more)."""
        if self.registry.records.get(record.key) is not record or not await self.publisher.join_step(record):
            return False
        seen = self.view.states.get(record.key)
        current = record.manifest.overwrite
        generation = writing_generation(record.manifest)
        if seen is not None and (current is None or current.removed_only):
            generation = seen.record.generation
        files = (await self.view.files(record.key, generation, fresh=True)).files
        listed = [
            inner
            for inner in sorted(self._removed.get(record.key, set()) & files.keys())
            if not self._is_here(record, inner)
        ]
        told = self._told.setdefault(record.key, set())
        gone = {inner: files[inner] for inner in listed if inner not in told}
        if gone and await self._tell_gone(record, seen, generation, gone):
            told |= gone.keys()
            self.publisher.changed(record)
        return bool(listed)

    def _is_here(self, record: StepRecord, inner: str) -> bool:
        return os.path.lexists(record.directory / inner)

    async def _tell_gone(
        self, record: StepRecord, seen: Seen[StepState] | None, generation: int, gone: dict[str, FileRecord]
    ) -> bool:
        if seen is None or seen.record.generation != generation:
            await self._put_operations(record, gone)
        elif any(self._is_part_of_it(inner, file) for inner, file in gone.items()):
            await self._withdraw(record, seen, gone)
        elif all(self.registry.rules.match(inner) is None for inner in gone):
            await self._leave_out(record, seen, gone)
        else:
            return False  # a marker alone: who writes the step again does that just before the new one comes
        return True

    def _is_part_of_it(self, inner: str, file: FileRecord) -> bool:
        return self.registry.rules.match(inner) is None and is_shard(inner, file)

    async def _withdraw(self, record: StepRecord, seen: Seen[StepState], gone: dict[str, FileRecord]) -> None:
        """The step is no longer complete: without the files it is not what was committed."""
        operations = self._operations(record, gone)
        first, rest = operations[:_OPERATIONS_AT_ONCE], operations[_OPERATIONS_AT_ONCE:]
        result = await self.store.txn(self.publisher.compares(record, seen), [Delete(state_key(*record.key)), *first])
        if not result.succeeded:
            raise TryAgain(f"others changed {record.rel}")
        for at in range(0, len(rest), _OPERATIONS_AT_ONCE):
            await self.store.txn([], rest[at : at + _OPERATIONS_AT_ONCE])
        for entry in self.publisher.journal.at(record.rel, "alone"):
            self.publisher.journal.done(entry)
        log.warning(
            "the commit is withdrawn, since a program removed %s", ", ".join(list(gone)[:4]),
            extra=self.registry.extra(record),
        )  # fmt: skip

    async def _leave_out(self, record: StepRecord, seen: Seen[StepState], gone: dict[str, FileRecord]) -> None:
        """Small files without which the step is what was committed: they leave the parts that list them."""
        prefix = parts_prefix(*record.key, seen.record.generation)
        found, _ = await self.store.range(prefix)
        state, puts, compares = seen.record, list[Put](), list[Compare]()
        for value in found:
            part = from_bytes(Part, value.value)
            kept = {inner: file for inner, file in part.files.items() if inner not in gone}
            if len(kept) < len(part.files) and len(puts) < _PAGES_AT_ONCE:
                puts.append(Put(value.key, to_bytes(replace(part, files=kept))))
                compares.append(Compare(value.key, "mod", "equal", value.mod_revision))
        counts = dict(state.parts)
        for file in gone.values():
            if counts.get(file.node, 0) > 0:
                counts[file.node] -= 1
        state = replace(
            state,
            parts=counts,
            files=max(0, state.files - len(gone)),
            bytes=max(0, state.bytes - sum(file.size_bytes for file in gone.values())),
        )
        result = await self.store.txn(
            [*compares, *self.publisher.compares(record, seen)],
            [
                *puts,
                Put(state_key(*record.key), to_bytes(state)),
                *self._operations(record, gone)[:_OPERATIONS_AT_ONCE],
            ],
        )
        self.publisher.parts.forget(record.key)
        if not result.succeeded:
            raise TryAgain(f"others changed {record.rel}")

    async def _put_operations(self, record: StepRecord, gone: dict[str, FileRecord]) -> None:
        operations = self._operations(record, gone)
        for at in range(0, len(operations), _OPERATIONS_AT_ONCE):
            await self.store.txn([], operations[at : at + _OPERATIONS_AT_ONCE])

    def _operations(self, record: StepRecord, gone: dict[str, FileRecord]) -> list[Put]:
        return [
            put_operation(Operation("unlink", self.node, f"{record.rel}/{inner}", version=file.version, at=time.time()))
            for inner, file in gone.items()
        ]

    async def _sweep(self) -> None:
        """Operations of this node that every node has seen or will never."""
        before = time.time() - OPERATION_LASTS_S
        old = [name for name, seen in self.view.operations.items() if _is_over(seen.record, self.node, before)]
        try:
            for at in range(0, len(old), _OPERATIONS_AT_ONCE):
                await self.store.txn([], [Delete(operation_key(name)) for name in old[at : at + _OPERATIONS_AT_ONCE]])
        except CatalogError as error:
            log.debug("operations stay in the catalogue for now: %s", error)


def _is_over(operation: Operation, node: str, before: float) -> bool:
    """Also of nodes that never came back, some time later."""
    return operation.at < (before if operation.node == node else before - OPERATION_LASTS_S)
