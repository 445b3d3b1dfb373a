"""Which steps leave the disk: those beyond `retention.disk_steps`, and as many as a newer one needs room. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_Age = tuple[bool, float, int, str, str]


@dataclass(frozen=True)
class StoredFacts:
    """A step that lies whole on the disk. `may_go`: nobody needs it there now."""

    namespace: str
    step: str
    number: int
    completed_at: float
    bytes: int
    may_go: bool


def choose_surplus(steps: Sequence[StoredFacts], most: Callable[[str], int]) -> list[StoredFacts]:
    """Those beyond the newest so many of their namespace; 0 is no limit."""
    chosen = []
    for namespace, newest_first in _by_namespace(steps).items():
        if most(namespace) > 0:
            chosen += [facts for facts in newest_first[most(namespace) :] if facts.may_go]
    return sorted(chosen, key=lambda facts: facts.completed_at)


def choose_for_room(
    steps: Sequence[StoredFacts], wanted_bytes: int, *, completed_at: float
) -> list[StoredFacts] | None:
    """The steps that go, in this order, for one that completed then; None where they can't give so much.

    The longest completed of all namespaces go first, never one that is newer than what needs the room, and never the
    newest of a namespace: until a newer one of it is whole on the disk, it is what comes back after a reboot. Of those
    that may go the one that `latest` names (the highest number) goes last.
    """
    kept: set[StoredFacts] = set()
    named: set[StoredFacts] = set()
    for newest_first in _by_namespace(steps).values():
        kept.add(newest_first[0])
        named.add(max(newest_first, key=lambda facts: (facts.number, facts.completed_at)))

    def worth(facts: StoredFacts) -> _Age:
        return facts in named, facts.completed_at, facts.number, facts.namespace, facts.step

    chosen: list[StoredFacts] = []
    freed = 0
    for facts in sorted((each for each in steps if each.may_go and each not in kept), key=worth):
        if freed >= wanted_bytes:
            break
        if facts.completed_at < completed_at:
            chosen.append(facts)
            freed += facts.bytes
    return chosen if freed >= wanted_bytes else None


def _by_namespace(steps: Iterable[StoredFacts]) -> dict[str, list[StoredFacts]]:
    found: dict[str, list[StoredFacts]] = {}
    for facts in steps:
        found.setdefault(facts.namespace, []).append(facts)
    for of_namespace in found.values():
        of_namespace.sort(key=lambda facts: (facts.completed_at, facts.number), reverse=True)
    return found
