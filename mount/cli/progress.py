"""One line of progress on a terminal, written over itself; nothing in a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

_BAR_WIDTH = 20
_NARROW_BAR_WIDTH = 10
#: A terminal of fewer columns gets the shorter bar: what is behind it says more.
_NARROW_COLUMNS = 100
#: Before this share a rate says nothing: the first files are small, and a step waits until nothing changes in it.
_RATE_FROM_SHARE = 0.01
_RATE_OVER_S = 5.0
_REDRAW_EVERY_S = 0.1


class ProgressLine:
    """Shows what an operation tells of itself: `bytes`, `bytes_total`, `path`, `files`, `steps_done`, `steps_total`,
    and `waiting_for`, a sentence. As a context manager it takes the line away at the end."""

    def __init__(self, verb: str, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._verb = verb
        self._stream = stream or sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._width = 0
        self._drawn_at = 0.0
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, progress: Mapping[str, Any]) -> None:
        now = time.monotonic()
        done, total = progress.get("bytes") or 0, progress.get("bytes_total") or 0
        if not self._enabled or (now - self._drawn_at < _REDRAW_EVERY_S and (not total or done < total)):
            return
        self._drawn_at = now
        self._seen.append((now, done))
        while now - self._seen[0][0] > _RATE_OVER_S:
            self._seen.popleft()
        from mount.cli.tables import Screen, plain

        screen = Screen.of(self._stream)
        columns = shutil.get_terminal_size().columns - 1
        width = _BAR_WIDTH if columns >= _NARROW_COLUMNS else _NARROW_BAR_WIDTH
        text = plain(progress_text(self._verb, progress, self._rate(), unicode=screen.unicode, width=width), screen)
        text = text if len(text) <= columns else text[: max(0, columns - 3)] + "..."
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def _rate(self) -> float:
        """Bytes a second over the last seconds; 0 while nobody can tell."""
        (then, before), (now, done) = self._seen[0], self._seen[-1]
        return max(0.0, (done - before) / (now - then)) if now - then > 0.5 else 0.0


def progress_text(
    verb: str, progress: Mapping[str, Any], rate: float, *, unicode: bool, width: int = _BAR_WIDTH
) -> str:
    """`sending [####----] 40% of 3 GiB, 420 MiB/s, 4 s left, 1 of 2 steps: run1/step_5`, of that what is known."""
    from tierfs.units import format_age, format_size

    done, total = progress.get("bytes") or 0, progress.get("bytes_total") or 0
    parts = []
    if total:
        share = min(1.0, done / total)
        full = int(share * width)
        bar = ("█" if unicode else "#") * full + ("░" if unicode else ".") * (width - full)
        parts.append(f"{verb} [{bar}] {share:4.0%} of {format_size(total)}")
    else:
        parts.append(f"{verb} {format_size(done)}" if done else verb)
    if rate and (not total or done >= total * _RATE_FROM_SHARE):
        parts.append(f"{format_size(rate)}/s")
        if total > done:
            parts.append(f"{format_age((total - done) / rate)} left")
    if progress.get("steps_total"):
        steps = progress["steps_total"]
        parts.append(f"{progress.get('steps_done') or 0} of {steps} step{'s' * (steps != 1)}")
    elif progress.get("files") is not None:
        parts.append(f"{progress['files']} file{'s' * (progress['files'] != 1)}")
    text = ", ".join(parts)
    if progress.get("waiting_for"):
        return f"{text}; waiting: {progress['waiting_for']}"
    return f"{text}: {progress['path']}" if progress.get("path") else text
