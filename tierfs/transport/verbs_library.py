"""Loads pyverbs where it is installed and fits the machine's libibverbs; says in one sentence why not where it doesn't.

Nothing of tierfs imports pyverbs at its own import. Versions 44 (Debian 12's) to 59 are known to differ in what is
hidden here: the module that holds the constants.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: libibverbs' private interface has a number, and pyverbs loads with the same one only (PABI_VERSION in the
#: CMakeLists.txt of rdma-core's releases): the releases of rdma-core that have it.
_RELEASES = {"34": "34 to 56", "57": "57 or 58", "59": "59 to 63"}
#: Up to 49, and since then.
_CONSTANTS_IN = ("pyverbs.enums", "pyverbs.libibverbs_enums")


class NoRdma(Exception):
    """`reason` is one sentence: why not, and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Library:
    """pyverbs' modules, which have no types, and libibverbs' constants by their names."""

    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    constants: Mapping[str, int]
    #: What every call of it raises; has an `error_code`, -1 where it is not an errno.
    failure: type[Exception]

    def __getitem__(self, constant: str) -> int:
        return self.constants[constant]


def load_library() -> Library:
    """NoRdma."""
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
        failure = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        constants = _constants()
    except Exception as error:  # also what a half-fitting library raises: RDMA is an offer, and TCP goes on without
        raise NoRdma(_why_not(error)) from error
    return Library(**modules, constants=constants, failure=failure)


def load_efa() -> tuple[Any, Any]:
    """pyverbs' modules of EFA: its classes and its constants. NoRdma."""
    try:
        classes = importlib.import_module("pyverbs.providers.efa.efadv")
        return classes, importlib.import_module("pyverbs.providers.efa.efa_enums")
    except Exception as error:  # as above
        raise NoRdma(f"this pyverbs can't be used with EFA ({error}): install one that was built with it") from error


_MODULES = ("addr", "cq", "device", "mr", "pd", "qp", "wr")


def _constants() -> dict[str, int]:
    found: dict[str, int] = {}
    for name in _CONSTANTS_IN:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        for key, value in vars(module).items():
            if isinstance(value, type):  # an enumeration, whose members are not the module's own everywhere
                found.update({each: int(member) for each, member in getattr(value, "__members__", {}).items()})
            elif isinstance(value, int):
                found[key] = int(value)
    if "IBV_QPT_RC" not in found:
        raise ImportError("it has no constants where versions 44 to 59 have them")
    return found


def _why_not(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "pyverbs":
        return (
            "pyverbs is not installed: install the distribution's python3-pyverbs for the distribution's Python, or "
            "pyverbs by pip for another"
        )
    text = str(error)
    private = re.search(r"IBVERBS_PRIVATE_(\d+)", text)
    if private is not None:
        wanted = private[1]
        fitting = f"rdma-core {_RELEASES[wanted]}" if wanted in _RELEASES else "the rdma-core of pyverbs' own version"
        return (
            f"pyverbs does not fit this machine's libibverbs, which has no IBVERBS_PRIVATE_{wanted}: install "
            f"{fitting}, or the pyverbs that was built with the rdma-core that is here"
        )
    if re.search(r"lib\w+\.so[.\d]*: cannot open shared object", text):
        return f"pyverbs lacks a library of rdma-core ({text}): install libibverbs1, librdmacm1 and ibverbs-providers"
    return f"pyverbs can't be loaded: {text or type(error).__name__}"
