"""What the gateway asks its instance's daemon, over the control socket as the command line does. Blocking: for threads.

Asked by name of the step rather than read from the mount, because only the daemon knows whether a step is whole on all
nodes; extended attributes would say it, but not before Linux 6.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mount.cli.client import request
from mount.runtime import Instance
from tierfs.errors import NotAStep, NotFound


class Daemon:
    """Raises InstanceError when no daemon answers in time; one that is just being replaced is waited for."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def step(self, rel: str) -> Mapping[str, Any] | None:
        """What is known of the step; None where there is none. See `tierfs stat --json`."""
        try:
            found: Mapping[str, Any] | None = request(self._instance, "stat", path=rel)["step"]
        except (NotFound, NotAStep):
            return None
        return found

    def complete_steps(self, namespace: str) -> list[str]:
        """The names of the complete steps in it, in no order."""
        try:
            entries = request(self._instance, "ls", path=namespace)["entries"]
        except NotFound:
            return []
        return [each["name"] for each in entries if each["step"] and each["state"] == "complete"]

    def commit(self, rel: str) -> None:
        """Declares a step complete that has no marker. CommitRefused, StepBusy."""
        request(self._instance, "commit", path=rel)

    def remove(self, rel: str) -> None:
        """Removes a step, as `tierfs rm` does. StepBusy while a file of it is being written."""
        with suppress(NotFound, NotAStep):
            request(self._instance, "rm", path=rel)


def is_whole(step: Mapping[str, Any] | None) -> bool:
    """Complete, not being changed, and each of its bytes to be had somewhere."""
    if step is None or step["state"] != "complete" or step["overwriting"]:
        return False
    replica = step.get("replica") or {}
    return step["level"] == "object" or replica.get("state") != "lost"
