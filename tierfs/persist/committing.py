"""One step to the object tier, all or nothing.

The order is the protocol: data, then the markers, then this node's file, then one listing that matches, then what is
left over goes, and last the manifest, by one conditional PUT. At each moment a manifest that is there names whole files
only, and a marker that is there has all its data beside it, whoever dies. What was sent already, by this daemon, its
predecessor or another node, is not sent again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import trio

from tierfs.errors import ChecksumMismatch, ObjectCorrupt, ObjectError, ObjectExists, ObjectUnavailable, TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.objects.store import SINGLE_PUT_BYTES
from tierfs.persist.layout import MANIFEST, file_key, is_own, manifest_key, node_key, node_of
from tierfs.persist.local_step import LocalStep, Superseded
from tierfs.persist.object_manifest import (
    MAX_BYTES,
    NodeFile,
    ObjectManifest,
    SentObject,
    merge,
    read_manifest,
)
from tierfs.persist.reporting import all_of
from tierfs.persist.stored_step import StoredStep, abort_uploads, look
from tierfs.persist.upload_journal import StepJournal
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.persist")

#: Files that are open at a time. The client bounds the requests; large files have several each.
FILES_AT_ONCE = 16
#: What a node that was seen beginning is given to finish, seconds, before this one sends the same.
YIELD_S = 300.0
#: How long a look for uploads that a crash left may take: not every key may do it, and it is a matter of tidiness.
TIDY_S = 15.0


class Yielding(ObjectUnavailable):
    """Another node is about to persist the same step; trying again soon finds what it did."""


class OlderThanCommitted(TierfsError):
    """Another node committed a newer save of the step, with other bytes."""


@dataclass(frozen=True)
class Committed:
    """`sent_bytes` is what had to be sent."""

    manifest: ObjectManifest
    etag: str
    sent_bytes: int


@dataclass
class StepCommit:
    """One run. Raises Superseded, OlderThanCommitted, PathRefused, ChecksumMismatch (RAM is damaged), ObjectError,
    NoRoom; done again it goes on where it stopped."""

    registry: StepRegistry
    client: ObjectClient
    local: LocalStep
    node: str
    conditional_put: bool = True
    yield_until: float = 0.0
    bytes_done: int = 0
    sent_bytes: int = 0
    _sent: dict[str, SentObject] = field(default_factory=dict)
    #: Keys of objects that are no part of the step.
    _strays: list[str] = field(default_factory=list)
    _is_tidy: bool = False

    def __post_init__(self) -> None:
        self._key = self.local.namespace, self.local.step
        self._journal = StepJournal.open(self.registry.tier.meta, *self._key)

    @property
    def bytes_total(self) -> int:
        """What is to be there in the end, as far as it was read."""
        return self.local.bytes

    async def run(self, my_turn: Callable[[], Awaitable[None]]) -> Committed:
        """`my_turn` is awaited when all data is sent, before anything makes the step look whole."""
        try:
            committed = await self._run(my_turn)
        finally:
            self._journal.close()
        await self._abort_leftover_uploads()
        return committed

    def forget_journal(self) -> None:
        """The commit is recorded: the journal is of no use any more, but to sweep what could not be aborted."""
        if self._is_tidy:
            self._journal.drop()

    async def _run(self, my_turn: Callable[[], Awaitable[None]]) -> Committed:
        local = self.local
        await local.read()
        for inner in [file.inner for file in self._journal.files() if file.inner not in local.entries]:
            self._journal.abandon(inner)
        stored = await self._look()
        if stored.manifest is not None:
            if await self._is_what_we_have(stored.manifest) and stored.holds_all_of(stored.manifest):
                # A daemon that died after its commit may have left what the commit before named.
                self._strays = [info.key for inner, info in stored.objects.items() if self._is_left_over(inner)]
                await self._delete_strays()
                return self._done(stored.manifest, stored.manifest_etag)
            if stored.manifest.age > local.age:
                raise OlderThanCommitted(
                    f"{local.namespace}/{local.step} of this node is older than what another node committed in the "
                    f"object tier, so it stays in RAM only; remove it here to see the other one"
                )
        if stored.node_info(self.node) is None:
            await self._put_node_file()  # whatever becomes of this, it can be told from what a person put there
            stored = await self._look()
        self._yield_to_others(stored)
        await self._adopt(stored)
        replaces = await self._prepare(stored)
        await self._send_all([inner for inner in local.entries if inner not in self._sent and not self._is_gate(inner)])
        await my_turn()
        local.check()
        await self._send_all([inner for inner in local.entries if inner not in self._sent])
        self.registry.crash("persist:gates-sent")
        local.check()
        mine = self._node_file()
        if stored.nodes.get(self.node) != mine:
            await self.client.put(node_key(*self._key, self.node), mine.to_bytes())
        self.registry.crash("persist:node-file")
        await self._verify(stored, replaces)
        manifest = merge([mine])
        etag = await self._commit(manifest, replaces)
        self.registry.crash("persist:committed")
        await self._delete_strays()
        return self._done(manifest, etag)

    def _done(self, manifest: ObjectManifest, etag: str) -> Committed:
        self.bytes_done = self.bytes_total
        return Committed(manifest, etag, self.sent_bytes)

    async def _look(self) -> StoredStep:
        return await look(self.client, self.registry.names, *self._key)

    def _to_send(self) -> Iterable[str]:
        """What of the step this node has to bring there."""
        return list(self.local.entries)

    def _is_gate(self, inner: str) -> bool:
        """Its being there says that the step is whole, to a framework that knows nothing of tierfs."""
        return inner == self.local.marker or self.registry.rules.match(inner) is not None

    # --- what is there already

    async def _is_what_we_have(self, manifest: ObjectManifest) -> bool:
        entries = self.local.entries
        if manifest.files.keys() != entries.keys() or any(
            file.size_bytes != entries[inner].size_bytes for inner, file in manifest.files.items()
        ):
            return False
        for inner, file in manifest.files.items():
            if await self.local.checksum(inner) != file.checksum:
                return False
        self.local.check()
        return True

    def _yield_to_others(self, stored: StoredStep) -> None:
        """Of two nodes that begin at once the first by name goes ahead; what the other finds then is sent already."""
        if stored.has_manifest or time.monotonic() >= self.yield_until:
            return
        for node in self._others_at_work(stored):
            if node < self.node and not stored.nodes[node].objects:
                raise Yielding(f"the node {node} is about to persist {self.local.namespace}/{self.local.step}")

    def _others_at_work(self, stored: StoredStep) -> list[str]:
        """Nodes that may be persisting the step now, by the times that the store itself gave the node files."""
        own = stored.node_info(self.node)
        if stored.has_manifest or own is None:
            return []
        others = [(node, stored.node_info(node)) for node in stored.nodes if node != self.node]
        return [node for node, info in others if info is not None and info.modified >= own.modified - YIELD_S]

    async def _adopt(self, stored: StoredStep) -> None:
        """Take for sent what is, by this node's journal or any node's file, with the ETag that it has now."""
        for inner in self._to_send():
            entry = self.local.entries[inner]
            done = self._journal.of_file(inner, entry).done
            if done is not None and stored.holds(inner, entry.size_bytes, done.etag):
                self._take(inner, done.etag, done.checksum.full, done.checksum.chunks)
                continue
            for known in stored.known(inner):
                if known.file.size_bytes == entry.size_bytes:
                    if await self.local.checksum(inner) == known.file.checksum:
                        self._take(inner, known.etag, known.file.checksum, known.file.chunks)
                    break

    def _take(self, inner: str, etag: str, checksum: int, chunks: tuple[int, ...]) -> None:
        self._sent[inner] = SentObject(self.local.object_file(inner, checksum, chunks), etag)
        self.bytes_done += self.local.entries[inner].size_bytes

    async def _prepare(self, stored: StoredStep) -> bool:
        """Take back what would vouch for a mixture of old and new: first the manifest, then the markers.

        True where the manifest stays until it is replaced: then files are only added to what it names, or go from it.
        """
        manifest = stored.manifest
        if manifest is not None and all(
            sent.file.has_same_bytes(file)
            if (sent := self._sent.get(inner)) is not None
            else inner not in self.local.entries
            for inner, file in manifest.files.items()
        ):
            return True
        if stored.has_manifest:
            await self.client.delete([manifest_key(*self._key)])
            self.registry.crash("persist:withdrawn")
        if all(inner in self._sent or self._is_gate(inner) for inner in self.local.entries):
            return False
        old_marker = manifest.marker if manifest is not None else None
        gates = [inner for inner in stored.objects if self._is_gate(inner) or inner == old_marker]
        # A marker that another node has just sent stays: that node may be about to commit it.
        if gates and not self._others_at_work(stored):
            await self.client.delete([stored.objects[inner].key for inner in gates])
            for inner in gates:
                if self._sent.pop(inner, None) is not None:
                    self.bytes_done -= self.local.entries[inner].size_bytes
        return False

    # --- sending

    async def _send_all(self, inners: list[str]) -> None:
        # The largest first: the last one to finish is then a small one.
        inners.sort(key=lambda inner: (-self.local.entries[inner].size_bytes, inner))
        await all_of((partial(self._send, inner) for inner in inners), at_once=FILES_AT_ONCE)

    async def _send(self, inner: str) -> None:
        local, entry = self.local, self.local.entries[inner]
        fd = await local.open(inner)
        counted = 0

        def on_sent(sent_bytes: int) -> None:
            nonlocal counted
            counted += sent_bytes
            self.bytes_done += sent_bytes

        journal = self._journal.of_file(inner, entry)
        try:
            sent = await self.client.upload(
                file_key(*self._key, inner), fd, entry.size_bytes, journal=journal, on_sent=on_sent
            )
            if not local.is_unchanged(inner, fd):
                raise Superseded
        except BaseException:
            self.bytes_done -= counted
            raise
        finally:
            os.close(fd)
        sealed = local.sealed_checksum(inner)
        if sealed is not None and sealed != sent.checksum.full:
            raise ChecksumMismatch(
                f"{local.namespace}/{local.step}/{inner} is damaged in RAM: its bytes are not those that were sealed. "
                f"The step is not persisted; save it again, or `tierfs rm` it"
            )
        journal.finished(sent)
        local.learn(inner, sent.checksum.full)
        self.bytes_done -= counted
        self._take(inner, sent.etag, sent.checksum.full, sent.checksum.chunks)
        self.sent_bytes += entry.size_bytes
        self.registry.crash("persist:file-sent")

    def _node_file(self) -> NodeFile:
        local = self.local
        return NodeFile(
            node=self.node,
            namespace=local.namespace,
            step=local.step,
            number=local.record.manifest.number,
            generation=local.generation,
            completed_at=local.completed_at,
            marker=local.marker,
            directory=local.directory,
            objects=dict(self._sent),
        )

    async def _put_node_file(self) -> None:
        await self.client.put(node_key(*self._key, self.node), self._node_file().to_bytes())

    # --- committing

    async def _verify(self, before: StoredStep, replaces: bool) -> None:
        """One listing must show what was sent, in its size and with its ETag; what is not of the step goes."""
        stored = await look(self.client, self.registry.names, *self._key)
        if stored.has_manifest != replaces or (replaces and stored.manifest_etag != before.manifest_etag):
            raise Yielding(f"another node committed {self.local.namespace}/{self.local.step} meanwhile")
        wrong = [
            inner
            for inner, sent in self._sent.items()
            if not stored.holds(inner, sent.file.size_bytes, sent.etag)
            and not any(known.file.has_same_bytes(sent.file) for known in stored.known(inner))
        ]
        if wrong:
            raise ObjectCorrupt(
                f"the object tier does not hold {self.local.namespace}/{self.local.step}/{wrong[0]} as it was sent"
                + (f" (nor {len(wrong) - 1} more files)" if len(wrong) > 1 else "")
            )
        self.registry.crash("persist:listed")
        self._strays = [info.key for inner, info in stored.objects.items() if self._is_stray(inner, stored)]
        if not replaces:
            await self._delete_strays()  # what the manifest that is there names has to stay until it is replaced

    async def _delete_strays(self) -> None:
        if self._strays:
            await self.client.delete(self._strays)
            self._strays = []

    def _is_left_over(self, inner: str) -> bool:
        return inner not in self.local.entries and not is_own(inner)

    def _is_stray(self, inner: str, stored: StoredStep) -> bool:
        node = node_of(inner)
        if node is None:
            return inner not in self._sent and inner != MANIFEST
        other = stored.nodes.get(node)
        if node == self.node or other is None:
            return node != self.node
        return any(
            (mine := self._sent.get(name)) is None or not sent.file.has_same_bytes(mine.file)
            for name, sent in other.objects.items()
        )

    async def _commit(self, manifest: ObjectManifest, replaces: bool) -> str:
        key = manifest_key(*self._key)
        self.local.check()
        try:
            return await self.client.put(key, manifest.to_bytes(), only_if_absent=self.conditional_put and not replaces)
        except ObjectExists:
            # Our own, whose answer was lost, or one of a node that was faster.
            data, etag = await self.client.get(key, most_bytes=MAX_BYTES)
            if not read_manifest(data, *self._key).has_same_bytes(manifest):
                raise Yielding(
                    f"another node committed other bytes of {self.local.namespace}/{self.local.step}"
                ) from None
            return etag

    async def _abort_leftover_uploads(self) -> None:
        """After the commit an upload below the step is of no use to anybody."""
        known = self._journal.uploads()
        is_in_parts = any(entry.size_bytes >= SINGLE_PUT_BYTES for entry in self.local.entries.values())
        with suppress(ObjectError), trio.move_on_after(TIDY_S):
            for inner, upload_id in known:
                await self.client.abort_upload(file_key(*self._key, inner), upload_id)
            if is_in_parts:
                # One that was begun when a daemon died is in nobody's journal.
                await abort_uploads(self.client, self.registry.names, *self._key)
            self._is_tidy = True
