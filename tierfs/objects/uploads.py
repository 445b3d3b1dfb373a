"""One file becomes one object: whole, or in parts of which those that arrived are never sent again."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from typing import Any, Protocol

import trio

from tierfs.checksum import CHUNK_BYTES, FileChecksum, combine
from tierfs.errors import ObjectCorrupt, ObjectError, ObjectMissing, TierfsError, UploadMissing
from tierfs.objects.client import PartJournal, SentFile
from tierfs.objects.store import SINGLE_PUT_BYTES, PartInfo, SentPart, part_bytes

log = logging.getLogger("tierfs.objects")

_MD5 = re.compile(r"[0-9a-f]{32}")
_ABORT_FOR_S = 5.0


class Ask(Protocol):
    """Makes a request of a worker, again where that may help; see `WorkerPool`."""

    async def __call__(
        self, op: str, arguments: dict[str, Any], *, fd: int | None = None, retry_for_s: float | None = None
    ) -> dict[str, Any]: ...


class FileUpload:
    """The upload of the file behind `fd`, `size_bytes` long, as `key`."""

    def __init__(
        self, ask: Ask, key: str, fd: int, size_bytes: int, journal: PartJournal, on_sent: Callable[[int], None]
    ) -> None:
        self._ask = ask
        self._key = key
        self._fd = fd
        self._size = size_bytes
        self._journal = journal
        self._on_sent = on_sent
        self._part_bytes = part_bytes(size_bytes)

    async def send(self, at_once: int) -> SentFile:
        """`at_once` parts in parallel at most.

        Cancelled, or failed in a way that may pass, it can be gone on with by another call with the same journal.
        After any other failure the store is asked to forget the parts.
        """
        if self._size < SINGLE_PUT_BYTES:
            if self._journal.upload_id:  # of a file that was larger
                await self._abort()
            return await self._send_whole()
        told: set[int] = set()
        for is_last in (False, True):
            try:
                return await self._send_parts(at_once, told)
            except UploadMissing:
                self._journal.forget()
                if is_last:
                    raise
                log.warning("the object store lost an upload that was under way; sending the file again",
                            extra={"file": self._key, "tier": "object"})  # fmt: skip
            except TierfsError as error:
                if not (isinstance(error, ObjectError) and error.may_pass) or isinstance(error, ObjectCorrupt):
                    await self._abort()
                raise
        raise AssertionError("not reached")

    async def _send_whole(self) -> SentFile:
        said = await self._ask("put_file", {"key": self._key, **self._range(0, self._size)}, fd=self._fd)
        self._on_sent(self._size)
        return self._sent(said["etag"], said["chunks"])

    async def _send_parts(self, at_once: int, told: set[int]) -> SentFile:
        """`told` are parts that `on_sent` has heard of: it is told once, though a part may have to be sent anew."""
        if self._journal.upload_id:
            await self._take_stock(told)
        else:
            said = await self._ask("start_upload", {"key": self._key})
            self._journal.started(said["upload_id"])
        missing = (number for number in range(1, self._parts + 1) if number not in self._journal.parts)

        failures: list[TierfsError] = []

        async def send_some(scope: trio.CancelScope) -> None:
            try:
                for number in missing:
                    await self._send_part(number)
                    self._tell(number, told)
            except TierfsError as error:
                failures.append(error)
                scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(at_once, self._parts)):
                nursery.start_soon(send_some, nursery.cancel_scope)
        if failures:
            raise failures[0]
        return await self._finish()

    async def _send_part(self, number: int) -> None:
        offset, length = self._extent(number)
        arguments = {"key": self._key, "upload_id": self._journal.upload_id, "number": number}
        said = await self._ask("put_part", {**arguments, **self._range(offset, length)}, fd=self._fd)
        self._note(number, said["etag"], said["chunks"])

    async def _take_stock(self, told: set[int]) -> None:
        """What of an earlier attempt counts: the store's word, and for parts whose answer never came their content."""
        try:
            there = await self._list_parts()
        except UploadMissing:
            if len(self._journal.parts) < self._parts:
                raise
            there = {number: _as_listed(part) for number, part in self._journal.parts.items()}  # maybe it was finished
        if any(each.size_bytes != self._extent(number)[1] for number, each in self._journal.parts.items()):
            await self._abort()
            raise UploadMissing(f"the upload of {self._key} that was begun was of another size")
        for number in range(1, self._parts + 1):
            found, noted = there.get(number), self._journal.parts.get(number)
            if noted is not None and (found is None or found.etag != noted.etag):
                del self._journal.parts[number]  # the store lost it, or somebody replaced it
                noted = None
            if noted is None and (found is None or not await self._take_over(found)):
                continue
            self._tell(number, told)

    async def _list_parts(self) -> dict[int, PartInfo]:
        said = await self._ask("list_parts", {"key": self._key, "upload_id": self._journal.upload_id})
        return {part.number: part for part in (PartInfo(*each) for each in said["parts"])}

    async def _take_over(self, found: PartInfo) -> bool:
        """Whether a part that the store has is this file's. Its ETag tells: an MD5, or of a `file://` tier the CRC."""
        offset, length = self._extent(found.number)
        if found.size_bytes != length:
            return False
        said = await self._ask("sum_range", self._range(offset, length), fd=self._fd)
        etag = found.etag.lower()
        if etag != said["md5"] and etag != f"{_combined(said['chunks'], length):016x}":
            return False
        self._note(found.number, found.etag, said["chunks"])
        return True

    async def _finish(self) -> SentFile:
        parts = self._noted_parts()
        wanted = [[part.number, part.size_bytes, part.etag, part.crc64nvme] for part in parts]
        arguments = {"key": self._key, "upload_id": self._journal.upload_id, "parts": wanted}
        try:
            etag = str((await self._ask("finish_upload", arguments))["etag"])
        except UploadMissing:
            etag = await self._find_finished()
            if not etag:
                raise
        return self._sent(etag, self._noted_chunks())

    async def _find_finished(self) -> str:
        """The ETag of the object if an earlier `finish_upload`, whose answer was lost, made it of just these parts.

        Where the ETag can't tell (a `file://` tier), the object's bytes do.
        """
        size_bytes, etag = await self._look_up()
        if not etag or size_bytes != self._size:
            return ""
        expected = multipart_etag(self._noted_parts())
        if expected:
            return etag if etag.lower() == expected else ""
        try:
            said = await self._ask("sum_object", {"key": self._key, "size_bytes": size_bytes})
        except ObjectMissing:
            return ""
        same = said["chunks"] == self._noted_chunks() and await self._look_up() == (size_bytes, etag)
        return etag if same else ""

    async def _look_up(self) -> tuple[int, str]:
        """Size and ETag of the object that has the key; "" where there is none."""
        more = ""
        while True:
            said = await self._ask("list_page", {"prefix": self._key, "delimiter": "", "more": more})
            for key, size_bytes, etag, _ in said["objects"]:
                if key == self._key:
                    return int(size_bytes), str(etag)
            more = said["more"]
            if not more:
                return 0, ""

    async def _abort(self) -> None:
        """As far as it can be done in short time: what is left is swept later."""
        upload_id = self._journal.upload_id
        if not upload_id:
            return
        self._journal.forget()
        with trio.move_on_after(_ABORT_FOR_S):
            try:
                await self._ask("abort_upload", {"key": self._key, "upload_id": upload_id}, retry_for_s=0.0)
            except TierfsError as error:
                log.warning("the parts of an upload stay in the object store for now: %s", error,
                            extra={"file": self._key, "tier": "object"})  # fmt: skip

    # --- small things

    @property
    def _parts(self) -> int:
        return -(-self._size // self._part_bytes)

    def _noted_parts(self) -> list[SentPart]:
        return [self._journal.parts[number] for number in range(1, self._parts + 1)]

    def _noted_chunks(self) -> list[int]:
        return [chunk for number in range(1, self._parts + 1) for chunk in self._journal.chunks[number]]

    def _extent(self, number: int) -> tuple[int, int]:
        offset = (number - 1) * self._part_bytes
        return offset, max(0, min(self._part_bytes, self._size - offset))

    def _range(self, offset: int, length: int) -> dict[str, int]:
        return {"offset": offset, "length": length, "file_bytes": self._size}

    def _note(self, number: int, etag: str, chunks: list[int]) -> None:
        length = self._extent(number)[1]
        self._journal.sent(SentPart(number, length, etag, _combined(chunks, length)), tuple(chunks))

    def _tell(self, number: int, told: set[int]) -> None:
        if number not in told:
            told.add(number)
            self._on_sent(self._extent(number)[1])

    def _sent(self, etag: str, chunks: list[int]) -> SentFile:
        return SentFile(etag, FileChecksum(self._size, _combined(chunks, self._size), tuple(chunks)))


def _as_listed(part: SentPart) -> PartInfo:
    return PartInfo(part.number, part.size_bytes, part.etag)


def multipart_etag(parts: list[SentPart]) -> str:
    """What Amazon S3 and most others call an object made of these parts: the MD5 of the parts' MD5s, and their number.

    "" where the parts' ETags are no MD5s (encrypted with a key of KMS, or another kind of store)."""
    etags = [part.etag.lower() for part in parts]
    if not all(_MD5.fullmatch(etag) for etag in etags):
        return ""
    digest = hashlib.md5(b"".join(bytes.fromhex(etag) for etag in etags), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(parts)}"


def _combined(chunks: list[int] | tuple[int, ...], size_bytes: int) -> int:
    full = 0
    for index, chunk in enumerate(chunks):
        full = combine(full, chunk, min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES))
    return full
