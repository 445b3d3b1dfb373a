"""Directories that a program renames, sending side: the operation first, for other nodes to rename what is theirs, then
the catalogue's keys, those of the directory and its steps last.

Until then the target is not there for anybody who joins, and whoever has the old name finds the operation that says
where it went. Begun renames are in the journal, and are finished by the next daemon.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.catalog.keys import holdings_prefix, operation_key, parts_prefix, state_key, tree_key
from tierfs.catalog.records import FileRecord, Operation, to_bytes
from tierfs.catalog.store import Compare, Delete, Put
from tierfs.cluster.journal import Owed
from tierfs.cluster.local_files import writing_generation
from tierfs.cluster.publishing import Publisher
from tierfs.cluster.tree_names import CATCH_UP_S, TryAgain
from tierfs.errors import CatalogError
from tierfs.steps.moves import Moves
from tierfs.steps.names import StepPath
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

#: Keys that are moved in one transaction, which is two operations each.
_KEYS_AT_ONCE = 50
#: Parts: a page may have 300 KiB.
_PAGES_AT_ONCE = 3
_ROUNDS = 8
_Change = tuple[Delete, Put | None]


class Moving:
    """Used from the trio thread."""

    def __init__(self, registry: StepRegistry, view: View, publisher: Publisher) -> None:
        self._registry, self._view, self._publisher = registry, view, publisher
        self._store, self._node = publisher.store, publisher.node
        #: Entries of the journal that this daemon works on itself.
        self.begun: set[int] = set()

    async def before_move(self, old: str, new: str) -> None:
        """See `Cluster.before_move`. EBUSY where others' files are in it and the catalogue can't be asked; EXDEV where
        others' files in a step would no longer be in one (a program copies them instead)."""
        root = self._registry.root
        if not _is_directory(root / old) or (_is_directory(root / new) and os.listdir(root / new)):
            return  # a file, or rename(2) will refuse it
        if old not in self._view.tree:
            return  # published under its new name
        if not self._view.connected:
            self._check_own(old)
            return
        for key in self._steps_at(old):
            await self._publisher.flush(key, within_s=CATCH_UP_S)
        entry = self._publisher.journal.add("rename", old, target=new)
        self.begun.add(entry.id)
        try:
            await self._check_stays(old, new)
            await self._store.txn([], [put_operation(Operation("rename", self._node, old, new, at=time.time()))])
            await self._move_keys(old, new)
        except (CatalogError, TryAgain) as error:
            # Others may have heard of it, so it is finished, though the program hears that it was not done.
            log.warning("%s can't be renamed to %s now: %s", old, new, error)
            self.begun.discard(entry.id)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), old) from error
        except OSError:
            self._publisher.journal.done(entry)
            raise

    def moved(self, old: str, new: str) -> None:
        """The directory has its new name here; its steps are still known by the old one. OSError (the journal)."""
        entries = [entry for entry in self._publisher.journal.at(old, "rename") if entry.target == new]
        for record in self._registry.records.values():
            if not f"{record.rel}/".startswith(f"{old}/"):
                continue
            seen = self._view.tree.get(new + record.rel[len(old) :])
            if not entries and record.manifest.joined:
                # Without the catalogue: what had the old name goes there, and this is another step.
                self._publisher.owes_removal(record, record.manifest.joined)
            record.manifest.joined = seen.create_revision if seen is not None and entries else 0
            record.unsaved = True
        if not entries and old in self._view.tree:
            self._publisher.gone(old)
        for entry in entries:
            self._publisher.journal.done(entry)
        for key in self._steps_at(new):
            self._publisher.owes(key)
        self._publisher.tree_changed(new)

    async def finish(self, entry: Owed) -> None:
        """A rename that a daemon before this one had begun. CatalogError, TryAgain, OSError."""
        root = self._registry.root
        await self._move_keys(entry.path, entry.target)
        if _is_directory(root / entry.path) and not (root / entry.target).exists():
            (root / entry.path).rename(root / entry.target)
            self.moved(entry.path, entry.target)
            Moves(self._registry, {}).directory_moved(entry.path, entry.target)
            for rel in (entry.path, entry.target):
                directory, _, name = rel.rpartition("/")
                self._registry.invalidate(directory, name)
        self._publisher.journal.done(entry)

    # --- what may be moved

    def _steps_at(self, rel: str) -> list[Key]:
        """The catalogue's steps at or below the directory."""
        found = []
        for path, seen in self._view.tree.items():
            where = self._registry.names.locate(path) if f"{path}/".startswith(f"{rel}/") else None
            if where is not None and not where.inner and seen.record.kind == "dir":
                found.append((where.namespace, where.step))
        return found

    def _check_own(self, old: str) -> None:
        for key in self._steps_at(old):
            record, state = self._registry.records.get(key), self._view.states.get(key)
            generations = {state.record.generation} if state is not None else set()
            if record is not None:
                generations.add(writing_generation(record.manifest))
            for generation in generations:
                known = self._view.known_files(key, generation)
                if state is not None and set(state.record.parts) - {self._node}:
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), old)
                if known is not None and any(files for node, files in known.parts.items() if node != self._node):
                    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), old)

    async def _check_stays(self, old: str, new: str) -> None:
        for key in self._steps_at(old):
            if self._locate_step(new + "/".join(key)[len(old) :]) is not None:
                continue
            state, record = self._view.states.get(key), self._registry.records.get(key)
            generation = writing_generation(record.manifest) if record is not None else 1
            files = await self._view.files(key, state.record.generation if state is not None else generation)
            if any(file.node != self._node for file in files.files.values()):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)

    def _locate_step(self, rel: str) -> StepPath | None:
        where = self._registry.names.locate(rel)
        return where if where is not None and not where.inner else None

    # --- the keys

    async def _move_keys(self, old: str, new: str) -> None:
        for _ in range(_ROUNDS):
            if not await self._view.caught_up(prefixes=("t/", "c/"), within_s=CATCH_UP_S):
                raise TryAgain("the view of the catalogue is behind")
            top = self._view.tree.get(old)
            if top is None:
                return
            here = Compare(tree_key(old), "create", "equal", top.create_revision)
            for key in self._steps_at(old):
                await self._move_step(key, new + "/".join(key)[len(old) :], here)
            changes = self._tree_changes(old, new)
            is_done = True
            for at in range(0, len(changes), _KEYS_AT_ONCE):
                is_done = is_done and await self._change(here, changes[at : at + _KEYS_AT_ONCE])
            await self._view.caught_up(keys=(tree_key(old), tree_key(new)), within_s=CATCH_UP_S)
            if is_done:
                return
        raise TryAgain(f"others go on changing {old}")

    def _tree_changes(self, old: str, new: str) -> list[_Change]:
        """Of names below, deepest first; then of steps with their states; last of the directory itself."""
        below: list[_Change] = []
        last: list[_Change] = []
        for path in sorted(self._view.tree, reverse=True):
            if not f"{path}/".startswith(f"{old}/"):
                continue
            record = self._view.tree[path].record
            target = new + path[len(old) :]
            source_step, target_step = self._locate_step(path), self._locate_step(target)
            where = self._registry.names.locate(target)
            if record.kind == "dir":
                record = replace(record, node=self._node)  # who finds the key anew hears of it as of another node's
            put: Put | None = Put(tree_key(target), to_bytes(record))
            if record.file is not None and where is not None and where.inner:
                self._expect(where, record.file)
                put = None  # whoever wrote it lists it in his part of the step
            change = Delete(tree_key(path)), put
            if source_step is not None:
                last += self._state_changes(source_step, target_step)
            (last if path == old or source_step is not None else below).append(change)
        return below + last

    def _state_changes(self, source: StepPath, target: StepPath | None) -> list[_Change]:
        seen = self._view.states.get((source.namespace, source.step))
        if seen is None:
            return []
        put = None
        if target is not None:
            state = replace(seen.record, number=target.number)
            put = Put(state_key(target.namespace, target.step), to_bytes(state))
        return [(Delete(state_key(source.namespace, source.step)), put)]

    def _expect(self, where: StepPath, file: FileRecord) -> None:
        """The step that the directory becomes is not whole before all nodes list what they had in it."""
        self._publisher.expected.setdefault((where.namespace, where.step), {})[where.inner] = file.size_bytes

    async def _move_step(self, key: Key, target: str, here: Compare) -> None:
        where = self._locate_step(target)
        for of, at_once in ((parts_prefix, _PAGES_AT_ONCE), (holdings_prefix, _KEYS_AT_ONCE)):
            prefix = of(*key)
            found, _ = await self._store.range(prefix)
            changes: list[_Change] = []
            for value in found:
                put = None
                if where is not None:
                    put = Put(of(where.namespace, where.step) + value.key.removeprefix(prefix), value.value)
                changes.append((Delete(value.key), put))
            for at in range(0, len(changes), at_once):
                await self._change(here, changes[at : at + at_once])
        self._publisher.parts.step_gone(key)

    async def _change(self, here: Compare, changes: list[_Change]) -> bool:
        operations: list[Put | Delete] = []
        for delete, put in changes:
            operations += [delete] if put is None else [delete, put]
        return not operations or (await self._store.txn([here], operations)).succeeded


def put_operation(operation: Operation) -> Put:
    return Put(operation_key(uuid.uuid4().hex), to_bytes(operation))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
