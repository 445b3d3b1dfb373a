"""Persist on SIGTERM: a job that is about to lose its nodes has its newest step in the object tier first."""

from __future__ import annotations

import logging
import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from dcp_compat.saved_step import SavedStep
from dcp_compat.steps import latest
from tierfs.errors import LevelNotReached

log = logging.getLogger("tierfs.dcp")


class persist_on_sigterm:
    """A context around the training. At SIGTERM (Slurm's `--signal`, a Kubernetes pod that is deleted) the newest whole
    step of the namespace is sent to the object tier, whatever the policy, and SystemExit(143) ends the training:

        with persist_on_sigterm("run1"):
            train()

    With `stop=False` nothing is raised, and the training looks at `requested` to save once more and end:

        with persist_on_sigterm("run1", stop=False) as termination:
            for step in range(steps):
                ...
                if termination.requested:
                    save(step)
                    break

    Leaving the context waits until that step is there, for `within_s` seconds at most (a pod has 30 in all by default);
    what is not in time is said in the log, and goes on while the daemon lives. For the main thread, as signals are.
    """

    def __init__(
        self,
        namespace: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        within_s: float = 25.0,
        stop: bool = True,
    ) -> None:
        self.requested = False
        self._namespace = namespace
        self._root = root
        self._within_s = within_s
        self._stop = stop
        self._deadline = 0.0
        self._before: Any = None

    def __enter__(self) -> persist_on_sigterm:
        self._before = signal.signal(signal.SIGTERM, self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.requested:
                self._persist()
        finally:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            return  # once more: it is on its way
        self.requested = True
        self._deadline = time.monotonic() + self._within_s
        if self._stop:
            raise SystemExit(128 + number)

    def _persist(self) -> None:
        try:
            newest = latest(self._namespace, root=self._root)
            if newest is None:
                log.warning("SIGTERM: %s has no whole step to persist", self._namespace)
                return
            step = SavedStep(newest.path)
            if step.persist():
                step.wait("object", max(0.0, self._deadline - time.monotonic()))
                log.info("SIGTERM: %s is in the object tier", newest.path)
        except (LevelNotReached, OSError) as failure:  # the process ends all the same
            log.error("SIGTERM: the newest step could not be persisted: %s", failure)
