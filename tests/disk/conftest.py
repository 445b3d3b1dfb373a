"""Instances with a disk tier. The disk is a tmpfs of its own, so that it can be full, and be taken away."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rig.fixtures import pytest_runtest_makereport, scratch
from rig.instance import Instance
from tests.conftest import needs_root

__all__ = ["pytest_runtest_makereport", "scratch"]

MountDisk = Callable[..., AbstractContextManager[Instance]]


@pytest.fixture
def disk(scratch: Path) -> Iterator[Path]:
    """Where a disk of 512 MiB is mounted; the tier lies below."""
    needs_root()
    where = scratch / f"nvme-{uuid.uuid4().hex[:8]}"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tierfs-test-disk", where], check=True)
    yield where
    while subprocess.run(["umount", "-l", where], capture_output=True).returncode == 0:
        pass


@pytest.fixture
def mount_disk(scratch: Path, disk: Path) -> Iterator[MountDisk]:
    """`mount_disk(size="192M", **options)`: an instance with the disk; `_` in names of options stands for the first
    `.`. The same one again within a test: its RAM is there unless it was unmounted with `--discard`."""
    name = f"disk-{uuid.uuid4().hex[:8]}"
    instances: list[Instance] = []

    @contextmanager
    def mount(*, size: str = "192M", **options: str) -> Iterator[Instance]:
        given = {key if key.startswith("debug") else key.replace("_", ".", 1): value for key, value in options.items()}
        given = {"disk.path": str(disk / "tier"), "retention.ram_steps": "1", **given}
        instance = Instance(scratch / name / "ckpt", name, size=size, options=given)
        instances.append(instance)
        instance.mount()
        yield instance
        instance.discard()
        instances.remove(instance)

    yield mount
    for instance in instances:
        instance.discard()
