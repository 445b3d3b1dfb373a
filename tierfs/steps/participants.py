"""Which processes take part in writing a step, and whether they are gone.

A process is named by its id and start time, so that a reused id is never taken for it. What a process id means is
the kernel's answer for the mount's own process-id namespace; 0 (a process that can't be seen from there) is no name.
"""

from __future__ import annotations

from pathlib import Path

#: Field 22 of /proc/PID/stat, counted from the state (field 3), which is the first one after the command's name.
_START_TIME = 22 - 3
_DEAD_STATES = ("Z", "X", "x")


def start_time(pid: int) -> int | None:
    """The start of a living process in clock ticks since boot (proc(5)); None when there is none or it is a zombie."""
    if pid <= 0:
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name may hold spaces and parentheses, so the fields are counted from the last parenthesis.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_TIME or fields[0] in _DEAD_STATES:
        return None
    return int(fields[_START_TIME])


def all_gone(participants: dict[str, int]) -> bool:
    """True when at least one process is known and none of them lives."""
    return bool(participants) and not any(start_time(int(pid)) == start for pid, start in participants.items())
