"""What this node lets others read: its copies, whole ones by their version and those that grow, and news of both."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import trio

from tierfs.checksum import FileChecksum, checksum_fd
from tierfs.cluster.copy_index import CopyIndex
from tierfs.cluster.kept_checksums import KeptChecksums
from tierfs.cluster.offering import GrowingFile, Offering
from tierfs.cluster.versions import (
    new_version,
    open_for_reading,
    whole_version,
)
from tierfs.errors import PeerLacks
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import Offer

log = logging.getLogger("tierfs.cluster")


class Copies(CopyIndex):
    """Implements `tierfs.transport.peers.Shelf`. Used from the trio thread."""

    def __init__(self, registry: StepRegistry, node: str) -> None:
        super().__init__(registry, node)
        self._checksums = KeptChecksums()
        self._summing: dict[str, trio.Event] = {}
        self._limiter = trio.CapacityLimiter(2)
        self._offering = Offering(self._sealed_now)
        #: Of what is being copied here while it grows elsewhere, by its growing name: the bytes from its start on.
        self.arrived: Callable[[str], FileChecksum | None] = lambda version: None
        #: What the disk's copy was summed up to when it was stored; None where the disk has none.
        self.summed_on_disk: Callable[[str], FileChecksum | None] = lambda version: None

    def forget(self, key: Key, version: str) -> None:
        super().forget(key, version)
        self._checksums.forget(version)

    # --- what others read

    def open_version(self, version: str) -> int:
        path = self.path(version)
        if path is not None:
            with contextlib.suppress(OSError):
                fd = open_for_reading(path)
                try:
                    if whole_version(fd) == version:
                        if not path.is_relative_to(self._tier.path):  # the disk's: read once, then not kept in memory
                            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NOREUSE)
                        return os.dup(fd)
                finally:
                    os.close(fd)
        raise PeerLacks(f"{self.node} does not hold the version {version}")

    def open_growing(self, version: str) -> int:
        """Also by the name that a file had while it grew, where it was sealed since."""
        file = self._offering.named(version)
        if file is not None:
            return os.dup(file.fd)
        final = self._offering.became(version)
        if final is None:
            raise PeerLacks(f"nothing grows on {self.node} as {version}")
        return self.open_version(final)

    async def checksum(self, version: str) -> FileChecksum:
        arrived = self.arrived(version)
        if arrived is not None:
            return arrived
        while version in self._summing:
            await self._summing[version].wait()
        fd = self.open_version(version)
        try:
            known = self._checksums.get(version)
            if known is None and self.path_in_ram(version) is None:
                known = self.summed_on_disk(version)
            if known is not None:
                return known
            done = self._summing[version] = trio.Event()
            try:
                summed = await trio.to_thread.run_sync(checksum_fd, fd, limiter=self._limiter)
            finally:
                del self._summing[version]
                done.set()
            if whole_version(fd) != version or os.fstat(fd).st_size != summed.size_bytes:
                raise PeerLacks(f"{version} was written again on {self.node} while it was summed up")
            self._check_with_manifest(version, os.fstat(fd).st_ino, summed)
        finally:
            os.close(fd)
        self.checksum_known(version, summed)
        return summed

    async def verify(self, version: str) -> FileChecksum:
        """What lies here now: read again, and told as it is. PeerLacks, OSError."""
        fd = self.open_version(version)
        try:
            summed = await trio.to_thread.run_sync(checksum_fd, fd, limiter=self._limiter)
            if whole_version(fd) != version:
                raise PeerLacks(f"{version} was written again on {self.node} while it was summed up")
        finally:
            os.close(fd)
        return summed

    def checksum_of(self, version: str) -> FileChecksum | None:
        """What it was summed up to when somebody first did so; None where that is not known."""
        return self._checksums.get(version)

    def checksum_known(self, version: str, checksum: FileChecksum) -> None:
        """By chunks, of one who summed the bytes up anyway."""
        self._checksums.keep(version, checksum)

    # --- what grows

    def offers(self) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        return self._offering.subscribe()

    def growing(self, rel: str, ino: int) -> str:
        """A file was opened for writing; returns the name by which others may read it meanwhile.

        "" for what is in no step. `rel` is relative to the mount. OSError (FileNotFoundError).
        """
        file = self._offering.growing(ino)
        if file is not None:
            return file.version
        where = self._registry.names.locate(rel)
        if where is None or not where.inner:
            return ""
        record = self._registry.at(where)
        generation = 1
        if record is not None:
            current = record.manifest.overwrite
            generation = current.generation if current is not None else record.manifest.generation
        fd = open_for_reading(self._registry.root / rel)
        if os.fstat(fd).st_ino != ino:
            os.close(fd)
            raise FileNotFoundError(f"{rel} has another inode than {ino}")
        file = GrowingFile(new_version(self.node), where.namespace, where.step, where.inner, generation, ino, fd)
        self._offering.begin(file)
        return file.version

    def growing_version(self, ino: int) -> str | None:
        """The name by which others may read a file that is being written; None for what is not."""
        file = self._offering.growing(ino)
        return file.version if file is not None else None

    def sealed(self, rel: str, ino: int) -> str:
        """The last writer closed it: `seal`, and whoever listens hears of it. OSError as for `seal`."""
        path = self._registry.root / rel
        before = self._offering.growing(ino)
        try:
            version = self.seal(path, ino)
        except OSError:
            self._offering.end(ino, None)
            raise
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None and where.inner else None
        offer = None
        if record is not None and where is not None:
            offer = Offer(
                version,
                where.namespace,
                where.step,
                where.inner,
                record.generation_of(where.inner),
                path.lstat().st_size,
                sealed=True,
                growing=before.version if before is not None else "",
            )
        self._offering.end(ino, offer)
        return version

    def tell_growth(self, ino: int) -> int:
        """Others hear at once how far an open file is written: that many bytes, 0 where it can't be told."""
        return self._offering.tell_now(ino)

    def grows_no_more(self, ino: int) -> None:
        """It was removed, or left its step, while it was written."""
        self._offering.end(ino, None)

    def close(self) -> None:
        self._offering.close()

    # --- inside

    def _sealed_now(self) -> Iterator[Offer]:
        """The files of steps that are being written here, as a new subscriber hears of them."""
        own = f"{self.node}/"
        for record in list(self._registry.records.values()):
            if record.is_complete:
                continue
            for inner, entry in list(record.manifest.files.items()):
                version = self._by_ino.get(entry.ino, "")
                if entry.sealed and version.startswith(own) and not record.is_of_old_generation(inner):
                    yield Offer(version, *record.key, inner, record.generation_of(inner), entry.size_bytes, sealed=True)

    def _check_with_manifest(self, version: str, ino: int, summed: FileChecksum) -> None:
        """Give the checksum to the manifest where it lacks it; PeerLacks where it has another one."""
        for record, inner in self._named(ino):
            entry = record.manifest.files[inner]
            if not entry.sealed or entry.size_bytes != summed.size_bytes:
                continue
            if entry.checksum is None:
                record.manifest.files[inner] = replace(entry, checksum=summed.text)
                record.unsaved = True
            elif entry.checksum != summed.text:
                message = f"{record.rel}/{inner} on {self.node} has other bytes than were sealed"
                log.error("%s", message, extra=self._registry.extra(record, inner))
                raise PeerLacks(message)

    def _named(self, ino: int) -> Iterator[tuple[StepRecord, str]]:
        """Names of the inode in steps, from where it is known to lie."""
        version = self._by_ino.get(ino)
        for place in self._copies[version].places if version in self._copies else ():
            where = self._registry.names.locate(place.removeprefix("root/")) if place.startswith("root/") else None
            record = self._registry.at(where) if where is not None else None
            if where is None or record is None or where.inner not in record.manifest.files:
                continue
            if record.manifest.files[where.inner].ino == ino:
                yield record, where.inner
