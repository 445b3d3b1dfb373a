"""What a process of tierfs hands to the next one."""

from __future__ import annotations

import os
from pathlib import Path

FUSE_FD = "TIERFS_FUSE_FD"
"""Variable with the number of the daemon's /dev/fuse."""
READY_FD = "TIERFS_READY_FD"
"""Variable with the number of the pipe on which the daemon says that it is ready."""
NODE_DRAIN_S = 90.0
"""What a node that goes may take to hand over what only it holds: before its mount goes, and again after it."""


def package_environment() -> dict[str, str]:
    """The environment for `python -m mount.…`: this very package is found first, wherever it was imported from."""
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parent.parent)
    paths = [home, *(path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != home)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
