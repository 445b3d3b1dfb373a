"""Notices that this node is about to be taken away: a file that appears, or a command that says so by its exit code."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
from collections.abc import Awaitable, Callable

import trio

from tierfs.settings_cluster import ClusterSettings

log = logging.getLogger("tierfs.cluster")

#: A command that has not ended by then is killed, and has said nothing.
COMMAND_WITHIN_S = 20.0
#: What of a command's output is logged, characters.
_SHOWN = 500


class Notices:
    """Looks every `cluster.notice_every_s`; the first notice calls `on_notice(reason)`, once, and that is all.

    `cluster.notice_command` is split as a shell would (quotes), but no shell runs it: nothing in it is expanded.
    """

    def __init__(self, settings: ClusterSettings, on_notice: Callable[[str], Awaitable[None]]) -> None:
        self._file = settings.notice_file
        self._every_s = settings.notice_every_s
        self._on_notice = on_notice
        self._limiter = trio.CapacityLimiter(1)
        self._told = ""
        try:
            self._command = shlex.split(settings.notice_command)
        except ValueError as error:
            log.error("cluster.notice_command can't be split into words (%s): it is not run", error)
            self._command = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until the notice came and was dealt with; at once where neither is set."""
        task_status.started()
        while self._file is not None or self._command:
            reason = await self._look()
            if reason:
                log.warning("this node is about to be taken away: %s", reason)
                await self._on_notice(reason)
                return
            await trio.sleep(self._every_s)

    async def _look(self) -> str:
        """Why the node has to go, or ""."""
        # In a thread: the file may lie on a share that hangs.
        if self._file is not None and await trio.to_thread.run_sync(
            os.path.lexists, self._file, limiter=self._limiter, abandon_on_cancel=True
        ):
            return f"{self._file} is there"
        return await self._ask_command() if self._command else ""

    async def _ask_command(self) -> str:
        try:
            with trio.fail_after(COMMAND_WITHIN_S):
                done = await trio.run_process(
                    self._command, check=False, stdin=b"", capture_stdout=True, stderr=subprocess.STDOUT
                )
        except trio.TooSlowError:
            self._tell(f"was killed after {COMMAND_WITHIN_S:.0f} s")
            return ""
        except OSError as error:
            self._tell(f"can't be run: {error.strerror}")
            return ""
        said = done.stdout[: 4 * _SHOWN].decode("utf-8", "replace").strip()[:_SHOWN]
        if done.returncode != 0:
            self._tell(f"ended with {done.returncode}: {said}", logging.DEBUG)
            return ""
        return f"{self._command[0]} says so: {said}" if said else f"{self._command[0]} says so"

    def _tell(self, what: str, level: int = logging.WARNING) -> None:
        """Once, as long as it stays the same."""
        if what != self._told:
            self._told = what
            log.log(level, "cluster.notice_command %s", what)
