"""Uploads in parts into a directory: what came is found again after a crash, as with S3.

An upload is a directory in the scratch: `data`, into which parts are written at their place, `upload.json` with the
key, and `parts.jsonl`, a line for each part whose bytes are on disk. Where a part belongs follows from the size of
part 1, since only the last is shorter; one that comes before part 1 has begun gets a file of its own and is copied
into place at the end.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tierfs.checksum import MIB
from tierfs.errors import ObjectCorrupt, ObjectError, UploadMissing
from tierfs.objects.file_tree import SCRATCH_PARTS, FileTree, etag_of, key_parts, sync_directory
from tierfs.objects.store import PartInfo, SentPart, UnfinishedUpload

_DATA, _ABOUT, _PARTS, _PART_SIZE = "data", "upload.json", "parts.jsonl", "part-size-"
_ID = re.compile(r"upload-[0-9a-f]{32}")
_REMOVING_TRIES = 10
_WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

#: Writes a part's bytes into a descriptor at an offset and returns their checksum.
Writer = Callable[[int, int], int]


@dataclass(frozen=True)
class _Placed:
    """Where a part's bytes are: `file` of the upload's directory, at `offset`."""

    part: SentPart
    file: str
    offset: int


class FileUploads:
    """Thread-safe, and safe against other processes that write parts of the same upload."""

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self._part_sizes: dict[str, int] = {}

    def start(self, key: str) -> str:
        key_parts(key)
        upload_id = f"upload-{uuid.uuid4().hex}"
        try:
            with self._tree.directory((*SCRATCH_PARTS, upload_id), create=True) as fds:
                data = os.open(_DATA, _WRITE, 0o666, dir_fd=fds[-1])
                about = {"key": key, "started": time.time(), "inode": os.fstat(data).st_ino}
                os.close(data)
                _append(fds[-1], _ABOUT, about)
                for fd in reversed(fds):
                    sync_directory(fd)
        except OSError as error:
            raise self._tree.failure(error, "writing", key) from error
        return upload_id

    def put(self, key: str, upload_id: str, number: int, size_bytes: int, write: Writer) -> str:
        """Write part `number` with `write`; returns its ETag once it is on disk and in the journal."""
        with self._open(key, upload_id) as fd:
            file, offset = self._place_of(fd, upload_id, number, size_bytes)
            data = os.open(file, _WRITE, 0o666, dir_fd=fd)
            try:
                checksum = write(data, offset)
                os.fdatasync(data)
            finally:
                os.close(data)
            line = {"number": number, "size": size_bytes, "crc64nvme": checksum, "file": file, "offset": offset}
            _append(fd, _PARTS, line)
            sync_directory(fd)
            return _etag(checksum)

    def parts(self, key: str, upload_id: str) -> list[PartInfo]:
        with self._open(key, upload_id) as fd:
            placed = _journal(fd)
        return [PartInfo(n, placed[n].part.size_bytes, placed[n].part.etag) for n in sorted(placed)]

    def finish(self, key: str, upload_id: str, parts: Sequence[SentPart]) -> str:
        with self._open(key, upload_id) as fd:
            try:
                data = os.open(_DATA, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except FileNotFoundError:
                # Finished once already, and the one who did it never heard of it.
                etag = self._finished(key, _about(fd)["inode"])
            else:
                try:
                    _assemble(fd, data, key, parts, _journal(fd))
                    os.fsync(data)
                    etag = etag_of(os.fstat(data))
                finally:
                    os.close(data)
                self._tree.place(fd, _DATA, key)
        self.abort(upload_id)
        return etag

    def abort(self, upload_id: str) -> None:
        self._part_sizes.pop(upload_id, None)
        if _ID.fullmatch(upload_id):
            try:
                with self._tree.directory(SCRATCH_PARTS) as fds:
                    _remove(fds[-1], upload_id)
            except FileNotFoundError:
                return
            except OSError as error:
                raise self._tree.failure(error, "removing", upload_id) from error

    def unfinished(self, prefix: str) -> list[UnfinishedUpload]:
        found = []
        for upload_id in self._tree.scratch_names():
            if _ID.fullmatch(upload_id):
                with suppress(UploadMissing), self._open(None, upload_id) as fd:
                    about = _about(fd)
                    if about["key"].startswith(prefix):
                        found.append(UnfinishedUpload(about["key"], upload_id, about["started"]))
        return found

    @contextmanager
    def _open(self, key: str | None, upload_id: str) -> Iterator[int]:
        """The upload's directory. UploadMissing, also when it goes meanwhile."""
        missing = UploadMissing(f"the directory {self._tree.root} has no upload {upload_id} of {key}")
        if not _ID.fullmatch(upload_id):
            raise missing
        try:
            with self._tree.directory((*SCRATCH_PARTS, upload_id)) as fds:
                if key not in (None, _about(fds[-1])["key"]):
                    raise missing
                yield fds[-1]
        except FileNotFoundError:
            raise missing from None
        except OSError as error:
            raise self._tree.failure(error, "writing", key or upload_id) from error

    def _place_of(self, fd: int, upload_id: str, number: int, size_bytes: int) -> tuple[str, int]:
        """The file of the upload's directory that a part goes to, and where in it."""
        if number == 1:
            with suppress(FileExistsError):
                os.close(os.open(f"{_PART_SIZE}{size_bytes}", _WRITE | os.O_EXCL, 0o666, dir_fd=fd))
            return _DATA, 0
        if upload_id not in self._part_sizes:
            for name in os.listdir(fd):
                if name.startswith(_PART_SIZE):
                    self._part_sizes[upload_id] = int(name[len(_PART_SIZE) :])
        part_bytes = self._part_sizes.get(upload_id, 0)
        return (_DATA, (number - 1) * part_bytes) if size_bytes <= part_bytes else (f"part-{number}", 0)

    def _finished(self, key: str, inode: int) -> str:
        fd = self._tree.open(key)
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if info.st_ino != inode:
            raise UploadMissing(f"the bytes of the upload of {key} are gone")
        return etag_of(info)


def _etag(checksum: int) -> str:
    return f"{checksum:016x}"


def _append(fd: int, file: str, line: dict[str, Any]) -> None:
    """One line more, on disk. It begins with a line end, too, in case a crash left half a line before it."""
    target = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=fd)
    try:
        os.write(target, f"\n{json.dumps(line)}\n".encode())
        os.fdatasync(target)
    finally:
        os.close(target)


def _lines(fd: int, file: str) -> Iterator[dict[str, Any]]:
    """What can be read of a file's lines; a torn one is as if never written."""
    source = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    with open(source, "rb") as lines:
        for line in lines:
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


def _about(fd: int) -> dict[str, Any]:
    for about in _lines(fd, _ABOUT):
        if isinstance(about.get("key"), str) and {"started", "inode"} <= about.keys():
            return about
    raise FileNotFoundError(f"no {_ABOUT} that can be read")


def _journal(fd: int) -> dict[int, _Placed]:
    placed: dict[int, _Placed] = {}
    with suppress(FileNotFoundError):
        for line in _lines(fd, _PARTS):
            with suppress(KeyError, TypeError, ValueError):
                number, checksum = int(line["number"]), int(line["crc64nvme"])
                part = SentPart(number, int(line["size"]), _etag(checksum), checksum)
                placed[number] = _Placed(part, str(line["file"]), int(line["offset"]))
    return placed


def _assemble(fd: int, data: int, key: str, parts: Sequence[SentPart], placed: dict[int, _Placed]) -> None:
    """See to it that `data` holds exactly the parts, one after the other."""
    end = 0
    for number, part in enumerate(parts, 1):
        if part.number != number:
            raise ObjectError(f"the parts of {key} must be numbered from 1 without gaps; {number} is missing")
        there = placed.get(number)
        if there is None or there.part.etag != part.etag or there.part.size_bytes != part.size_bytes:
            raise UploadMissing(f"part {number} of the upload of {key} is not there as it was sent")
        if there.part.crc64nvme != part.crc64nvme:
            raise ObjectCorrupt(f"part {number} of {key} has another checksum than what was sent")
        if there.file != _DATA:
            _copy(fd, there.file, data, end, part.size_bytes)
        elif there.offset != end:
            raise ObjectError(f"the parts of {key} must be of one size, only the last may be shorter")
        end += part.size_bytes
    os.ftruncate(data, end)


def _copy(fd: int, file: str, data: int, offset: int, size_bytes: int) -> None:
    if not re.fullmatch(r"part-[0-9]+", file):
        raise FileNotFoundError(file)
    source = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        done = 0
        while done < size_bytes:
            piece = os.pread(source, min(MIB, size_bytes - done), done)
            if not piece:
                raise UploadMissing(f"{file} of an upload is shorter than its journal says")
            write_all(data, memoryview(piece), offset + done)
            done += len(piece)
    finally:
        os.close(source)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """pwrite(2) until all is written."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _remove(scratch: int, upload_id: str) -> None:
    """Remove an upload's directory, also while somebody still writes a part into it."""
    for _ in range(_REMOVING_TRIES):
        try:
            fd = os.open(upload_id, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=scratch)
            try:
                # What makes it an upload goes first, so that a crash leaves none that lacks parts.
                for name in sorted(os.listdir(fd), key=lambda name: name != _ABOUT):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
            finally:
                os.close(fd)
            os.rmdir(upload_id, dir_fd=scratch)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    sync_directory(scratch)
