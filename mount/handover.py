"""Gets the FUSE connection out of a living daemon whose keeper died, so that a new keeper can hold it.

Two ways: the daemon hands it over its control socket; and where it doesn't answer, the kernel copies the
descriptor (pidfd_getfd(2), Linux 5.6), which asks nothing of the daemon.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from pathlib import Path

from mount.kernel_mount import connection_is_alive
from mount.live_process import LiveProcess
from mount.runtime import Instance, unix_address
from tierfs.errors import InstanceError, MountError

HANDOVER = "handover"
_SYS_PIDFD_GETFD = 438  # the same on every architecture: include/uapi/asm-generic/unistd.h
_libc = ctypes.CDLL(None, use_errno=True)


def take_over_connection(instance: Instance, daemon: LiveProcess, *, timeout_s: float = 5.0) -> int:
    """A descriptor of the daemon's /dev/fuse. MountError says why there is none."""
    try:
        return _ask(instance, timeout_s)
    except (OSError, ValueError, InstanceError) as refused:
        try:
            return _copy(daemon)
        except OSError as error:
            raise MountError(
                f"the daemon {daemon.pid} of {instance.name!r} lives without a keeper, and its connection can't be had "
                f"({refused}; {error.strerror}): unmount it with `tierfs umount`, then mount again"
            ) from error


def _ask(instance: Instance, timeout_s: float) -> int:
    with unix_address(instance.control_socket) as address, socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        connection.sendall(json.dumps({"op": HANDOVER}).encode() + b"\n")
        reply, fds = b"", []
        while not reply.endswith(b"\n"):
            data, received, _, _ = socket.recv_fds(connection, 65536, 4)
            for fd in received:
                os.set_inheritable(fd, False)  # recv_fds passes no flags on
            fds += received
            reply += data
            if not data:
                break
    for fd in fds[1:]:
        os.close(fd)
    if not fds:
        raise InstanceError(f"the control socket answered {reply.decode(errors='replace').strip() or 'nothing'}")
    return fds[0]


def _copy(daemon: LiveProcess) -> int:
    pidfd = daemon.pidfd()
    if pidfd is None:
        raise ProcessLookupError(3, "the daemon has ended", str(daemon.pid))
    try:
        for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
            if os.readlink(entry) != "/dev/fuse":  # noqa: PTH115
                continue
            fd: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, int(entry.name), 0)
            if fd < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            os.set_inheritable(fd, False)
            if connection_is_alive(fd):
                return fd
            os.close(fd)
    finally:
        os.close(pidfd)
    raise OSError(9, "the daemon has no /dev/fuse open")
