"""The control operations that are about the local disk: what `tierfs wait --level disk`, `verify --tier disk` and,
where there is no other tier, `prefetch` ask of a running daemon.

Answers are the `--json` contract of the command line (docs/cli.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mount.object_operations import globs_of, path_of, paths_of, seconds_of, telling
from tierfs.errors import SettingsError

if TYPE_CHECKING:
    from mount.control import Progress

Tell = Callable[[dict[str, Any]], Awaitable[None]]

NO_DISK_TIER = "no disk tier: mount with -o disk.path=DIRECTORY"


class DiskWork(Protocol):
    """What does the work: `tierfs.disk.operations.DiskOperations`. Paths are from the mount's root."""

    def status(self) -> dict[str, Any]: ...

    def problems(self) -> list[dict[str, str]]: ...

    async def wait(self, path: str, /, *, timeout_s: float | None, progress: Tell) -> dict[str, Any]: ...

    async def prefetch(self, paths: Sequence[str], /, *, globs: Sequence[str], progress: Tell) -> dict[str, Any]: ...

    async def verify(self, path: str, progress: Tell, /) -> dict[str, Any]: ...


class DiskControl:
    """Without a disk tier all but `status` refuse."""

    def __init__(self, work: DiskWork | None) -> None:
        self._work = work

    @property
    def is_there(self) -> bool:
        return self._work is not None

    @property
    def work(self) -> DiskWork:
        """SettingsError (exit code 2) without a disk tier."""
        if self._work is None:
            raise SettingsError(NO_DISK_TIER, key="disk.path")
        return self._work

    def status(self) -> dict[str, Any] | None:
        return None if self._work is None else self._work.status()

    def problems(self) -> list[dict[str, str]]:
        return [] if self._work is None else self._work.problems()

    async def wait(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, path, timeout_s = self.work, path_of(arguments), seconds_of(arguments)
        return await telling(progress, lambda tell: work.wait(path, timeout_s=timeout_s, progress=tell))

    async def prefetch(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, paths, globs = self.work, paths_of(arguments), globs_of(arguments)
        return await telling(progress, lambda tell: work.prefetch(paths, globs=globs, progress=tell))

    async def verify(self, path: str, progress: Tell) -> dict[str, Any]:
        """Part of the operation `verify`, for what lies on the disk."""
        return await self.work.verify(path, progress)
