"""Where there is no device: why, and addresses from the wire."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.errors import PeerRefused
from tierfs.transport import verbs_devices, verbs_library
from tierfs.transport.verbs_device import check_address
from tierfs.transport.verbs_devices import Found, find_devices, numa_node
from tierfs.transport.verbs_port import LinkAddress


def _import_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def import_module(name: str) -> ModuleType:
        if name.startswith("pyverbs"):
            raise error
        return importlib.import_module(name)

    monkeypatch.setattr(
        verbs_library, "importlib", type("Importlib", (), {"import_module": staticmethod(import_module)})
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'pyverbs'", name="pyverbs"), "pyverbs is not installed: install"),
        (
            ImportError("/lib/libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found (required by device.so)"),
            "which has no IBVERBS_PRIVATE_59: install rdma-core 59 to 63, or the pyverbs",
        ),
        (
            ImportError("version `IBVERBS_PRIVATE_64' not found"),
            "which has no IBVERBS_PRIVATE_64: install the rdma-core of pyverbs' own version",
        ),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"),
            "install libibverbs1",
        ),
        (ModuleNotFoundError("No module named 'pyverbs.wr'", name="pyverbs.wr"), "can't be loaded: No module named"),
        (SystemError(""), "can't be loaded: SystemError"),
    ],
)
def test_why_the_library_is_not_there(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    _import_fails(monkeypatch, error)
    found = find_devices()
    assert found.devices == () and reason in found.reason and "\n" not in found.reason


def test_this_machine_has_devices_or_a_reason() -> None:
    found = find_devices()
    assert bool(found.devices) != bool(found.reason)


class _Failure(Exception):
    error_code = -1


class _Device:
    """pyverbs' device, context, and the answers to what is asked of them."""

    def __init__(self, name: str = "mlx5_0", **facts: int) -> None:
        self.name = name.encode()
        self.transport_type = facts.get("transport", 0)
        self.vendor_id, self.phys_port_cnt = 0x15B3, 1
        self.max_qp_rd_atom = self.max_qp_init_rd_atom = facts.get("reads", 16)
        self.max_qp_wr, self.max_cqe = facts.get("depth", 32768), 1 << 22
        self.state, self.max_msg_sz = facts.get("state", 4), 1 << 31

    def query_device(self) -> _Device:
        return self

    def query_port(self, _: int) -> _Device:
        return self

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _library(monkeypatch: pytest.MonkeyPatch, listed: Callable[[], list[_Device]]) -> None:
    class Devices:
        @staticmethod
        def get_device_list() -> list[_Device]:
            return listed()

        @staticmethod
        def Context(name: str) -> _Device:
            return next(each for each in listed() if each.name == name.encode())

    none: Any = None
    constants = {"IBV_PORT_ACTIVE": 4, "IBV_TRANSPORT_IB": 0}
    made = verbs_library.Library(none, none, Devices, none, none, none, none, constants, _Failure)
    monkeypatch.setattr(verbs_devices, "load_library", lambda: made)
    monkeypatch.setattr(verbs_devices, "is_capable", lambda _: True)


def test_a_kernel_without_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def fail() -> list[_Device]:
        raise _Failure("Failed to get devices list")

    _library(monkeypatch, fail)
    monkeypatch.setattr(verbs_devices, "_SYSFS", tmp_path / "none")
    assert "kernel has no InfiniBand" in find_devices().reason


@pytest.mark.parametrize(
    ("devices", "wanted", "reason"),
    [
        ([], "", "there is no RDMA device here"),
        ([_Device()], "mlx5_1", "there is no RDMA device mlx5_1: here are mlx5_0"),
        ([_Device(state=1)], "", "no port of it is up"),
        ([_Device(transport=1)], "", "neither InfiniBand, RoCE nor EFA"),
        ([_Device(reads=0)], "", "can't READ"),
    ],
)
def test_why_no_device_can_be_used(
    monkeypatch: pytest.MonkeyPatch, devices: list[_Device], wanted: str, reason: str
) -> None:
    _library(monkeypatch, lambda: devices)
    found = find_devices(wanted)
    assert found.devices == () and reason in found.reason


def test_what_a_device_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, lambda: [_Device("b"), _Device("a", depth=64), _Device("c", state=1)])
    found = find_devices()
    assert [(each.device, each.kind, each.queue_depth) for each in found.devices] == [("a", "rc", 64), ("b", "rc", 256)]
    assert found.devices[0].most_read_bytes == 1 << 30 and found.reason == ""
    assert [each.device for each in find_devices("b, a").devices] == ["b", "a"]


def test_too_little_memory_may_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, lambda: [_Device()])
    monkeypatch.setattr(verbs_devices, "is_capable", lambda _: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert find_devices() == Found(
        (),
        "only 8192 KiB of memory may be locked: set LimitMEMLOCK=infinity in the service's unit "
        "(`ulimit -l unlimited` in a shell), or give the daemon CAP_IPC_LOCK",
    )


def test_the_numa_node_that_the_kernel_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(verbs_devices, "_SYSFS", tmp_path)
    (tmp_path / "mlx5_0" / "device").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "device" / "numa_node").write_text("1\n")
    assert (numa_node("mlx5_0"), numa_node("rxe0")) == (1, -1)


# --- addresses

_GOOD = LinkAddress("fe80:0000:0000:0000:0000:0000:0000:0001", 17, 5, 9)


@given(
    st.ip_addresses(v=6).filter(lambda gid: not gid.is_multicast and not gid.is_unspecified),
    st.integers(2, (1 << 24) - 1),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, (1 << 32) - 1),
)
def test_an_address_is_taken_however_its_gid_is_written(gid: Any, pair: int, sequence: int, key: int) -> None:
    for written in (gid.compressed, gid.exploded, gid.exploded.upper()):
        assert check_address(LinkAddress(written, pair, sequence, key)) == LinkAddress(
            gid.exploded, pair, sequence, key
        )


_NO_NUMBER = st.one_of(st.none(), st.text(max_size=4), st.floats(), st.booleans(), st.integers(max_value=-1))


@given(st.one_of(st.text(), st.none(), st.integers(), st.binary(), st.sampled_from(["::", "ff02::1", "fe80::1%eth0"])))
def test_what_is_no_gid_is_refused(gid: Any) -> None:
    try:
        taken = check_address(LinkAddress(gid, 17))
    except PeerRefused as refused:
        assert len(refused.message) < 200
    else:
        assert len(taken.gid) == 39


@given(_NO_NUMBER | st.integers(min_value=1 << 24), st.sampled_from(["queue_pair", "sequence"]))
def test_a_number_of_more_than_24_bits_is_refused(number: Any, where: str) -> None:
    with pytest.raises(PeerRefused):
        check_address(LinkAddress(**{**vars(_GOOD), where: number}))


@given(_NO_NUMBER | st.integers(min_value=1 << 32))
def test_a_key_of_more_than_32_bits_is_refused(key: Any) -> None:
    with pytest.raises(PeerRefused):
        check_address(LinkAddress(_GOOD.gid, 17, 0, key))


@pytest.mark.parametrize("pair", [0, 1])
def test_the_queue_pairs_of_the_fabrics_managers_are_refused(pair: int) -> None:
    with pytest.raises(PeerRefused):
        check_address(LinkAddress(_GOOD.gid, pair))
