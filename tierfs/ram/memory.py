"""How much memory this process may count on: the machine's, or its control group's where that is less.

Control groups (v1 and v2) limit a whole branch, so each level from the process's own group up to the root counts.
Inside a container the group's path is often not visible under /sys/fs/cgroup; then its root stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GroupFiles:
    """The files of one level of one control group hierarchy."""

    limit: Path
    usage: Path
    statistics: Path
    reclaimable_key: str


def total_memory_bytes() -> int:
    """The least of MemTotal and every control group limit above this process."""
    total = _meminfo()["MemTotal"]
    for group in _groups():
        limit = _number(group.limit)
        if limit is not None:
            total = min(total, limit)
    return total


def available_memory_bytes() -> int:
    """What can be taken now without swapping or meeting a limit: MemAvailable, or less where a group allows less."""
    memory = _meminfo()
    available = memory.get("MemAvailable", memory["MemFree"])
    for group in _groups():
        limit, usage = _number(group.limit), _number(group.usage)
        if limit is None or usage is None or limit >= memory["MemTotal"]:
            continue
        available = min(available, max(0, limit - usage + _reclaimable(group)))
    return available


def _meminfo() -> dict[str, int]:
    values = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            key, _, rest = line.partition(":")
            values[key] = int(rest.split()[0]) * 1024
            if key == "MemAvailable":
                break
    return values


def _groups() -> Iterator[GroupFiles]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for level in _levels(_CGROUP_ROOT, path):
                yield GroupFiles(level / "memory.max", level / "memory.current", level / "memory.stat", "inactive_file")
        elif "memory" in controllers.split(","):
            for level in _levels(_CGROUP_ROOT / "memory", path):
                yield GroupFiles(
                    level / "memory.limit_in_bytes",
                    level / "memory.usage_in_bytes",
                    level / "memory.stat",
                    "total_inactive_file",
                )


def _levels(root: Path, path: str) -> Iterator[Path]:
    level = root / path.strip("/")
    if ".." in level.parts or not level.is_dir():
        level = root
    while True:
        yield level
        if level == root:
            return
        level = level.parent


def _number(path: Path) -> int | None:
    """The file's number; None where there is no such file or it says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(group: GroupFiles) -> int:
    try:
        with group.statistics.open(encoding="ascii") as lines:
            for line in lines:
                key, _, value = line.partition(" ")
                if key == group.reclaimable_key:
                    return int(value)
    except OSError:
        pass
    return 0
