"""Whether the mount still answers, asked again and again by the keeper: a daemon that hangs is as bad as a dead one.

A dead daemon shows by its pidfd; one whose loop stands still shows only to whoever asks it something.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from mount.notify import service_is_alive

_LOOKS = 3
"""How often it is looked within the time that the service manager, or the mount, may be silent."""


class Watchdog:
    """Of the mount on `mountpoint`, which may be silent for `within_s`. All methods belong to the keeper's loop."""

    def __init__(self, mountpoint: str, within_s: float) -> None:
        self.within_s = within_s
        self.look_at = 0.0
        """time.monotonic() of the next look."""
        self._mountpoint = mountpoint
        self._asked_at = 0.0
        self._asked: threading.Thread | None = None

    def look(self, now: float, *, is_serving: bool) -> bool:
        """Tells the service manager that the keeper lives. True where the mount was silent for too long.

        While no daemon serves (`is_serving`), the time that a question waits is not the daemon's.
        """
        if now < self.look_at:
            return False
        self.look_at = now + self.within_s / _LOOKS
        service_is_alive()
        if self._asked is None or not self._asked.is_alive():
            self._asked_at = now
            # A thread asks, since the answer may never come; there is one at a time.
            self._asked = threading.Thread(target=self._ask, name="watchdog", daemon=True)
            self._asked.start()
            return False
        if not is_serving:
            self._asked_at = now
        return now - self._asked_at >= self.within_s

    def forgive(self) -> None:
        """Another daemon comes: its time begins now."""
        self._asked_at = time.monotonic()

    def _ask(self) -> None:
        with suppress(OSError):
            os.statvfs(self._mountpoint)  # statfs is never answered from the kernel's cache
