"""The checksum of files: right, in parts, and stoppable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tierfs.checksum import (
    ChecksumStopped,
    checksum_fd,
    combine,
    from_base64,
    from_text,
    to_base64,
    to_text,
)

#: Of "123456789", by the reveng catalogue of CRCs.
CHECK = 0xAE8B14860A799888


def bitwise_crc64nvme(data: bytes) -> int:
    """The definition, a bit at a time: polynomial ad93d23594c93659 reflected, all ones before and after."""
    crc = 0xFFFF_FFFF_FFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF_FFFF_FFFF


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "shard", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_the_published_check_value(fd: int) -> None:
    os.write(fd, b"123456789")
    found = checksum_fd(fd)
    assert (found.size_bytes, found.full, found.chunks) == (9, CHECK, (CHECK,))
    assert found.text == "crc64nvme:rosUhgp5mIg="
    assert bitwise_crc64nvme(b"123456789") == CHECK


def test_an_empty_file(fd: int) -> None:
    found = checksum_fd(fd)
    assert (found.size_bytes, found.full, found.chunks) == (0, 0, ())


@given(data=st.binary(max_size=300), chunk_bytes=st.integers(1, 120))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunks_are_those_of_their_bytes_and_make_up_the_whole(fd: int, data: bytes, chunk_bytes: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    found = checksum_fd(fd, chunk_bytes=chunk_bytes)
    parts = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    assert found.chunks == tuple(bitwise_crc64nvme(part) for part in parts)
    assert found.full == bitwise_crc64nvme(data)
    whole = 0
    for part, checksum in zip(parts, found.chunks, strict=True):
        whole = combine(whole, checksum, len(part))
    assert whole == found.full


def test_reads_longer_than_one_buffer_and_leaves_the_position(fd: int) -> None:
    data = os.urandom(5_000_001)
    os.write(fd, data)
    os.lseek(fd, 17, os.SEEK_SET)
    in_one, in_many = checksum_fd(fd), checksum_fd(fd, chunk_bytes=3_000_000)
    assert in_one.full == in_many.full
    assert len(in_one.chunks) == 1
    assert len(in_many.chunks) == 2
    assert in_one.size_bytes == in_many.size_bytes == len(data)
    assert os.lseek(fd, 0, os.SEEK_CUR) == 17


def test_stops_when_told(fd: int) -> None:
    os.truncate(fd, 64 << 20)
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with pytest.raises(ChecksumStopped):
        checksum_fd(fd, should_stop=should_stop)
    assert asked == 3


@given(st.integers(0, (1 << 64) - 1))
def test_text_forms_turn_back(checksum: int) -> None:
    assert from_base64(to_base64(checksum)) == checksum
    assert from_text(to_text(checksum)) == checksum


@pytest.mark.parametrize("text", ["", "crc64nvme:", "crc64nvme:AAAA", "crc32:rosUhgp5mIg=", "crc64nvme:rosUhgp5mI!="])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        from_text(text)
