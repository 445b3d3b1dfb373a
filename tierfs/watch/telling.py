"""Carries events to those who are to be told: at once to the log, in their order and bounded in number to the others.

Whoever tells an event never waits. A hook that is too slow loses the oldest events, and that is counted and logged.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import trio

from tierfs.errors import TierfsError
from tierfs.settings_watch import EventsSettings
from tierfs.steps.news import Event, News
from tierfs.watch.command_hook import CommandHook

log = logging.getLogger("tierfs.events")

#: Events that wait for one hook at most.
MOST_WAITING = 1000
_WARNINGS = frozenset({"under-replicated", "lost", "walk-back"})


class Hook(Protocol):
    """`deliver` returns once the event is where it belongs, or raises TierfsError; it is bounded in time."""

    name: str

    async def deliver(self, event: dict[str, Any]) -> None: ...


class _Line:
    """The events that wait for one hook."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.waiting: deque[dict[str, Any]] = deque()
        self.is_busy = False
        self.dropped = 0
        self.outcomes: Counter[str] = Counter({"delivered": 0, "failed": 0})
        self.news = trio.Event()


class Telling:
    """Passes on what `news` tells, where `is_told_here` says so. `facts` are of this instance and go with each event.

    `counts` has the events by kind; `is_told_here` may be set later, by who knows of other nodes.
    """

    def __init__(
        self, news: News, settings: EventsSettings, facts: Mapping[str, Any], hooks: list[Hook] | None = None
    ) -> None:
        """SettingsError. `hooks` replaces those of the settings, for tests."""
        self.is_told_here: Callable[[Event], bool] = lambda event: True
        self.on_event: Callable[[Event], None] = lambda event: None
        self.counts: Counter[str] = Counter()
        self._only = frozenset(settings.only)
        self._facts = dict(facts)
        self._lines = [_Line(hook) for hook in (_hooks(settings) if hooks is None else hooks)]
        self._moved = trio.Event()
        news.listen(self._told)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for line in self._lines:
                nursery.start_soon(self._serve, line)
            task_status.started()

    async def finish(self, *, within_s: float) -> None:
        """Before the end: until all hooks have everything, or time is up."""
        with trio.move_on_after(within_s):
            while any(line.waiting or line.is_busy for line in self._lines):
                await self._moved.wait()

    def hooks(self) -> dict[str, dict[str, int]]:
        """For metrics, by hook: waiting, dropped, delivered, failed."""
        return {
            line.hook.name: {"waiting": len(line.waiting) + line.is_busy, "dropped": line.dropped, **line.outcomes}
            for line in self._lines
        }

    def _told(self, event: Event) -> None:
        if not self.is_told_here(event):
            return
        self.counts[event.kind] += 1
        self.on_event(event)
        level = logging.WARNING if event.kind in _WARNINGS else logging.INFO
        fields = {name: value for name, value in (("namespace", event.namespace), ("step", event.step)) if value}
        log.log(level, "%s: %s", event.kind, event.message, extra=fields)
        if not self._lines or (self._only and event.kind not in self._only):
            return
        said = _said(event, self._facts)
        for line in self._lines:
            if len(line.waiting) >= MOST_WAITING:
                line.waiting.popleft()
                line.dropped += 1
                if line.dropped & (line.dropped - 1) == 0:  # the first, and each time that they doubled
                    log.warning("the events' %s is too slow: %d were dropped", line.hook.name, line.dropped)
            line.waiting.append(said)
            line.news.set()

    async def _serve(self, line: _Line) -> None:
        while True:
            if not line.waiting:
                line.news = trio.Event()
                await line.news.wait()
            line.is_busy = True
            said = line.waiting.popleft()
            try:
                await line.hook.deliver(said)
                line.outcomes["delivered"] += 1
            except TierfsError as error:
                line.outcomes["failed"] += 1
                log.warning("the event %s was not passed on: %s", said["event"], error.message)
            except Exception:
                line.outcomes["failed"] += 1
                log.exception("passing on an event failed")
            finally:
                line.is_busy = False
                moved, self._moved = self._moved, trio.Event()
                moved.set()


def _hooks(settings: EventsSettings) -> list[Hook]:
    hooks: list[Hook] = []
    if settings.command:
        hooks.append(CommandHook(settings.command, within_s=settings.timeout_s))
    if settings.webhook:
        # Here, as an HTTP client takes some 30 ms to import, at each start and takeover.
        from tierfs.watch.webhook import Webhook

        hooks.append(
            Webhook(
                settings.webhook,
                settings.webhook_token_file,
                within_s=settings.timeout_s,
                retry_for_s=settings.retry_for_s,
            )
        )
    return hooks


def _said(event: Event, facts: Mapping[str, Any]) -> dict[str, Any]:
    """As docs/events.md has it."""
    return {
        "event": event.kind,
        "id": uuid.uuid4().hex,
        "at": event.at,
        **facts,
        "namespace": event.namespace,
        "step": event.step,
        "message": event.message,
        **event.facts,
    }
