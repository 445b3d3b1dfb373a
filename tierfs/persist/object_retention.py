"""Which steps leave the object tier because newer ones are there. Pure: facts in, a list out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfs.settings import RetentionSettings


@dataclass(frozen=True)
class StoredFacts:
    """A committed step of one namespace. `may_go` is False for one that is pinned, open, or owed again."""

    step: str
    number: int
    completed_at: float
    may_go: bool


def choose_deletions(steps: Sequence[StoredFacts], policy: RetentionSettings) -> list[StoredFacts]:
    """Those beyond the newest `object_steps`, oldest first, but not the multiples of `object_every`.

    Newest means completed last, as in RAM: training that goes back to an older step is newest there. What `latest`
    names, the highest number, stays as well, so that at least one step always does.
    """
    if policy.object_steps <= 0:
        return []
    newest_first = sorted(steps, key=lambda facts: (facts.completed_at, facts.number, facts.step), reverse=True)
    highest = max(newest_first, key=lambda facts: (facts.number, facts.completed_at), default=None)
    return [
        facts
        for facts in reversed(newest_first[policy.object_steps :])
        if facts.may_go
        and facts is not highest
        and not (policy.object_every > 0 and facts.number % policy.object_every == 0)
    ]


def choose_old_parts(
    parts: Sequence[StoredFacts], steps: Sequence[StoredFacts], policy: RetentionSettings
) -> list[StoredFacts]:
    """Of steps that are there in part, those that completed before the oldest of the newest `object_steps` others."""
    newest_first = sorted((facts.completed_at for facts in steps), reverse=True)
    if not 0 < policy.object_steps <= len(newest_first):
        return []
    oldest = newest_first[policy.object_steps - 1]
    return [
        facts
        for facts in parts
        if facts.may_go
        and facts.completed_at < oldest
        and not (policy.object_every > 0 and facts.number % policy.object_every == 0)
    ]
