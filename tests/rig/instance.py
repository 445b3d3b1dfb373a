"""A mounted instance, handled as a user would: `tierfs mount`, `tierfs status --json`, `tierfs umount`, and signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from mount.cli.client import request
from mount.runtime import Instance as Runtime
from tierfs.errors import TierfsError

TIERFS = Path(sys.executable).parent / "tierfs"
MIB = 1 << 20
#: How long a mount may take. An emulated processor (tests/rdma) starts a daemon in 10 to 30 s, if it is not held back.
MOUNT_S = 100 if os.environ.get("TIERFS_RDMA_VM") else 30
COMMAND_TIMEOUT_S = 30 + MOUNT_S


class CommandFailed(AssertionError):
    """A `tierfs` command ended with an exit code other than 0; the message holds what it printed."""


def tierfs(*arguments: str | Path, timeout_s: float = COMMAND_TIMEOUT_S, may_be_degraded: bool = False) -> str:
    """Runs the `tierfs` command of this virtual environment and returns what it printed.

    CommandFailed for an exit code other than 0, or 3 (something needs attention) where that is expected.
    """
    command = [str(TIERFS), *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode not in ((0, 3) if may_be_degraded else (0,)):
        raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_until(claim: Callable[[], Any], what: str, timeout_s: float = 20, every_s: float = 0.02) -> Any:
    """Returns the first true answer of `claim`; fails with `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = claim()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)


class Instance:
    """One instance. `live` holds those that are mounted now, so that a failing test can show their logs."""

    live: ClassVar[list[Instance]] = []

    def __init__(self, mountpoint: Path, name: str, *, size: str, options: dict[str, str] | None = None) -> None:
        self.mountpoint = mountpoint
        self.name = name
        self.options = {"name": name, "size": size, **(options or {})}
        self._ram_path: Path | None = None

    def mount(self) -> None:
        """Mounts it and returns when it is ready."""
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        tierfs("mount", self.mountpoint, "-o", options, "--timeout", str(MOUNT_S))
        if self not in self.live:
            self.live.append(self)
        self._ram_path = Path(self.status()["ram"]["path"])

    def status(self) -> dict[str, Any]:
        """What `tierfs status --json` prints, asked for without starting a program where it can be: tests poll it."""
        answer: dict[str, Any]
        if self._ram_path is None:
            answer = json.loads(tierfs("status", self.mountpoint, "--json", may_be_degraded=True))
            return answer
        try:
            answer = request(Runtime(self.runtime_path), "status")
        except TierfsError as error:
            raise CommandFailed(f"{self.name} says no status: {error}") from None
        return answer

    def steps(self, namespace: str) -> dict[str, dict[str, Any]]:
        """The steps of a namespace by name, as `tierfs status` tells them."""
        return {step["step"]: step for step in self.status()["steps"] if step["namespace"] == namespace}

    @property
    def ram_path(self) -> Path:
        """Mount point of the RAM tier's tmpfs."""
        assert self._ram_path is not None, "not mounted yet"
        return self._ram_path

    @property
    def runtime_path(self) -> Path:
        return self.ram_path.parent

    def daemon_pid(self) -> int:
        return int(self.status()["daemon_pid"])

    def wait_for_new_daemon(self, old_pid: int, timeout_s: float = 20) -> int:
        """Waits until another daemon than `old_pid` answers, and returns its process id."""

        def new_pid() -> int:
            try:
                pid = self.daemon_pid()
            except CommandFailed:
                return 0
            return pid if pid != old_pid else 0

        return int(wait_until(new_pid, f"another daemon than {old_pid} answers", timeout_s))

    def umount(self) -> None:
        tierfs("umount", self.mountpoint)

    def log(self, lines: int = 60) -> str:
        """The last lines of each log of the instance."""
        parts = []
        for path in sorted((self.runtime_path / "log").rglob("*")):
            if path.is_file():
                tail = path.read_text(errors="replace").splitlines()[-lines:]
                parts.append("\n".join([f"--- {path}", *tail]))
        return "\n".join(parts)

    def discard(self) -> None:
        """Takes everything down whatever state it is in: processes, mount, RAM tier, runtime directory."""
        if self in self.live:
            self.live.remove(self)
        with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):
            tierfs("umount", "--discard", "--no-flush", self.name)
        if self._ram_path is None:
            return
        for name in ("keeper.pid", "daemon.pid"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                _kill_if_tierfs(int((self.runtime_path / name).read_text().split()[0]))
        for path in (self.mountpoint, self._ram_path):
            while _is_mounted(path) and subprocess.run(["umount", "-l", path], capture_output=True).returncode == 0:
                pass
        shutil.rmtree(self.runtime_path, ignore_errors=True)


def _is_mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def _kill_if_tierfs(pid: int) -> None:
    """Kills a process left over, unless its number has meanwhile gone to some other program."""
    if b"mount" in Path(f"/proc/{pid}/cmdline").read_bytes():
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def mounted(directory: Path, name: str, *, size: str, options: dict[str, str] | None = None) -> Iterator[Instance]:
    """An instance mounted below `directory`; nothing of it is left afterwards, also after a failure."""
    instance = Instance(directory / "ckpt", name, size=size, options=options)
    try:
        instance.mount()
        yield instance
    finally:
        instance.discard()
