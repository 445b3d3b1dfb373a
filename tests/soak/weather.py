"""Which faults are there now, and which were a moment ago: what excuses an error, and what does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

#: How long what a fault did may be felt after its end: leases, stalls and repeats, one after the other.
AFTERMATH_S = 15.0


@dataclass
class Spell:
    """One fault. `nodes` are the numbers of those it struck; empty is none in particular."""

    kind: str
    nodes: frozenset[int]
    begin: float
    what: str
    end: float | None = None

    def touches(self, since: float, aftermath_s: float) -> bool:
        return self.end is None or self.end + aftermath_s > since


@dataclass
class Weather:
    spells: list[Spell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def spell(self, kind: str, *nodes: int, what: str = "") -> Iterator[Spell]:
        made = Spell(kind, frozenset(nodes), time.monotonic(), what or kind)
        with self._lock:
            self.spells.append(made)
        try:
            yield made
        finally:
            made.end = time.monotonic()

    def felt(self, *kinds: str, node: int | None = None, since: float, aftermath_s: float = AFTERMATH_S) -> list[Spell]:
        """Those of these kinds that were there since then, or shortly before; with `node` only what struck it."""
        with self._lock:
            return [
                each
                for each in self.spells
                if each.kind in kinds
                and each.touches(since, aftermath_s)
                and (node is None or not each.nodes or node in each.nodes)
            ]

    def now(self) -> list[str]:
        with self._lock:
            return [each.what for each in self.spells if each.end is None]
