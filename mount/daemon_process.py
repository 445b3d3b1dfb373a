"""The daemon as its keeper sees it: a process to start, to hear and to watch.

It is started as `python -m mount.daemon R fresh|takeover`, with the connection's descriptor number in TIERFS_FUSE_FD
and that of a pipe in TIERFS_READY_FD, on which it writes one line of JSON such as `{"resend": true}` once it serves.
Exit status 0 means that the mount is gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from mount.live_process import LiveProcess
from mount.processes import FUSE_FD, READY_FD, package_environment
from mount.runtime import Instance, lock_daemon, write_process
from tierfs.errors import MountError

log = logging.getLogger("tierfs.keeper")


@dataclass
class DaemonProcess:
    """A started or adopted daemon. `pidfd` is the caller's to close; it becomes readable when the daemon ends."""

    process: LiveProcess
    pidfd: int
    child: subprocess.Popen[bytes] | None = None
    """None for an adopted daemon."""
    ready_pipe: int | None = None
    ready: bool = False
    started: float = field(default_factory=time.monotonic)
    """time.monotonic()"""

    def hear_ready(self) -> dict[str, Any] | None:
        """What it says on its pipe, which is readable; None when the pipe ended without a word."""
        assert self.ready_pipe is not None
        line = os.read(self.ready_pipe, 65536)
        self.close_ready_pipe()
        if not line:
            return None
        self.ready = True
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        return said if isinstance(said, dict) else {}

    def close_ready_pipe(self) -> None:
        if self.ready_pipe is not None:
            os.close(self.ready_pipe)
            self.ready_pipe = None

    def exit_status(self) -> int | None:
        """Of a daemon that has ended; None for an adopted one, whose status only its parent could learn."""
        return self.child.wait() if self.child is not None else None


def start_daemon(instance: Instance, module: str, mode: str, fuse_fd: int) -> DaemonProcess:
    """Starts `module` on the connection and writes its pid file.

    MountError when it can't be started, or another daemon still works on the tier.
    """
    lock = lock_daemon(instance)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    environment = package_environment()
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"):  # these are the keeper's own
        environment.pop(name, None)
    environment |= {FUSE_FD: str(fuse_fd), READY_FD: str(writing)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(instance.directory), mode],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # whatever it prints belongs into the log
            env=environment,
            pass_fds=(fuse_fd, writing, lock),  # the lock is only held
            cwd=instance.directory,
            start_new_session=True,  # a Ctrl-C in the keeper's terminal is the keeper's to pass on
        )
    except OSError as error:
        os.close(reading)
        raise MountError(f"the daemon can't be started: {error.strerror} ({sys.executable})") from error
    finally:
        os.close(writing)
        os.close(lock)
    log.info("started the daemon %d (%s)", child.pid, mode)
    process = write_process(instance.daemon_pid, child.pid) or LiveProcess(child.pid, 0)
    pidfd = os.pidfd_open(child.pid)  # it is not reaped yet, so the pid is still its own
    return DaemonProcess(process, pidfd, child, reading)


def describe_status(status: int) -> str:
    """For people: `killed by SIGKILL`, `exit status 1`."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
