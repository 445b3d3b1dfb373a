"""A step that was saved, as a handle: how durable it is, waiting for more, and a future of it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

from dcp_compat.mounts import attribute, is_tierfs, reaches, wish
from tierfs.errors import LevelNotReached

_FIRST_LOOK_S = 0.01
_LOOK_EVERY_S = 0.25


class SavedStep:
    """The step as it was saved: what is saved over it later is another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_tierfs = is_tierfs(path)
        self._generation = ""
        self.level()

    def level(self) -> str:
        """`ram`, `replica` or `object`; "" while it is not complete. LevelNotReached when it is gone."""
        if not self._is_tierfs:
            return "ram" if self.path.is_dir() else ""
        state, generation = attribute(self.path, "state"), attribute(self.path, "generation")
        if self._generation and (state == "" or generation != self._generation):
            raise LevelNotReached(f"{self.path} was {'removed' if state == '' else 'saved again'} meanwhile")
        if state == "complete":
            self._generation = generation
        return attribute(self.path, "level")

    def reached(self, level: str) -> bool:
        """True once the step is as durable as `level`. LevelNotReached, ValueError."""
        return reaches(self.level(), level)

    def wait(self, level: str = "object", timeout_s: float | None = None) -> None:
        """Until the step is as durable as `level`, for `timeout_s` seconds at most (None: for ever).

        Raises LevelNotReached when the time is over, the step is gone or was saved again, or nothing would ever take it
        there: on another file system than tierfs.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_LOOK_S
        while not self.reached(level):
            if not self._is_tierfs:
                raise LevelNotReached(f"{self.path} is on no tierfs mount: nothing takes it to {level!r}")
            if deadline is not None and time.monotonic() >= deadline:
                raise LevelNotReached(
                    f"{self.path} is not {level!r} within {timeout_s:g} s but {self.level() or 'being written'!r}; "
                    "`tierfs status` says what it waits for"
                )
            time.sleep(pause_s)
            pause_s = min(_LOOK_EVERY_S, pause_s * 1.5)

    def future(self, level: str = "object", timeout_s: float | None = None) -> Future[Path]:
        """Its result is the step's path, once it is as durable as `level`; its exception what `wait` raises."""
        future: Future[Path] = Future()

        def run() -> None:
            try:
                self.wait(level, timeout_s)
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)
            else:
                future.set_result(self.path)

        reaches("ram", level)  # a level that is none is the caller's mistake
        future.set_running_or_notify_cancel()
        threading.Thread(target=run, name=f"tierfs-wait-{self.path.name}", daemon=True).start()
        return future

    def persist(self) -> bool:
        """Has it sent to the object tier now, whatever was asked for before. False where there is none. OSError."""
        return self._is_tierfs and wish(self.path, "tiers", "ram,replica,object")
