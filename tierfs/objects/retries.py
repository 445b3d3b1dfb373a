"""When a request to the object store that failed is made again, and when it is given up. It only decides."""

from __future__ import annotations

import random
from collections.abc import Callable

from tierfs.errors import ObjectCorrupt, ObjectDenied, ObjectError, TierfsError

LEAST_PAUSE_S = 0.2
MOST_PAUSE_S = 20.0
#: Credentials are renewed every few minutes, policies corrected by people: asking more often only fills their logs.
DENIED_PAUSE_S = 5.0
#: A bit that flips on the way passes at once; what differs four times is damaged where it lies.
MOST_CORRUPT = 4


class RetryPlan:
    """Of one request. The budget counts from its first failure, so that a slow transfer has it whole."""

    def __init__(self, budget_s: float, *, pick: Callable[[float, float], float] = random.uniform) -> None:
        """`pick(low, high)` is the jitter, evenly spread: full jitter keeps many nodes from coming back together
        (Amazon's "Exponential Backoff And Jitter")."""
        self._budget_s = budget_s
        self._pick = pick
        self._deadline: float | None = None
        self._corrupt = 0
        self.failures = 0

    def pause_after(self, error: TierfsError, now: float) -> float | None:
        """Seconds to wait before the next attempt; None: the error is final, or the budget would be spent by then."""
        if not isinstance(error, ObjectError) or not error.may_pass:
            return None
        self._deadline = now + self._budget_s if self._deadline is None else self._deadline
        self.failures += 1
        if isinstance(error, ObjectCorrupt):
            self._corrupt += 1
            if self._corrupt >= MOST_CORRUPT:
                return None
        longest_s: float = min(MOST_PAUSE_S, LEAST_PAUSE_S * 2.0 ** min(self.failures - 1, 16))
        pause_s = self._pick(0.0, longest_s)
        if isinstance(error, ObjectDenied):
            pause_s += DENIED_PAUSE_S
        return pause_s if now + pause_s <= self._deadline else None
