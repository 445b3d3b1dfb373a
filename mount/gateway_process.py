"""The gateway's process as the daemon sees it: started, watched, ended with the mount, and taken over from a daemon
that died, since the mount lived on and so did the requests of the gateway's clients."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import trio

import tierfs
from mount.cluster_check import cannot_listen
from mount.daemon_process import describe_status
from mount.processes import package_environment
from mount.runtime import Instance, read_process, write_atomically, write_process
from tierfs.errors import InstanceError, MountError, SettingsError
from tierfs.sagemaker.layout import step_name
from tierfs.settings import GatewaySettings, Settings
from tierfs.steps.names import StepNames

log = logging.getLogger("tierfs.gateway")

READY_FD = "TIERFS_GATEWAY_READY_FD"
"""Variable with the number of the pipe on which it says that it serves."""
PAUSE_S = 1.0
_READY_WITHIN_S = 20.0
_END_WITHIN_S = 3.0
_PACKAGES = ("h11", "xxhash")


def check_gateway(settings: Settings, instance: Instance) -> None:
    """SettingsError where a package is missing or its steps are none by the settings, MountError where it can't listen.
    Ends what an instance that was killed left. For an instance that is not mounted."""
    from tierfs.transport.addresses import join_address, split_setting

    if not settings.gateway.listen:
        return
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise SettingsError(
            f"gateway.listen needs {' and '.join(missing)}: pip install 'tierfs[sagemaker]'", key="gateway.listen"
        )
    if StepNames(settings.steps.patterns).number(step_name(0)) is None:
        raise SettingsError(
            "gateway.listen needs steps that are named step_N: add step_(?P<step>[0-9]+) to steps.patterns",
            key="steps.patterns",
        )
    end_leftover(instance)
    for host, port in split_setting(settings.gateway.listen, "gateway.listen"):
        problem = cannot_listen(host, port)
        at = f"{join_address(host, port)} (gateway.listen)"
        if problem == errno.EADDRINUSE:
            raise MountError(f"another program listens at {at}: name another port, or end that program")
        if problem:
            raise MountError(f"the gateway can't listen at {at}: {os.strerror(problem)}")


def end_leftover(instance: Instance) -> None:
    """Of an instance whose mount is gone: its gateway serves nobody."""
    process = read_process(instance.gateway_pid)
    if process is None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        if process.wait(_END_WITHIN_S):
            return


class GatewayProcess:
    """One gateway, for as long as the mount."""

    def __init__(self, instance: Instance, settings: GatewaySettings) -> None:
        self._instance = instance
        self._starts_as = {**asdict(settings), "version": tierfs.__version__}
        self._child: subprocess.Popen[bytes] | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started once it serves. Raises InstanceError when it ended by itself; cancelled, it ends it."""
        pidfd = await self._adopt()
        if pidfd is None:
            pidfd = await self._start()
        try:
            task_status.started()
            await trio.lowlevel.wait_readable(pidfd)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._end(pidfd)
            raise
        finally:
            os.close(pidfd)
        raise InstanceError(f"the gateway's process ended by itself ({self._status()})")

    async def _adopt(self) -> int | None:
        process = read_process(self._instance.gateway_pid)
        pidfd = process.pidfd() if process is not None else None
        if process is None or pidfd is None:
            return None
        if self._was_started_as() != self._starts_as:
            os.close(pidfd)
            log.info(
                "the gateway (process %d) is exchanged for one of this version and with these settings", process.pid
            )
            await trio.to_thread.run_sync(end_leftover, self._instance)
            return None
        log.info("the gateway (process %d) goes on", process.pid)
        return pidfd

    def _was_started_as(self) -> object:
        try:
            return json.loads(_start_file(self._instance).read_text())
        except (OSError, ValueError):
            return None

    async def _start(self) -> int:
        reading = self._spawn()
        assert self._child is not None
        pidfd = os.pidfd_open(self._child.pid)
        try:
            if not await _hear_ready(reading):
                raise InstanceError(f"the gateway does not serve ({self._status()}); its log gateway.log says why")
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._end(pidfd)
            os.close(pidfd)
            raise
        finally:
            os.close(reading)
        return pidfd

    def _spawn(self) -> int:
        """The pipe on which it says that it serves."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "mount.gateway.main", str(self._instance.directory)],
                stdin=subprocess.DEVNULL,
                env={**package_environment(), READY_FD: str(writing)},
                pass_fds=(writing,),
                cwd=self._instance.directory,
                start_new_session=True,
            )
        except OSError as error:
            os.close(reading)
            raise InstanceError(f"the gateway can't be started: {error.strerror} ({sys.executable})") from error
        finally:
            os.close(writing)
        write_atomically(_start_file(self._instance), json.dumps(self._starts_as))
        write_process(self._instance.gateway_pid, self._child.pid)
        return reading

    async def _end(self, pidfd: int) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                break
            with trio.move_on_after(_END_WITHIN_S):
                await trio.lowlevel.wait_readable(pidfd)
                break
        if self._child is not None:
            self._child.poll()

    def _status(self) -> str:
        status = self._child.poll() if self._child is not None else None
        return describe_status(status) if status is not None else "it was started by an earlier daemon"


async def _hear_ready(fd: int) -> bool:
    with trio.move_on_after(_READY_WITHIN_S):
        await trio.lowlevel.wait_readable(fd)
        return os.read(fd, 1) != b""
    return False


def _start_file(instance: Instance) -> Path:
    """With what the gateway was started, so that a daemon with other settings does not take it over."""
    return instance.directory / "gateway.json"
