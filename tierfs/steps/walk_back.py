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

        Not yet while the newest is being changed: either its old self is put back, or it is whole again, or it goes.
        """
        before = self._newest.get(namespace) or self._linked(namespace)
        now = (newest.manifest.number, newest.manifest.step) if newest is not None else None
        went_back = before is not None and (now is None or now < before)
        reason = self._why(namespace, before[1]) if before is not None and went_back else ""
        if before is not None and went_back and not reason:
            self._newest[namespace] = before
            return
        self._newest.pop(namespace, None)
        if now is not None:
            self._newest[namespace] = now
        if before is not None and went_back:
            self._tell(namespace, before[1], now[1] if now is not None else "", reason)

    def _tell(self, namespace: str, before: str, now: str, reason: str) -> None:
        where = f"back to {now}" if now else "to no step at all"
        self._news.tell(
            Event(
                "walk-back",
                f"the newest whole step of {namespace} is no longer {before}, {_REASONS[reason]}: it goes {where}",
                namespace,
                now,
                {"from": before, "to": now, "reason": reason},
            )
        )

    def _linked(self, namespace: str) -> tuple[int, str] | None:
        where = self._link.named(namespace)
        return (where.number, where.step) if where is not None else None

    def _why(self, namespace: str, step: str) -> str:
        """Why the step is not whole any more; "" where that is not decided."""
        record = self._records.get((namespace, step))
        if record is None:
            return "removed"
        if record.manifest.overwrite is not None:
            return ""
        return "lost" if record.is_complete else "incomplete"
