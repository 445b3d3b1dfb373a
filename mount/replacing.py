"""One keeper takes an instance over from another while programs have files open: for a new version, or from a new pod.

The new one first gets a descriptor of the connection, so that the mount lives whatever becomes of the old one. Then it
asks the old one to let go (`LET_GO`), ends the daemon, and starts its own on the same connection; programs that ask
something meanwhile wait, as after a crash. The old keeper stays as the *spare*: where the new one does not come to
serve, as with a broken version, it takes the instance back.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from contextlib import suppress

from mount import kernel_mount
from mount.handover import take_over_connection
from mount.live_process import LiveProcess
from mount.runtime import Instance, keeper_is_alive, read_daemon_ready, read_process, write_process
from tierfs.errors import MountError

LET_GO = signal.SIGUSR1
"""To a keeper: another one is here. One that doesn't know it ends by it, which costs the mount nothing."""

_SERVES_WITHIN_S = 15.0
_LETS_GO_WITHIN_S = 10.0
_LOCKS_WITHIN_S = 10.0
_LOOK_S = 0.1


def take_from_keeper(instance: Instance) -> int:
    """Makes the keeper of a mounted instance let go. Returns a descriptor of its connection.

    MountError, and everything stays as it is: no daemon of it serves, its connection can't be had or taken over
    (before Linux 6.9, `resend=off`), or its keeper does not let go.
    """
    daemon = _serving_daemon(instance)
    if not (read_daemon_ready(instance) or {}).get("resend"):
        raise MountError(
            f"a daemon of {instance.name!r} can't be replaced while it is mounted: the kernel (before Linux 6.9) or "
            "`resend = off` does not send unanswered requests again; unmount it, then mount it"
        )
    connection = take_over_connection(instance, daemon)
    try:
        keeper = read_process(instance.keeper_pid)
        if keeper is not None and keeper_is_alive(instance):
            keeper.send_signal(LET_GO)
            deadline = time.monotonic() + _LETS_GO_WITHIN_S
            while keeper_is_alive(instance):
                if time.monotonic() > deadline:
                    raise MountError(f"the keeper {keeper.pid} of {instance.name!r} does not let go of the mount")
                time.sleep(_LOOK_S / 5)
    except BaseException:
        os.close(connection)
        raise
    return connection


def _serving_daemon(instance: Instance) -> LiveProcess:
    """Waits for a daemon that was just started again."""
    deadline = time.monotonic() + _SERVES_WITHIN_S
    while True:
        daemon = read_process(instance.daemon_pid)
        if daemon is not None and _is_served(instance):
            return daemon
        if time.monotonic() > deadline:
            raise MountError(
                f"no daemon of {instance.name!r} serves now; `tierfs status {instance.name}` and its log say why"
            )
        time.sleep(_LOOK_S / 5)


def become_spare(instance: Instance) -> int:
    """Before the keeper's lock is given up: who comes next can see that somebody would take the instance back. Returns
    the pid of the daemon that served until now."""
    write_process(instance.spare_pid, os.getpid())
    daemon = read_process(instance.daemon_pid)
    return daemon.pid if daemon is not None else -1


def has_spare(instance: Instance) -> bool:
    return read_process(instance.spare_pid) is not None


def stand_by(
    instance: Instance, mountpoint: str, connection: int, wake: socket.socket, *, served_by: int, stays: bool
) -> bool:
    """The spare's wait. True where it must take the instance back; else `connection` is closed, and it may end.

    `wake` is where the numbers of signals arrive, `served_by` what `become_spare` returned. With `stays` only SIGTERM
    or SIGINT ends it: whoever started it would start it again. Without, it ends once the other keeper's daemon serves,
    or the mount is gone.
    """
    deadline = time.monotonic() + _LOCKS_WITHIN_S
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    while not (poll.poll(int(_LOOK_S * 1000)) and _was_told_to_stop(wake)):
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)  # the daemon was this process's child
        if connection >= 0 and not _is_mounted(mountpoint, connection):
            os.close(connection)  # held open, it would let programs wait for ever
            connection = -1
        if keeper_is_alive(instance):
            if not stays and _is_served(instance, not_by=served_by):
                break
        elif connection >= 0 and (_was_taken(instance) or time.monotonic() > deadline):
            instance.spare_pid.unlink(missing_ok=True)
            return True
        if connection < 0 and not stays:
            break
    if connection >= 0:
        os.close(connection)
    spare = read_process(instance.spare_pid)
    if spare is not None and spare.pid == os.getpid():
        instance.spare_pid.unlink(missing_ok=True)
    return False


def _is_mounted(mountpoint: str, connection: int) -> bool:
    entry = kernel_mount.find_mount(mountpoint)
    return entry is not None and entry.is_tierfs and kernel_mount.connection_is_alive(connection)


def _was_taken(instance: Instance) -> bool:
    """Whether another keeper came as far as to write itself down; it may have ended since."""
    with suppress(OSError):
        return instance.keeper_pid.read_text().split()[:1] != [str(os.getpid())]
    return True


def _is_served(instance: Instance, *, not_by: int = -1) -> bool:
    daemon, said = read_process(instance.daemon_pid), read_daemon_ready(instance)
    return daemon is not None and said is not None and said.get("pid") == daemon.pid != not_by


def _was_told_to_stop(wake: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return any(number in (signal.SIGTERM, signal.SIGINT) for number in wake.recv(64))
    return False
