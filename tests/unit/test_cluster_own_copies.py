"""Own copies serve the stubs that stand for them; what is not here, or is wrong here, comes from others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from awscrt.checksums import crc64nvme

from tests.unit.step_driver import Driver
from tierfs.checksum import CHUNK_BYTES
from tierfs.cluster.copies import Copies
from tierfs.cluster.own_copies import OwnFirst
from tierfs.cluster.versions import write_version
from tierfs.hydrate.stubs import StubMark

KEY = ("run", "step_1")
DATA = os.urandom(CHUNK_BYTES + 12345)
MARK = StubMark(*KEY, "a.distcp", len(DATA), None, 0, version="a/01")


class Others:
    reads_first = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def chunks(self, mark: StubMark) -> tuple[int, ...]:
        self.asked.append("chunks")
        return ()

    async def read_range(self, mark: StubMark, offset: int, length: int, fd: int, **how: Any) -> int:
        self.asked.append("range")
        return 0

    def came_wrong(self, mark: StubMark, offset: int) -> None:
        self.asked.append("wrong")


async def test_what_is_here_is_read_here_until_it_goes_or_is_found_wrong(tmp_path: Path) -> None:
    copies = Copies(Driver(tmp_path / "tier").registry, "b")
    others = Others()
    source = OwnFirst(others, copies)
    fd = os.open(tmp_path / "stub", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, len(DATA))

    async def read(offset: int, length: int) -> int:
        return await source.read_range(MARK, offset, length, fd, urgent=True, retry_for_s=1.0)

    def put() -> None:
        place = copies.place(KEY, MARK.version)
        place.write_bytes(DATA)
        write_version(place, MARK.version)
        copies.shelved(KEY, MARK.version, place)

    put()
    assert await source.chunks(MARK) == (crc64nvme(DATA[:CHUNK_BYTES]), crc64nvme(DATA[CHUNK_BYTES:]))
    assert await read(5, len(DATA) - 9) == crc64nvme(DATA[5:-4])
    assert os.pread(fd, len(DATA), 0) == bytes(5) + DATA[5:-4] + bytes(4) and others.asked == []
    copies.drop(KEY, MARK.version)
    await read(0, 10)
    await source.chunks(MARK)
    source.came_wrong(MARK, 0)
    assert others.asked == ["range", "chunks", "wrong"]
    put()
    source.came_wrong(MARK, 0)
    await read(0, 10)
    assert others.asked[3:] == ["range"]
    os.close(fd)
