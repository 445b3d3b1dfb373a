"""From settings and a mount point to a running keeper: what `tierfs mount` and the mount(8) helper share."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mount import kernel_mount
from mount.cluster_check import check_cluster, check_listening
from mount.gateway_process import check_gateway
from mount.processes import package_environment
from mount.runtime import (
    Instance,
    MountRecord,
    already_mounted,
    default_parent,
    instance_name,
    is_running,
    keeper_is_alive,
    log_directory,
    make_instance,
    other_on,
    read_process,
    read_record,
    real_mountpoint,
    write_atomically,
    write_record,
)
from mount.still_sending import end_sending, has_object_tier, is_unmounted
from tierfs.errors import InstanceError, MountError, TierfsError
from tierfs.ram.memory import total_memory_bytes
from tierfs.settings import Settings
from tierfs.settings_sources import load_settings, settings_from_json, settings_to_json, split_mount_options
from tierfs.units import format_size

READY_WITHIN_S = 30.0
SENDING_ENDS_WITHIN_S = 10.0
"""How long a daemon whose mount is gone may take to leave what is owed to the next one."""
_TAIL_LINES = 15
_DAEMON_TAIL_LINES = 3

UNPRIVILEGED_LIMITS = (
    "mounted without root: no kernel passthrough, no ballast and no size limit of its own (the RAM tier is a plain "
    "directory in shared memory), other users only with user_allow_other in /etc/fuse.conf"
)


class LaunchFailed(MountError):
    """The keeper or the first daemon failed; `log_tail` has the last lines that they wrote to `log_path`."""

    def __init__(self, message: str, *, log_path: Path, log_tail: str) -> None:
        super().__init__(message)
        self.log_path = log_path
        self.log_tail = log_tail


@dataclass(frozen=True)
class Prepared:
    """An instance whose keeper can be started."""

    instance: Instance
    settings: Settings
    record: MountRecord
    adopts: bool
    """A daemon of it lives without a keeper: it goes on with the settings it has."""
    replaces: bool
    """It is mounted, and its keeper and daemon are replaced by new ones."""
    notes: tuple[str, ...]
    """What the user should read once it is mounted."""


def prepare_mount(
    mountpoint: Path,
    options: Sequence[str],
    *,
    config: Path | None = None,
    flags: Mapping[str, str] | None = None,
    source: str = "tierfs",
    make_mountpoint: bool = True,
    replace: bool = False,
) -> Prepared:
    """Checks everything that can be checked before, and makes the runtime directory and a missing mount point.

    With `replace` an instance that is mounted there already is no error: its keeper and daemon are to be replaced.

    SettingsError for settings, MountError for the rest: a mount point that is missing its parent, is no directory,
    is not empty (without `-o nonempty`), or is in use by another instance; a name that is mounted already.
    """
    kernel_options = split_mount_options(options).kernel
    if "ro" in kernel_options:
        raise MountError("tierfs can't be mounted read-only: leave out the option `ro`")
    place = real_mountpoint(mountpoint)
    settings = load_settings(config, os.environ, options, flags or {}, default_name=instance_name(place))
    instance = Instance(Path(os.path.realpath(settings.runtime_dir or default_parent())) / settings.name)
    _check_object_tier(settings)
    notes = [*settings.warnings, *filter(None, [check_cluster(settings)])]
    may_send = is_running(instance) and is_unmounted(instance) and has_object_tier(instance)
    if may_send and end_sending(instance, within_s=SENDING_ENDS_WITHIN_S):
        notes.append("the last daemon still sent steps to the object tier; this one goes on with what is owed")
    before = read_record(instance)
    if replace and before is not None and is_running(instance):
        if before.mountpoint != str(place):
            raise MountError(
                f"the instance {instance.name!r} is mounted on {before.mountpoint}, and can be replaced only there"
            )
        write_atomically(instance.next_settings, settings_to_json(settings))
        return Prepared(instance, settings, before, adopts=False, replaces=True, notes=tuple(notes))
    if keeper_is_alive(instance):
        raise already_mounted(instance)
    daemon = read_process(instance.daemon_pid)
    if daemon is not None and before is not None:
        if before.mountpoint != str(place):
            raise MountError(
                f"the instance {instance.name!r} is served on {before.mountpoint} by the daemon {daemon.pid}, whose "
                f"keeper was killed: mount it there again, or unmount it with `tierfs umount {before.mountpoint}`"
            )
        notes.append(f"adopted the running daemon {daemon.pid}; changed settings take effect at the next mount")
        running = settings_from_json(instance.settings.read_text())
        return Prepared(instance, running, before, adopts=True, replaces=False, notes=tuple(notes))

    check_listening(settings)
    check_gateway(settings, instance)
    if settings.size > (memory := total_memory_bytes()):
        notes.append(
            f"the RAM tier of {format_size(settings.size)} is larger than the memory there is, {format_size(memory)}: "
            "steps that fill it leave none for programs"
        )
    crashed = _free_mountpoint(place, instance)
    if before is not None and before.mountpoint != str(place):
        _free_mountpoint(Path(before.mountpoint), instance, must=False)
    nonempty = any("nonempty" in option.split(",") for option in options)
    privileged = os.geteuid() == 0
    made = _check_mountpoint(place, make=make_mountpoint, nonempty=nonempty)
    try:
        make_instance(instance.directory.parent, instance.name)
    except MountError:
        if made:
            place.rmdir()
        raise
    if made:
        notes.append(f"made the directory {place}; `tierfs umount` removes it")
    if not privileged:
        notes.append(UNPRIVILEGED_LIMITS)
    # The directory that a mount made which was never unmounted: the next one's to remove.
    inherited = crashed and before is not None and before.made_mountpoint and before.mountpoint == str(place)
    record = MountRecord(str(place), privileged, made or inherited, source, kernel_options)
    write_atomically(instance.settings, settings_to_json(settings))
    write_record(instance, record)
    return Prepared(instance, settings, record, adopts=False, replaces=False, notes=tuple(notes))


def prepare_upgrade(instance: Instance) -> Prepared:
    """Of a mounted instance, whose keeper and daemon are to be replaced by this version's with the settings they have.
    InstanceError where it is not mounted."""
    record = read_record(instance)
    if record is None or not is_running(instance):
        raise InstanceError(f"the instance {instance.name!r} is not mounted: there is nothing to replace")
    text = instance.settings.read_text()
    write_atomically(instance.next_settings, text)
    return Prepared(instance, settings_from_json(text), record, adopts=False, replaces=True, notes=())


def _check_object_tier(settings: Settings) -> None:
    """SettingsError for a URL that is none, or where the package for it is missing. Asks the store nothing: one that
    can't be reached now is no reason not to mount."""
    if settings.object:
        from tierfs.objects.opening import StoreSettings, open_store

        open_store(StoreSettings(settings.object, settings.s3, 1)).close()


def _free_mountpoint(place: Path, instance: Instance, *, must: bool = True) -> bool:
    """Detaches a dead tierfs mount; whether there was one. A living one stays; with `must` it is refused, since
    mounting would hide it."""
    entry = kernel_mount.find_mount(str(place))
    if entry is None or not entry.is_tierfs:
        return False
    if other := other_on(str(place), instance):
        problem = f"the instance {other.name!r} is mounted on {place} already; unmount it first"
    elif answers(place, timeout_s=2.0):
        problem = f"a tierfs mount that this user knows nothing of is on {place}; unmount it first"
    else:
        kernel_mount.detach_dead(str(place))
        return True
    if must:
        raise MountError(problem)
    return False


def answers(place: Path, *, timeout_s: float) -> bool:
    """Whether the file system at `place` answers a request in time. A thread asks, since it may hang."""
    answered = threading.Event()

    def ask() -> None:
        with suppress(OSError):
            os.statvfs(place)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()


def _check_mountpoint(place: Path, *, make: bool, nonempty: bool) -> bool:
    """Whether it had to be made."""
    if not make and not place.exists():
        raise MountError(f"the mount point {place} does not exist; make it first")
    try:
        place.mkdir()
        return True
    except FileExistsError:
        pass
    except OSError as error:
        raise MountError(f"the mount point {place} can't be made: {error.strerror}; make it first") from error
    if not place.is_dir():
        raise MountError(f"the mount point {place} is not a directory")
    try:
        with os.scandir(place) as entries:
            first = next(entries, None)
    except OSError as error:
        raise MountError(f"the mount point {place} can't be read: {error.strerror}") from error
    if first is not None and not nonempty:
        raise MountError(
            f"the mount point {place} is not empty (it holds {first.name!r}, which the mount would hide); name "
            "another, or mount with -o nonempty"
        )
    return False


def start_detached(
    prepared: Prepared, *, timeout_s: float = READY_WITHIN_S, daemon_module: str = "mount.daemon"
) -> dict[str, Any]:
    """Starts the keeper as a process of its own and waits until the mount answers.

    Returns what the daemon said when it was ready. MountError has the reason and the last lines of the log.
    """
    instance = prepared.instance
    log_path = log_directory(instance, prepared.settings) / "keeper.log"
    daemon_log = log_path.with_name("daemon.log")
    daemon_log_start = daemon_log.stat().st_size if daemon_log.exists() else 0
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    command = [sys.executable, "-m", "mount.keeping", str(instance.directory)]
    command += ["--report-fd", str(writing), "--daemon-module", daemon_module, *["--replace"] * prepared.replaces]
    with open(log_path, "ab") as log_file, os.fdopen(reading, "rb") as report:
        log_start = log_file.tell()
        try:
            keeper = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=package_environment(),
                pass_fds=(writing,),
                cwd=instance.directory,
                start_new_session=True,
            )
        finally:
            os.close(writing)
        said = _hear_report(report.fileno(), timeout_s)
        if said is None:
            keeper.send_signal(signal.SIGTERM)
            said = {"error": f"the mount did not answer within {timeout_s:.0f} s"}
        if "error" in said:
            with suppress(subprocess.TimeoutExpired):
                keeper.wait(10)
            tail = _tail(log_path, log_start)
            if why := _tail(daemon_log, daemon_log_start, lines=_DAEMON_TAIL_LINES):
                tail += f"\nand of {daemon_log}:\n{why}"
            raise LaunchFailed(said["error"], log_path=log_path, log_tail=tail)
        keeper.returncode = 0  # it lives on; keeps subprocess from warning that nobody waited for it
    with suppress(OSError, ValueError):
        told: dict[str, Any] = json.loads(instance.daemon_ready.read_text())
        return told
    return {}


def object_tier_problem(prepared: Prepared) -> str:
    """Of a mount that is just ready: why its object tier can't be used now, "" when it can, or nobody knows yet."""
    from mount.cli.client import request

    if not prepared.settings.object:
        return ""
    try:
        status = request(prepared.instance, "status")
    except TierfsError:
        return ""
    problem = (status.get("object") or {}).get("problem")
    return f"warning: the object tier can't be used now, and steps stay in RAM: {problem}" if problem else ""


def _hear_report(fd: int, timeout_s: float) -> dict[str, Any] | None:
    deadline = time.monotonic() + timeout_s
    heard = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not heard.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        data = os.read(fd, 65536)
        if not data:
            return {"error": "the keeper ended before the mount was ready"}
        heard += data
    said: dict[str, Any] = json.loads(heard)
    return said


def _tail(path: Path, start: int, *, lines: int = _TAIL_LINES) -> str:
    with suppress(OSError), open(path, "rb") as file:
        file.seek(start)
        written = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in written[-lines:])
    return ""
