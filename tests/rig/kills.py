"""SIGKILL for the processes of an instance, and how to know that they are gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rig.instance import Instance, wait_until


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_keeper_and_daemon(instance: Instance) -> None:
    """Both at once; the mount is dead then, and `instance.mount()` finds what is in RAM."""
    status = instance.status()
    for pid in (status["keeper_pid"], status["daemon_pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(status["daemon_pid"]), "the daemon is gone")


def kill_daemon(instance: Instance) -> None:
    """Returns when the keeper's next one answers."""
    pid = instance.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    instance.wait_for_new_daemon(pid)


def workers(daemon: int) -> list[int]:
    """The daemon's processes that talk to the object store."""
    found = []
    for task in Path(f"/proc/{daemon}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"tierfs.objects.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def kill_worker(instance: Instance) -> None:
    """One of them, where there is any now; the daemon starts another."""
    for pid in workers(instance.daemon_pid())[:1]:
        os.kill(pid, signal.SIGKILL)
