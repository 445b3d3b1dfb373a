"""Two ports of the machine's first RDMA device, and memory registered with them. Skipped, with the reason, without one.

`make test-verbs` runs these in a virtual machine with soft-RoCE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rdma.memory import Memory
from tierfs.transport.verbs_device import DevicePort
from tierfs.transport.verbs_devices import find_devices
from tierfs.transport.verbs_port import Capabilities


@pytest.fixture(scope="session")
def device() -> Capabilities:
    found = find_devices()
    if not found.devices:
        if os.environ.get("TIERFS_RDMA_VM"):
            pytest.fail(f"here must be a device: {found.reason}")
        pytest.skip(found.reason)
    return found.devices[0]


@pytest.fixture
def asker(device: Capabilities) -> Iterator[DevicePort]:
    port = DevicePort(device)
    yield port
    port.close()


@pytest.fixture
def holder(device: Capabilities) -> Iterator[DevicePort]:
    port = DevicePort(device)
    yield port
    port.close()


@pytest.fixture
def held(holder: DevicePort) -> Iterator[Memory]:
    with Memory(holder, 8 << 20, remote=True) as memory:
        memory.fill()
        yield memory


@pytest.fixture
def target(asker: DevicePort) -> Iterator[Memory]:
    with Memory(asker, 8 << 20, remote=False) as memory:
        yield memory
