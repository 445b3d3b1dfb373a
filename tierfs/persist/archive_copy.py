"""One persisted step to the archive, whole or not at all: copied by the store, object by object.

The order is that of `tierfs.persist.committing`: data, then the markers, then one look at what lies at both ends, and
last the manifest, by one conditional PUT. So a manifest in the archive names whole files only, and a marker there has
all its data beside it, whoever dies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from tierfs.checksum import FileChecksum, to_text
from tierfs.errors import ObjectCorrupt, ObjectError, ObjectExists, ObjectMissing, ObjectUnavailable, TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.objects.store import COPY_BYTES
from tierfs.persist.layout import file_key, is_own, manifest_key
from tierfs.persist.object_manifest import MAX_BYTES, ObjectManifest, read_manifest
from tierfs.persist.reporting import all_of
from tierfs.persist.stored_step import StoredStep, abort_uploads, look
from tierfs.steps.registry import Key, StepRegistry

#: Each is a request that waits for the store.
FILES_AT_ONCE = 8
#: Not every key may list uploads, and it is a matter of tidiness.
TIDY_S = 15.0


class SourceChanged(TierfsError):
    """The step's objects are not what they were when the copying began: it begins anew."""


class OlderThanArchived(TierfsError):
    """The archive has a newer save of the step."""


@dataclass
class ArchiveCopy:
    """One run, for what is committed when it begins. Done again it goes on where it stopped: `copied` has the checksum
    and the ETag of each file whose copy is there, and `note` is called after each that is added."""

    registry: StepRegistry
    source: ObjectClient
    archive: ObjectClient
    key: Key
    copied: dict[str, tuple[str, str]]
    note: Callable[[], None]
    conditional_put: bool = True
    bytes_copied: int = 0

    async def run(self) -> ObjectManifest:
        """Raises SourceChanged, OlderThanArchived, ObjectMissing (the step is no longer there), ObjectError."""
        data, etag = await self.source.get(manifest_key(*self.key), most_bytes=MAX_BYTES)
        manifest = read_manifest(data, *self.key)
        there = await look(self.archive, self.registry.names, *self.key)
        if there.manifest is not None:
            if there.manifest.has_same_bytes(manifest) and there.holds_all_of(manifest):
                return manifest
            # By time: a newer save has the lower generation where its name was free in the object tier.
            if there.manifest.completed_at > manifest.completed_at:
                raise OlderThanArchived(f"the archive has a newer save of {'/'.join(self.key)}")
        before = await self._sources()
        await self._withdraw(there, manifest)
        missing = [inner for inner in manifest.files if not self._is_there(inner, manifest, there)]
        gates = {inner for inner in missing if self._is_gate(inner, manifest)}
        await self._copy_all([inner for inner in missing if inner not in gates], manifest)
        await self._copy_all(sorted(gates), manifest)
        self.registry.crash("archive:copied")
        await self._check(manifest, etag, before)
        await self._commit(manifest, data)
        self.registry.crash("archive:committed")
        await self._abort_leftover_uploads(manifest)
        return manifest

    async def _sources(self) -> dict[str, str]:
        stored = await look(self.source, self.registry.names, *self.key, read=False)
        return {inner: info.etag for inner, info in stored.objects.items() if not is_own(inner)}

    def _is_gate(self, inner: str, manifest: ObjectManifest) -> bool:
        return inner == manifest.marker or self.registry.rules.match(inner) is not None

    def _is_there(self, inner: str, manifest: ObjectManifest, there: StoredStep) -> bool:
        checksum, etag = self.copied.get(inner, ("", ""))
        file = manifest.files[inner]
        return checksum == to_text(file.checksum) and there.holds(inner, file.size_bytes, etag)

    async def _withdraw(self, there: StoredStep, manifest: ObjectManifest) -> None:
        """Before anything of an older save is replaced: what vouches for it."""
        if there.has_manifest:
            await self.archive.delete([manifest_key(*self.key)])
        gates = [
            inner
            for inner in there.objects
            if not is_own(inner)
            and self._is_gate(inner, manifest)
            and not (inner in manifest.files and self._is_there(inner, manifest, there))
        ]
        if gates:
            await self.archive.delete([there.objects[inner].key for inner in gates])
        self.registry.crash("archive:withdrawn")

    async def _copy_all(self, inners: list[str], manifest: ObjectManifest) -> None:
        inners.sort(key=lambda inner: (-manifest.files[inner].size_bytes, inner))
        await all_of((partial(self._copy, inner, manifest) for inner in inners), at_once=FILES_AT_ONCE)

    async def _copy(self, inner: str, manifest: ObjectManifest) -> None:
        file = manifest.files[inner]
        known = FileChecksum(file.size_bytes, file.checksum, file.chunks, manifest.chunk_bytes)
        try:
            etag = await self.archive.copy(self.source.url, file_key(*self.key, inner), known)
        except ObjectMissing:
            raise SourceChanged(f"{inner} of {'/'.join(self.key)} is no longer in the object tier") from None
        self.copied[inner] = to_text(file.checksum), etag
        self.note()
        self.bytes_copied += file.size_bytes
        self.registry.crash("archive:file-copied")

    async def _check(self, manifest: ObjectManifest, etag: str, before: dict[str, str]) -> None:
        """What was copied was of this very commit all the time, and lies there."""
        try:
            now = (await self.source.get(manifest_key(*self.key), most_bytes=MAX_BYTES))[1]
        except ObjectMissing:
            now = ""
        after = await self._sources()
        if now != etag or any(after.get(inner) != before.get(inner) for inner in manifest.files):
            raise SourceChanged(f"{'/'.join(self.key)} was committed anew while it was copied")
        there = await look(self.archive, self.registry.names, *self.key, read=False)
        for inner in manifest.files:
            if not self._is_there(inner, manifest, there):
                self.copied.pop(inner, None)
                raise ObjectCorrupt(f"the archive does not hold {'/'.join(self.key)}/{inner} as it was copied")
        strays = [
            info.key for inner, info in there.objects.items() if not is_own(inner) and inner not in manifest.files
        ]
        if strays:
            await self.archive.delete(strays)

    async def _abort_leftover_uploads(self, manifest: ObjectManifest) -> None:
        """Of a daemon that died while a large file was copied: now they are of no use to anybody."""
        if any(file.size_bytes > COPY_BYTES for file in manifest.files.values()):
            with suppress(ObjectError), trio.move_on_after(TIDY_S):
                await abort_uploads(self.archive, self.registry.names, *self.key)

    async def _commit(self, manifest: ObjectManifest, data: bytes) -> None:
        key = manifest_key(*self.key)
        try:
            await self.archive.put(key, data, only_if_absent=self.conditional_put)
        except ObjectExists:
            # Our own, whose answer was lost, or one of a node that did the same.
            found, _ = await self.archive.get(key, most_bytes=MAX_BYTES)
            if not read_manifest(found, *self.key).has_same_bytes(manifest):
                raise ObjectUnavailable(f"another node archived other bytes of {'/'.join(self.key)}") from None
