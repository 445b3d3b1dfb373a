"""What this process may do beside what its user may (capabilities(7))."""

from __future__ import annotations

from pathlib import Path

# include/uapi/linux/capability.h
IPC_LOCK = 14
SYS_ADMIN = 21
SYS_RESOURCE = 24


def is_capable(capability: int) -> bool:
    """It is in the effective set."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False
