"""Pieces: whatever grows, is cut, comes late or fails, what counts as here is what lies in the file."""

from __future__ import annotations

import random

from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.cluster.pieces import Piece, Pieces

CHUNK = 64


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 60))
def test_what_counts_as_here_has_the_checksum_of_what_lies_there(seed: int, steps: int) -> None:
    chance = random.Random(seed)
    pieces = Pieces(chunk_bytes=CHUNK)
    theirs, ours = bytearray(), bytearray(5000)
    under_way: list[tuple[Piece, bytes]] = []

    def end_one() -> None:
        piece, data = under_way.pop(chance.randrange(len(under_way)))
        # What was read when the pull began arrives now, or a part of it, or nothing that counts.
        came = data[: chance.choice([len(data), chance.randint(0, len(data)), 0])]
        ours[piece.offset : piece.offset + len(came)] = came
        pieces.ended(piece, len(came), crc64nvme(bytes(came)))

    for _ in range(steps):
        what = chance.random()
        if what < 0.3:
            theirs += chance.randbytes(chance.randint(1, 3 * CHUNK))
            pieces.grow(len(theirs))
        elif what < 0.4:
            del theirs[chance.randint(0, len(theirs)) :]
            pieces.grow(len(theirs))
        elif what < 0.45 and theirs:
            theirs[chance.randrange(len(theirs))] ^= 1  # the writer went back
        elif what < 0.75:
            piece = pieces.next(at_once=True)
            if piece is not None:
                assert all(other.chunk != piece.chunk for other, _ in under_way)
                under_way.append((piece, bytes(theirs[piece.offset : piece.offset + piece.length])))
        elif under_way:
            end_one()
        assert pieces.busy == len(under_way) and 0 <= pieces.pulled_bytes <= pieces.size_bytes

    pieces.seal(len(theirs))
    sums = [crc64nvme(bytes(theirs[at : at + CHUNK])) for at in range(0, len(theirs), CHUNK)]
    for _ in range(10_000):
        piece = pieces.next(at_once=False)
        if piece is not None:
            under_way.append((piece, bytes(theirs[piece.offset : piece.offset + piece.length])))
        elif under_way:
            end_one()
        elif differing := pieces.differing(sums):
            assert pieces.is_whole
            pieces.again(differing)
        else:
            break
    assert pieces.is_whole and pieces.missing_bytes == 0
    assert bytes(ours[: len(theirs)]) == bytes(theirs)
