"""One step on its way to the disk: whole or not at all.

Files that the step's copy there has already are linked, so a file that was added to a step costs its own bytes only.
The others are read from RAM, summed up by chunks and held against what was sealed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.checksum import CHUNK_BYTES, combine, from_text
from tierfs.cluster.versions import write_version
from tierfs.disk.direct_io import DirectWriter
from tierfs.disk.disk_step import DiskStep
from tierfs.disk.store import DiskStore
from tierfs.errors import ChecksumMismatch
from tierfs.objects.bandwidth import Bandwidth
from tierfs.persist.layout import is_own
from tierfs.persist.local_step import LocalStep, Superseded
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest
from tierfs.persist.reporting import all_of
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.disk")

T = TypeVar("T")

#: Files that are copied side by side.
FILES_AT_ONCE = 2
#: Before each chunk while a program writes into a step, so that a save has the memory and the processors.
BUSY_PAUSE_S = 0.5


class NotHere(Exception):
    """Some of the step's bytes are neither in RAM nor on the disk: it is not copied."""


class StepCopy:
    """`old` is what the disk has of the step. Of a step that the catalogue `cluster` has ("" for none) those files are
    copied that this node holds whole; `version_of` is the version of an inode's bytes there, also of a stub's.
    `is_there` tells whether `old` is still what the disk has."""

    def __init__(
        self,
        registry: StepRegistry,
        store: DiskStore,
        record: StepRecord,
        old: DiskStep | None,
        *,
        node: str,
        bandwidth: Bandwidth,
        threads: trio.CapacityLimiter,
        is_stub: Callable[[int], bool],
        cluster: str = "",
        version_of: Callable[[int], str | None] = lambda ino: None,
        is_there: Callable[[DiskStep], bool] = lambda stored: True,
    ) -> None:
        self.local = LocalStep(registry, record, hydrate=_refuse, is_stub=is_stub)
        self.local.is_mine = self._is_whole_here
        self.bytes_done = 0
        self._registry, self._store, self._record, self._old = registry, store, record, old
        self._node, self._bandwidth, self._threads = node, bandwidth, threads
        self._is_stub, self.cluster, self._version_of = is_stub, cluster, version_of
        self._is_there = is_there
        self._versions: dict[str, str] = {}
        #: By the path inside the step, those of `old` that are as they are now.
        self._linked: dict[str, ObjectFile] = {}
        self._to_copy: list[str] = []
        self._copied: dict[str, ObjectFile] = {}

    async def prepare(self) -> int:
        """Look at what is there now; returns how many bytes have to be copied. Superseded, NotHere, TierfsError."""
        await self.local.read()
        self._linked, self._to_copy, self._versions = {}, [], {}
        for inner, entry in self.local.entries.items():
            if is_own(inner):
                continue
            version = self._version_of(entry.ino) if self.cluster else None
            if version is not None:
                self._versions[inner] = version
            before = self._old.file(inner) if self._old is not None else None
            if before is not None and self._is_as_before(inner, before):
                now = self.local.object_file(inner, before.checksum, before.chunks)
                self._linked[inner] = replace(now, mtime_ns=entry.mtime_ns)  # bringing bytes moves a stub's own time
            elif self._is_stub(entry.ino):
                if not self.cluster:
                    raise NotHere
            elif self.cluster and version is None:
                raise Superseded  # it is just being published
            else:
                self._to_copy.append(inner)
        if not self._to_copy and not self._linked:
            raise NotHere
        return self.bytes_total

    def _is_whole_here(self, inner: str) -> bool:
        entry = self._record.manifest.files.get(inner)
        return entry is None or not self._is_stub(entry.ino)

    @property
    def bytes_total(self) -> int:
        return sum(self.local.entries[inner].size_bytes for inner in self._to_copy)

    def _is_as_before(self, inner: str, before: ObjectFile) -> bool:
        entry = self.local.entries[inner]
        if self.cluster:
            versions: Mapping[str, str] = self._old.versions if self._old is not None else {}
            return inner in self._versions and versions.get(inner) == self._versions[inner]
        if entry.checksum is None:
            return False
        return (before.size_bytes, before.checksum) == (entry.size_bytes, from_text(entry.checksum))

    async def run(self) -> tuple[DiskStep, Path | None]:
        """Copy, and give the step its place; returns it with where its older copy lies now.

        Superseded, ChecksumMismatch (RAM has other bytes than were sealed), OSError (of the disk).
        """
        incoming = await self._in_thread(self._store.begin)
        done = False
        try:
            await self._in_thread(partial(self._make_directories, incoming))
            self._registry.crash("disk:begun")
            await all_of((partial(self._copy, incoming, inner) for inner in self._to_copy), at_once=FILES_AT_ONCE)
            self._registry.crash("disk:copied")
            self.local.check()
            if self._old is not None and not self._is_there(self._old):
                raise Superseded  # a file of it was found to be damaged, which may be one that was linked
            stored = self._stored(incoming)
            old = await self._in_thread(partial(self._store.commit, stored))
            done = True
            self._registry.crash("disk:committed")
            return replace(stored, directory=self._store.place(stored.key)), old
        finally:
            if not done:
                with trio.CancelScope(shield=True), trio.move_on_after(1), contextlib.suppress(OSError):
                    await self._in_thread(partial(self._store.discard, incoming))

    def _make_directories(self, incoming: Path) -> None:
        for inner in (*self._linked, *self._to_copy):
            (incoming / inner).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._old is not None:
            for inner in self._linked:
                os.link(self._old.directory / inner, incoming / inner, follow_symlinks=False)

    async def _copy(self, incoming: Path, inner: str) -> None:
        size = self.local.entries[inner].size_bytes
        source = await self.local.open(inner)
        writer: DirectWriter | None = None
        try:
            writer = await self._in_thread(partial(DirectWriter, incoming / inner))
            chunks: list[int] = []
            full = 0
            for offset in range(0, size, CHUNK_BYTES):
                await self._yield_to_saves()
                length = min(CHUNK_BYTES, size - offset)
                await trio.sleep(self._bandwidth.take(length))
                try:
                    chunks.append(await self._in_thread(partial(writer.copy, source, offset, length)))
                except EOFError:
                    raise Superseded from None
                full = combine(full, chunks[-1], length)
                self.bytes_done += length
            if inner in self._versions:  # by which other nodes ask for it
                await self._in_thread(partial(write_version, incoming / inner, self._versions[inner]))
            await self._in_thread(partial(writer.finish, size))
            self.local.check(inner)
            if not self.local.is_unchanged(inner, source):
                raise Superseded
        finally:
            os.close(source)
            if writer is not None:
                writer.close()
        sealed = self.local.sealed_checksum(inner)
        if sealed is not None and sealed != full:
            raise ChecksumMismatch(
                f"{self._record.rel}/{inner} in RAM is not what was sealed; `tierfs verify` says more"
            )
        self.local.learn(inner, full)
        self._copied[inner] = self.local.object_file(inner, full, tuple(chunks))

    async def _yield_to_saves(self) -> None:
        if any(record.writers for record in self._registry.records.values()):
            await trio.sleep(BUSY_PAUSE_S)

    def _stored(self, incoming: Path) -> DiskStep:
        local, manifest = self.local, self._record.manifest
        files = {**self._linked, **self._copied}
        step = ObjectManifest(
            namespace=local.namespace,
            step=local.step,
            number=manifest.number,
            generation=local.generation,
            completed_at=local.completed_at,
            marker=local.marker if local.marker in files else None,
            files=files,
            directory=local.directory,
        )
        return DiskStep(
            directory=incoming,
            step=step,
            node=self._node,
            stored_at=time.time(),
            owed=manifest.owed,
            marker=local.marker,
            versions={inner: version for inner, version in self._versions.items() if inner in files},
            cluster=self.cluster,
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._threads)


async def _refuse(ino: int) -> None:
    raise NotHere
