"""The devices of this node: which are used, and what becomes of those that go, come and do not open."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import trio
import trio.testing

from tests.unit.step_driver import until
from tests.unit.verbs_double import DoublePort, Fabric
from tierfs.settings import Settings
from tierfs.transport import verbs_fabric
from tierfs.transport.verbs_devices import Found
from tierfs.transport.verbs_fabric import Devices, choose
from tierfs.transport.verbs_port import Capabilities, Port


def device(name: str, numa_node: int = -1) -> Capabilities:
    return Capabilities(name, "srd", True, 1 << 30, 16, numa_node)


@dataclass
class Machine:
    """What is plugged in, and what of it opens."""

    fabric: Fabric = field(default_factory=lambda: Fabric(1))
    present: list[str] = field(default_factory=list)
    locked: set[str] = field(default_factory=set)
    failure: Exception | None = None
    opened: list[DoublePort] = field(default_factory=list)
    looked: int = 0

    def find(self, wanted: str) -> Found:
        self.looked += 1
        if self.failure is not None:
            raise self.failure
        names = wanted.split(",") if wanted else self.present
        found = tuple(device(name) for name in names if name in self.present)
        return Found(found, "" if found else "there is no RDMA device here")

    def open_port(self, capabilities: Capabilities) -> Port:
        if capabilities.device in self.locked:
            raise OSError("it is another program's")
        self.opened.append(self.fabric.port(capabilities.device, capabilities.kind))
        return self.opened[-1]

    def devices(self, *, transport: str = "auto", wanted: str = "") -> Devices:
        settings = Settings()
        settings.peer.transport, settings.peer.verbs_devices = transport, wanted
        return Devices(settings, find=self.find, open_port=self.open_port)


@asynccontextmanager
async def running(devices: Devices) -> AsyncIterator[Devices]:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(devices.run)
            yield devices
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_fabric, "LOOK_EVERY_S", 0.02)


def names(devices: Devices) -> list[str]:
    return [each.name for each in devices.ports]


async def test_a_device_that_goes_is_closed_when_nobody_has_anything_of_it_and_used_again_when_it_is_back() -> None:
    machine = Machine(present=["efa0", "efa1"])
    async with running(machine.devices()) as devices:
        assert names(devices) == ["efa0", "efa1"] and devices.reason == ""
        first = devices.ports[0]
        devices.keep(first)
        devices.keep(first)
        machine.opened[0].remove()
        await until(lambda: names(devices) == ["efa1"], "it is not used any more")
        assert "efa0 is gone" in first.gone and devices.lost == 1
        looked = machine.looked
        await until(lambda: machine.looked > looked + 2, "it is looked for")
        devices.release(first)
        await trio.testing.wait_all_tasks_blocked()
        assert not machine.opened[0].is_closed and names(devices) == ["efa1"], "somebody still has a link of it"
        devices.release(first)
        await until(lambda: names(devices) == ["efa0", "efa1"], "it is used again")
        assert machine.opened[0].is_closed and devices.ports[0] is not first
        looked = machine.looked
        with pytest.raises(ValueError, match="closed already"):
            devices.keep(first)
        await trio.sleep(0.1)
        assert machine.looked == looked, "nothing is missing"
    assert all(each.is_closed for each in machine.opened) and len(machine.opened) == 3


@pytest.mark.parametrize("what", ["arm", "completions", "close"])
async def test_a_device_that_fails_as_nobody_thought_of_is_one_that_went(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(present=["efa0", "efa1"])
    async with running(machine.devices()) as devices:
        first, port = devices.ports[0], machine.opened[0]

        def fail() -> None:
            raise TypeError("of another pyverbs")

        setattr(port, what, fail)
        if what == "close":
            port.remove()
        else:
            os.eventfd_write(port.fd, 1)
        await until(lambda: first.gone, "it is gone")
        await until(lambda: names(devices) == ["efa0", "efa1"], "it is used again")
        assert devices.ports[0] is not first and "Traceback" in caplog.text


async def test_devices_are_looked_for_until_there_are_some(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierfs.transport")
    machine = Machine()
    async with running(machine.devices()) as devices:
        assert devices.reason == "there is no RDMA device here" and devices.ports == ()
        assert devices.describe() == {"transport": "auto", "devices": [], "reason": devices.reason}
        machine.failure = AttributeError("no such thing in this pyverbs")
        await until(lambda: "no such thing in this pyverbs" in devices.reason, "why")
        machine.failure = None
        machine.present, machine.locked = ["efa0", "efa1"], {"efa0", "efa1"}
        await until(lambda: "it is another program's" in devices.reason, "why")
        machine.locked = {"efa0"}
        await until(lambda: names(devices) == ["efa1"], "the one that opens is used")
        assert devices.reason == ""
        assert devices.describe()["devices"] == [{"name": "efa1", "kind": "srd", "numa_node": -1}]
        machine.locked = set()
        await until(lambda: names(devices) == ["efa0", "efa1"], "the other one, too")
        machine.present = []
        for port in machine.opened:
            port.remove()
        await until(lambda: devices.reason == "there is no RDMA device here", "all are gone")
    assert [record.levelname for record in caplog.records].count("WARNING") == 2, "those that went"
    told = [record.message for record in caplog.records if "files come by" in record.message]
    assert all(one != other for one, other in pairwise(told)), "one line for each change"
    assert told[0] == told[-1] == "files come by TCP: there is no RDMA device here"


async def test_where_rdma_is_wanted_its_lack_is_a_warning_and_by_tcp_nobody_looks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tierfs.transport")
    machine = Machine(present=["efa0"])
    async with running(machine.devices(transport="tcp")) as devices:
        assert (devices.ports, devices.reason, machine.looked) == ((), "peer.transport is tcp", 0)
    assert not caplog.records
    async with running(machine.devices(transport="verbs", wanted="efa7")) as devices:
        assert devices.reason == "there is no RDMA device here"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_at_the_end_a_device_is_closed_after_what_others_have_of_it() -> None:
    machine = Machine(present=["efa0"])
    devices = machine.devices()
    async with trio.open_nursery() as nursery:
        await nursery.start(devices.run)
        devices.keep(devices.ports[0])
        kept = devices.ports[0]
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert not machine.opened[0].is_closed and devices.ports == ()
            devices.release(kept)
    assert machine.opened[0].is_closed


def test_the_near_devices_are_chosen_and_of_each_node_as_many() -> None:
    devices = [device(f"efa{number}", number // 4) for number in range(16)]
    chosen = [each.device for each in choose(devices, {1, 2})]
    assert chosen == ["efa4", "efa8", "efa5", "efa9", "efa6", "efa10", "efa7", "efa11"]
    assert [each.device for each in choose(devices, {3})] == [
        "efa12", "efa13", "efa14", "efa15", "efa0", "efa4", "efa8", "efa1",
    ]  # fmt: skip
    unknown = [device("rxe0"), device("rxe1")]
    assert choose(unknown, {0}) == choose(unknown, ()) == tuple(unknown)
    assert choose((), {0}) == ()


def test_the_processors_of_a_node_are_read_as_the_kernel_writes_them() -> None:
    assert verbs_fabric._numbers("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert verbs_fabric._numbers("\n") == []
