"""Making a file of another node here: a hard link where its version lies on this node already, its bytes where it is
small, else a stub."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Literal

import trio
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.catalog.records import FileRecord
from tierfs.checksum import from_text
from tierfs.cluster.copies import Copies
from tierfs.cluster.placing import look, put
from tierfs.cluster.versions import read_version, write_version
from tierfs.cluster.view import View
from tierfs.errors import PeerError
from tierfs.hydrate.stubs import MarkDamaged, StubMark, make_stub, read_mark
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import SMALL_FILE_BYTES, Peers

log = logging.getLogger("tierfs.cluster")

#: What one node may take for a small file, and all of them together, seconds.
ASK_ONE_S = 2.0
FETCH_WITHIN_S = 5.0
#: Nodes that are asked for one small file, and files that are fetched at once.
MOST_ASKED = 4
FETCHES_AT_ONCE = 16
#: In the mark of a stub that is in no step: no object of the object tier has such a key.
NO_STEP = "-"

Standing = Literal["absent", "same", "other", "in the way"]


class FileMaker:
    """Used from the trio thread. `add_stub` tells hydration of a stub (inode, mark, path), `on_replaced` of an inode
    that lost its name to another one."""

    def __init__(
        self,
        registry: StepRegistry,
        view: View,
        copies: Copies,
        peers: Peers,
        add_stub: Callable[[int, StubMark, Path], object],
        on_replaced: Callable[[int], None] = lambda ino: None,
    ) -> None:
        self._registry = registry
        self._view = view
        self._copies = copies
        self._peers = peers
        self._add_stub = add_stub
        self.on_replaced = on_replaced
        #: A step has another name: its stubs are marked as that one's.
        self.mark_anew: Callable[[StepRecord], Awaitable[None]] = _no_stubs
        self._root = registry.root

    # --- looking

    def standing(self, top: Path, rel: str, file: FileRecord) -> tuple[Standing, str]:
        """How what has the name stands to the file, and its version ("": it has none, so it is being written).

        `in the way` is what is no regular file. NotADirectoryError as for `look`.
        """
        info = look(top, rel)
        if info is None:
            return "absent", ""
        if not stat.S_ISREG(info.st_mode):
            return "in the way", ""
        version, mark = version_at(top / rel)
        if version == file.version:
            return "same", version
        if mark is not None and not mark.version:  # only the object tier has its bytes
            same = mark.checksum_text == file.checksum and mark.size_bytes == file.size_bytes
            return ("same" if same else "other"), ""
        return "other", version

    # --- small files

    def is_to_fetch(self, file: FileRecord) -> bool:
        return 0 < file.size_bytes < SMALL_FILE_BYTES and not self._copies.has(file.version)

    async def fetch_all(self, files: Iterable[FileRecord], *, within_s: float = FETCH_WITHIN_S) -> dict[str, bytes]:
        """By version, what could be had in time of the small ones among the files."""
        found: dict[str, bytes] = {}
        wanted = {file.version: file for file in files if self.is_to_fetch(file)}
        slots = trio.Semaphore(FETCHES_AT_ONCE)

        async def one(file: FileRecord) -> None:
            async with slots:
                data = await self._fetch(file, self._likely_holders(file))
            if data is not None:
                found[file.version] = data

        if wanted:
            with trio.move_on_after(within_s):
                async with trio.open_nursery() as nursery:
                    for file in wanted.values():
                        nursery.start_soon(one, file)
        return found

    async def _fetch(self, file: FileRecord, holders: list[str]) -> bytes | None:
        for node in holders[:MOST_ASKED]:
            with trio.move_on_after(ASK_ONE_S):
                try:
                    data = await self._peers.fetch(node, file.version, most_bytes=SMALL_FILE_BYTES)
                except PeerError as error:
                    log.info("a small file can't be had from %s: %s", node, error.message, extra={"tier": "peer"})
                    continue
                if is_of(data, file):
                    return data
                log.error("%s sent other bytes than those of %s", node, file.version, extra={"tier": "peer"})
        return None

    def _likely_holders(self, file: FileRecord) -> list[str]:
        """Live nodes that should have a small file, its author first: all have those that are sealed."""
        others = sorted(node for node in self._view.nodes if node not in (file.node, self._copies.node))
        return [file.node, *others] if file.node in self._view.nodes else others

    # --- making

    def make(
        self,
        top: Path,
        rel: str,
        file: FileRecord,
        where: tuple[str, str, str],
        data: bytes | None,
        *,
        later: list[Callable[[], None]] | None = None,
        shown_at: Path | None = None,
    ) -> FileEntry:
        """Give the file its name below `top`, in place of what has it; blocking for some 100 µs.

        `where` is (namespace, step, path in the step). In a tree that is built aside, to lie at `shown_at` afterwards,
        the rest is to be done by calling what is put into `later` then. OSError (ENOSPC; NotADirectoryError),
        TierfsError.
        """
        namespace, step, inner = where
        scratch = self._registry.tier.generations / f"{uuid.uuid4().hex}.shown"
        before = look(top, rel)
        key = namespace, step
        mark = None
        shelved = False
        try:
            found = self._copies.path_in_ram(file.version)
            if found is None and data is None and file.size_bytes < SMALL_FILE_BYTES:
                data = self._from_disk(file)
            if found is not None:
                shelved = found.is_relative_to(self._copies.shelf)
                os.link(found, scratch, follow_symlinks=False)
                if shelved or file.node != self._copies.node:
                    _make_as(scratch, file)  # also where it was brought before its last chmod or touch
            elif data is not None or file.size_bytes == 0:
                _write(scratch, data or b"", file)
            else:
                mark = StubMark(
                    namespace=namespace,
                    step=step,
                    file=inner,
                    size_bytes=file.size_bytes,
                    checksum=from_text(file.checksum) if file.checksum is not None else None,
                    mtime_ns=file.mtime_ns,
                    version=file.version,
                )
                make_stub(scratch, mark, mode=file.mode, uid=file.uid, gid=file.gid)
            info = scratch.lstat()
            path = (shown_at if shown_at is not None else top) / rel
            if mark is not None:
                self._add_stub(info.st_ino, mark, path)  # before anybody can open it there: its holes are no data
            if before is None or before.st_ino != info.st_ino:  # rename(2) does nothing between two names of one inode
                put(top, rel, scratch, mtime_ns=file.mtime_ns)
        finally:
            scratch.unlink(missing_ok=True)

        def tell() -> None:
            if mark is None and shelved:
                self._copies.unshelve(key, file.version, path)
            elif mark is None:
                self._copies.noted(file.version, info.st_ino, path)
            if before is not None and before.st_ino != info.st_ino:
                self.on_replaced(before.st_ino)

        if later is None:
            tell()
        else:
            later.append(tell)
        mtime_ns = file.mtime_ns if mark is not None else info.st_mtime_ns
        return FileEntry(file.size_bytes, mtime_ns, info.st_ino, file.checksum, True)

    def _from_disk(self, file: FileRecord) -> bytes | None:
        """A small file that this node's disk has; None where it has not, or has other bytes."""
        path = self._copies.on_disk(file.version)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError as error:
            log.warning("a small file can't be read from the disk: %s", error, extra={"tier": "disk"})
            return None
        if is_of(data, file):
            return data
        self._copies.forget_on_disk(file.version)
        return None

    def entry_of(self, path: Path, file: FileRecord) -> FileEntry:
        """Of a file that is there as the record says. OSError."""
        info = path.lstat()
        is_stub = version_at(path)[1] is not None
        return FileEntry(info.st_size, file.mtime_ns if is_stub else info.st_mtime_ns, info.st_ino, file.checksum, True)


async def _no_stubs(record: StepRecord) -> None:
    pass


def version_at(path: Path) -> tuple[str, StubMark | None]:
    """The version of a file, whole or a stub ("" for none), and the mark of a stub. FileNotFoundError."""
    try:
        mark = read_mark(path)
    except MarkDamaged:
        return "", None
    if mark is not None:
        return mark.version, mark
    return read_version(path) or "", None


def is_of(data: bytes, file: FileRecord) -> bool:
    if len(data) != file.size_bytes:
        return False
    return file.checksum is None or int(crc64nvme(data)) == from_text(file.checksum)


def plain_place(rel: str) -> tuple[str, str, str]:
    """(namespace, step, path in the step) for the mark of a file that is in no step."""
    directory, _, name = rel.rpartition("/")
    return directory or NO_STEP, NO_STEP, name


def key_of(where: tuple[str, str, str]) -> Key:
    return where[0], where[1]


def _write(scratch: Path, data: bytes, file: FileRecord) -> None:
    fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        write_version(fd, file.version)
    finally:
        os.close(fd)
    _make_as(scratch, file)


def _make_as(scratch: Path, file: FileRecord) -> None:
    info = scratch.lstat()
    if (info.st_uid, info.st_gid) != (file.uid, file.gid):
        with contextlib.suppress(PermissionError):
            os.chown(scratch, file.uid, file.gid, follow_symlinks=False)
    if stat.S_IMODE(info.st_mode) != file.mode:
        scratch.chmod(file.mode)
    if info.st_mtime_ns != file.mtime_ns:
        os.utime(scratch, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
