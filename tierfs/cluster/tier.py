"""This node among others, put together: what the mount and the steps tell the cluster and ask of it.

`ClusterTier` implements `tierfs.steps.cluster.Cluster`. Each call is handed on to the part whose job it is; what they
know of each other is set here and nowhere else.
"""

from __future__ import annotations

import logging
import stat
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio

import tierfs
from tierfs.catalog.records import NodeRecord
from tierfs.catalog.store import KeyStore
from tierfs.cluster.addresses import advertised
from tierfs.cluster.agreeing import Agreement
from tierfs.cluster.copies import Copies
from tierfs.cluster.describing import describe
from tierfs.cluster.draining import Drain
from tierfs.cluster.following import Following
from tierfs.cluster.holdings import Holdings
from tierfs.cluster.joining import join, read_identity
from tierfs.cluster.making import FileMaker, version_at
from tierfs.cluster.membership import Membership
from tierfs.cluster.moved_stubs import mark_anew
from tierfs.cluster.notices import Notices
from tierfs.cluster.operating import Operating
from tierfs.cluster.own_copies import OwnFirst, replace_stub
from tierfs.cluster.part_files import PartFiles
from tierfs.cluster.publishing import Publisher
from tierfs.cluster.putting_away import put_away_others
from tierfs.cluster.removing import Removing
from tierfs.cluster.replication import Replicator
from tierfs.cluster.shelf_sweeping import author_of
from tierfs.cluster.showing import Showing
from tierfs.cluster.sources import Sources
from tierfs.cluster.stewardship import Stewardship
from tierfs.cluster.taking import Taking
from tierfs.cluster.transport import Transport
from tierfs.cluster.view import Change, View
from tierfs.errors import CatalogError
from tierfs.hydrate.hydration import Hydration
from tierfs.steps.cluster import Agreement as Outcome
from tierfs.steps.markers import MarkerContent
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.cluster")

#: After the catalogue was read and could not be brought together with what is here.
JOIN_AGAIN_S = 1.0
#: How long a start waits until this node is a member.
MEMBER_WITHIN_S = 3.0
#: How long a close(2) waits for the catalogue.
FLUSHED_WITHIN_S = 2.0
#: How long leaving may take: telling the others that this node goes.
LEAVE_WITHIN_S = 5.0
#: A node that was told to go is hardly there any longer.
NOTICED_DRAIN_S = 3600.0
#: This node's room is told again when it moved by one part in so many.
ROOM_SHARE = 20
LOOK_AT_ROOM_S = 5.0


class ClusterTier:
    """Parts are public: the command line's operations read them. `run` is started before requests are served."""

    shares = True

    def __init__(self, registry: StepRegistry, store: KeyStore, *, node: str, mountpoint: str) -> None:
        """Reads what the RAM tier knows of the cluster. SettingsError, OSError."""
        settings = registry.settings
        self.registry, self.settings, self.node, self.store = registry, settings, node, store
        self._mountpoint = mountpoint
        self._started_at = time.time()
        self._tier = read_identity(registry.tier.meta).tier
        self.view = View(store)
        self.view.use_markers(lambda inner: registry.rules.match(inner) is not None)
        self.copies = Copies(registry, node)
        self.transport = Transport(self.copies, settings, node, self._addresses_of)
        self.server, self.peers = self.transport.server, self.transport.peers
        self.sources = Sources(
            self.view,
            self.peers,
            node=node,
            retry_for_s=settings.transfer.read_retry_for_s,
            streams=settings.peer.streams,
        )
        self.hydration = Hydration(registry, OwnFirst(self.sources, self.copies))
        self.hydration.on_whole_version = self._copy_came
        self.hydration.version_of = self.copies.version_of
        self.publisher = Publisher(registry, store, self.view, self.copies, node)
        self.agreement = Agreement(registry, self.view, self.publisher, self.copies, node)
        self.removing = Removing(registry, store, self.view, self.publisher, node)
        maker = FileMaker(
            registry,
            self.view,
            self.copies,
            self.peers,
            self.hydration.table.add,
            lambda ino: self.hydration.on_replaced(ino),
        )
        self.showing = Showing(registry, self.view, self.copies, maker)
        self.taking = Taking(self.showing)
        self.following = Following(
            registry, self.view, self.showing, self.taking, Operating(registry, self.view, self.showing)
        )
        parts = PartFiles(store, self.view)
        self.holdings = Holdings(store, self.view, self.copies, parts, node)
        self.replicator = Replicator(registry, self.view, self.peers, self.copies, self.holdings, parts, node)
        self.stewardship = Stewardship(
            store,
            self.view,
            node,
            lambda namespace: settings.for_namespace(namespace).replication.replicas,
            self.is_persisted,
            settings.replication.after_s,
        )
        self.membership = Membership(store, self.view, self.describe_node, lease_s=settings.cluster.lease_s)
        self.drain = Drain(
            registry,
            self.view,
            self.peers,
            self.copies,
            self.replicator.groups,
            node,
            member_changed=self.membership.changed,
            is_persisted=self.is_persisted,
        )
        self._addresses: tuple[str, ...] = ()
        self._told_free = 0
        self._join_wanted = trio.Event()
        #: Files outside of steps that were published at a close(2), by inode: size and time then.
        self._flushed: dict[int, tuple[int, int]] = {}
        self._wire()

    def _wire(self) -> None:
        """What the parts tell each other."""
        self.transport.follow(self.registry, self.copies, self.hydration)
        self.view.listen(self._seen)
        self.publisher.counts_as_member = self.membership.may_count
        self.agreement.is_member = lambda: self.membership.member
        self.publisher.on_deleted = self.following.step_deleted
        self.publisher.on_committed = self.following.step_committed
        self.publisher.on_withdrawn = self.following.step_withdrawn
        self.publisher.names.on_kept = self.following.path_kept
        self.publisher.names.on_published = self.showing.note_published
        self.publisher.names.on_overruled = self.following.path_overruled
        self.following.known_here = self.publisher.names.known
        self.showing.is_behind = self.following.is_behind = self.publisher.names.is_behind
        self.showing.removed_here = self.publisher.is_removed_here
        self.showing.is_moving_here = self.publisher.is_moving_here
        self.showing.is_being_told = self.publisher.is_being_told
        self.showing.is_completing = self.publisher.is_completing
        self.showing.is_being_emptied = self.removing.has_removed
        self.showing.maker.mark_anew = lambda record: mark_anew(self.hydration.table, record)
        self.following.made_here = self.publisher.is_made_here
        self.holdings.on_put = self.stewardship.poke
        self.holdings.on_less = self.stewardship.recount_soon
        self.replicator.waits.is_believed = self.stewardship.is_believed
        self.replicator.taking_over.show = self.showing.place_tree
        self.replicator.on_arrived = partial(replace_stub, self.registry, self.showing)

    def scan(self) -> None:
        """At start, before the first request, after the stubs: find the copies. Blocking."""
        self.copies.scan()

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started once the catalogue was read and is shown, or it can't be reached."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.transport.run)
            self._addresses = advertised(self.settings, self.server.addresses)
            await nursery.start(self.hydration.run)
            await nursery.start(self.following.run)
            await nursery.start(self.view.run)
            await nursery.start(self.membership.run)
            nursery.start_soon(self._be_member, nursery, as_member := trio.Event())
            await nursery.start(Notices(self.settings.cluster, self._noticed).run)
            with trio.move_on_after(MEMBER_WITHIN_S):
                await as_member.wait()
            task_status.started()

    async def _be_member(self, nursery: trio.Nursery, done: trio.Event) -> None:
        """Only a member says what it has, counts copies and takes any: another node may have this one's name."""
        while not self.membership.member:
            await self.view.until(lambda: self.membership.member, within_s=JOIN_AGAIN_S)
        for part in (self.replicator, self.holdings, self.stewardship, self.publisher, self.removing):
            await nursery.start(part.run)
        nursery.start_soon(self._join_again)
        nursery.start_soon(self._tell_room)
        done.set()

    async def leave(self) -> None:
        """The mount is gone: others needn't wait for the lease to run out. Before `run` is cancelled."""
        with trio.move_on_after(LEAVE_WITHIN_S):
            await self.publisher.flush(None, within_s=LEAVE_WITHIN_S / 2)
            await self.membership.leave()

    async def _join_again(self) -> None:
        """Bring what is here and what the catalogue has together, each time it was read as a whole."""
        while True:
            self._join_wanted = trio.Event()
            if self.view.connected:
                try:
                    await join(self.registry, self.view, self.publisher, on_path_deleted=self.following.path_deleted)
                except (CatalogError, OSError) as error:
                    log.warning("can't be brought together with the catalogue yet: %s", error)
                    await trio.sleep(JOIN_AGAIN_S)
                    continue
            await self._join_wanted.wait()

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            self._join_wanted.set()
        if change.kind == "node" and change.key != self.node and (change.old is None or change.new is None):
            came = change.new is not None
            log.log(
                logging.INFO if came else logging.WARNING, "the node %s %s", change.key, "came" if came else "is gone"
            )
        if change.kind in ("node", "reset"):
            for record in self.registry.records.values():
                if not record.is_complete and record.manifest.files:
                    self.registry.judge_soon(record)  # it may have waited for just this node
        if change.kind == "state" and change.step is not None:
            self.registry.update_latest(change.step[0])

    async def _noticed(self, reason: str) -> None:
        """This node is about to be taken away: as much as there is time for goes to others."""
        await self.drain.drain(within_s=NOTICED_DRAIN_S)

    async def _tell_room(self) -> None:
        """Others choose whom to give copies by the room there is."""
        while True:
            await trio.sleep(LOOK_AT_ROOM_S)
            usage = self.registry.tier.usage()
            if abs(usage.free_bytes - self._told_free) * ROOM_SHARE > usage.size_bytes:
                self.membership.changed()

    def describe_node(self) -> NodeRecord:
        usage = self.registry.tier.usage()
        self._told_free = usage.free_bytes
        return NodeRecord(
            node=self.node,
            addresses=self._addresses,
            tier=self._tier,
            domain=self.settings.cluster.domain,
            size_bytes=usage.size_bytes,
            free_bytes=max(0, usage.free_bytes - self.replicator.room.promised_bytes),
            version=tierfs.__version__,
            started_at=self._started_at,
            state=self.drain.state,
            mountpoint=self._mountpoint,
        )

    def _addresses_of(self, node: str) -> tuple[str, ...]:
        seen = self.view.nodes.get(node)
        return seen.record.addresses if seen is not None else ()

    # --- names

    async def make_directory(self, rel: str, mode: int, uid: int, gid: int) -> None:
        try:
            await self.publisher.make_directory(rel, mode, uid, gid)
        except FileExistsError:
            await self.showing.show(rel)
            raise

    async def claim(self, rel: str) -> None:
        await self.showing.show(rel)
        if self._look(rel) is not None:
            return  # open(2) itself says EEXIST
        await self.publisher.claim(rel)

    def may_have(self, rel: str) -> bool:
        return self.showing.may_have(rel)

    async def show(self, rel: str) -> None:
        await self.showing.show(rel)

    async def show_listing(self, rel: str) -> None:
        await self.showing.show_listing(rel)

    def made(self, rel: str) -> None:
        info = self._look(rel)
        if info is None:
            return
        if not stat.S_ISREG(info.st_mode):
            self.publisher.tree_changed(rel)
        elif info.st_nlink > 1 and info.st_ino not in self.registry.tier.growing:
            self.sealed(rel, info.st_ino)  # a hard link: nobody closes it

    def gone(self, rel: str) -> None:
        self.removing.gone(rel)
        self.transport.exports.look_soon()

    async def before_move(self, old: str, new: str) -> None:
        await self.removing.before_move(old, new)

    def moved(self, old: str, new: str) -> None:
        self.copies.moved(self.registry.root / old, self.registry.root / new)
        self.following.moved_here(old, new)
        self.removing.moved(old, new)

    # --- files

    def opened(self, rel: str, ino: int) -> None:
        self._flushed.pop(ino, None)
        self.publisher.opened(rel, ino)
        try:
            self.copies.growing(rel, ino)
        except OSError as error:
            log.debug("%s is gone already: %s", rel, error)

    async def before_write(self, rel: str, ino: int) -> None:
        await self.publisher.withdraw(rel, ino)
        await self.transport.exports.fence(ino)

    async def flushed(self, rel: str, ino: int) -> None:
        await self.registry.tier.before_times_are_set(ino)  # giving room would look like a write after the close(2)
        info = self._look(rel)
        is_file = info is not None and stat.S_ISREG(info.st_mode) and info.st_ino == ino
        if not is_file or not self.view.connected or self.hydration.is_stub(ino):
            return
        now = info.st_size, info.st_mtime_ns
        if self._flushed.get(ino, now) != now:
            # A shell's `> file` closes a copy of its descriptor before anything is written.
            self.copies.withdraw(ino, self.registry.root / rel)
        try:
            self.copies.seal(self.registry.root / rel, ino)
        except OSError as error:
            log.debug("%s is published when it is closed: %s", rel, error)
            return
        if ino in self.registry.tier.growing:  # its last close is still to come
            self._flushed[ino] = now
        self.publisher.sealed(rel, ino)
        await self.publisher.flush_path(rel, within_s=FLUSHED_WITHIN_S)

    def attributes_set(self, rel: str) -> None:
        where = self.registry.names.locate(rel)
        record = self.registry.at(where) if where is not None and where.inner else None
        info = self._look(rel)
        if record is not None and info is not None and stat.S_ISREG(info.st_mode):
            self.publisher.changed(record)
        elif info is not None:
            for each in self.publisher.names.looks_set(rel):
                self.publisher.tree_changed(each)

    def sealed(self, rel: str, ino: int) -> None:
        info, flushed = self._look(rel), self._flushed.pop(ino, None)
        now = (info.st_size, info.st_mtime_ns) if info is not None else None
        if None not in (now, flushed) and now != flushed:
            # Written on after a close(2) that was not the last one: other bytes than those that were published.
            self.copies.withdraw(ino, self.registry.root / rel)
        if not self.hydration.is_stub(ino):
            try:
                self.copies.sealed(rel, ino)
            except OSError as error:
                log.warning("%s can't be given a version: %s", rel, error, extra=self._extra(rel))
                return
        if flushed is None or now != flushed:  # else it was published at close(2): what others wrote since is newer
            self.publisher.sealed(rel, ino)

    async def wait_file_replicated(self, rel: str, ino: int) -> None:
        where = self.registry.names.locate(rel)
        version = self.copies.version_of(ino)
        if where is not None and version is None:
            await self.replicator.waits.wait_growing(where.namespace, ino)
        elif where is not None and version is not None:
            await self.replicator.waits.wait_file(where.namespace, version)

    # --- steps

    async def agree(
        self,
        record: StepRecord,
        marker: str | None,
        content: MarkerContent | None,
        marker_at: str | None,
        *,
        patient: bool = True,
    ) -> Outcome:
        outcome = await self.agreement.agree(record, marker, content, marker_at, patient=patient)
        if outcome == "agreed" and not await self.showing.show_committed(record, marker):
            put_away_others(self.registry, self.copies, record, content.files if content is not None else ())
        return outcome

    def completed(self, record: StepRecord) -> None:
        self.agreement.completed(record)
        self.publisher.changed(record)
        self.holdings.changed(record.key)

    def changed(self, record: StepRecord) -> None:
        self.publisher.changed(record)

    def removed(self, record: StepRecord) -> None:
        self.publisher.removed(record)
        self.copies.forget_step(record.key)
        self.replicator.forget(record.key)

    def retire(self, record: StepRecord) -> bool:
        if not record.manifest.joined:
            return True
        if not self.view.connected:
            return False
        self.removed(record)
        return True

    def evicted(self, record: StepRecord) -> None:
        self.replicator.forget(record.key)

    # --- asked

    def room_for_next(self, record: StepRecord) -> int:
        files = self.view.known_files(record.key, record.manifest.generation)
        own = (file.size_bytes for file in files.parts.get(self.node, {}).values()) if files is not None else ()
        return sum(own) + self.replicator.room_needed_for_replicas(record.manifest.namespace)

    def owns(self, record: StepRecord, inner: str) -> bool:
        """The node that wrote the file; where that is gone, whoever has its bytes."""
        path = record.directory / inner
        version, _ = self._version(path)
        author = version.partition("/")[0]
        if not author:
            return path.exists()  # nobody gave it a version yet: it was written here
        if author == self.node:
            return True
        return author not in self.view.nodes and self.copies.has(version)

    def is_readable(self, record: StepRecord) -> bool:
        seen = self.view.states.get(record.key)
        if seen is None or seen.record.generation != record.manifest.generation:
            return True
        return seen.record.level != "lost" or record.is_persisted

    def may_leave_ram(self, record: StepRecord) -> bool:
        return self.registry.is_elsewhere(record)

    def ram_bytes(self, record: StepRecord) -> int | None:
        if not record.manifest.joined and not record.manifest.files:
            return None
        return self.hydration.ram_bytes(record) + self.copies.bytes_of(record.key)

    async def wait_replicated(self, record: StepRecord) -> None:
        await self.replicator.waits.wait_replicated(record.key, record.manifest.generation)

    def has_peers(self) -> bool:
        return len(self.view.nodes) > 1

    def has_takers(self) -> bool:
        """Somebody is there to take over what this node holds."""
        return any(record.node != self.node for record in self.replicator.groups.serving())

    def is_persisted(self, key: Key) -> bool:
        """The object tier has the step as it is complete here."""
        record = self.registry.records.get(key)
        return record is not None and record.is_persisted

    def describe(self, record: StepRecord) -> dict[str, Any]:
        return describe(self, record)

    # --- inside

    def gave_up(self, key: Key) -> None:
        """Copies of the step's files were dropped here because they are damaged: it has to be counted again."""
        self.holdings.changed(key)

    def _copy_came(self, ino: int, path: Path, version: str) -> None:
        """A stub is whole, since it was read: this node holds one more copy. OSError."""
        self.copies.adopt(path, ino, version)
        if not path.is_relative_to(self.registry.root):
            return  # of a generation that is about to go
        where = self.registry.names.locate(str(path.relative_to(self.registry.root)))
        if where is not None and where.inner:
            self.holdings.copied((where.namespace, where.step), [author_of(version)])

    def _look(self, rel: str) -> Any:
        try:
            return (self.registry.root / rel).lstat()
        except OSError:
            return None

    def _version(self, path: Path) -> tuple[str, Any]:
        try:
            return version_at(path)
        except OSError:
            return "", None

    def _extra(self, rel: str) -> dict[str, str]:
        where = self.registry.names.locate(rel)
        if where is None:
            return {"file": rel}
        return {"namespace": where.namespace, "step": where.step, "file": where.inner}
