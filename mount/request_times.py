"""How long requests of the kernel take, counted for metrics at a cost that no request feels."""

from __future__ import annotations

import errno
from collections import Counter

from tierfs.watch.histogram import Histogram

#: Upper bounds in seconds: a lookup takes some 0.1 ms, a rename that waits for copies may take a minute.
BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)


class RequestTimes:
    """By the name of the handler, as pyfuse3 calls it. `in_hand` are requests that are being answered."""

    def __init__(self) -> None:
        self.by_operation: dict[str, Histogram] = {}
        self.in_hand = 0
        self._failures: Counter[tuple[str, int]] = Counter()

    def took(self, operation: str, seconds: float) -> None:
        times = self.by_operation.get(operation)
        if times is None:
            times = self.by_operation[operation] = Histogram(BOUNDS_S)
        times.observe(seconds)

    def failed(self, operation: str, number: int) -> None:
        self._failures[operation, number] += 1

    def failures(self) -> dict[tuple[str, str], int]:
        """By operation and the errno's name, such as ENOENT."""
        return {
            (operation, errno.errorcode.get(number, str(number))): count
            for (operation, number), count in self._failures.items()
        }
