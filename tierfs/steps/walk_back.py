"""Notices that a namespace's newest whole step is an older one than before: a job that loads `latest` goes back."""

from __future__ import annotations

from collections.abc import Mapping

from tierfs.steps.latest import LatestLink
from tierfs.steps.news import Event, News
from tierfs.steps.record import StepRecord

#: Why a step is no longer the newest, in words for people.
_REASONS = {
    "lost": "a file of it has no copy left",
    "incomplete": "it is no longer complete",
    "removed": "it was removed",
}


class NewestSteps:
    """The newest whole step of each namespace when it was looked at last; from an earlier daemon its link says it."""

    def __init__(self, news: News, records: Mapping[tuple[str, str], StepRecord], link: LatestLink) -> None:
        self._news = news
        self._records = records
        self._link = link
        self._newest: dict[str, tuple[int, str]] = {}

    def seen(self, namespace: str, newest: StepRecord | None) -> None:
        """Before the link is changed: tells where this is an older one than before.

        Not while the newest is being written again: its old self is set aside for that, and is put back where the save
        fails.
        """
        before = self._newest.get(namespace) or self._linked(namespace)
        if newest is not None:
            self._newest[namespace] = newest.manifest.number, newest.manifest.step
        else:
            self._newest.pop(namespace, None)
        now = self._newest.get(namespace)
        if before is None or (now is not None and now >= before):
            return
        reason = self._why(namespace, before[1])
        if not reason:
            return
        step = now[1] if now is not None else ""
        where = f"back to {step}" if step else "to no step at all"
        self._news.tell(
            Event(
                "walk-back",
                f"the newest whole step of {namespace} is no longer {before[1]}, {_REASONS[reason]}: it goes {where}",
                namespace,
                step,
                {"from": before[1], "to": step, "reason": reason},
            )
        )

    def _linked(self, namespace: str) -> tuple[int, str] | None:
        where = self._link.named(namespace)
        return (where.number, where.step) if where is not None else None

    def _why(self, namespace: str, step: str) -> str:
        """Why the step is not whole any more; "" for what is no walk-back."""
        record = self._records.get((namespace, step))
        if record is None:
            return "removed"
        if record.manifest.overwrite is not None:
            return ""
        return "lost" if record.is_complete else "incomplete"
