"""What a keeper tells the service manager: sd_notify(3), a datagram to $NOTIFY_SOCKET. Without one nothing is sent."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def service_is_ready() -> None:
    """The mount answers (Type=notify)."""
    _notify("READY=1")


def service_is_alive() -> None:
    """The keeper's loop goes round (WatchdogSec=)."""
    _notify("WATCHDOG=1")


def service_is_stopping() -> None:
    """The end was asked for and is on its way."""
    _notify("STOPPING=1")


def service_needs_longer(seconds: float) -> None:
    """Wait so much longer, from now on, before killing what is being stopped."""
    _notify(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def service_main_process() -> None:
    """This process is the service's main one from now on: it replaces the keeper that was (NotifyAccess=all)."""
    _notify(f"MAINPID={os.getpid()}")


def watchdog_s() -> float | None:
    """How long this process may be silent before the service manager kills it (sd_watchdog_enabled(3)); None where it
    doesn't watch, or watches another process."""
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", ""))
        watched = int(os.environ.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and watched == os.getpid() else None


def _notify(state: str) -> None:
    """A leading @ of the address names an abstract socket."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
        notifier.sendto(state.encode(), address)
