"""What of a file came from another node, and which piece is fetched next. Pure.

A file is kept by chunks of 16 MiB, those that checksums are made of. In each the bytes come from its start on, so
that the checksum of what came is always known; several chunks may be under way at once, but only one piece of each:
a late one must not lay old bytes over newer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfs.checksum import CHUNK_BYTES, FileChecksum, combine

#: A piece of a growing file is at least so large, or has waited long enough.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """`length` bytes from `offset` on, all of one chunk. `round` tells pieces from before a cut from later ones."""

    chunk: int
    offset: int
    length: int
    round: int


@dataclass
class _Chunk:
    have: int = 0
    crc: int = 0
    busy: bool = False
    round: int = 0


class Pieces:
    """`size_bytes` is what its node has of the file as far as is known; once `sealed` it is the file's size."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size_bytes = 0
        self.sealed = False
        #: Pieces under way.
        self.busy = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []  # may reach beyond the size, where the file was cut
        self._first = 0  # all chunks before it are here as far as the file goes

    @property
    def pulled_bytes(self) -> int:
        whole = min(self._first * self._chunk_bytes, self.size_bytes)
        return whole + sum(self._chunks[index].have for index in range(self._first, self._count))

    @property
    def missing_bytes(self) -> int:
        """What its node has of it and this one has not."""
        return self.size_bytes - self.pulled_bytes

    @property
    def is_whole(self) -> bool:
        """All bytes of the sealed file came, right or wrong."""
        return self.sealed and self._first >= self._count and not self.busy

    def arrived(self) -> FileChecksum:
        """The bytes that are here from the file's start on, up to the first that is missing."""
        size = full = 0
        chunks = []
        for index in range(min(self._first + 1, self._count)):
            chunk = self._chunks[index]
            if not chunk.have:
                break
            full = combine(full, chunk.crc, chunk.have) if size else chunk.crc
            size += chunk.have
            chunks.append(chunk.crc)
        return FileChecksum(size, full, tuple(chunks), self._chunk_bytes)

    def grow(self, size_bytes: int) -> None:
        """So much is there now. Less than before: it was cut, and what came of the cut chunk may be another."""
        if size_bytes < self.size_bytes:
            for index in range(size_bytes // self._chunk_bytes, self._count):
                self._reset(index)
        last = max(0, self._count - 1)
        self.size_bytes = size_bytes
        self._chunks.extend(_Chunk() for _ in range(self._count - len(self._chunks)))
        self._first = min(self._first, last, max(0, self._count - 1))
        self._advance()

    def seal(self, size_bytes: int) -> None:
        self.grow(size_bytes)
        self.sealed = True

    def next(self, *, at_once: bool) -> Piece | None:
        """The next piece, which is under way from now on. `at_once`: also a small one of a growing file."""
        for index in range(self._first, self._count):
            chunk, end = self._chunks[index], self._end(index)
            if chunk.busy or chunk.have >= end:
                continue
            length = end - chunk.have
            if self.sealed or at_once or length >= PIECE_BYTES or end == self._chunk_bytes:
                chunk.busy = True
                self.busy += 1
                return Piece(index, index * self._chunk_bytes + chunk.have, length, chunk.round)
        return None

    def ended(self, piece: Piece, length: int = 0, crc: int = 0) -> None:
        """The piece is not under way any more; its first `length` bytes are here, with this checksum."""
        if not 0 <= length <= piece.length:
            raise ValueError(f"{length} bytes came for a piece of {piece.length}")
        chunk = self._chunks[piece.chunk]
        chunk.busy = False
        self.busy -= 1
        if chunk.round == piece.round and length:
            chunk.crc = combine(chunk.crc, crc, length) if chunk.have else crc
            chunk.have += length
        self._advance()

    def differing(self, checksums: Sequence[int]) -> list[int]:
        """The chunks whose bytes are not those of the sealed file."""
        found = []
        for index in range(self._count):
            chunk = self._chunks[index]
            if index >= len(checksums) or chunk.have != self._end(index) or chunk.crc != checksums[index]:
                found.append(index)
        return found

    def again(self, chunks: Sequence[int]) -> None:
        """These are fetched once more, from their start."""
        for index in chunks:
            self._reset(index)
            self._first = min(self._first, index)

    @property
    def _count(self) -> int:
        return -(-self.size_bytes // self._chunk_bytes)

    def _end(self, index: int) -> int:
        """How many bytes of the chunk its node has."""
        return min(self._chunk_bytes, self.size_bytes - index * self._chunk_bytes)

    def _reset(self, index: int) -> None:
        chunk = self._chunks[index]
        chunk.have = chunk.crc = 0
        chunk.round += 1  # a piece that is under way won't count when it comes

    def _advance(self) -> None:
        while self._first < self._count:
            chunk = self._chunks[self._first]
            if chunk.busy or chunk.have < self._end(self._first):
                return
            self._first += 1


__all__ = ["CHUNK_BYTES", "PIECE_BYTES", "Piece", "Pieces"]
