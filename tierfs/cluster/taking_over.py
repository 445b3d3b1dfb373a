"""Large files of no step lie only where they were written: of a node that drains, others take them over.

A file outside of steps has one record, in the tree, and its holder is who wrote it. So the node that takes it over
copies the bytes, gives them a version of its own, and puts that into the record; from then on the file is its.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, TreeRecord, to_bytes
from tierfs.catalog.store import Compare, Put
from tierfs.cluster import placement
from tierfs.cluster.copies import Copies
from tierfs.cluster.grouping import Groups
from tierfs.cluster.making import key_of, plain_place
from tierfs.cluster.pulling import FilePull, Means
from tierfs.cluster.versions import new_version, write_version
from tierfs.cluster.view import Change, Seen, View
from tierfs.errors import CatalogError, TierfsError
from tierfs.transport.peers import SMALL_FILE_BYTES

log = logging.getLogger("tierfs.cluster")

_AT_ONCE = 4
_CHECKPOINT_EVERY = 200
#: A round that failed in part is made again while the node drains.
_AGAIN_S = 1.0
_SEEN_WITHIN_S = 5.0


class TakingOver:
    """`show(path)` has the file shown here as its record in the tree says (`Showing.place_tree`)."""

    def __init__(self, view: View, copies: Copies, groups: Groups, means: Means, node: str) -> None:
        self._view = view
        self._copies = copies
        self._groups = groups
        self._means = means
        self._node = node
        self._draining = trio.Event()
        self.show: Callable[[str], Awaitable[object]] = _nothing

    def seen(self, change: Change) -> None:
        if change.kind == "node" and change.new is not None and self._groups.is_draining(change.key):
            self._draining.set()

    async def run(self) -> None:
        while True:
            self._draining = trio.Event()
            leaving = {node for node in self._view.nodes if self._groups.is_draining(node)}
            if leaving and self._node not in leaving and await self._take_all(leaving):
                continue
            with trio.move_on_after(_AGAIN_S if leaving else float("inf")):
                await self._draining.wait()

    async def _take_all(self, leaving: set[str]) -> bool:
        """True where files were taken, so that there may be more."""
        serving = self._groups.serving()
        limiter = trio.CapacityLimiter(_AT_ONCE)
        taken: list[str] = []
        async with trio.open_nursery() as nursery:
            for at, (path, seen) in enumerate(list(self._view.tree.items())):
                if at % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                    await trio.lowlevel.checkpoint()
                file = seen.record.file
                if file is None or file.node not in leaving or file.size_bytes < SMALL_FILE_BYTES:
                    continue
                first = placement.candidates(
                    key_of(plain_place(path)), path, serving, (file.node,), needed_bytes=file.size_bytes
                )
                if first[:1] == [self._node]:
                    nursery.start_soon(self._take, path, seen, file, limiter, taken)
        return bool(taken)

    async def _take(
        self, path: str, seen: Seen[TreeRecord], file: FileRecord, limiter: trio.CapacityLimiter, taken: list[str]
    ) -> None:
        async with limiter:
            try:
                if await self._take_one(path, seen, file):
                    taken.append(path)
                    log.info("took %s over from %s", path, file.node)
            except (TierfsError, OSError) as error:
                log.warning("%s can't be taken over from %s: %s", path, file.node, error)

    async def _take_one(self, path: str, seen: Seen[TreeRecord], file: FileRecord) -> bool:
        """False where it is another file by now. TierfsError, OSError."""
        key = key_of(plain_place(path))
        if not self._copies.has(file.version):
            pull = FilePull(self._means, key, path, file.version, lambda pull: [file.node])
            pull.seal(file.version, file.size_bytes)
            if not await pull.run():
                return False
        lies_at = self._copies.path(file.version)
        if lies_at is None:
            return False
        version = new_version(self._node)
        # Where it was read here it has its name already, and that inode becomes this node's.
        is_shelved = lies_at.is_relative_to(self._copies.shelf)
        place = self._copies.place(key, version) if is_shelved else lies_at
        write_version(lies_at, version)
        if is_shelved:
            lies_at.rename(place)
            self._copies.drop(key, file.version)
        self._copies.noted(version, place.lstat().st_ino, place)
        if await self._put(path, seen, file, version):
            await self.show(path)
            return True
        if is_shelved:
            self._copies.drop(key, version)
        else:
            write_version(place, file.version)
            self._copies.noted(file.version, place.lstat().st_ino, place)
        return False

    async def _put(self, path: str, seen: Seen[TreeRecord], file: FileRecord, version: str) -> bool:
        """The record says so now, as the view saw. CatalogError where that is not known."""
        record = replace(seen.record, node=self._node, file=replace(file, version=version))
        unchanged = Compare(keys.tree_key(path), "mod", "equal", seen.mod_revision)
        lost: CatalogError | None = None
        try:
            if not (await self._view.store.txn([unchanged], [Put(keys.tree_key(path), to_bytes(record))])).succeeded:
                return False
        except CatalogError as error:
            lost = error  # it may have been put all the same
        await self._view.until(lambda: self._view.tree.get(path) is not seen, within_s=_SEEN_WITHIN_S)
        now = self._view.tree.get(path)
        if now is not None and now.record.file is not None and now.record.file.version == version:
            return True
        if lost is not None:
            raise lost
        return False


async def _nothing(path: str) -> None:
    await trio.lowlevel.checkpoint()
