"""Finds this node's RDMA devices and what each says of itself. Where there is none to use, it says why."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.capabilities import IPC_LOCK, is_capable
from tierfs.transport.verbs_library import Library, NoRdma, load_efa, load_library
from tierfs.transport.verbs_port import Capabilities, Kind

#: PCI vendor of EFA devices (Amazon), by which libfabric knows them as well.
EFA_VENDOR = 0x1D0F
#: More outstanding READs of 1 MiB than any link needs to be kept busy; each takes a place in every link's queue.
MOST_OUTSTANDING = 256
#: Less than this of locked memory is no RAM tier. Distributions allow 64 KiB or 8 MiB unless told otherwise.
LEAST_LOCKED_BYTES = 1 << 30
#: `struct ibv_port_attr.max_msg_sz` is 2 GiB in some, and the length of a scatter entry has 32 bits.
_MOST_READ_BYTES = 1 << 30
_SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Found:
    """`reason` is "" where there are devices, else one sentence: why there are none, and what to do."""

    devices: tuple[Capabilities, ...]
    reason: str


def find_devices(wanted: str = "") -> Found:
    """All that can READ, or of those named in `wanted` (separated by commas). Opens each once: in a thread."""
    try:
        return Found(_find(load_library(), [name for name in re.split(r"[,\s]+", wanted) if name]), "")
    except NoRdma as error:
        return Found((), error.reason)


def active_port(library: Library, context: Any) -> int:
    """The first port that is up. NoRdma."""
    for number in range(1, context.query_device().phys_port_cnt + 1):
        if context.query_port(number).state == library["IBV_PORT_ACTIVE"]:
            return number
    raise NoRdma("no port of it is up")


def _find(library: Library, wanted: list[str]) -> tuple[Capabilities, ...]:
    try:
        listed = library.device.get_device_list()
    except library.failure as error:  # not an empty list, and no errno
        if not _SYSFS.exists():
            raise NoRdma("this machine's kernel has no InfiniBand: load ib_uverbs and the device's driver") from error
        raise NoRdma(f"the RDMA devices can't be listed ({error}): is ib_uverbs loaded?") from error
    if not listed:
        raise NoRdma("there is no RDMA device here, or none whose driver of rdma-core (ibverbs-providers) is installed")
    by_name = {device.name.decode(): device for device in listed}
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise NoRdma(f"there is no RDMA device {', '.join(unknown)}: here are {', '.join(sorted(by_name))}")
    _need_locked_memory()
    found, reasons = [], []
    for name in wanted or sorted(by_name):
        try:
            found.append(_capabilities(library, by_name[name], name))
        except NoRdma as error:
            reasons.append(f"{name}: {error.reason}")
        except library.failure as error:
            reasons.append(f"{name} can't be opened ({error}): are its /dev/infiniband/uverbs* for this user?")
    if not found:
        raise NoRdma(f"no RDMA device can be used: {'; '.join(reasons)}")
    return tuple(found)


def _capabilities(library: Library, device: Any, name: str) -> Capabilities:
    with library.device.Context(name=name) as context:
        attributes = context.query_device()
        port = active_port(library, context)
        if attributes.vendor_id == EFA_VENDOR:
            kind: Kind = "srd"
            efa, efa_constants = load_efa()
            with efa.EfaContext(name=name) as efa_context:
                limits = efa_context.query_efa_device()
            can_read = bool(limits.device_caps & efa_constants.EFADV_DEVICE_ATTR_CAPS_RDMA_READ)
            most_read_bytes, depth = limits.max_rdma_size, limits.max_sq_wr
        elif device.transport_type == library["IBV_TRANSPORT_IB"]:
            kind = "rc"
            can_read = min(attributes.max_qp_rd_atom, attributes.max_qp_init_rd_atom) > 0
            most_read_bytes, depth = context.query_port(port).max_msg_sz, attributes.max_qp_wr
        else:
            raise NoRdma("neither InfiniBand, RoCE nor EFA")
        if not can_read or most_read_bytes <= 0:
            raise NoRdma("it can't READ another node's memory")
        # The completion queue has two places for each READ (`verbs_device`).
        depth = min(depth, attributes.max_cqe // 2, MOST_OUTSTANDING)
        return Capabilities(name, kind, True, min(most_read_bytes, _MOST_READ_BYTES), depth, numa_node(name))


def numa_node(device: str) -> int:
    """-1 where the kernel does not say: a machine of one node, or a device that is software."""
    try:
        return int((_SYSFS / device / "device" / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _need_locked_memory() -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed == resource.RLIM_INFINITY or allowed >= LEAST_LOCKED_BYTES or is_capable(IPC_LOCK):
        return
    raise NoRdma(
        f"only {allowed >> 10} KiB of memory may be locked: set LimitMEMLOCK=infinity in the service's unit "
        "(`ulimit -l unlimited` in a shell), or give the daemon CAP_IPC_LOCK"
    )
