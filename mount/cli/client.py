"""Asks a running instance over its control socket: one request, lines of progress, one answer."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mount.runtime import (
    Instance,
    all_instances,
    find_instance,
    is_running,
    read_record,
    unix_address,
)
from tierfs import errors
from tierfs.errors import InstanceError, TierfsError

SILENCE_S = 30.0
"""How long an instance may say nothing: no progress and no answer."""
_CONNECT_WITHIN_S = 15.0
_ASKED_AGAIN = frozenset(
    [
        "status",
        "ls",
        "stat",
        "config",
        "wait",
        "verify",
        "flush",
        "prefetch",
        "repair",
        "drain",
        "drain-node",
        "nodes",
        "commit",
        "pin",
        "unpin",
    ]
)
"""What may be asked of the next daemon when one died over it: doing it twice is as doing it once."""
_MOST_DEATHS = 5
_MOST_BYTES = 64 << 20


class _BrokeOff(InstanceError):
    """The daemon was gone before it had answered."""


@dataclass(frozen=True)
class _Patience:
    """How long to listen to one answer, and who hears how far it is."""

    silence_s: float
    within_s: float | None
    deadline: float | None
    on_progress: Callable[[dict[str, Any]], None] | None


class OutOfTime(TierfsError):
    """The time that was given for an operation is up."""


def request(
    instance: str | Instance | None,
    op: str,
    /,
    *,
    timeout_s: float = SILENCE_S,
    within_s: float | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    **arguments: Any,
) -> Any:
    """The answer of a running instance to `op`.

    `instance` is a mount point, a path in it or a name; None is the only one.
    Waits while a daemon that died is being replaced, and asks the new one again where that does no harm. Raises what
    the daemon raised, with its exit code; InstanceError
    (exit code 4) when the instance is not mounted, doesn't answer within `timeout_s` of silence, or there are several;
    OutOfTime when there is no answer `within_s`, though it goes on telling how far it is.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    found = instance if isinstance(instance, Instance) else choose_instance(instance)
    line = json.dumps({"op": op, **arguments}).encode() + b"\n"
    patience = _Patience(timeout_s, within_s, deadline, on_progress)
    deaths = 0
    while True:
        try:
            return _ask(found, line, patience)
        except _BrokeOff:
            deaths += 1
            if op not in _ASKED_AGAIN or deaths > _MOST_DEATHS or not is_running(found):
                raise


def _ask(found: Instance, line: bytes, patience: _Patience) -> Any:
    with _connect(found, patience.deadline) as connection:
        connection.settimeout(patience.silence_s)
        try:
            connection.sendall(line)
            for answer in _lines(connection):
                said = json.loads(answer)
                if "progress" in said:
                    if patience.on_progress is not None:
                        patience.on_progress(said["progress"])
                    if patience.deadline is not None and time.monotonic() > patience.deadline:
                        raise OutOfTime(f"not done within {patience.within_s:g} s; it goes on without this command")
                elif said.get("ok"):
                    return said.get("result")
                else:
                    raise _error(said.get("error") or {})
        except TimeoutError as error:
            raise InstanceError(
                f"{found.name} did not answer for {patience.silence_s:.0f} s; see the log in {found.log_directory}"
            ) from error
        except ConnectionError as error:
            raise _BrokeOff(f"the daemon of {found.name} died before it answered ({error}); try again") from error
        except (OSError, ValueError) as error:
            raise InstanceError(f"the answer of {found.name} broke off ({error}); try again") from error
    raise _BrokeOff(f"{found.name} ended the connection without an answer: its daemon died or ended; try again")


def choose_instance(target: str | None) -> Instance:
    """The instance that `target` names; without a target the only mounted one. InstanceError, NotFound otherwise."""
    if target is not None:
        return find_instance(target, below=True)
    mounted = [one for one in all_instances() if is_running(one)]
    if len(mounted) == 1:
        return mounted[0]
    if not mounted:
        raise InstanceError("no tierfs instance is mounted; `tierfs mount DIR` mounts one")
    names = ", ".join(f"{one.name} on {record.mountpoint}" for one in mounted if (record := read_record(one)))
    raise InstanceError(f"several instances are mounted, name one: {names}")


def _connect(instance: Instance, ends: float | None) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_WITHIN_S
    if ends is not None:
        deadline = min(deadline, ends)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_CONNECT_WITHIN_S)
            with unix_address(instance.control_socket) as address:
                connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:  # the last: many ask already
            connection.close()
            if not is_running(instance):
                raise InstanceError(_not_mounted(instance)) from error
            if time.monotonic() > deadline:
                raise InstanceError(
                    f"{instance.name} is mounted, but its daemon does not come up; see the log in "
                    f"{instance.log_directory}"
                ) from error
            time.sleep(0.05)  # its keeper is just starting another daemon
        except OSError as error:
            connection.close()
            raise InstanceError(
                f"the control socket {instance.control_socket} refuses this user: {os.strerror(error.errno or 0)}"
            ) from error


def _not_mounted(instance: Instance) -> str:
    record = read_record(instance)
    where = f" on {record.mountpoint}; `tierfs mount {record.mountpoint} -o name={instance.name}`" if record else ""
    return f"{instance.name} is not mounted{where}"


def _lines(connection: socket.socket) -> Iterator[bytes]:
    rest = b""
    while data := connection.recv(1 << 18):
        rest += data
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > _MOST_BYTES:
            raise ValueError("an endless line")


def _error(said: dict[str, Any]) -> TierfsError:
    """The daemon's exception again; kinds that this version doesn't know are InstanceErrors."""
    kind = getattr(errors, str(said.get("kind")), None)
    cls = kind if isinstance(kind, type) and issubclass(kind, TierfsError) else InstanceError
    error: TierfsError = cls(str(said.get("message", "failed without a reason")))
    error.exit_code = int(said.get("exit_code", 1))
    return error
