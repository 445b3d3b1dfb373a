"""What PyTorch users import from tierfs. Stock DCP needs none of it.

It may use `tierfs`, never `mount`; everything that needs torch is imported lazily by its own module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_compat.prefetching import Prefetch, prefetch
from dcp_compat.saved_step import SavedStep
from dcp_compat.steps import Step, latest, list_steps, namespace_path, step_path
from dcp_compat.termination import persist_on_sigterm

if TYPE_CHECKING:
    from dcp_compat.reader import TieredStorageReader
    from dcp_compat.stager import TieredStager
    from dcp_compat.writer import TieredStorageWriter

__all__ = [
    "Prefetch",
    "SavedStep",
    "Step",
    "TieredStager",
    "TieredStorageReader",
    "TieredStorageWriter",
    "latest",
    "list_steps",
    "namespace_path",
    "persist_on_sigterm",
    "prefetch",
    "step_path",
]

_WITH_TORCH = {"TieredStager": "stager", "TieredStorageReader": "reader", "TieredStorageWriter": "writer"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'dcp_compat' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dcp_compat.{_WITH_TORCH[name]}"), name)
