"""Which complete steps leave the RAM tier when room is needed. Pure: facts in, a list out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierfs.settings import RetentionSettings


@dataclass(frozen=True)
class StepFacts:
    """What retention needs to know of a step.

    `bytes` is what evicting it would free. `only_copy_owed`: it is the only copy of something that a policy still owes
    to a slower tier.
    """

    namespace: str
    step: str
    number: int
    completed_at: float | None
    bytes: int
    pinned: bool
    open_handles: int
    only_copy_owed: bool
    state: str


def choose_evictions(
    steps: Sequence[StepFacts], policies: Callable[[str], RetentionSettings], wanted_bytes: int
) -> list[StepFacts]:
    """The steps to evict, in this order, so that `wanted_bytes` become free; fewer bytes where no more may go.

    First those above a namespace's `ram_max_steps`, whatever is wanted; then, while bytes are wanted, the longest
    completed of all namespaces among those beyond their namespace's newest `ram_steps`. Newest means completed last,
    not the highest number: training that goes back to an older step is newest there. But `latest` names the highest
    number. Of all that may go for room, what it names goes last; and under `ram_max_steps` it counts as the second
    newest, so that only what was completed last can stay in its stead. Never a step that is pinned, open, owed to a
    slower tier, or not complete; but each complete one counts as one of the newest.
    """
    named_by_latest: set[StepFacts] = set()
    surplus: list[StepFacts] = []
    spare: list[StepFacts] = []
    for namespace, newest_first in _complete_by_namespace(steps).items():
        policy = policies(namespace)
        highest = max(newest_first, key=lambda facts: (facts.number, _age(facts)))
        named_by_latest.add(highest)
        first, *others = newest_first
        by_worth = list(dict.fromkeys((first, highest, *others)))
        most = policy.ram_max_steps if policy.ram_max_steps > 0 else len(by_worth)
        # A maximum below `ram_steps` is the stronger of the two: it says never.
        surplus += by_worth[most:]
        stay = set(by_worth[:most])
        spare += [facts for facts in newest_first[max(0, policy.ram_steps) :] if facts in stay]

    def last_comes_latest(facts: StepFacts) -> tuple[bool, tuple[float, int, str, str]]:
        return facts in named_by_latest, _age(facts)

    chosen = sorted(filter(_may_go, surplus), key=last_comes_latest)
    freed = sum(facts.bytes for facts in chosen)
    for facts in sorted(filter(_may_go, spare), key=last_comes_latest):
        if freed >= wanted_bytes:
            break
        # A step without bytes here (all of it stubs) would be lost from view for nothing.
        if facts.bytes > 0:
            chosen.append(facts)
            freed += facts.bytes
    return chosen


def _complete_by_namespace(steps: Sequence[StepFacts]) -> dict[str, list[StepFacts]]:
    found: dict[str, list[StepFacts]] = {}
    for facts in steps:
        if facts.state == "complete" and facts.completed_at is not None:
            found.setdefault(facts.namespace, []).append(facts)
    for of_namespace in found.values():
        of_namespace.sort(key=_age, reverse=True)
    return found


def _may_go(facts: StepFacts) -> bool:
    return not (facts.pinned or facts.open_handles > 0 or facts.only_copy_owed)


def _age(facts: StepFacts) -> tuple[float, int, str, str]:
    """Sorts the longest completed first, the same way each time."""
    return (facts.completed_at or 0.0, facts.number, facts.namespace, facts.step)
