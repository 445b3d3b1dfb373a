"""Which processes take part in writing a step, and whether they are gone.

A process is named by its id and start time, so that a reused id is never taken for it. What a process id means is
the kernel's answer for the mount's own process-id namespace; 0 (a process that can't be seen from there) is no name.
"""

from __future__ import annotations

from pathlib import Path

#: Fields of /proc/PID/stat (proc(5)) counted from the state (field 3), which is the first after the command's name.
_PARENT = 4 - 3
_START_TIME = 22 - 3
_DEAD_STATES = ("Z", "X", "x")
#: How far up from a writer its ancestors are looked at: trainer, a worker of it, a process that the worker forks.
_GENERATIONS_UP = 4


def process_of(thread: int) -> int:
    """The process that a thread belongs to; the same number when there is no such thread.

    A FUSE request names the thread that made it (`fuse_req` in fs/fuse/dev.c takes `task_pid(current)`), and DCP writes
    with threads that end long before the save does.
    """
    try:
        text = Path(f"/proc/{thread}/status").read_text(errors="replace")
    except OSError:
        return thread
    _, _, rest = text.partition("\nTgid:")
    found = rest.partition("\n")[0].strip()
    return int(found) if found.isdigit() else thread


def start_time(pid: int) -> int | None:
    """The start of a living process in clock ticks since boot (proc(5)); None when there is none or it is a zombie."""
    fields = _fields(pid)
    if len(fields) <= _START_TIME or fields[0] in _DEAD_STATES:
        return None
    return int(fields[_START_TIME])


def ancestors(pid: int) -> list[int]:
    """The nearest ancestors of a living process, its parent first."""
    found: list[int] = []
    while len(found) < _GENERATIONS_UP:
        fields = _fields(pid)
        pid = int(fields[_PARENT]) if len(fields) > _PARENT else 0
        if pid <= 1:
            break
        found.append(pid)
    return found


def all_gone(participants: dict[str, int]) -> bool:
    """True when at least one process is known and none of them lives."""
    return bool(participants) and not any(start_time(int(pid)) == start for pid, start in participants.items())


def _fields(pid: int) -> list[str]:
    if pid <= 0:
        return []
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The command's name may hold spaces and parentheses, so the fields are counted from the last parenthesis.
    return text.rpartition(")")[2].split()
