"""`file:///path`: a directory as an object store, for a shared file system and for trying tierfs out.

Objects are plain files under their keys, so a step's directory there is a usable checkpoint. A file gets its name
once its bytes are on disk, and each answer that something is there (or gone) holds after a power failure.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.checksum import FileChecksum
from tierfs.errors import ObjectCorrupt, ObjectError
from tierfs.objects.file_copies import copy_file
from tierfs.objects.file_tree import SCRATCH_PARTS, FileTree, etag_of
from tierfs.objects.file_uploads import FileUploads, write_all
from tierfs.objects.opening import file_root
from tierfs.objects.probing import found_capabilities
from tierfs.objects.store import (
    BATCH_KEYS,
    MIB,
    Capabilities,
    Flow,
    ObjectInfo,
    Page,
    PartInfo,
    SentPart,
    UnfinishedUpload,
)

#: What a writer that was killed left in the scratch goes after a day; no writer of one object takes so long.
_LEFT_BEHIND_S = 86400.0
_PUT = "put-"


class FileStore:
    """See `tierfs.objects.store.ObjectStore`. The directory is made where its parent exists."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self._tree = FileTree(root)
        self._uploads = FileUploads(self._tree)

    def probe(self) -> Capabilities:
        self._remove_left_behind()
        return found_capabilities(self)

    def put(self, key: str, data: memoryview, crc64nvme: int, flow: Flow, *, only_if_absent: bool = False) -> str:
        def write(fd: int) -> None:
            _write(fd, 0, data, crc64nvme, flow, key)

        return self._make(key, write, only_if_absent=only_if_absent)

    def copy(self, source_url: str, key: str, checksum: FileChecksum, flow: Flow) -> str:
        source = FileTree(file_root(source_url)).open(key)
        try:
            size = os.fstat(source).st_size
            if size != checksum.size_bytes:
                raise ObjectCorrupt(f"{source_url}/{key} has {size} bytes; {checksum.size_bytes} are to be copied")
            return self._make(key, lambda fd: copy_file(source, fd, size, flow))
        finally:
            os.close(source)

    def _make(self, key: str, write: Callable[[int], None], *, only_if_absent: bool = False) -> str:
        """The object of what `write` writes to a descriptor, once that is on disk."""
        name = f"{_PUT}{uuid.uuid4().hex}"
        try:
            with self._tree.directory(SCRATCH_PARTS, create=True) as fds:
                try:
                    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=fds[-1])
                    try:
                        write(fd)
                        os.fsync(fd)
                        etag = etag_of(os.fstat(fd))
                    finally:
                        os.close(fd)
                    self._tree.place(fds[-1], name, key, only_if_absent=only_if_absent)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fds[-1])
        except OSError as error:
            raise self._tree.failure(error, "writing", key) from error
        return etag

    def get(self, key: str, most_bytes: int) -> tuple[bytes, str]:
        fd = self._tree.open(key)
        try:
            info = os.fstat(fd)
            if info.st_size > most_bytes:
                raise ObjectError(f"{self.url}/{key} has {info.st_size} bytes; at most {most_bytes} were expected")
            with open(fd, "rb", closefd=False) as file:
                return file.read(), etag_of(info)
        except OSError as error:
            raise self._tree.failure(error, "reading", key) from error
        finally:
            os.close(fd)

    def read_range(self, key: str, offset: int, into: memoryview, flow: Flow) -> None:
        fd = self._tree.open(key)
        try:
            done = 0
            while done < len(into):
                piece = into[done : done + MIB]
                flow.passing(len(piece))
                got = os.preadv(fd, [piece], offset + done)
                if not got:
                    raise ObjectCorrupt(
                        f"{self.url}/{key} has {os.fstat(fd).st_size} bytes; those up to {offset + len(into)} were "
                        "asked for"
                    )
                done += got
        except OSError as error:
            raise self._tree.failure(error, "reading", key) from error
        finally:
            os.close(fd)

    def list_page(self, prefix: str, *, delimiter: str = "", more: str = "") -> Page:
        if delimiter not in ("", "/"):
            raise ValueError(f"a directory can't be listed with the delimiter {delimiter!r}")
        with closing(self._tree.entries(prefix, delimited=bool(delimiter), after=more)) as entries:
            found = list(islice(entries, BATCH_KEYS))
            is_last = next(entries, None) is None
        return Page(
            objects=tuple(
                ObjectInfo(entry.key, entry.info.st_size, etag_of(entry.info), entry.info.st_mtime)
                for entry in found
                if entry.info
            ),
            prefixes=tuple(entry.key for entry in found if not entry.info),
            more="" if is_last else found[-1].key,
        )

    def delete(self, keys: Sequence[str]) -> None:
        self._tree.remove(keys)

    def start_upload(self, key: str) -> str:
        return self._uploads.start(key)

    def put_part(self, key: str, upload_id: str, number: int, data: memoryview, crc64nvme: int, flow: Flow) -> str:
        def write(fd: int, offset: int) -> int:
            _write(fd, offset, data, crc64nvme, flow, key)
            return crc64nvme

        return self._uploads.put(key, upload_id, number, len(data), write)

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        return self._uploads.parts(key, upload_id)

    def finish_upload(self, key: str, upload_id: str, parts: Sequence[SentPart]) -> str:
        return self._uploads.finish(key, upload_id, parts)

    def abort_upload(self, key: str, upload_id: str) -> None:
        self._uploads.abort(upload_id)

    def list_uploads(self, prefix: str) -> list[UnfinishedUpload]:
        return self._uploads.unfinished(prefix)

    def close(self) -> None:
        return

    def _remove_left_behind(self) -> None:
        oldest = time.time() - _LEFT_BEHIND_S
        for name in self._tree.scratch_names():
            with suppress(OSError), self._tree.directory(SCRATCH_PARTS) as fds:
                if name.startswith(_PUT) and os.stat(name, dir_fd=fds[-1], follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=fds[-1])


def _write(fd: int, offset: int, data: memoryview, checksum: int, flow: Flow, key: str) -> None:
    """Write the bytes; ObjectCorrupt where they are not those that the checksum was made of."""
    found = 0
    for at in range(0, len(data), MIB):
        piece = data[at : at + MIB]
        flow.passing(len(piece))
        found = crc64nvme(piece, found)
        write_all(fd, piece, offset + at)
    if found != checksum:
        raise ObjectCorrupt(f"what was to be written as {key} does not have the checksum that was sent along")
