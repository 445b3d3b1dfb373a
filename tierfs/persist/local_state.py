"""Where this node keeps what it must still know of the object tier after a crash: small files in the RAM tier.

They lie in `meta/%object/<kind>/<namespace>/<step><suffix>`; '%' keeps them apart from the manifests of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tierfs.steps.names import escape_namespace, safe_component

_OBJECT = "%object"


def state_path(meta: Path, kind: str, namespace: str, step: str, suffix: str) -> Path:
    return meta / _OBJECT / kind / escape_namespace(namespace) / (safe_component(step) + suffix)


def object_path(meta: Path, name: str) -> Path:
    """Of what is kept of the tier as a whole."""
    return meta / _OBJECT / "tier" / name  # directly below it would pass for the manifest of a step


def namespace_path(meta: Path, kind: str, namespace: str, suffix: str) -> Path:
    """Of what is kept by namespace."""
    return meta / _OBJECT / kind / (escape_namespace(namespace) + suffix)


def all_of_kind(meta: Path, kind: str, suffix: str) -> Iterator[Path]:
    """Each file that is kept. Which step it is of is in the file: a long namespace can't be told from the path."""
    top = meta / _OBJECT / kind
    for directory in sorted(top.iterdir()) if top.is_dir() else ():
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if path.name.endswith(suffix) and not path.name.startswith("."):
                yield path
