"""Each contract test runs in memory and on a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from catalog.targets import ETCD, MEMORY, EtcdTarget, MemoryTarget, Target
from rig.etcd_server import etcd_server
from tierfs.catalog.store import KeyStore

__all__ = ["etcd_server"]


@pytest.fixture(params=[MEMORY, ETCD])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == MEMORY:
        return MemoryTarget()
    return EtcdTarget(request.getfixturevalue("etcd_server"))


@pytest.fixture
async def store(target: Target) -> AsyncIterator[KeyStore]:
    opened = target.open()
    yield opened
    await opened.aclose()


@pytest.fixture
async def other(target: Target) -> AsyncIterator[KeyStore]:
    opened = target.open()
    yield opened
    await opened.aclose()
