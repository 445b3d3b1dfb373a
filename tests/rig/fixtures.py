"""Fixtures for conftest files: a mounted instance, a directory for checkpoints, the instance's log after a failure."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.instance import Instance, mounted

PLAIN_DIRECTORY = os.environ.get("TIERFS_TEST_DIR", "")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """An ordinary directory that is not on the mount."""
    path = Path(tempfile.mkdtemp(prefix="tierfs-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_instance(scratch: Path) -> Iterator[Instance | None]:
    """One instance for all tests of a module; None when TIERFS_TEST_DIR names a plain directory to test instead."""
    if PLAIN_DIRECTORY:
        yield None
        return
    with mounted(scratch, f"test-{uuid.uuid4().hex[:8]}", size="2G") as instance:
        yield instance


@pytest.fixture
def ckpt_root(shared_instance: Instance | None) -> Iterator[Path]:
    """A namespace of its own on the mount (or in TIERFS_TEST_DIR)."""
    base = shared_instance.mountpoint if shared_instance else Path(PLAIN_DIRECTORY)
    path = base / f"run-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """The source of random moments. Its seed is printed; TIERFS_SEED repeats it."""
    seed = int(os.environ.get("TIERFS_SEED", time.time_ns() % 1_000_000))
    print(f"random moments from TIERFS_SEED={seed}")
    return random.Random(f"{seed}-{request.node.name}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds the logs of all mounted instances to the report of a test that failed."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for instance in Instance.live:
            report.sections.append((f"log of {instance.name}", instance.log()))
