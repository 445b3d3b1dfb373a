"""The command of the settings that is run for each event."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from typing import Any

import trio

from tierfs.errors import SettingsError, TierfsError

#: What of a command's output is said where it fails, characters.
SHOWN = 500
#: A command that was killed has ended within this.
_KILLED_WITHIN_S = 5.0


class CommandHook:
    """`deliver` runs the command with the event in its environment, and on its standard input as JSON.

    TIERFS_EVENT is the kind; each fact is TIERFS_EVENT_ and its name in capitals, such as TIERFS_EVENT_STEP; one that
    is not known is empty. SettingsError where the command can't be split.
    """

    name = "command"

    def __init__(self, command: str, *, within_s: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise SettingsError(f"events.command can't be split into words: {error}", key="events.command") from None
        self._within_s = within_s

    async def deliver(self, event: dict[str, Any]) -> None:
        """Returns once it ended with 0; TierfsError otherwise. Once only: it may have done something already."""
        given = {f"TIERFS_EVENT_{key.upper()}": "" if value is None else str(value) for key, value in event.items()}
        given["TIERFS_EVENT"] = given.pop("TIERFS_EVENT_EVENT")
        try:
            process = await trio.lowlevel.open_process(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **given},
                start_new_session=True,  # so that what it starts itself is killed with it
            )
        except OSError as error:
            raise TierfsError(f"{self._words[0]} can't be run: {error.strerror}") from None
        said = bytearray()
        try:
            with trio.move_on_after(self._within_s) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_give, process, json.dumps(event).encode() + b"\n")
                    nursery.start_soon(_take, process, said)
                    await process.wait()
                    with trio.move_on_after(0.1):  # a child of its own may hold the pipe open
                        await trio.sleep_forever()
                    nursery.cancel_scope.cancel()
        finally:
            await _end(process)
        if scope.cancelled_caught:
            raise TierfsError(f"{self._words[0]} was killed after {self._within_s:.0f} s")
        if process.returncode:
            text = said.decode("utf-8", "replace").strip()[:SHOWN]
            raise TierfsError(f"{self._words[0]} ended with {process.returncode}: {text or 'it said nothing'}")


async def _give(process: trio.Process, data: bytes) -> None:
    if process.stdin is not None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it need not read
            await process.stdin.send_all(data)
            await process.stdin.aclose()


async def _take(process: trio.Process, said: bytearray) -> None:
    """All is read, so that it is never stopped by a full pipe; the beginning is kept."""
    if process.stderr is not None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for piece in process.stderr:
                said += piece[: max(0, 4 * SHOWN - len(said))]


async def _end(process: trio.Process) -> None:
    """Kill it with all that it started, if it still runs; also where this task is being cancelled."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(_KILLED_WITHIN_S, shield=True):
            await process.wait()
    with trio.CancelScope(shield=True):
        for stream in (process.stdin, process.stderr):
            if stream is not None:
                with suppress(trio.BrokenResourceError):
                    await trio.aclose_forcefully(stream)
