"""Counts of values by their size, as Prometheus takes histograms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """`bounds` are the upper bounds, smallest first; above the last there is one more bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound, how many values are not above it), up to infinity."""
        summed, found = 0, []
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            summed += count
            found.append((bound, summed))
        return found
