"""Names outside of steps' files, sending side: directories, plain files, symbolic links, names claimed with O_EXCL.

What lstat says now is what the catalogue gets. Each change compares what this node knows of the key, so of two nodes
that change one name at once one wins, and the other sees it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.catalog.keys import tree_below, tree_key
from tierfs.catalog.records import TreeRecord, to_bytes
from tierfs.catalog.store import Compare, Delete, KeyStore, Put
from tierfs.cluster.journal import Journal, Owed
from tierfs.cluster.local_files import LocalFiles, write_joined, write_opened
from tierfs.cluster.tables import Change
from tierfs.cluster.versions import read_version
from tierfs.errors import CatalogError, CatalogUnavailable
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.registry import StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.tables import Seen
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

#: How often a change is tried again that another node's came before.
_ROUNDS = 8
#: How long it is waited for the view to see what the catalogue has, seconds.
CATCH_UP_S = 2.0


class TryAgain(Exception):
    """Other nodes' changes came before this node's again and again, or the view of the catalogue is behind."""


class TreeNames:
    """Used from the trio thread."""

    def __init__(
        self, registry: StepRegistry, store: KeyStore, view: View, files: LocalFiles, journal: Journal, node: str
    ) -> None:
        self._registry, self._store, self._view = registry, store, view
        self._files, self._journal = files, journal
        self.node = node
        #: Told when a directory that was removed here stays, since another node has something in it.
        self.on_kept: Callable[[str], None] = lambda rel: None
        #: Told the version under which the catalogue has, or had, this node's file of that name.
        self.on_published: Callable[[str, str], None] = lambda rel, version: None
        #: Told when another node's file may count instead of this node's.
        self.on_overruled: Callable[[str], None] = lambda rel: None
        #: Directories made in the catalogue by this daemon, by the revision, until their record or tree tells it.
        self.made: dict[str, int] = {}
        self._put_at: dict[str, tuple[int, int]] = {}  # what was put last, by create and modify revision
        self._growing: set[int] = set()
        self._linked: dict[int, list[str]] = {}  # other names of a file that is written again, by inode
        #: Closed or renamed while the catalogue could be reached: the last one counts, whenever it was opened. And
        #: names whose mode, owner or time was set. By number, since more may come while one is published.
        self._just_made: dict[str, int] = {}
        self._looks_set: dict[str, int] = {}
        self._changes = itertools.count(1)
        view.listen(self._seen)

    # --- before a name is made

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> bool:
        """The name in the catalogue, before mkdir(2). False with the catalogue away: then it is owed.

        FileExistsError where the cluster has it; FileNotFoundError where its parent was removed by another node.
        """
        record = TreeRecord("dir", self.node, mode=stat.S_IMODE(mode) & 0o777, uid=uid, gid=gid)
        created = await self._make(rel, record)
        if created:
            self.made[rel] = created
        return bool(created)

    async def claim(self, rel: str, mode: int = 0o600) -> bool:
        """The same for a file made with O_EXCL. A claim of this node's without a file is one that it made no use of."""
        return bool(await self._make(rel, TreeRecord("claim", self.node, mode=mode & 0o777)))

    async def _make(self, rel: str, record: TreeRecord) -> int:
        is_unsure = False  # an answer was lost: what stands there may be of this very call
        for _ in range(_ROUNDS):
            if not self._view.connected:
                return 0
            seen = self._view.tree.get(rel)
            if seen is not None:
                if is_unsure and seen.record == record and not self._is_here(rel):
                    return seen.create_revision
                if not self._may_replace(rel, seen, record):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), rel)
            try:
                above = await self._parents(rel)
                here = Compare(tree_key(rel), "mod", "equal", seen.mod_revision if seen is not None else 0)
                result = await self._store.txn([here, *above], [Put(tree_key(rel), to_bytes(record))])
                if result.succeeded:
                    created = result.revision if seen is None else seen.create_revision
                    self._put_at[rel] = created, result.revision
                    return created
            except CatalogUnavailable:
                is_unsure = True
            except (CatalogError, TryAgain) as error:
                log.warning("%s can't be made in the catalogue now: %s", rel, error)
                return 0
            await self._view.caught_up(keys=(tree_key(rel), *_keys_above(rel)), within_s=CATCH_UP_S)
        return 0

    def _may_replace(self, rel: str, seen: Seen[TreeRecord], record: TreeRecord) -> bool:
        """What stands there is this node's and means nothing: a claim not made use of, what was removed here."""
        if self._is_here(rel):
            return False
        if any(entry.created == seen.create_revision for entry in self._journal.at(rel, "path")):
            return seen.record.kind != "dir"
        return record.kind == "claim" and seen.record.kind == "claim" and seen.record.node == self.node

    async def _parents(self, rel: str) -> list[Compare]:
        """The directory above is in the catalogue: made there where it is not, with those above it."""
        parent = rel.rpartition("/")[0]
        if not parent:
            return []
        seen = self._view.tree.get(parent)
        if seen is None:
            await self.ensure_directory(parent)
            seen = self._view.tree.get(parent)
        created = seen.create_revision if seen is not None else self._put_at.get(parent, (0, 0))[0]
        return [Compare(tree_key(parent), "create", "equal", created)] if created else []

    async def ensure_directory(self, rel: str) -> int:
        """The directory is in the catalogue; returns the revision at which it came. CatalogError, TryAgain.

        FileNotFoundError where it is not here (any more).
        """
        seen = self._view.tree.get(rel)
        if seen is not None:
            return seen.create_revision
        if rel in self.made:
            return self.made[rel]
        info = os.lstat(self._registry.root / rel)
        above = await self._parents(rel)
        record = _directory(info, self.node)
        absent = Compare(tree_key(rel), "create", "equal", 0)
        result = await self._store.txn([absent, *above], [Put(tree_key(rel), to_bytes(record))])
        if result.succeeded:
            self._put_at[rel] = result.revision, result.revision
            self.joined(rel, result.revision)
            return result.revision
        await self._view.caught_up(keys=(tree_key(rel), *(each.key for each in above)), within_s=CATCH_UP_S)
        seen = self._view.tree.get(rel)
        if seen is None:
            raise TryAgain(f"the view of the catalogue is behind for {rel}")
        return seen.create_revision

    # --- afterwards

    def opened(self, ino: int) -> None:
        self._growing.add(ino)

    def joined(self, rel: str, revision: int) -> None:
        """The catalogue has the name since that revision: noted at it, also of what was made here for another node."""
        where = self._registry.names.locate(rel)
        if where is None:
            write_joined(self._registry.root / rel, revision)

    def withdrawn(self, path: Path, ino: int, version: str) -> None:
        """A file is about to be written that the catalogue may have under several names (hard links). OSError."""
        if path.lstat().st_nlink > 1:
            self._linked[ino] = self._names_of(version)

    def sealed(self, rel: str, ino: int) -> list[str]:
        """Returns the other names that have the new bytes too."""
        self._growing.discard(ino)
        self.came(rel)
        names = self._linked.pop(ino, [])
        for each in names:
            self.came(each)
        return names

    def came(self, rel: str) -> None:
        """A program closed a file of this name, or gave it the name."""
        if self._view.connected:
            self._just_made[rel] = next(self._changes)

    def looks_set(self, rel: str) -> list[str]:
        """A program set mode, owner or time, maybe of another node's file. Returns all names that have them now."""
        path = self._registry.root / rel
        version = None
        with contextlib.suppress(OSError):
            version = read_version(path) if path.lstat().st_nlink > 1 and path.is_file() else None
        names = [rel] if version is None else [rel, *(each for each in self._names_of(version) if each != rel)]
        for each in names:
            self._looks_set[each] = next(self._changes)
        return names

    def _names_of(self, version: str) -> list[str]:
        tree = self._view.tree.items()
        return [rel for rel, seen in tree if seen.record.file is not None and seen.record.file.version == version]

    def known(self, rel: str, created: int) -> None:
        """The catalogue's news told of the name made at that revision: the catalogue is what counts from now on."""
        if self.made.get(rel) == created:
            del self.made[rel]

    def is_behind(self, rel: str, revision: int) -> bool:
        """This node has changed the name in the catalogue since that revision."""
        return self._put_at.get(rel, (0, 0))[1] > revision

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            self._just_made.clear()  # others went on meanwhile, maybe

    def gone(self, rel: str) -> bool:
        """A program removed the name. True where the catalogue has to be told. OSError (the journal)."""
        self.made.pop(rel, None)
        seen = self._view.tree.get(rel)
        created, modified = self._put_at.pop(rel, (0, 0))
        if seen is None and not created:
            return False
        if seen is not None and seen.mod_revision > modified:  # else the view is behind what was put here
            created, modified = seen.create_revision, seen.mod_revision
        is_directory = seen is not None and seen.record.kind == "dir"
        self._journal.add("path", rel, created=created, modified=0 if is_directory else modified)
        return True

    async def publish(self, rel: str) -> None:
        """Bring the catalogue to what is here. CatalogError, TryAgain."""
        for entry in self._journal.at(rel, "path"):
            await self._publish_removal(entry)
        for _ in range(_ROUNDS):
            if await self._publish_once(rel):
                self._look_again(rel)
                return
            for entry in self._journal.at(rel, "path"):
                await self._publish_removal(entry)
        raise TryAgain(f"others go on changing {rel}")

    def _look_again(self, rel: str) -> None:
        """What another node published meanwhile was not brought here, or this node's file does not count."""
        now = self._view.tree.get(rel)
        if now is not None and now.record.file is not None and now.record.node != self.node:
            self.on_overruled(rel)

    async def _publish_removal(self, entry: Owed) -> None:
        rel, modified = entry.path, entry.modified
        for _ in range(_ROUNDS):
            if self._is_here(rel):
                break  # made again: that is published instead
            compares = [Compare(tree_key(rel), "create", "equal", entry.created)]
            if modified:
                compares.append(Compare(tree_key(rel), "mod", "equal", modified))
            else:
                compares.append(Compare(tree_below(rel), "mod", "less", 1, is_prefix=True))
                if self._is_owed_below(rel):
                    raise TryAgain(f"what was removed below {rel} goes before it")
            result = await self._store.txn(compares, [Delete(tree_key(rel))])
            if result.succeeded:
                # Until the view has it too the name would be shown again.
                await self._view.until(lambda at=result.revision: self._view.revision >= at, within_s=CATCH_UP_S)  # type: ignore[misc]
                break
            await self._view.caught_up(keys=(tree_key(rel),), prefixes=(tree_below(rel),), within_s=CATCH_UP_S)
            seen = self._view.tree.get(rel)
            if seen is None or seen.create_revision != entry.created:
                break
            if not modified or seen.record.node != self.node or seen.mod_revision == modified:
                self.on_kept(rel)
                break
            modified = seen.mod_revision
        self._journal.done(entry)

    def _is_owed_below(self, rel: str) -> bool:
        return any(entry.kind in ("step", "path") and entry.path.startswith(f"{rel}/") for entry in self._journal)

    async def _publish_once(self, rel: str) -> bool:
        """False where another node came first."""
        if not self._is_here(rel):
            return True
        directory, _, name = rel.rpartition("/")
        if name == LATEST and self._registry.latest.is_ours(directory):
            return True
        where = self._registry.names.locate(rel)
        at = self._just_made.get(rel, 0), self._looks_set.get(rel, 0)
        record = self._as_it_is(rel, inside=where is not None and where.inner != "")
        if record is None:
            return True
        seen = self._view.tree.get(rel)
        if seen is not None and _says_the_same(seen.record, record, looks_count=at[1] > 0):
            self.joined(rel, seen.create_revision)
            self._settled(rel, record, at)
            return True
        if seen is not None and (seen.record.kind == "dir") != (record.kind == "dir"):
            log.error("%s is a %s here and a %s in the catalogue, which stays", rel, record.kind, seen.record.kind)
            return True
        if seen is not None and _is_newer(seen.record, record):
            if rel not in self._just_made:
                self._settled(rel, record, at)
                return True  # it gives way, by `_look_again`
            record = self._opened_after(rel, record, seen.record)
        above = await self._parents(rel)
        here = Compare(tree_key(rel), "mod", "equal", seen.mod_revision if seen is not None else 0)
        result = await self._store.txn([here, *above], [Put(tree_key(rel), to_bytes(record))])
        if not result.succeeded:
            await self._view.caught_up(keys=(tree_key(rel), *(each.key for each in above)), within_s=CATCH_UP_S)
            return False
        created = seen.create_revision if seen is not None else result.revision
        self._put_at[rel] = created, result.revision
        self._settled(rel, record, at)
        self.joined(rel, created)
        # Removed meanwhile, when nobody knew that the catalogue would have it: that is owed now.
        return self._is_here(rel) or not self.gone(rel)

    def _settled(self, rel: str, record: TreeRecord, at: tuple[int, int]) -> None:
        for changes, change in zip((self._just_made, self._looks_set), at, strict=True):
            if changes.get(rel) == change:
                del changes[rel]
        if record.file is not None:
            self.on_published(rel, record.file.version)

    def _opened_after(self, rel: str, record: TreeRecord, known: TreeRecord) -> TreeRecord:
        """Opened earlier than another node's, or as early, and closed later: noted so that it counts as the later one
        for whoever compares them once more."""
        if record.file is None or known.file is None:
            return record
        opened_at = known.file.opened_at + 1
        path = self._registry.root / rel
        write_opened(path, path.lstat().st_ino, opened_at)
        return replace(record, file=replace(record.file, opened_at=opened_at))

    def _is_here(self, rel: str) -> bool:
        return os.path.lexists(self._registry.root / rel)

    def _as_it_is(self, rel: str, *, inside: bool) -> TreeRecord | None:
        """None for what is not published here: files of steps, and what is being written."""
        path = self._registry.root / rel
        try:
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                return _directory(info, self.node)
            if stat.S_ISLNK(info.st_mode):
                return TreeRecord(
                    "link", self.node, 0o777, info.st_uid, info.st_gid, info.st_mtime_ns, target=str(path.readlink())
                )
            if inside or not stat.S_ISREG(info.st_mode) or info.st_ino in self._growing:
                return None
            file = self._files.describe(path, None)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if file is None or (file.node != self.node and rel in self._view.tree and rel not in self._just_made):
            known = self._view.tree.get(rel)
            if file is None or known is None or known.record.file is None or rel not in self._looks_set:
                return None  # another node's: its own to tell, unless it got its name or its mode here
            if known.record.file.version != file.version:
                return None
            file = replace(file, opened_at=known.record.file.opened_at)
        return TreeRecord("file", self.node, file.mode, file.uid, file.gid, file.mtime_ns, file=file)


def is_being_renamed(view: View, rel: str, joined: int) -> bool:
    """A rename of that step, or of a directory above it, came after its directory: that has a new key."""
    return any(
        f"{rel}/".startswith((f"{seen.record.path}/", f"{seen.record.target}/"))
        for seen in view.operations.values()
        if seen.record.kind == "rename" and seen.mod_revision > joined
    )


def _keys_above(rel: str) -> tuple[str, ...]:
    parent = rel.rpartition("/")[0]
    return (tree_key(parent),) if parent else ()


def _directory(info: os.stat_result, node: str) -> TreeRecord:
    # Without its time, which moves with each name in it.
    return TreeRecord("dir", node, stat.S_IMODE(info.st_mode) & 0o777, info.st_uid, info.st_gid)


def _says_the_same(known: TreeRecord, record: TreeRecord, *, looks_count: bool) -> bool:
    """Of the same bytes the catalogue's mode, owner and time count, unless a program has just set them here."""
    if known.kind != record.kind:
        return False
    if record.kind == "dir":
        return (known.mode, known.uid, known.gid) == (record.mode, record.uid, record.gid)
    if record.kind == "link":
        return known.target == record.target
    if known.file is None or record.file is None or known.file.version != record.file.version:
        return False
    return not looks_count or looks_of(known) == looks_of(record)


def looks_of(record: TreeRecord) -> tuple[int, int, int, int]:
    return record.mode, record.uid, record.gid, record.mtime_ns


def _is_newer(known: TreeRecord, record: TreeRecord) -> bool:
    """Another node's file was opened later."""
    if known.file is None or record.file is None or known.node == record.node:
        return False
    if known.file.version == record.file.version:
        return False  # the same bytes with another mode, owner or time
    return (known.file.opened_at, known.node) > (record.file.opened_at, record.node)
