"""CRC64NVME of files: the checksum that seals shards, and the one S3 computes itself.

A file's checksum is kept whole and by chunks, so that a part that was copied can be checked, and checksums of
parts combine into that of the whole without reading again. The native code (awscrt) lets go of the interpreter lock
while it reads and computes, so this runs in a thread beside the requests of the mount.

CRC-64/NVME is the 64-bit CRC of the NVM Express NVM Command Set Specification; of the nine bytes "123456789" it is
ae8b14860a799888 (the check value of the reveng catalogue). S3 writes it as the base64 of its eight bytes, most
significant first.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from dataclasses import dataclass

from awscrt.checksums import combine_crc64nvme, crc64nvme  # type: ignore[import-untyped]

MIB = 1 << 20
CHUNK_BYTES = 16 * MIB
#: One read. Small enough to be still in the processor's cache when it is summed up.
READ_BYTES = 1 * MIB

_PREFIX = "crc64nvme:"


class ChecksumStopped(Exception):
    """`should_stop` said so before the file's end was reached."""


@dataclass(frozen=True)
class FileChecksum:
    """`size_bytes` were read up to the end of the file. `chunks` are those of each `chunk_bytes`, the last shorter."""

    size_bytes: int
    full: int
    chunks: tuple[int, ...]
    chunk_bytes: int = CHUNK_BYTES

    @property
    def text(self) -> str:
        """`crc64nvme:<base64>`, as manifests and xattrs show it."""
        return to_text(self.full)


def checksum_fd(
    fd: int, *, chunk_bytes: int = CHUNK_BYTES, should_stop: Callable[[], bool] | None = None
) -> FileChecksum:
    """The checksum of a file from its start to its end; the file's position is neither used nor moved.

    Reads rather than maps: a mapped file that is cut meanwhile kills the process with SIGBUS. A file that changes
    meanwhile gives a checksum of no moment in time; the caller compares size and mtime before and after.
    `should_stop` is asked about once a MiB. Raises OSError, ChecksumStopped.
    """
    if chunk_bytes < 1:
        raise ValueError("chunk_bytes must be at least 1")
    buffer = memoryview(bytearray(min(READ_BYTES, chunk_bytes)))
    size = full = chunk = in_chunk = 0
    chunks: list[int] = []
    while True:
        if should_stop is not None and should_stop():
            raise ChecksumStopped
        got = os.preadv(fd, [buffer[: chunk_bytes - in_chunk]], size)
        if got:
            chunk = crc64nvme(buffer[:got], chunk)
            size += got
            in_chunk += got
        if in_chunk and (not got or in_chunk == chunk_bytes):
            full = combine_crc64nvme(full, chunk, in_chunk)
            chunks.append(chunk)
            chunk = in_chunk = 0
        if not got:
            return FileChecksum(size, full, tuple(chunks), chunk_bytes)


def combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two parts one after the other, of theirs and the second one's length."""
    return int(combine_crc64nvme(first, second, second_bytes))


def to_base64(checksum: int) -> str:
    """As S3 writes it (`x-amz-checksum-crc64nvme`)."""
    return base64.b64encode(checksum.to_bytes(8, "big")).decode("ascii")


def from_base64(text: str) -> int:
    """The opposite of `to_base64`; ValueError for anything else."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{text!r} is not base64") from None
    if len(raw) != 8:
        raise ValueError(f"{text!r} is not the base64 of 8 bytes")
    return int.from_bytes(raw, "big")


def to_text(checksum: int) -> str:
    """`crc64nvme:<base64>`."""
    return _PREFIX + to_base64(checksum)


def from_text(text: str) -> int:
    """The opposite of `to_text`; ValueError for anything else."""
    if not text.startswith(_PREFIX):
        raise ValueError(f"{text!r} is not a checksum: it must begin with {_PREFIX!r}")
    return from_base64(text[len(_PREFIX) :])
