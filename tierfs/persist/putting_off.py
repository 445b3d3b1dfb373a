"""Steps that could not be persisted: when each is tried again, and what to tell of it."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass

from tierfs.errors import (
    ChecksumMismatch,
    ObjectDenied,
    ObjectStoreFull,
    ObjectStoreMissing,
    ObjectThrottled,
    ObjectUnavailable,
    PathRefused,
    TierfsError,
)
from tierfs.steps.registry import Key
from tierfs.units import format_duration

log = logging.getLogger("tierfs.persist")

#: After a failure: doubled up to the second figure, with up to half as much again at random.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
#: These concern the whole store: they are told of once, not once a step.
GENERAL = (ObjectDenied, ObjectStoreMissing, ObjectStoreFull, ObjectUnavailable, ObjectThrottled)
#: These stay until somebody does something about the step itself.
LASTING = (PathRefused, ChecksumMismatch)


@dataclass
class Failure:
    """`message` is "" where nothing failed and the step only has to be looked at again. `next_try_at` is Unix time,
    the others are monotonic."""

    message: str = ""
    is_general: bool = False
    severity: str = "warning"
    attempts: int = 0
    next_try: float = 0.0
    next_try_at: float = 0.0
    failed_at: float = 0.0


class PutOff:
    """By step. `what` says what has not been done then, and `where` what the step waits for."""

    def __init__(self, what: str = "persisted", where: str = "the object tier") -> None:
        self._what = what
        self._where = where
        self._failures: dict[Key, Failure] = {}

    def __len__(self) -> int:
        return sum(bool(failure.message) for failure in self._failures.values())

    def failure(self, key: Key) -> Failure | None:
        return self._failures.get(key)

    def pause_s(self, key: Key) -> float:
        """How long the step still has to wait; not above 0 where it may go."""
        failure = self._failures.get(key)
        return failure.next_try - time.monotonic() if failure is not None else 0.0

    def forget(self, key: Key) -> None:
        """It succeeded, or is another step now."""
        self._failures.pop(key, None)

    def changed(self, key: Key) -> None:
        """Something in the step changed: what was wrong with the step itself may be right now."""
        failure = self._failures.get(key)
        if failure is not None and failure.severity == "error":
            del self._failures[key]

    def for_now(self, key: Key, pause_s: float) -> None:
        """Nothing is wrong with it, but it is to be looked at a little later."""
        failure = self._failures.setdefault(key, Failure())
        failure.message = ""
        failure.next_try, failure.next_try_at = time.monotonic() + pause_s, time.time() + pause_s

    def failed(self, key: Key, error: Exception) -> None:
        """It failed: it is tried again after a pause that grows."""
        failure = self._failures.setdefault(key, Failure())
        is_lasting = isinstance(error, LASTING)
        pause_s = (
            LONGEST_PAUSE_S if is_lasting else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failure.attempts, 16))
        )
        pause_s *= random.uniform(1.0, 1.5)
        failure.attempts += 1
        failure.message = error.message if isinstance(error, TierfsError) else f"it could not be {self._what}: {error}"
        failure.severity = "error" if is_lasting else "warning"
        failure.is_general = isinstance(error, GENERAL)
        failure.failed_at = time.monotonic()
        failure.next_try, failure.next_try_at = failure.failed_at + pause_s, time.time() + pause_s
        log.log(
            logging.ERROR if is_lasting else logging.WARNING,
            "not %s yet, tried again in %s: %s",
            self._what,
            format_duration(pause_s),
            failure.message,
            extra={"namespace": key[0], "step": key[1], "tier": "object"},
        )

    def problems(self) -> list[dict[str, str]]:
        """For `status`: what concerns the whole store in one line, the rest by step."""
        failed = {key: failure for key, failure in self._failures.items() if failure.message}
        general = [failure for failure in failed.values() if failure.is_general]
        found = []
        if general:
            next_s = max(0.0, min(failure.next_try for failure in general) - time.monotonic())
            steps = f"{len(general)} steps wait" if len(general) > 1 else "1 step waits"
            message = f"{steps} for {self._where}: {general[0].message}; tried again in {format_duration(next_s)}"
            found.append({"severity": "warning", "message": message, "path": ""})
        for key, failure in failed.items():
            if not failure.is_general:
                found.append({"severity": failure.severity, "message": failure.message, "path": "/".join(key)})
        return found
