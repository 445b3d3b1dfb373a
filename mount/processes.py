"""What a process of tierfs hands to the next one, and what it tells systemd."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
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


def service_is_ready() -> None:
    """Tells systemd (Type=notify) that the mount answers."""
    _notify_service_manager("READY=1")


def service_is_stopping() -> None:
    """Tells systemd that the end was asked for and is on its way."""
    _notify_service_manager("STOPPING=1")


def service_needs_longer(seconds: float) -> None:
    """Tells systemd to wait so much longer, from now on, before it kills what it stops (sd_notify(3))."""
    _notify_service_manager(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def _notify_service_manager(state: str) -> None:
    """sd_notify(3): a datagram to $NOTIFY_SOCKET; a leading @ names an abstract socket."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.sendto(state.encode(), address)
