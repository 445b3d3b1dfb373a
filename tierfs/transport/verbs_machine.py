"""What there is of RDMA on this machine, in versions and attributes: what somebody needs who was not there.

Everything is looked up as far as it can be; what can't is left out, or says why. No secret is in it: names, versions,
limits, and the devices' addresses.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tierfs
from tierfs.capabilities import IPC_LOCK, is_capable
from tierfs.transport.verbs_devices import active_port
from tierfs.transport.verbs_library import Library, NoRdma, load_efa, load_library
from tierfs.transport.verbs_port import Capabilities

_SYSFS = Path("/sys/class/infiniband")
#: Modules of the kernel whose version says something; most have the kernel's and none of their own.
_MODULES = ("efa", "mlx5_ib", "ib_uverbs", "rdma_rxe", "siw")
#: Where the installer of EFA's packages leaves what it installed.
_EFA_PACKAGES = Path("/opt/amazon/efa_installed_packages")
#: libibverbs.so.1.14.44.0 is of rdma-core 44.0, and so with its other libraries and its drivers.
_LIBRARY = re.compile(r"/(lib(?:ibverbs|rdmacm|efa|mlx\d)\.so\.\d+\.\d+\.(\d+\.\d+)|lib[\w-]+-rdmav\d+\.so)$")
#: Of `struct ibv_device_attr`, as pyverbs names them.
_DEVICE = (
    "fw_ver", "vendor_id", "vendor_part_id", "hw_ver", "phys_port_cnt", "max_mr_size", "max_mr", "max_qp", "max_qp_wr",
    "max_cq", "max_cqe", "max_pd", "max_ah", "max_qp_rd_atom", "max_qp_init_rd_atom",
)  # fmt: skip
#: Of `struct ibv_port_attr`.
_PORT = (
    "state", "link_layer", "active_mtu", "max_mtu", "max_msg_sz", "active_speed", "active_width", "gid_tbl_len", "lid",
)  # fmt: skip
#: Of `struct efadv_device_attr`.
_EFA = ("device_caps", "max_rdma_size", "max_sq_wr", "max_rq_wr", "max_sq_sge", "inline_buf_size")


def describe_machine() -> dict[str, Any]:
    """Versions and limits. Loads pyverbs, so that its libraries are seen."""
    said: dict[str, Any] = {
        "tierfs": tierfs.__version__,
        "python": platform.python_version(),
        "kernel": os.uname().release,
        "architecture": os.uname().machine,
        "system": _system(),
        "locked_memory": _locked_memory(),
    }
    try:
        load_library()
    except NoRdma as error:
        said["pyverbs"] = f"not usable: {error.reason}"
    else:
        said["pyverbs"] = _pyverbs()
        libraries = dict(_libraries())
        said["rdma_core"] = libraries.get("libibverbs", "unknown")
        said["libraries"] = ", ".join(sorted({name for _, name in _mapped()}))
    for name in _MODULES:
        version = _read(Path("/sys/module") / name / "version")
        if version or (Path("/sys/module") / name).is_dir():
            said[f"module_{name}"] = version or "the kernel's"
    if packages := _read(_EFA_PACKAGES):
        said["efa_installer"] = packages.splitlines()[0].strip("# ")
    return said


def describe_devices(devices: Sequence[Capabilities]) -> list[dict[str, Any]]:
    """What each says of itself, and sysfs of it; also of those that can't be used."""
    known = {each.device: each for each in devices}
    listed = sorted(each.name for each in _SYSFS.iterdir()) if _SYSFS.is_dir() else []
    return [_describe(name, known.get(name)) for name in dict.fromkeys([*known, *listed])]


def _describe(name: str, capabilities: Capabilities | None) -> dict[str, Any]:
    said: dict[str, Any] = {"device": name}
    if capabilities is None:
        said["usable"] = False
    else:
        said |= {
            "usable": True,
            "kind": capabilities.kind,
            "most_read_bytes": capabilities.most_read_bytes,
            "queue_depth": capabilities.queue_depth,
            "numa_node": capabilities.numa_node,
        }
    place = _SYSFS / name
    for key in ("fw_ver", "hca_type", "board_id", "ports/1/state", "ports/1/rate", "ports/1/link_layer"):
        if value := _read(place / key):
            said[key.rpartition("/")[2]] = value
    driver = place / "device" / "driver"
    if driver.exists():
        said["driver"] = driver.resolve().name
    try:
        said |= _attributes(load_library(), name)
    except NoRdma as error:
        said["attributes"] = f"none: {error.reason}"
    except Exception as error:  # pyverbs' own, and what it does not think of: this is to be sent, not to fail
        said["attributes"] = f"none: {type(error).__name__}: {error}"
    return said


def _attributes(library: Library, name: str) -> dict[str, Any]:
    with library.device.Context(name=name) as context:
        attributes = context.query_device()
        said = _of(attributes, _DEVICE)
        try:
            said |= {f"port_{key}": value for key, value in _of(context.query_port(1), _PORT).items()}
            said["port"] = active_port(library, context)
        except NoRdma as error:
            said["port"] = error.reason
    try:
        efa, _ = load_efa()
        with efa.EfaContext(name=name) as efa_context:
            said |= {f"efa_{key}": value for key, value in _of(efa_context.query_efa_device(), _EFA).items()}
    except (NoRdma, library.failure):
        pass  # no EFA device
    return said


def _of(attributes: Any, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(attributes, name, None)
        if isinstance(value, bytes):
            value = value.rstrip(b"\0").decode("ascii", "replace")
        if value is not None:
            found[name] = value if isinstance(value, int) else str(value)
    return found


def _mapped() -> list[tuple[str, str]]:
    """rdma-core's version, or "", and the file's name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = _LIBRARY.search(line)
        if match is not None:
            found.append((match[2] or "", match[1]))
    return found


def _libraries() -> list[tuple[str, str]]:
    return [(name.partition(".")[0], version) for version, name in _mapped() if version]


def _pyverbs() -> str:
    place = Path(str(importlib.import_module("pyverbs").__file__)).parent
    try:
        version = importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        version = "no version told"
    return f"{version}, {place}"


def _locked_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return f"{limit}, {'with' if is_capable(IPC_LOCK) else 'without'} CAP_IPC_LOCK"


def _system() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', _read(Path("/etc/os-release")), re.MULTILINE)
    return match[1] if match else "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
