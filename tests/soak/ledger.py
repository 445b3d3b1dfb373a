"""What was saved, so what a load may give: for each step the seeds that its bytes may follow from.

A step *must* load once its save was answered, until it is removed, or lost with a node before it was durable. While a
save is under way, or after one that was cut off, it may hold the old generation or the new one, but never a mixture.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

#: How long other nodes may go on to show the generation before: their news of the commit is on its way.
STALE_S = 10.0


@dataclass(frozen=True)
class Entry:
    """`seeds` that it may hold, the newest last. `version` grows with each change, so that looks can be compared."""

    path: str
    kind: str
    seeds: tuple[int, ...] = ()
    must: bool = False
    changing: bool = False
    removed: bool = False
    held: bool = False
    """Nobody changes it now: a fault is being tried on it."""
    version: int = 0
    at: float = 0.0
    """When a save or a removal of it was answered last."""
    former: tuple[int, ...] = ()
    """What it held before, which news on its way may leave visible elsewhere for a moment."""

    @property
    def number(self) -> int:
        return int(self.path.rpartition("_")[2])

    @property
    def namespace(self) -> str:
        return self.path.rpartition("/")[0]

    def may_hold(self, now: float) -> set[int]:
        return {*self.seeds, *(self.former if now - self.at < STALE_S else ())}


@dataclass
class Ledger:
    """Of all namespaces. Threads may share it."""

    entries: dict[str, Entry] = field(default_factory=dict)
    durable: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Level that a node told of the step as it is now, and the version that it was told of."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def get(self, path: str) -> Entry | None:
        with self._lock:
            return self.entries.get(path)

    def all(self, namespace: str = "") -> list[Entry]:
        with self._lock:
            return [entry for entry in self.entries.values() if not namespace or entry.namespace == namespace]

    def begin(self, path: str, kind: str, seed: int) -> None:
        """A save begins."""
        with self._lock:
            old = self.entries.get(path) or Entry(path, kind)
            self._put(old, seeds=(*old.seeds, seed), changing=True, removed=False)

    def saved(self, path: str, seed: int) -> None:
        with self._lock:
            old = self.entries[path]
            former = tuple(other for other in old.seeds if other != seed)
            self._put(old, seeds=(seed,), must=True, changing=False, at=time.monotonic(), former=former)

    def failed(self, path: str) -> None:
        """The save was cut off: what was there before is there, or the new one."""
        with self._lock:
            self._put(self.entries[path], changing=False)

    def remove(self, path: str) -> None:
        """A removal begins; it may take effect at any moment from now on."""
        with self._lock:
            self._put(self.entries[path], must=False, removed=True, changing=True, at=time.monotonic())

    def was_removed(self, path: str) -> None:
        with self._lock:
            self._put(self.entries[path], changing=False, at=time.monotonic())

    def hold(self, path: str, is_held: bool) -> bool:
        """Whether it is as was asked for now: what is being changed can't be held."""
        with self._lock:
            old = self.entries[path]
            if is_held and (old.changing or old.held or not old.must):
                return False
            self._put(old, held=is_held, is_change=False)
            return True

    def told(self, levels: Mapping[str, str], versions: Mapping[str, int]) -> None:
        """What a node says of steps; `versions` are from before it was asked: its news may be of an older save."""
        with self._lock:
            for path, entry in self.entries.items():
                level = levels.get(path, "")
                if entry.version == versions.get(path) and not entry.changing:
                    if level in ("replica", "object"):
                        self.durable[path] = (level, entry.version)
                    else:
                        self.durable.pop(path, None)

    def versions(self) -> dict[str, int]:
        with self._lock:
            return {path: entry.version for path, entry in self.entries.items()}

    def is_durable(self, path: str) -> bool:
        with self._lock:
            entry, told = self.entries.get(path), self.durable.get(path)
            return entry is not None and told is not None and told[1] == entry.version and not entry.changing

    def lose_what_is_not_durable(self, keep: set[str]) -> list[str]:
        """A node is lost: of steps other than these nobody promised that they survive. Returns them."""
        lost = []
        with self._lock:
            for path, entry in list(self.entries.items()):
                if entry.must and path not in keep:
                    self._put(entry, must=False)
                    lost.append(path)
        return lost

    def _put(self, old: Entry, *, is_change: bool = True, **changes: object) -> None:
        version = old.version + is_change
        self.entries[old.path] = replace(old, **changes, version=version)  # type: ignore[arg-type]
