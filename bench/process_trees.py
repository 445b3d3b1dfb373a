"""What a process and all its descendants cost: CPU time, and memory of their own at its peak."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

SAMPLE_S = 0.02
_TICKS_S = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its descendants that live now."""
    found = [pid]
    for each in found:
        for task in _tasks(each):
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the tree, with that of children that ended and were waited for (proc(5), stat 14-17)."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS_S


def anonymous_bytes(pid: int) -> int:
    """Resident memory of the tree that is no file's: mappings of the RAM tier do not count."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{each}/status").read_text()
            total += int(status.split("RssAnon:")[1].split()[0]) << 10
    return total


class PeakMemory:
    """Looks at a tree's memory every few milliseconds while it is entered; `over_idle_bytes` is the most it grew by."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._idle = self._peak = 0

    @property
    def over_idle_bytes(self) -> int:
        return self._peak - self._idle

    def __enter__(self) -> PeakMemory:
        self._idle = self._peak = anonymous_bytes(self._pid)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._peak = max(self._peak, anonymous_bytes(self._pid))


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
