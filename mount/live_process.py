"""A process known by its pid and its start time, so that another one that was given its pid is never taken for it."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LiveProcess:
    """A process that is known to be the one meant: same pid, same start time, now watched through `pidfd`."""

    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/PID/stat (proc(5))."""

    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None when it has ended already."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if start_time(self.pid) != self.start_time:
            os.close(fd)
            return None
        return fd

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.start_time

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process, never another one that was given its pid meanwhile."""
        fd = self.pidfd()
        if fd is None:
            return
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)

    def wait(self, timeout_s: float) -> bool:
        """True once the process has ended; False when it still lives after `timeout_s`."""
        fd = self.pidfd()
        if fd is None:
            return True
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(max(0, int(timeout_s * 1000))))
        finally:
            os.close(fd)


def start_time(pid: int) -> int | None:
    """Clock ticks since boot; None when there is no such process any more, or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])
