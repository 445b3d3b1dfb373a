"""What this node has to tell the catalogue, as marks and not as messages.

A mark says that a step or a path may differ from what the catalogue has of it; what is put is computed when it is put.
So a lost answer, a crash or an outage costs nothing: after each of them the same is found to be owed. What the tree
can't tell any more (removals) is in a journal (`tierfs.cluster.journal`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import trio

from tierfs.catalog.keys import state_key, tree_key
from tierfs.catalog.records import FileRecord, StepState
from tierfs.catalog.store import Compare, KeyStore
from tierfs.cluster.journal import Journal, Owed
from tierfs.cluster.local_files import LocalFiles, read_opened, write_opened, writing_generation
from tierfs.cluster.marks import Mark, Marks
from tierfs.cluster.own_parts import OwnParts, revision_now
from tierfs.cluster.putting_away import drop_marker
from tierfs.cluster.step_removal import delete_step
from tierfs.cluster.tree_names import CATCH_UP_S, TreeNames, TryAgain, is_being_renamed
from tierfs.errors import CatalogError, CatalogUnavailable
from tierfs.steps.names import StepPath
from tierfs.steps.record import SHARD_SUFFIXES, StepRecord
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.copies import Copies
    from tierfs.cluster.tables import Seen
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

#: After a request that failed; after a failure that nobody expected.
_RETRY_S = 0.2
_RETRY_LATER_S = 10.0
#: How long a program that writes a file again waits for the catalogue; how often it is looked for the lease then.
_TOLD_WITHIN_S, _LOOK_AT_LEASE_S = 5.0, 0.2
#: How often a change is tried again that another node's came before.
_ROUNDS = 8


class Publisher:
    """Used from the trio thread. The callbacks are set by who assembles the cluster's parts; they return at once."""

    def __init__(self, registry: StepRegistry, store: KeyStore, view: View, copies: Copies, node: str) -> None:
        """Reads the journal. OSError."""
        self.registry, self.store, self.view, self.node = registry, store, view, node
        self._copies = copies
        self.files = LocalFiles(copies, node)
        self.parts = OwnParts(store, node)
        self.journal = Journal(registry.tier.meta)
        self.names = TreeNames(registry, store, view, self.files, self.journal, node)
        #: Another node removed the step: it goes here too.
        self.on_deleted: Callable[[StepRecord], None] = lambda record: None
        #: The catalogue's commit is not what this node has: it takes that one over.
        self.on_committed: Callable[[Key], None] = lambda key: None
        #: The catalogue's commit was withdrawn, since a file of it was removed: it is no longer complete here either.
        self.on_withdrawn: Callable[[StepRecord], None] = lambda record: None
        #: Make the commit of a step that is complete here and unknown there (`Agreement.commit_complete`).
        self.commit: Callable[[StepRecord], Awaitable[None]] = _no_commit
        #: Markers that got their names though their steps are not complete yet (a commit that was `pending`).
        self.waiting_markers: dict[Key, str] = {}
        #: A file that a program removed from a step (`Removing.is_removed`).
        self.is_removed_inside: Callable[[Key, str], bool] = lambda key, inner: False
        #: Files (and their sizes) that came into a step with its directory's rename: it is not whole without them.
        self.expected: dict[Key, dict[str, int]] = {}
        #: The step is about to be complete here, as the catalogue says already (`Agreement.is_completing`).
        self.is_completing: Callable[[Key], bool] = lambda key: False
        #: Others may take this node for a member (`Membership.may_count`).
        self.counts_as_member: Callable[[], bool] = lambda: False
        #: Steps of before this daemon: what the catalogue has of an overwrite that was given up is not known.
        self._of_before = set(registry.records)
        self._marks = Marks(registry.names)
        self._locks: dict[Key, trio.Lock] = {}
        for entry in self.journal:
            self._mark_owed(entry)

    # --- told

    def changed(self, record: StepRecord) -> None:
        """What this node has of the step may be another."""
        self._marks.add(("step", *record.key))

    def owes(self, key: Key) -> None:
        """The same of a step that has no record (yet)."""
        self._marks.add(("step", *key))

    def opened(self, rel: str, ino: int) -> None:
        """A file was opened for writing (after `withdraw`, or made)."""
        where = self.registry.names.locate(rel)
        if where is None or not where.inner:
            self.names.opened(ino)
        else:
            self._drop_waiting_marker(where)
        path = self.registry.root / rel
        try:
            if not read_opened(path):
                write_opened(path, ino, revision_now(self.registry, self.view, self.parts, where))
        except OSError as error:
            log.debug("%s was opened and is gone: %s", rel, error)

    def sealed(self, rel: str, ino: int) -> None:
        self.files.sealed(ino)
        self._marks.add(*(("path", other) for other in self.names.sealed(rel, ino)))
        where = self.registry.names.locate(rel)
        if where is not None and where.inner:
            self._marks.add(("step", where.namespace, where.step))
        else:
            self._marks.add(("path", rel))

    def tree_changed(self, rel: str) -> None:
        """A directory, plain file or link was made, or has other attributes."""
        where = self.registry.names.locate(rel)
        if where is not None and where.inner == "":
            self._marks.add(("step", where.namespace, where.step))
        self._marks.add(("path", rel))

    def gone(self, rel: str) -> None:
        """A program removed the name, which is none of a step's directory (`removed`). OSError (the journal)."""
        where = self.registry.names.locate(rel)
        if where is not None and where.inner:
            self._marks.add(("step", where.namespace, where.step))
        if self.names.gone(rel):
            self._marks.add(("path", rel))

    def removed(self, record: StepRecord) -> None:
        """A program removed the step: it goes everywhere. OSError (the journal)."""
        made = self.names.made.pop(record.rel, 0)
        for entry in self.journal.at(record.rel, "alone"):
            self.journal.done(entry)
        if record.manifest.joined or made:
            self.owes_removal(record, record.manifest.joined or made)

    def owes_removal(self, record: StepRecord, created: int) -> None:
        """Of the step with the directory of that revision, unless a generation is complete that was not known here.

        OSError (the journal).
        """
        known = record.manifest.generation if record.manifest.state == "complete" else record.manifest.generation - 1
        self.journal.add("step", record.rel, created=created, generation=max(0, known))
        self._marks.add(("step", *record.key))

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> None:
        """See `Cluster.make_directory`."""
        await self._removals_first(rel)
        try:
            if not await self.names.make_directory(rel, mode, uid, gid):
                self.tree_changed(rel)
        except FileExistsError:
            where = self.registry.names.locate(rel)
            record = self.registry.at(where) if where is not None and where.inner == "" else None
            seen = self.view.tree.get(rel)
            if record is not None and seen is not None and not record.manifest.joined:
                record.manifest.joined = seen.create_revision
                record.unsaved = True
            raise

    async def claim(self, rel: str) -> None:
        """See `Cluster.claim`."""
        await self._removals_first(rel)
        await self.names.claim(rel)

    async def withdraw(self, rel: str, ino: int) -> None:
        """Before a file is written again: the catalogue no longer has it as one of this node's sealed files.

        With the catalogue away it is waited until this node is no member for the others any more, since they don't
        commit files of nodes that are not there: so no commit can name bytes that are written over. OSError.
        """
        if not ino:
            return
        path = self.registry.root / rel
        self.files.withdrawn(ino)
        version = self._copies.withdraw(ino, path)
        where = self.registry.names.locate(rel)
        if version is not None and where is None:
            self.names.withdrawn(path, ino, version)
        write_opened(path, ino, revision_now(self.registry, self.view, self.parts, where))
        record = self.registry.at(where) if where is not None and where.inner else None
        if where is not None:
            self._drop_waiting_marker(where)
        if record is None or version is None or not version.startswith(f"{self.node}/"):
            return
        self.changed(record)
        known = self.view.connected and await self.flush(record.key, within_s=_TOLD_WITHIN_S)
        if not known and self.counts_as_member():
            log.warning("%s is written again once this node is no member any more: the catalogue is away", rel)
            while self.counts_as_member() and not await self.flush(record.key, within_s=_LOOK_AT_LEASE_S):
                pass
        write_opened(path, ino, revision_now(self.registry, self.view, self.parts, where))

    def _drop_waiting_marker(self, where: StepPath) -> None:
        """A shard is written again: the marker of the save before, which never was complete, would vouch for it."""
        key = where.namespace, where.step
        marker, record = self.waiting_markers.get(key), self.registry.records.get(key)
        if marker is None or where.inner == marker or PurePosixPath(where.inner).suffix not in SHARD_SUFFIXES:
            return
        del self.waiting_markers[key]
        if record is not None and not record.is_complete and drop_marker(self.registry, record, marker):
            self.changed(record)

    # --- asked

    @property
    def pending(self) -> int:
        """How many steps and paths the catalogue has to be told of."""
        return len(self._marks)

    def is_removed_here(self, rel: str) -> bool:
        """A program removed it here, and the catalogue does not know yet: it is not to be shown again."""
        where = self.registry.names.locate(rel)
        if where is not None:
            if self.journal.at(where.step_rel, "step"):
                return self.registry.at(where) is None
            if where.inner and self.is_removed_inside((where.namespace, where.step), where.inner):
                return True
        return bool(self.journal.at(rel, "path")) and not (self.registry.root / rel).exists()

    def is_moving_here(self, rel: str) -> bool:
        """It is at or below a directory that is just being renamed here, by its old or its new name."""
        return any(
            f"{rel}/".startswith((f"{entry.path}/", f"{entry.target}/"))
            for entry in self.journal
            if entry.kind == "rename"
        )

    def is_made_here(self, rel: str) -> bool:
        """A program made it here, and the catalogue does not know yet."""
        return rel in self.names.made or self.is_being_told(rel)

    def is_being_told(self, rel: str) -> bool:
        """The catalogue is about to hear of the name."""
        return self._marks.has(("path", rel))

    async def flush_path(self, rel: str, *, within_s: float) -> bool:
        return await self._marks.flushed(("path", rel), within_s=within_s)

    async def flush(self, key: Key | None, *, within_s: float) -> bool:
        """Until what was marked before this call (of that step) is published; False where it takes longer."""
        return await self._marks.flushed(None if key is None else ("step", *key), within_s=within_s)

    @asynccontextmanager
    async def alone_at(self, key: Key) -> AsyncIterator[None]:
        """Nothing else of this node puts parts of the step meanwhile."""
        lock = self._locks.setdefault(key, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and self._locks.get(key) is lock:
                del self._locks[key]

    def completed_alone(self, record: StepRecord, generation: int) -> None:
        """The step is complete here while the catalogue is away: its commit is owed, in this order. OSError."""
        if not any(entry.generation == generation for entry in self.journal.at(record.rel, "alone")):
            self.journal.add("alone", record.rel, generation=generation)
        self._marks.add_last(("step", *record.key))  # behind those that were completed before

    def is_alone(self, record: StepRecord) -> bool:
        generation = record.manifest.generation
        return any(entry.generation == generation for entry in self.journal.at(record.rel, "alone"))

    # --- the work

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                if not self.view.connected:
                    await self.view.until(lambda: self.view.connected, within_s=60)
                    continue
                for mark in self._marks.take():
                    nursery.start_soon(self._publish, mark)
                await self._marks.wait()

    async def _publish(self, mark: Mark) -> None:
        kind, *of = mark
        try:
            if kind == "step":
                await self._publish_step((of[0], of[1]))
            else:
                await self.names.publish(of[0])
        except (CatalogError, TryAgain) as error:
            log.debug("%s is published later: %s", "/".join(of), error)
            if kind == "step":
                self.parts.forget((of[0], of[1]))
            if isinstance(error, CatalogUnavailable):
                self.view.doubt()
            self._marks.again(mark, _RETRY_S)
        except FileNotFoundError as error:
            log.debug("%s went while it was published: %s", "/".join(of), error)
        except Exception:
            log.exception("publishing %s failed; tried again in %.0f s", "/".join(of), _RETRY_LATER_S)
            self._marks.again(mark, _RETRY_LATER_S)
        finally:
            self._marks.done(mark)

    # --- a step

    async def _publish_step(self, key: Key) -> None:
        async with self.alone_at(key):
            for entry in self.journal.at("/".join(key), "step"):
                await delete_step(self.store, self.view, key, entry, on_kept=self.names.on_kept)
                self.parts.step_gone(key)
                self.journal.done(entry)
            record = self.registry.records.get(key)
            for _ in range(_ROUNDS):
                if record is None or self.registry.records.get(key) is not record:
                    return
                if await self._publish_once(record):
                    return
                await self._catch_up(record)
        raise TryAgain(f"others go on changing {'/'.join(key)}")

    async def _publish_once(self, record: StepRecord) -> bool:
        """False where the view has to catch up, and then it is to be done anew."""
        if record.is_complete and not record.manifest.populated and not record.manifest.joined:
            return True  # what is in it is not known here, so others have to publish it
        if not await self.join_step(record):
            return True
        key, manifest = record.key, record.manifest
        seen = self.view.states.get(key)
        generation = writing_generation(manifest)
        added = record.is_complete
        if added:
            verdict = await self._compare_with_catalogue(record, seen)
            if verdict != "same":
                return verdict == "done"
            files = await self._additions(record)
        elif seen is not None and seen.record.generation >= generation:
            if self.is_completing(key):
                raise TryAgain(f"{record.rel} is about to be complete here")
            self.on_committed(key)
            return True
        else:
            files = await self.files.own(record)
        if record.is_complete != added or writing_generation(manifest) != generation:
            return False
        compares = self.compares(record, seen)
        if added and not await self._give_up(record, generation + 1, compares):
            return False
        return await self.parts.put(key, generation, files, compares, added=added)

    async def _give_up(self, record: StepRecord, generation: int, compares: list[Compare]) -> bool:
        """What this node had put of an overwrite that was given up is put empty."""
        if record.key not in self._of_before and not self.parts.has_put(record.key, generation):
            return True
        if not await self.parts.put(record.key, generation, {}, compares, added=False):
            return False
        self._of_before.discard(record.key)
        return True

    async def _compare_with_catalogue(
        self, record: StepRecord, seen: Seen[StepState] | None
    ) -> Literal["same", "done", "again"]:
        """Of a step that is complete here. done: somebody else takes it from here."""
        manifest = record.manifest
        if seen is None or seen.record.generation < manifest.generation:
            await self._catch_up(record)
            if self.view.states.get(record.key) != seen:
                return "again"
            if seen is None and manifest.joined and not self.is_alone(record):
                self.on_withdrawn(record)
                return "done"
            if self._comes_after_another(record):
                raise TryAgain(f"steps that were completed before {record.rel} are committed first")
            await self.commit(record)
            return "done"
        if seen.record.generation > manifest.generation or not await self.is_same(record, seen.record):
            for entry in self.journal.at(record.rel, "alone"):
                self.journal.done(entry)
                message = (
                    f"{record.rel} was completed here while the catalogue was away, and by {seen.record.node} too, "
                    f"which counts: this node's files of generation {manifest.generation} are given up"
                )
                log.error("%s", message, extra=self.registry.extra(record))
                self.registry.problem("error", message, record.rel)
            self.on_committed(record.key)
            return "done"
        for entry in self.journal.at(record.rel, "alone"):
            self.journal.done(entry)
        return "same"

    def _comes_after_another(self, record: StepRecord) -> bool:
        """A step that was completed alone earlier is about to be committed."""
        for entry in self.journal:
            where = self.registry.names.locate(entry.path) if entry.kind == "alone" else None
            if entry.path == record.rel:
                return False
            if where is not None and self._marks.is_due(("step", where.namespace, where.step)):
                return True
        return False

    async def is_same(self, record: StepRecord, state: StepState) -> bool:
        """The catalogue's commit is of the files that are complete here; the manifest takes over when it was."""
        manifest = record.manifest
        if state.generation != manifest.generation:
            return False
        if manifest.completed_at == state.completed_at:
            return True
        if manifest.populated:
            merged = (await self.view.files(record.key, state.generation)).files
            for inner, file in (await self.files.every(record)).items():
                known = merged.get(inner)
                if inner not in manifest.added and (known is None or known.version != file.version):
                    return False
        manifest.completed_at = state.completed_at
        record.unsaved = True
        return True

    async def _additions(self, record: StepRecord) -> dict[str, FileRecord]:
        """This node's files of the complete step that its commit does not have."""
        key, generation = record.key, record.manifest.generation
        own = await self.files.own(record)
        known = (await self.parts.known(key, generation)).files()
        rest = {inner: file for inner, file in own.items() if _version(known.get(inner)) != file.version}
        if not rest:
            return {}
        committed = await self.view.files(key, generation, fresh=True)
        frozen = {inner: file for part in committed.parts.values() for inner, file in part.items()}
        versions = {file.version for part in committed.parts.values() for file in part.values()}
        return {
            inner: file
            for inner, file in rest.items()
            if file.version not in versions
            and (inner not in frozen or not record.is_protected(inner, self.registry.rules))
        }

    async def join_step(self, record: StepRecord) -> bool:
        """The step's directory is in the catalogue, and is the one that this node knows. False where another node
        removed it; that was told then. CatalogError, TryAgain."""
        manifest, rel = record.manifest, record.rel
        if not manifest.joined:
            manifest.joined = self.names.made.pop(rel, 0)
        seen = self.view.tree.get(rel)
        if not manifest.joined:
            if record.is_complete and not self.is_alone(record):
                # Of before this node was in a cluster, or of a catalogue that was lost: its commit is owed.
                self.journal.add("alone", rel, generation=manifest.generation)
            created = await self.names.ensure_directory(rel)
            if self.registry.records.get(record.key) is not record:
                self.owes_removal(record, created)
                return False
            manifest.joined = created
            record.unsaved = True
            return True
        if (seen.create_revision if seen is not None else 0) != manifest.joined:
            if not await self.view.caught_up(keys=(tree_key(rel),), within_s=CATCH_UP_S):
                raise TryAgain(f"{rel} can't be looked up in the catalogue")
            seen = self.view.tree.get(rel)
            if (seen.create_revision if seen is not None else 0) != manifest.joined:
                if is_being_renamed(self.view, rel, manifest.joined):
                    if seen is None:
                        raise TryAgain(f"{rel} is being renamed")
                    manifest.joined = seen.create_revision
                else:
                    self.on_deleted(record)
                    return False
        record.unsaved = True
        return True

    def compares(self, record: StepRecord, seen: Seen[StepState] | None) -> list[Compare]:
        """Nobody completed or removed the step since this node looked."""
        return [
            Compare(state_key(*record.key), "mod", "equal", seen.mod_revision if seen is not None else 0),
            Compare(tree_key(record.rel), "create", "equal", record.manifest.joined),
        ]

    async def _catch_up(self, record: StepRecord) -> None:
        if not await self.view.caught_up(keys=(state_key(*record.key), tree_key(record.rel)), within_s=CATCH_UP_S):
            raise TryAgain("the view of the catalogue is behind")

    def _mark_owed(self, entry: Owed) -> None:
        where = self.registry.names.locate(entry.path)
        if entry.kind in ("step", "alone") and where is not None:
            self._marks.add(("step", where.namespace, where.step))
        elif entry.kind == "path":
            self._marks.add(("path", entry.path))

    async def _removals_first(self, rel: str) -> None:
        """A name that was removed here is made again: the catalogue hears of both in this order."""
        if self.view.connected and self.journal.at(rel, "step", "path"):
            where = self.registry.names.locate(rel)
            key = (where.namespace, where.step) if where is not None else None
            await self.flush(key, within_s=self.registry.settings.etcd.timeout_s)


def _version(file: FileRecord | None) -> str:
    return file.version if file is not None else ""


async def _no_commit(record: StepRecord) -> Any:
    raise CatalogUnavailable(f"{record.rel}: nothing commits yet")
