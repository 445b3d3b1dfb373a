"""Nodes that really publish, on `cluster_nodes`: programs' calls go through the steps, and these tell the cluster."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.unit.cluster_nodes import Node
from tests.unit.step_driver import MARKER, content, marker
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer
from tierfs.catalog.records import NodeRecord, to_bytes
from tierfs.cluster.agreeing import Agreement
from tierfs.cluster.joining import join
from tierfs.cluster.publishing import Publisher
from tierfs.cluster.putting_away import put_away_others
from tierfs.cluster.removing import Removing
from tierfs.cluster.stewardship import Stewardship
from tierfs.cluster.view import Change
from tierfs.errors import CatalogError
from tierfs.steps.cluster import Agreement as Outcome
from tierfs.steps.cluster import Alone
from tierfs.steps.markers import MarkerContent
from tierfs.steps.record import StepRecord


class Told(Alone):
    """What the steps tell the cluster, handed to the parts that are tested, as `ClusterTier` does."""

    shares = True

    def __init__(self, node: WritingNode) -> None:
        self._node = node

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> None:
        await self._node.publisher.make_directory(rel, mode, uid, gid)

    async def claim(self, rel: str) -> None:
        await self._node.publisher.claim(rel)

    def made(self, rel: str) -> None:
        if not (self._node.root / rel).is_file():
            self._node.publisher.tree_changed(rel)

    def gone(self, rel: str) -> None:
        self._node.removing.gone(rel)

    async def before_move(self, old: str, new: str) -> None:
        await self._node.removing.before_move(old, new)

    def moved(self, old: str, new: str) -> None:
        self._node.copies.moved(self._node.root / old, self._node.root / new)
        self._node.removing.moved(old, new)

    def opened(self, rel: str, ino: int) -> None:
        self._node.publisher.opened(rel, ino)

    async def before_write(self, rel: str, ino: int) -> None:
        await self._node.publisher.withdraw(rel, ino)

    def sealed(self, rel: str, ino: int) -> None:
        self._node.publisher.sealed(rel, ino)

    async def agree(
        self,
        record: StepRecord,
        marker: str | None,
        content: MarkerContent | None,
        marker_at: str | None,
        *,
        patient: bool = True,
    ) -> Outcome:
        node = self._node
        outcome = await node.agreement.agree(record, marker, content, marker_at, patient=patient)
        if outcome == "agreed":  # what others wrote gets its names before the marker does
            current = record.manifest.overwrite
            generation = current.generation if current is not None else record.manifest.generation
            try:
                files = await node.view.files(record.key, generation, fresh=True)
            except CatalogError:
                put_away_others(node.registry, node.copies, record, content.files if content is not None else {})
                return outcome
            names = [inner for inner in files.files if inner != marker]
            async with node.showing.lock(record.key):
                await node.showing.place_files(record, files, names, is_complete=True, by_force=True)
        return outcome

    def completed(self, record: StepRecord) -> None:
        self._node.agreement.completed(record)
        self._node.publisher.changed(record)

    def changed(self, record: StepRecord) -> None:
        self._node.publisher.changed(record)

    def removed(self, record: StepRecord) -> None:
        self._node.publisher.removed(record)

    def is_readable(self, record: StepRecord) -> bool:
        seen = self._node.view.states.get(record.key)
        return seen is None or seen.record.level != "lost"

    def owns(self, record: StepRecord, inner: str) -> bool:
        return True


class WritingNode(Node):
    """`told_deleted` and so on are what the publisher said of steps."""

    def __init__(self, name: str, path: Path, server: MemoryServer, nodes: Mapping[str, Node]) -> None:
        super().__init__(name, path, server, nodes)
        self.registry.settings.cluster.wait_s = 0.5
        self.registry.settings.etcd.timeout_s = 1.0

    def _build(self) -> None:
        super()._build()
        self.publisher = Publisher(self.registry, self.store, self.view, self.copies, self.name)
        self.agreement = Agreement(self.registry, self.view, self.publisher, self.copies, self.name)
        self.agreement.settled_after_s = 0.0  # tests have no time to spare for it
        self.removing = Removing(self.registry, self.store, self.view, self.publisher, self.name)
        self.stewardship = Stewardship(self.store, self.view, self.name, lambda _: 1, lambda _: False, 0.5)
        self.publisher.on_deleted = self.following.step_deleted
        self.publisher.on_committed = self.following.step_committed
        self.publisher.on_withdrawn = self.following.step_withdrawn
        self.publisher.names.on_kept = self.following.path_kept
        self.publisher.names.on_published = self.showing.note_published
        self.publisher.names.on_overruled = self.following.path_overruled
        self.showing.is_behind = self.following.is_behind = self.publisher.names.is_behind
        self.showing.removed_here = self.publisher.is_removed_here
        self.showing.is_being_emptied = self.removing.has_removed
        self.showing.is_being_told = self.publisher.is_being_told
        self.following.made_here = self.publisher.is_made_here
        self.registry.cluster = Told(self)  # type: ignore[assignment]
        self._join_wanted = trio.Event()
        self.view.listen(self._seen)

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            self._join_wanted.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.following.run)
            await nursery.start(self.publisher.run)
            await nursery.start(self.removing.run)
            await nursery.start(self.stewardship.run)
            await nursery.start(self.view.run)
            nursery.start_soon(self._join_again)
            if self.view.connected:
                await self.become_member()
            yield
            nursery.cancel_scope.cancel()

    async def become_member(self) -> None:
        await self.store.put(keys.node_key(self.name), to_bytes(NodeRecord(self.name, ("x:1",), tier=self.name)))

    async def _join_again(self) -> None:
        while True:
            self._join_wanted = trio.Event()
            if self.view.connected:
                try:
                    await join(self.registry, self.view, self.publisher, on_path_deleted=self.following.path_deleted)
                except CatalogError:
                    await trio.sleep(0.05)
                    continue
            await self._join_wanted.wait()

    # --- programs

    async def mkdirs(self, rel: str) -> None:
        """As `os.makedirs(exist_ok=True)` on the mount."""
        if not rel or (self.root / rel).is_dir():
            return
        await self.mkdirs(rel.rpartition("/")[0])
        try:
            await self.registry.cluster.make_directory(rel, 0o755, os.geteuid(), os.getegid())
        except FileExistsError:
            await self.showing.show(rel)
        if not (self.root / rel).is_dir():
            self.driver.mkdir(rel)

    async def shards(self, step: str, seed: int, files: Mapping[str, int]) -> None:
        await self.mkdirs(step)
        for inner in files:
            await self.showing.show(f"{step}/{inner}")
        for inner, size in files.items():
            await self.driver.write(f"{step}/{inner}", content(seed, inner, size))

    async def finish(self, step: str, seed: int, files: Mapping[str, int]) -> None:
        """DCP's marker: written beside, then renamed, which is the commit."""
        await self.showing.show(f"{step}/{MARKER}")
        await self.driver.write(f"{step}/{MARKER}.tmp", marker(seed, files))
        if (self.root / step / MARKER).exists():
            await self.driver.unlink(f"{step}/{MARKER}")
        await self.driver.rename(f"{step}/{MARKER}.tmp", f"{step}/{MARKER}")

    async def flushed(self) -> None:
        assert await self.publisher.flush(None, within_s=5), "not published in time"
