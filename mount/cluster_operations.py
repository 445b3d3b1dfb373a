"""The control operations that are about the other nodes: what `tierfs nodes, drain, wait --level replica, prefetch,
repair` and `verify --tier replica` ask of a running daemon.

Answers are the `--json` contract of the command line (docs/cli.md).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mount.object_operations import globs_of, path_of, paths_of, seconds_of, telling
from tierfs.errors import SettingsError

if TYPE_CHECKING:
    from mount.control import Operation, Progress

Tell = Callable[[dict[str, Any]], Awaitable[None]]

NO_CLUSTER = "this node is alone: mount with -o catalog=etcd://HOST:PORT to share steps with other nodes"


class ClusterWork(Protocol):
    """What does the work: `tierfs.cluster.operations.ClusterOperations`. Paths are from the mount's root."""

    def nodes(self) -> dict[str, Any]: ...

    def status(self) -> dict[str, Any]: ...

    def problems(self) -> list[dict[str, str]]: ...

    async def wait_replica(self, path: str, /, *, timeout_s: float | None, progress: Tell) -> dict[str, Any]: ...

    async def drain(self, progress: Tell, /, *, timeout_s: float | None) -> dict[str, Any]: ...

    def stop_draining(self) -> bool: ...

    async def prefetch(self, paths: Sequence[str], /, *, globs: Sequence[str], progress: Tell) -> dict[str, Any]: ...

    async def verify(self, path: str, progress: Tell, /) -> dict[str, Any]: ...

    async def repair(self, path: str, progress: Tell, /, *, dry_run: bool) -> dict[str, Any]: ...


class ClusterControl:
    """The operations of one instance. A node that is alone answers `nodes`, and refuses the rest."""

    def __init__(self, work: ClusterWork | None, alone: Callable[[], dict[str, Any]]) -> None:
        """`alone` describes this node as the only one, for `nodes`."""
        self._work = work
        self._alone = alone

    def table(self) -> dict[str, Operation]:
        return {"nodes": self.nodes, "drain-node": self.drain}

    @property
    def work(self) -> ClusterWork:
        """SettingsError (exit code 2) where the node is alone."""
        if self._work is None:
            raise SettingsError(NO_CLUSTER, key="catalog")
        return self._work

    @property
    def is_alone(self) -> bool:
        return self._work is None

    def status(self) -> dict[str, Any] | None:
        """The cluster's part of `status`; None where the node is alone."""
        return None if self._work is None else self._work.status()

    def problems(self) -> list[dict[str, str]]:
        return [] if self._work is None else self._work.problems()

    async def nodes(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        if self._work is not None:
            return self._work.nodes()
        return {"catalog": "embedded", "cluster": "", "connected": True, "nodes": [self._alone()]}

    async def drain(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """With `stop` the node stays after all, and takes copies of others' files again."""
        work, timeout_s = self.work, seconds_of(arguments)
        if arguments.get("stop") is True:
            return {"stopped": work.stop_draining()}
        return await telling(progress, lambda tell: work.drain(tell, timeout_s=timeout_s))

    async def prefetch(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """The operation `prefetch`, where there is no object tier."""
        work, paths, globs = self.work, paths_of(arguments), globs_of(arguments)
        return await telling(progress, lambda tell: work.prefetch(paths, globs=globs, progress=tell))

    async def wait(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """The operation `wait` for the level replica."""
        work, path, timeout_s = self.work, path_of(arguments), seconds_of(arguments)
        return await telling(progress, lambda tell: work.wait_replica(path, timeout_s=timeout_s, progress=tell))

    async def verify(self, path: str, progress: Tell) -> dict[str, Any]:
        """Part of the operation `verify`, for the copies on other nodes."""
        return await self.work.verify(path, progress)

    async def repair(self, path: str, progress: Tell, *, dry_run: bool) -> dict[str, Any]:
        """Part of the operation `repair`, for this node's copies."""
        return await self.work.repair(path, progress, dry_run=dry_run)
