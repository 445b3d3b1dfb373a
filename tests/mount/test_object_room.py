"""Fetching a range of an object into a RAM tier that is full: said as such, and nobody is killed for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.conftest import needs_root
from tierfs.errors import NoRoom
from tierfs.objects.pool import WorkerPool
from tierfs.settings import Settings

MIB = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    needs_root()
    where = tmp_path / "ram"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tierfs-test", str(where)], check=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


async def test_a_range_that_does_not_fit_is_enospc_and_the_worker_lives(small_tmpfs: Path, tmp_path: Path) -> None:
    settings = Settings()
    settings.object = f"file://{tmp_path / 'tier'}"
    pool = WorkerPool(settings)
    stub = os.open(small_tmpfs / "stub", os.O_RDWR | os.O_CREAT)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            data = os.urandom(8 * MIB)
            await pool.put("run/shard", data)
            os.ftruncate(stub, 8 * MIB)
            with pytest.raises(NoRoom) as full:
                await pool.read_range("run/shard", 0, 8 * MIB, stub)
            assert full.value.needed_bytes == 8 * MIB
            assert full.value.free_bytes <= 4 * MIB
            await pool.read_range("run/shard", MIB, 2 * MIB, stub)
            assert os.pread(stub, 2 * MIB, MIB) == data[MIB : 3 * MIB]
            assert pool.stats.retries == 0
            assert pool.stats.errors_by_kind == {}
            nursery.cancel_scope.cancel()
    os.close(stub)
