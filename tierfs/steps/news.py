"""What happens to steps, as people and their programs are told: events, and those who listen to them.

Whoever decides about steps tells; what becomes of it (a log, a command, a webhook, a figure) is none of its business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

log = logging.getLogger("tierfs.events")

EventKind = Literal["level", "under-replicated", "lost", "walk-back", "drain"]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


@dataclass(frozen=True)
class Event:
    """`facts` go with the kind, see docs/events.md; `message` says it to people. `at` is Unix time, seconds."""

    kind: EventKind
    message: str
    namespace: str = ""
    step: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = field(default_factory=time.time)


class News:
    """Told in the trio thread, from the middle of a commit: who listens returns at once. What one of them raises is
    logged and holds up nobody."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, told: Callable[[Event], None]) -> None:
        self._listeners.append(told)

    def tell(self, event: Event) -> None:
        for told in self._listeners:
            try:
                told(event)
            except Exception:
                log.exception("an event was not told: %s", event.message)


def reached(
    namespace: str, step: str, level: str, *, generation: int, size_bytes: int, files: int, seconds: float | None
) -> Event:
    """The step survives more than before. `seconds`: how long that took, since the first write of it for the level
    `ram`, since it was complete for others; None where nobody knows."""
    took = f" after {seconds:.1f} s" if seconds is not None else ""
    where = {
        "ram": "complete in RAM",
        "disk": "on this node's disk",
        "replica": "on several nodes",
        "object": "in the object tier",
    }[level]
    facts = {
        "level": level, "generation": generation, "bytes": size_bytes, "files": files,
        "seconds": round(seconds, 3) if seconds is not None else None,
    }  # fmt: skip
    return Event("level", f"{namespace}/{step} is {where}{took}", namespace, step, facts)
