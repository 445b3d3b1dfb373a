"""A limit of bytes a second for the transfers of one process, in one direction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: How much may pass at once after a pause: short bursts cost no bandwidth in the long run.
_BURST_S = 0.25


class Bandwidth:
    """A token bucket that threads share. Each takes its bytes at once and then sleeps off the debt, so that a piece
    larger than the bucket passes too, and threads that wait get their turn in order of asking.

    `bytes_s` of 0 is no limit.
    """

    def __init__(self, bytes_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_s = bytes_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock() - _BURST_S
        """When all that was taken has been paid for."""

    def take(self, size_bytes: int) -> float:
        """How many seconds the caller must now sleep."""
        if self._bytes_s <= 0:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._bytes_s
            return max(0.0, self._free_at - now)
