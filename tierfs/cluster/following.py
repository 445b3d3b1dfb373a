"""What other nodes changed is done here too: directories, plain files and links, whole steps, removals, renames.

The view tells changes in their order and is never held up. They are worked off in that order, as what the catalogue
says by then; what has to wait for other nodes goes on beside. What fails for one path is logged, and tried again with
growing pauses, without holding up the rest. A name that a program of this node made or changed, and that is not
published yet, is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import trio

from tierfs.catalog.records import FileRecord, TreeRecord
from tierfs.cluster import placing
from tierfs.cluster.making import version_at
from tierfs.cluster.operating import Operating
from tierfs.cluster.showing import Showing
from tierfs.cluster.taking import Taking, was_renamed
from tierfs.cluster.view import Change, Seen, View
from tierfs.errors import TierfsError
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.cluster")

#: The pauses before something that failed is tried again, seconds, and how often that is.
LEAST_PAUSE_S = 0.2
MOST_PAUSE_S = 30.0
MOST_TRIES = 20
#: What fails at first is often a matter of order (a directory goes before what is in it) and is no news for people.
SAID_AFTER_TRIES = 3
#: Steps and plain files that are brought at once.
AT_ONCE = 8
#: How long a program waits for renames that are on their way.
APPLIED_WITHIN_S = 2.0

_Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class _Told:
    """What is to be done for a name: in order, or beside the rest, where it may wait for other nodes. Of a reset,
    `revision` is the one up to which all was told by then."""

    kind: str
    name: str
    work: _Work
    is_in_order: bool
    revision: int = 0


@dataclass
class _Failed:
    work: _Work
    tries: int
    due: float
    message: str


class _Moving(TierfsError):
    """It has to wait for a rename that this node is just making."""


class Following:
    """Used from the trio thread. `made_here` says of a path that a program made it here since, though the catalogue's
    news are of its removal."""

    def __init__(
        self, registry: StepRegistry, view: View, showing: Showing, taking: Taking, operating: Operating
    ) -> None:
        self._registry = registry
        self._view = view
        self._showing = showing
        self._taking = taking
        self._operating = operating
        self._node = showing.copies.node
        self._root = showing.root
        self.made_here: Callable[[str], bool] = lambda rel: False
        #: Told of a name that the catalogue's news are of, and when it was made there.
        self.known_here: Callable[[str, int], None] = lambda rel, created: None
        #: This node has changed the name in the catalogue since that revision.
        self.is_behind: Callable[[str, int], bool] = lambda rel, revision: False
        self._queue: deque[_Told] = deque()
        self._operations = 0  # in the queue
        self._failed: dict[tuple[str, str], _Failed] = {}
        self._waiting = 0  # for their turn beside the rest
        self._busy = 0
        self._news = trio.Event()
        self._lot = trio.lowlevel.ParkingLot()
        self._slots = trio.Semaphore(AT_ONCE)
        view.listen(self._told)
        showing.operations_applied = self.operations_applied

    def _told(self, change: Change) -> None:
        if change.kind == "tree":
            work: _Work = partial(self._tree, change.key, change.old, change.new)
            in_order = change.new is None or change.new.record.kind != "file"
            self._add(_Told("tree", change.key, work, in_order))
        elif change.kind == "state" and change.step is not None:
            self._add(_Told("state", "/".join(change.step), partial(self._state, change.step), False))
        elif change.kind == "operation":
            self._add(_Told("operation", change.key, partial(self._operating.apply, change.new), True))
        elif change.kind == "node":
            self._add(_Told("node", change.key, self._nodes, True))
        else:
            seen = (operation.mod_revision for operation in self._view.operations.values())
            revision = max(self._view.revision, *seen, 0)
            self._add(_Told("reset", "", trio.lowlevel.checkpoint, True, revision))

    def _add(self, told: _Told) -> None:
        self._queue.append(told)
        self._operations += told.kind == "operation"
        self._news.set()

    # --- told by the sending side, which compares what is here with the catalogue

    def step_deleted(self, record: StepRecord) -> None:
        """Another node removed the step."""
        self._taking.forget(record)

    def step_committed(self, key: Key) -> None:
        """The catalogue's commit is not what this node has: it takes that one over."""
        self._add(_Told("state", "/".join(key), partial(self._take_over, key), False))

    def step_withdrawn(self, record: StepRecord) -> None:
        """The catalogue's commit was withdrawn."""
        self._add(_Told("state", record.rel, partial(self._state, record.key), False))

    def path_kept(self, rel: str) -> None:
        """A directory that was removed here stays, since another node has something in it."""
        self._add(_Told("tree", rel, partial(self._place, rel), False))

    def path_overruled(self, rel: str) -> None:
        """Another node's file of that name is the later one."""
        self._add(_Told("tree", rel, partial(self._place, rel), False))

    def path_deleted(self, rel: str) -> None:
        """A name outside of steps was removed by another node while this one was away."""
        self._add(_Told("tree", rel, partial(self._removed_meanwhile, rel), True))

    def moved_here(self, old: str, new: str) -> None:
        """A program renamed a directory here, and the steps at or below it are about to be known by their new names."""
        names = self._registry.names
        for record in list(self._registry.records.values()):
            where = names.locate(new + record.rel[len(old) :]) if f"{record.rel}/".startswith(f"{old}/") else None
            if where is not None and not where.inner:
                key = where.namespace, where.step
                work = partial(self._step_moved, record.key, key)
                self._add(_Told("moved", "/".join(key), work, True))

    async def _step_moved(self, old: Key, new: Key) -> None:
        record = self._registry.records.get(new)
        if record is not None:
            self._showing.copies.step_moved(old, new)
            await self._showing.maker.mark_anew(record)

    @property
    def is_idle(self) -> bool:
        """All that was told is done, or failed."""
        return not (self._queue or self._waiting or self._busy)

    def problems(self) -> list[str]:
        """What could not be done so far."""
        failed = [(name, each) for (_, name), each in self._failed.items() if each.tries >= SAID_AFTER_TRIES]
        return sorted(f"{name}: {each.message}" for name, each in failed)

    async def operations_applied(self) -> None:
        """Until the renames and removals that the view has are made here, for a bounded time."""
        with trio.move_on_after(APPLIED_WITHIN_S):
            while self._operations:
                await self._lot.park()
        await trio.lowlevel.checkpoint()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Works off what is told, until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                self._news = trio.Event()
                while self._queue:
                    await self._next(nursery)
                due = min((failed.due for failed in self._failed.values()), default=float("inf"))
                with trio.move_on_at(due):
                    await self._news.wait()
                self._retry(nursery)

    # --- in order

    async def _next(self, nursery: trio.Nursery) -> None:
        told = self._queue.popleft()
        name = told.kind, told.name
        self._busy += 1
        try:
            await trio.lowlevel.checkpoint()
            if told.kind == "reset":
                await self._operating.all_read(told.revision)
                await self._all(nursery)
            elif told.is_in_order:
                await self._try(name, told.work, 0)
            else:
                self._start(nursery, name, told.work)
        finally:
            self._busy -= 1
            if told.kind == "operation":
                self._operations -= 1
                self._lot.unpark_all()

    async def _all(self, nursery: trio.Nursery) -> None:
        """After a full read: what is not here, since this tier lost it or it could not be done, is looked for anew."""
        for at, (rel, seen) in enumerate(sorted(self._view.tree.items())):
            if at % AT_ONCE == AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if not self._is_there(rel):
                work = partial(self._place, rel)
                if seen.record.kind == "file":
                    self._start(nursery, ("tree", rel), work)
                else:
                    await self._try(("tree", rel), work, 0)
        for key, state in list(self._view.states.items()):
            if self._showing.is_to_take(self._registry.records.get(key), state):
                self._start(nursery, ("state", f"{key[0]}/{key[1]}"), partial(self._state, key))

    def _is_there(self, rel: str) -> bool:
        return os.path.lexists(self._root / rel)

    async def _place(self, rel: str) -> None:
        await self._showing.place_tree(rel)

    def _start(self, nursery: trio.Nursery, name: tuple[str, str], work: _Work, tries: int = 0) -> None:
        """Go on beside the rest."""

        async def beside() -> None:
            async with self._slots:
                self._waiting -= 1
                self._busy += 1
                try:
                    await self._try(name, work, tries)
                finally:
                    self._busy -= 1

        self._waiting += 1
        nursery.start_soon(beside)

    async def _try(self, name: tuple[str, str], work: _Work, tries: int) -> None:
        try:
            if self._showing.is_moving_here(name[1]) and name[0] in ("tree", "state"):
                raise _Moving(f"{name[1]} is just being renamed here")
            await work()
        except (OSError, TierfsError) as error:
            self._fails(name, work, tries + 1, error)
        else:
            self._failed.pop(name, None)

    def _fails(self, name: tuple[str, str], work: _Work, tries: int, error: Exception) -> None:
        rel = name[1]
        if tries >= SAID_AFTER_TRIES and not isinstance(error, _Moving):
            self._showing.cannot(rel, error)
        else:
            log.debug("%s is tried again: %s", rel, error)
        if tries >= MOST_TRIES:
            log.error("given up after %d tries: %s", tries, error, extra={"file": rel})
            self._failed.pop(name, None)
            return
        pause_s = LEAST_PAUSE_S if isinstance(error, _Moving) else min(MOST_PAUSE_S, LEAST_PAUSE_S * 2.0 ** (tries - 1))
        self._failed[name] = _Failed(work, tries, trio.current_time() + pause_s, str(error))
        self._news.set()

    def _retry(self, nursery: trio.Nursery) -> None:
        now = trio.current_time()
        for name, failed in list(self._failed.items()):
            if failed.due <= now:
                failed.due = float("inf")
                self._start(nursery, name, failed.work, failed.tries)

    # --- names

    async def _tree(self, rel: str, old: Seen[TreeRecord] | None, new: Seen[TreeRecord] | None) -> None:
        """The name is brought from what it was to what it is in the catalogue now."""
        for seen in (old, new):
            if seen is not None:
                self.known_here(rel, seen.create_revision)
        if old is not None and old.record.file is not None:
            self._showing.note_published(rel, old.record.file.version)
        now = self._view.tree.get(rel)
        if old is not None and (now is None or now.create_revision != old.create_revision):
            await self._removed(rel, old)
        if now is None:
            self._showing.forget_name(rel)
        elif now.record.node == self._node:
            self._note_own(rel, now)
            if old is not None:
                self._look_like(rel, now)  # what came before may have been made here since
        else:
            await self._made(rel, old, now)

    def _note_own(self, rel: str, now: Seen[TreeRecord]) -> None:
        if now.record.file is not None:
            self._showing.note_published(rel, now.record.file.version)
        where = self._registry.names.locate(rel)
        if where is not None and not where.inner and now.record.kind == "dir":
            record = self._registry.at(where)
            if record is not None:
                self._showing.joins(where, now)

    async def _made(self, rel: str, old: Seen[TreeRecord] | None, now: Seen[TreeRecord]) -> None:
        where = self._registry.names.locate(rel)
        if where is not None and not where.inner and now.record.kind == "dir":
            record = self._registry.at(where)
            joined = record.manifest.joined if record is not None else 0
            if record is not None and joined not in (0, now.create_revision):
                if was_renamed(self._view, rel, joined):
                    record.manifest.joined = now.create_revision
                    record.unsaved = True
                else:
                    await self._taking.removed(record.key, joined)
        was_link = old is not None and old.record.kind == now.record.kind == "link"
        if (
            was_link
            and old is not None
            and placing.read_link(self._root, rel) == old.record.target != now.record.target
        ):
            placing.remove_file(self._root, rel)
        await self._showing.place_tree(rel)
        if old is not None:
            self._look_like(rel, now)

    def _let_go_of_link(self, rel: str, old: str, new: str) -> None:
        if old != new and placing.read_link(self._root, rel) == old:
            placing.remove_file(self._root, rel)

    def _look_like(self, rel: str, now: Seen[TreeRecord]) -> None:
        """Mode, owner and time as another node set them, unless a program set them here and that is not told yet."""
        if self.made_here(rel) or self.is_behind(rel, now.mod_revision):
            return
        if now.record.kind == "dir":
            if self._showing.is_directory(rel) and placing.make_like(self._root, rel, now.record):
                self._showing.tell(rel)
        elif now.record.kind == "file":
            self._same_bytes_other_looks(rel, now.record)

    def _same_bytes_other_looks(self, rel: str, record: TreeRecord) -> None:
        """chmod and touch of a plain file."""
        file = record.file
        info = placing.look(self._root, rel)
        if file is None or info is None or not stat.S_ISREG(info.st_mode):
            return
        version, mark = version_at(self._root / rel)
        if version != file.version:
            return
        with placing.parent_of(self._root, rel) as (directory, name):
            if (info.st_uid, info.st_gid) != (file.uid, file.gid):
                with contextlib.suppress(PermissionError):  # who is not root can't give away
                    os.chown(name, file.uid, file.gid, dir_fd=directory, follow_symlinks=False)
            if stat.S_IMODE(info.st_mode) != file.mode:
                os.chmod(name, file.mode, dir_fd=directory)
            if mark is None and info.st_mtime_ns != file.mtime_ns:
                os.utime(name, ns=(info.st_atime_ns, file.mtime_ns), dir_fd=directory, follow_symlinks=False)
        self._showing.tell(rel)

    async def _removed(self, rel: str, old: Seen[TreeRecord]) -> None:
        """Another node removed it (or this one did: then there is nothing left to do)."""
        where = self._registry.names.locate(rel)
        if where is not None and not where.inner and old.record.kind == "dir":
            await self._taking.removed((where.namespace, where.step), old.create_revision)
            if self._registry.at(where) is not None:
                return  # another one of its name
        info = placing.look(self._root, rel)
        if info is None or self.made_here(rel):
            return
        if old.record.kind == "dir" and stat.S_ISDIR(info.st_mode):
            self._remove_directory(rel)
        elif old.record.kind == "link" and placing.read_link(self._root, rel) == old.record.target:
            placing.remove_file(self._root, rel)
        elif old.record.file is not None and stat.S_ISREG(info.st_mode):
            if not self._is_left_of(rel, old.record.file):
                return  # written again since
            placing.remove_file(self._root, rel)
            self._showing.maker.on_replaced(info.st_ino)
        else:
            return
        self._is_gone(rel)

    def _is_left_of(self, rel: str, file: FileRecord) -> bool:
        """What stands there is the file that was removed, or an earlier one whose successor was not brought in time."""
        version = version_at(self._root / rel)[0]
        if version == file.version:
            return True
        is_news = rel in self._view.tree or self.is_behind(rel, self._view.revision)
        return not is_news and self._showing.was_published(rel, version)

    async def _removed_meanwhile(self, rel: str) -> None:
        info = placing.look(self._root, rel)
        if info is None or rel in self._view.tree or self.made_here(rel):
            return
        if stat.S_ISDIR(info.st_mode):
            self._remove_directory(rel)
        elif stat.S_ISLNK(info.st_mode) or version_at(self._root / rel)[0]:  # one without is being written
            placing.remove_file(self._root, rel)
            self._showing.maker.on_replaced(info.st_ino)
        else:
            return
        self._is_gone(rel)

    def _is_gone(self, rel: str) -> None:
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory:
            self._registry.latest.removed_by_program(directory)
            self._registry.update_latest(directory)
        self._showing.tell(rel)

    def _remove_directory(self, rel: str) -> None:
        self._registry.latest.clear_for_rmdir(rel)
        self._remove_theirs_below(rel)
        try:
            placing.remove_directory(self._root, rel)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # What is left was made here and is published anew, with its directory; or goes in a moment.
            raise TierfsError(f"{rel} was removed by another node, but is not empty here") from None
        self._registry.latest.removed_below(rel)

    def _remove_theirs_below(self, rel: str) -> None:
        """Files of other nodes in a directory inside of a step, which they removed with it."""
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None and where.inner else None
        if record is None or where is None or record.is_complete:
            return
        for inner in [name for name in record.manifest.files if name.startswith(f"{where.inner}/")]:
            try:
                author = version_at(record.directory / inner)[0].partition("/")[0]
            except FileNotFoundError:
                record.manifest.files.pop(inner, None)
                continue
            if author and author != self._node and inner not in record.open_names():
                self._showing.remove_file(record, inner)

    # --- steps and nodes

    async def _state(self, key: Key) -> None:
        state = self._view.states.get(key)
        if state is None:
            if f"{key[0]}/{key[1]}" in self._view.tree:
                await self._taking.withdrawn(key)
        elif self._showing.is_to_take(self._registry.records.get(key), state):
            await self._taking.follow(key)
        self._registry.update_latest(key[0])

    async def _take_over(self, key: Key) -> None:
        await self._taking.take(key, anyway=True)

    async def _nodes(self) -> None:
        """A node came or went: other steps may be readable now."""
        for namespace in {namespace for namespace, _ in self._registry.records}:
            await trio.lowlevel.checkpoint()
            self._registry.update_latest(namespace)
