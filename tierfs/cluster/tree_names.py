"""Names outside of steps' files, sending side: directories, plain files, symbolic links, names claimed with O_EXCL.

What lstat says now is what the catalogue gets. Each change compares what this node knows of the key, so of two nodes
that change one name at once one wins, and the other sees it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierfs.catalog.keys import tree_below, tree_key
from tierfs.catalog.records import TreeRecord, to_bytes
from tierfs.catalog.store import Compare, Delete, KeyStore, Put
from tierfs.cluster.journal import Journal, Owed
from tierfs.cluster.local_files import LocalFiles, write_joined
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
        #: Directories made in the catalogue by this daemon, by the revision, until their record or tree tells it.
        self.made: dict[str, int] = {}
        self._put_at: dict[str, int] = {}
        self._growing: set[int] = set()

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
                    self._put_at[rel] = result.revision
                    return result.revision if seen is None else seen.create_revision
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
        created = seen.create_revision if seen is not None else self._put_at.get(parent, 0)
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
            self._put_at[rel] = result.revision
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

    def sealed(self, ino: int) -> None:
        self._growing.discard(ino)

    def gone(self, rel: str) -> bool:
        """A program removed the name. True where the catalogue has to be told. OSError (the journal)."""
        self.made.pop(rel, None)
        seen = self._view.tree.get(rel)
        put_at = self._put_at.pop(rel, 0)
        if seen is None and not put_at:
            return False
        created, modified = (seen.create_revision, seen.mod_revision) if seen is not None else (put_at, put_at)
        is_directory = seen is not None and seen.record.kind == "dir"
        self._journal.add("path", rel, created=created, modified=0 if is_directory else max(modified, put_at))
        return True

    async def publish(self, rel: str) -> None:
        """Bring the catalogue to what is here. CatalogError, TryAgain."""
        for entry in self._journal.at(rel, "path"):
            await self._publish_removal(entry)
        for _ in range(_ROUNDS):
            if await self._publish_once(rel):
                return
            for entry in self._journal.at(rel, "path"):
                await self._publish_removal(entry)
        raise TryAgain(f"others go on changing {rel}")

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
            result = await self._store.txn(compares, [Delete(tree_key(rel))])
            if result.succeeded:
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

    async def _publish_once(self, rel: str) -> bool:
        """False where another node came first."""
        if not self._is_here(rel):
            return True
        directory, _, name = rel.rpartition("/")
        if name == LATEST and self._registry.latest.is_ours(directory):
            return True
        where = self._registry.names.locate(rel)
        record = self._as_it_is(rel, inside=where is not None and where.inner != "")
        if record is None:
            return True
        seen = self._view.tree.get(rel)
        if seen is not None and _says_the_same(seen.record, record):
            self.joined(rel, seen.create_revision)
            return True
        if seen is not None and (seen.record.kind == "dir") != (record.kind == "dir"):
            log.error("%s is a %s here and a %s in the catalogue, which stays", rel, record.kind, seen.record.kind)
            return True
        if seen is not None and _is_newer(seen.record, record):
            return True
        above = await self._parents(rel)
        here = Compare(tree_key(rel), "mod", "equal", seen.mod_revision if seen is not None else 0)
        result = await self._store.txn([here, *above], [Put(tree_key(rel), to_bytes(record))])
        if not result.succeeded:
            await self._view.caught_up(keys=(tree_key(rel), *(each.key for each in above)), within_s=CATCH_UP_S)
            return False
        self._put_at[rel] = result.revision
        self.joined(rel, seen.create_revision if seen is not None else result.revision)
        # Removed meanwhile, when nobody knew that the catalogue would have it: that is owed now.
        return self._is_here(rel) or not self.gone(rel)

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
        if file is None or (file.node != self.node and rel in self._view.tree):
            return None  # another node's: its own to tell, unless it got its name here
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


def _says_the_same(known: TreeRecord, record: TreeRecord) -> bool:
    if known.kind != record.kind:
        return False
    if record.kind == "dir":
        return (known.mode, known.uid, known.gid) == (record.mode, record.uid, record.gid)
    if record.kind == "link":
        return known.target == record.target
    return known == record


def _is_newer(known: TreeRecord, record: TreeRecord) -> bool:
    """Another node's file was opened later."""
    if known.file is None or record.file is None or known.node == record.node:
        return False
    return (known.file.opened_at, known.node) > (record.file.opened_at, record.node)
