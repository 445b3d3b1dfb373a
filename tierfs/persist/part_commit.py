"""Some files of a step to the object tier, without making it look as if the step were there.

The files go to the places that they have in the whole step, then one file says which they are (`part_file`). A
framework's marker goes along only where all files that it may vouch for, those of its directory, do: a marker of the
step as a whole never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tierfs.errors import ObjectCorrupt, TierfsError
from tierfs.persist.committing import StepCommit
from tierfs.persist.layout import is_own, part_key
from tierfs.persist.part_file import PartFile
from tierfs.persist.part_turns import is_meant
from tierfs.persist.stored_step import StoredStep, look


class NoPart(TierfsError):
    """There is nothing to send in part: the whole step is there, or no file is meant."""


@dataclass
class PartCommit(StepCommit):
    """One run. Raises what `StepCommit` does, and NoPart. `mine` is known once the step was read."""

    patterns: tuple[str, ...] = ()
    mine: frozenset[str] = frozenset()

    @property
    def bytes_total(self) -> int:
        return sum(self.local.entries[inner].size_bytes for inner in self.mine)

    async def send(self) -> PartFile:
        """What was put in the object tier."""
        try:
            return await self._send_part()
        finally:
            self._journal.close()

    async def _send_part(self) -> PartFile:
        local = self.local
        mine = await self._choose()
        local.is_mine = mine.__contains__
        await local.read()
        self.mine = mine & local.entries.keys()
        if not self.mine:
            raise NoPart("no file of the step is meant, or other nodes have them")
        stored = await self._look()
        if stored.has_manifest:
            raise NoPart("a whole save of the step is there already")
        before = stored.parts.get(self.node)
        if before is None or before.sent.age != local.age:
            await self._put(PartFile(replace(self._node_file(), objects={})))  # nothing vouches for what was there
        await self._adopt(stored)
        # An earlier save of the part had them, and this one has not.
        gone = [inner for inner in (before.sent.objects if before else ()) if inner not in self.mine]
        gone = [inner for inner in gone if inner in stored.objects]
        await self._withdraw(stored, gone)
        await self.client.delete([stored.objects[inner].key for inner in gone])
        await self._send_all([inner for inner in self.mine if inner not in self._sent and not self._is_gate(inner)])
        await self._send_all([inner for inner in self.mine if inner not in self._sent])
        self.registry.crash("part:sent")
        local.check()
        part = PartFile(self._node_file(), frozenset(local.entries.keys() - self.mine))
        stored = await look(self.client, self.registry.names, *self._key, read=False)
        if stored.has_manifest:
            raise NoPart("a whole save of the step is there already")
        for inner, sent in self._sent.items():
            if not stored.holds(inner, sent.file.size_bytes, sent.etag):
                raise ObjectCorrupt(f"the object tier does not hold {'/'.join(self._key)}/{inner} as it was sent")
        await self._put(part)
        self.registry.crash("part:committed")
        return part

    async def _choose(self) -> frozenset[str]:
        """What of the step this node is to send now."""
        record, cluster = self.local.record, self.registry.cluster
        if self.registry.is_shared(record):
            if not record.manifest.populated:
                raise NoPart("no file of the step is here")
            await cluster.show_listing(record.rel)
        names = [inner for inner in record.manifest.files if not is_own(inner)]
        meant = {inner for inner in names if is_meant(inner, self.patterns) and cluster.owns(record, inner)}
        return frozenset(
            inner
            for inner in meant
            if not self._is_gate(inner) or ("/" in inner and self._vouches_for(inner, names) <= meant)
        )

    def _vouches_for(self, gate: str, names: Iterable[str]) -> set[str]:
        directory = gate.rpartition("/")[0]
        return {inner for inner in names if not directory or inner.startswith(f"{directory}/")}

    async def _withdraw(self, stored: StoredStep, gone: list[str]) -> None:
        """An earlier save's markers beside which a file is about to change or go: a mixture would pass for whole."""
        changing = [inner for inner in self.mine if inner not in self._sent and not self._is_gate(inner)] + gone
        gates = [
            inner
            for inner in stored.objects
            if not is_own(inner) and self._is_gate(inner) and self._vouches_for(inner, changing)
        ]
        await self.client.delete([stored.objects[inner].key for inner in gates])
        for inner in gates:
            if self._sent.pop(inner, None) is not None:
                self.bytes_done -= self.local.entries[inner].size_bytes
        self.registry.crash("part:withdrawn")

    def _to_send(self) -> Iterable[str]:
        return self.mine

    async def _put(self, part: PartFile) -> None:
        await self.client.put(part_key(*self._key, self.node), part.to_bytes())
