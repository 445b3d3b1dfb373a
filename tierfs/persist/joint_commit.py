"""A step of several nodes to the object tier: each sends what it owns, and all their node files make one manifest.

The order is that of `tierfs.persist.committing`, over all nodes: first every node's data, then the markers, each by its
owner once all data is listed, then the manifest by whoever sees all of it listed. Nobody fetches files of others to
send them, and nobody holds up other steps while it waits: a run that can't go on ends with `Waiting`, and the next one
looks again. Of the nodes that wait only those whom the next move is up to read what the others listed.

A step's age is that of its commit in the catalogue, the same on all nodes, so node files of another age are of another
save. A newer save may have the lower generation, where its name was free before: hence its time decides.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import trio

from tierfs.checksum import from_text
from tierfs.errors import ObjectMissing
from tierfs.persist.committing import Committed, OlderThanCommitted, StepCommit, Yielding
from tierfs.persist.layout import MANIFEST, is_own, manifest_key, node_key, node_of, part_of
from tierfs.persist.object_manifest import MAX_BYTES, NodeFile, ObjectManifest, SentObject, merge, read_manifest
from tierfs.persist.stored_step import StoredStep, look
from tierfs.steps.manifest import FileEntry

#: A node that only waits for the commit makes sure so often that what it sent is still there.
LOOK_AT_ALL_S = 60.0
#: Where so many nodes at most persist the step, each reads what all have listed; of more only those whom it concerns,
#: or that would be requests by the square of the nodes.
FEW_NODES = 64
#: A node that wrote nothing of the step, and where nobody looked into it, leaves it so long to the others before it
#: makes sure that nothing is left to it.
UNLISTED_S = 60.0
#: Asking who owns a file takes some microseconds.
NAMES_AT_ONCE = 100
#: Between two looks: a quarter of the time waited so far, within these bounds.
LEAST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0


Accepted = dict[str, tuple[NodeFile, SentObject]]


class Waiting(Yielding):
    """Other nodes have not sent, or not committed, their part yet."""


@dataclass
class Memory:
    """What a node remembers of a step from run to run. `listed` tells what of its own it has sent and listed."""

    began: float = field(default_factory=time.monotonic)
    stored: StoredStep | None = None
    listed: object = None
    looked_at: float = 0.0
    #: The next move is another node's: this one has nothing to send.
    is_done: bool = False
    #: And it does not commit the step either.
    is_idle: bool = False

    @property
    def pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, max(LEAST_PAUSE_S, (time.monotonic() - self.began) / 4))


@dataclass
class JointCommit(StepCommit):
    """One run of one node. Raises what `StepCommit` does, and Waiting."""

    memory: Memory = field(default_factory=Memory)
    #: What of the step this node is to send.
    mine: frozenset[str] = frozenset()

    @property
    def bytes_total(self) -> int:
        return sum(self.local.entries[inner].size_bytes for inner in self.mine)

    async def _run(self, my_turn: Callable[[], Awaitable[None]]) -> Committed:
        local, record = self.local, self.local.record
        if not record.manifest.populated and time.monotonic() < self.memory.began + UNLISTED_S:
            self.memory.is_idle = True
            return await self._committed_by_another()
        await self.registry.cluster.show_listing(record.rel)
        # As it is now: other nodes may be lost at any time.
        mine = await self._owned(list(record.manifest.files))
        local.is_mine = mine.__contains__
        await local.read()
        self.mine = frozenset(mine & local.entries.keys())
        if self._has_only_to_wait():
            return await self._committed_by_another()
        for inner in [file.inner for file in self._journal.files() if file.inner not in self.mine]:
            self._journal.abandon(inner)
        stored = await self._look_at_all()
        if (
            stored.manifest is not None
            and await self._is_ours(stored.manifest)
            and stored.holds_all_of(stored.manifest)
        ):
            return self._done(stored.manifest, stored.manifest_etag)
        await self._send_mine(stored, my_turn)
        if not self._reads_all(stored):
            self._note_listed(is_done=True)
            raise self._waiting()
        stored = await self._look_at_all()
        await self._send_gates(stored)
        if self._gates():
            stored = await self._look_at_all()
        return await self._commit_all(stored, await self._check_listed(stored, local.entries))

    async def _owned(self, names: list[str]) -> frozenset[str]:
        """What of the step this node is to send."""
        record, owned = self.local.record, set()
        for at, inner in enumerate(names):
            if at % NAMES_AT_ONCE == NAMES_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            if self.registry.cluster.owns(record, inner):
                owned.add(inner)
        return frozenset(owned)

    # --- waiting

    def _has_only_to_wait(self) -> bool:
        return (
            self.memory.is_done
            and self.memory.listed == self._state_of_mine()
            and not self._leads()
            and time.monotonic() < self.memory.looked_at + self._look_at_all_s()
        )

    def _leads(self) -> bool:
        """The next move may be this node's: it has a marker to send, or is the one to commit a step without any."""
        return bool(self._gates()) or min(self.local.entries) in self.mine

    def _state_of_mine(self) -> object:
        entries = self.local.entries
        own = frozenset((inner, entries[inner].ino, entries[inner].mtime_ns) for inner in self.mine)
        return self.local.age, frozenset(entries), own

    async def _committed_by_another(self) -> Committed:
        key = manifest_key(*self._key)
        if not any(info.key == key for info in (await self.client.list_all(key)).objects):
            raise self._waiting()
        try:
            data, etag = await self.client.get(key, most_bytes=MAX_BYTES)
        except ObjectMissing:
            raise self._waiting() from None
        manifest = read_manifest(data, *self._key)
        if not await self._is_ours(manifest):
            raise self._waiting()
        return self._done(manifest, etag)

    def _waiting(self, missing: Iterable[str] = ()) -> Waiting:
        names = sorted(missing)
        what = (
            f"{names[0]} and {len(names) - 1} more files" if len(names) > 1 else names[0] if names else "their commit"
        )
        return Waiting(f"other nodes have {what} of {'/'.join(self._key)} to send")

    async def _check_listed(self, stored: StoredStep, wanted: Iterable[str]) -> Accepted:
        """What is listed and lies there; raises Waiting where not all that is wanted is among it."""
        accepted = await self._accepted(stored)
        missing = [inner for inner in wanted if inner not in accepted]
        if missing:
            self._note_listed(is_done=not any(inner in self.mine for inner in missing))
            raise self._waiting(missing)
        return accepted

    def _note_listed(self, *, is_done: bool) -> None:
        self.memory.listed, self.memory.is_done = self._state_of_mine(), is_done
        self.memory.is_idle = is_done and not self._leads()

    # --- what there is

    async def _look_at_all(self) -> StoredStep:
        stored = await look(self.client, self.registry.names, *self._key, kept=self.memory.stored)
        self.memory.stored, self.memory.looked_at = stored, time.monotonic()
        return stored

    async def _look_at_what_concerns(self) -> StoredStep:
        """The step's objects, and what nodes say of them: all, or only this one."""
        listed = await look(self.client, self.registry.names, *self._key, read=False)
        if self._reads_all(listed):
            return await self._look_at_all()
        names = self.registry.names
        return await look(self.client, names, *self._key, only=self.node, kept=self.memory.stored)

    def _reads_all(self, stored: StoredStep) -> bool:
        # Who has become the owner of more may find it sent by the one that was it before.
        has_more = self.memory.is_done and self.memory.listed != self._state_of_mine()
        is_due = self.memory.is_done and time.monotonic() >= self.memory.looked_at + self._look_at_all_s()
        return stored.node_count <= FEW_NODES or self._leads() or has_more or is_due

    def _look_at_all_s(self) -> float:
        nodes = self.memory.stored.node_count if self.memory.stored is not None else 1
        return LOOK_AT_ALL_S * (1 + nodes / FEW_NODES)

    async def _is_ours(self, manifest: ObjectManifest) -> bool:
        """The manifest is of this very save, with all that was added to it. OlderThanCommitted."""
        local, entries = self.local, self.local.entries
        if manifest.age != local.age:
            if manifest.completed_at > local.completed_at:
                raise OlderThanCommitted(
                    f"{'/'.join(self._key)} of these nodes is older than what is committed in the object tier, so it "
                    f"stays in RAM only; remove it here to see the other one"
                )
            return False
        if not entries and not local.record.manifest.populated:
            return True  # nothing of it is here that could differ
        if manifest.files.keys() != entries.keys():
            return False
        for inner, file in manifest.files.items():
            known = await local.checksum(inner) if inner in self.mine else local.sealed_checksum(inner)
            if file.size_bytes != entries[inner].size_bytes or known not in (None, file.checksum):
                return False
        local.check()
        return True

    async def _accepted(self, stored: StoredStep) -> Accepted:
        """By the path inside the step: who sent what lies there, where that is the file of this save."""
        return await trio.to_thread.run_sync(_accepted, stored, self.local.entries, self.local.age)

    # --- sending

    def _gates(self) -> list[str]:
        return [inner for inner in self.mine if self._is_gate(inner)]

    async def _send_mine(self, stored: StoredStep, my_turn: Callable[[], Awaitable[None]]) -> None:
        """All data that this node owns, and the list of it."""
        if not self.mine:
            return
        if stored.node_info(self.node) is None:
            await self._put_node_file()  # whatever becomes of this, it can be told from what a person put there
        await self._adopt(stored)
        await self._withdraw(stored)
        await self._send_all([inner for inner in self.mine if inner not in self._sent and not self._is_gate(inner)])
        await my_turn()
        self.local.check()
        await self._list_mine(stored)

    async def _list_mine(self, stored: StoredStep) -> None:
        mine = self._node_file()
        if stored.nodes.get(self.node) != mine:
            await self.client.put(node_key(*self._key, self.node), mine.to_bytes())
        self.registry.crash("persist:node-file")

    def _to_send(self) -> Iterable[str]:
        return self.mine

    async def _withdraw(self, stored: StoredStep) -> None:
        """Take back what would vouch for a mixture of old and new, before anything of it is replaced.

        Only who has data to send does: as long as that is missing nobody else sends a marker or commits.
        """
        unsent = [inner for inner in self.mine if inner not in self._sent]
        if not unsent:
            return
        manifest = stored.manifest
        is_added_to = (
            manifest is not None
            and manifest.age == self.local.age
            and not any(inner in manifest.files for inner in unsent)
        )
        if is_added_to:
            return
        if stored.has_manifest:
            await self.client.delete([manifest_key(*self._key)])
            self.registry.crash("persist:withdrawn")
        if all(self._is_gate(inner) for inner in unsent):
            return
        accepted = await self._accepted(stored)
        old_marker = manifest.marker if manifest is not None else None
        gates = [inner for inner in stored.objects if self._is_gate(inner) or inner == old_marker]
        old = [inner for inner in gates if inner not in accepted]
        if old:
            await self.client.delete([stored.objects[inner].key for inner in old])
            for inner in old:
                if self._sent.pop(inner, None) is not None:
                    self.bytes_done -= self.local.entries[inner].size_bytes

    async def _send_gates(self, stored: StoredStep) -> None:
        """This node's markers, once all data of all nodes is listed."""
        await self._check_listed(stored, [inner for inner in self.local.entries if not self._is_gate(inner)])
        if self._gates():
            await self._send_all([inner for inner in self._gates() if inner not in self._sent])
            self.registry.crash("persist:gates-sent")
            self.local.check()
            await self._list_mine(stored)

    # --- committing

    async def _commit_all(self, stored: StoredStep, accepted: Accepted) -> Committed:
        """All of the step is listed and lies there."""
        objects: dict[str, dict[str, SentObject]] = {}
        for inner, (node_file, sent) in accepted.items():
            objects.setdefault(node_file.node, {})[inner] = sent
        parts = [replace(stored.nodes[node], objects=objects[node]) for node in objects]
        manifest = replace(merge(parts), marker=self.local.marker)
        self.registry.crash("persist:listed")
        self._strays = [info.key for inner, info in stored.objects.items() if self._is_stray(inner, stored)]
        replaces = stored.has_manifest
        if not replaces:
            await self._delete_strays()  # what the manifest that is there names has to stay until it is replaced
        etag = await self._commit(manifest, replaces)
        self.registry.crash("persist:committed")
        await self._delete_strays()
        return self._done(manifest, etag)

    def _is_stray(self, inner: str, stored: StoredStep) -> bool:
        node = node_of(inner)
        if node is None:
            return part_of(inner) is not None or (inner not in self.local.entries and not is_own(inner))
        other = stored.nodes.get(node)
        # One without objects is of a node that has just begun, maybe with what comes next.
        return inner != MANIFEST and (other is None or (other.age != self.local.age and bool(other.objects)))


def _accepted(stored: StoredStep, entries: Mapping[str, FileEntry], age: tuple[int, float]) -> Accepted:
    """In a thread, since it takes time by the number of files."""
    found: Accepted = {}
    for _, node_file in sorted(stored.nodes.items()):
        if node_file.age != age:
            continue
        for inner, sent in node_file.objects.items():
            entry = entries.get(inner)
            if entry is None or entry.size_bytes != sent.file.size_bytes:
                continue
            known = from_text(entry.checksum) if entry.checksum is not None else None
            if known in (None, sent.file.checksum) and stored.holds(inner, sent.file.size_bytes, sent.etag):
                found.setdefault(inner, (node_file, sent))
    return found
