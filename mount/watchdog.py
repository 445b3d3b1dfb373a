"""Whether the mount still answers, asked again and again by the keeper: a daemon that hangs is as bad as a dead one.

A dead daemon shows by its pidfd; one whose loop stands still shows only to whoever asks it something.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from mount.asking import ask
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
        self._asked: subprocess.Popen[bytes] | None = None

    def look(self, now: float, *, is_serving: bool) -> bool:
        """Tells the service manager that the keeper lives. True where the mount was silent for too long.

        While no daemon serves (`is_serving`), the time that a question waits is not the daemon's.
        """
        if now < self.look_at:
            return False
        self.look_at = now + self.within_s / _LOOKS
        service_is_alive()
        if self._asked is None or self._asked.poll() is not None:
            self._asked_at = now
            with suppress(OSError):
                self._asked = ask(self._mountpoint)  # one at a time
            return False
        if not is_serving:
            self._asked_at = now
        return now - self._asked_at >= self.within_s

    def forgive(self) -> None:
        """Another daemon comes: its time begins now."""
        self._asked_at = time.monotonic()
