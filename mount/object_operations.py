"""The control operations that are about the object tier: what `tierfs flush, wait, prefetch, import, repair, verify`
and `umount` ask of a running daemon.

Answers are the `--json` contract of the command line (docs/cli.md). Each may take long, so each says how far it is, and
says it again every few seconds though nothing moved: a client can tell slow from dead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import trio

from mount.leaving import Leaving
from tierfs.errors import PathRefused, SettingsError
from tierfs.steps.names import safe_relative

if TYPE_CHECKING:
    from mount.control import Operation, Progress

Tell = Callable[[dict[str, Any]], Awaitable[None]]

HEARTBEAT_S = 5.0
NO_OBJECT_TIER = "no object tier: mount with -o object=file:///... or s3://..."
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)


class ObjectWork(Protocol):
    """What does the work: `tierfs.persist.operations.ObjectOperations`. Paths are from the mount's root."""

    async def flush(self, paths: Sequence[str], /, *, wait: bool, progress: Tell) -> dict[str, Any]: ...

    async def wait(self, path: str, /, *, level: str, timeout_s: float | None, progress: Tell) -> dict[str, Any]: ...

    async def prefetch(self, paths: Sequence[str], /, *, globs: Sequence[str], progress: Tell) -> dict[str, Any]: ...

    async def verify(self, path: str, progress: Tell, /) -> dict[str, Any]: ...

    async def repair(self, path: str, /, *, dry_run: bool, progress: Tell) -> dict[str, Any]: ...

    async def adopt(self, path: str, progress: Tell, /, *, force: bool = False) -> dict[str, Any]: ...

    async def drain(self, progress: Tell, /, *, timeout_s: float | None = None) -> dict[str, Any]: ...

    async def status(self) -> dict[str, Any]: ...


class ObjectControl:
    """The operations of one instance, by name in `table()`. Without an object tier all but the draining refuse."""

    def __init__(self, work: ObjectWork | None, leaving: Leaving) -> None:
        self._tier = work
        self._leaving = leaving

    def table(self) -> dict[str, Operation]:
        """Name → operation, as `ControlServer` takes them."""
        return {
            "flush": self.flush,
            "wait": self.wait,
            "prefetch": self.prefetch,
            "repair": self.repair,
            "import": self.adopt,
            "drain": self.drain,
            "stop-draining": self.stop_draining,
        }

    @property
    def is_there(self) -> bool:
        return self._tier is not None

    @property
    def work(self) -> ObjectWork:
        """SettingsError (exit code 2) without an object tier."""
        if self._tier is None:
            raise SettingsError(NO_OBJECT_TIER, key="object")
        return self._tier

    async def status(self) -> dict[str, Any] | None:
        """The object tier's part of `status`; None without one."""
        return None if self._tier is None else await self._tier.status()

    async def flush(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, paths, wait = self.work, paths_of(arguments), arguments.get("wait") is True
        return await telling(progress, lambda tell: work.flush(paths, wait=wait, progress=tell))

    async def wait(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        if self._tier is None:
            message = f"{NO_OBJECT_TIER}; --level replica waits for copies on other nodes, disk for the local disk"
            raise SettingsError(message, key="object")
        work, path, level = self.work, path_of(arguments), arguments.get("level", "object")
        timeout_s = seconds_of(arguments)
        if level not in ("ram", "object"):
            raise PathRefused(f"{level!r} is no level to wait for; there are ram and object")
        return await telling(progress, lambda tell: work.wait(path, level=level, timeout_s=timeout_s, progress=tell))

    async def prefetch(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, paths, globs = self.work, paths_of(arguments), globs_of(arguments)
        return await telling(progress, lambda tell: work.prefetch(paths, globs=globs, progress=tell))

    async def verify(self, path: str, progress: Tell) -> dict[str, Any]:
        """Part of the operation `verify`, for what lies in the object tier."""
        return await self.work.verify(path, progress)

    async def repair(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, path, dry_run = self.work, path_of(arguments), arguments.get("dry_run") is True
        return await telling(progress, lambda tell: work.repair(path, dry_run=dry_run, progress=tell))

    async def adopt(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        work, path, force = self.work, path_of(arguments), arguments.get("force") is True
        return await telling(progress, lambda tell: work.adopt(path, tell, force=force))

    async def drain(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """Until nothing is owed, for `seconds` at most. `left` names what is then not durable, and `problem` why."""
        work, timeout_s = self._tier, seconds_of(arguments)
        if work is None:
            return {"steps": 0, "bytes": 0, "left": [], "bytes_left": 0, "problem": ""}

        answer = await telling(progress, lambda tell: work.drain(tell, timeout_s=timeout_s))
        status = await work.status() if answer["left"] else {}
        reasons = [each["error"] for each in status.get("sending", []) if each.get("error")]
        problem = status.get("problem") or next(iter(reasons), "")
        return {**answer, "bytes_left": status.get("bytes_owed", 0), "problem": problem}

    async def stop_draining(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """A daemon whose mount is gone and that still sends what is owed ends now; the next mount goes on with it."""
        return {"stopped": self._leaving.stop()}


async def telling(progress: Progress, work: Callable[[Tell], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """What `work` returns or raises. What it tells goes to `progress`, the last word again every HEARTBEAT_S."""
    last: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    failure: Exception | None = None

    async def tell(values: dict[str, Any]) -> None:
        nonlocal last
        last = dict(values)
        await progress(last)

    async def repeat() -> None:
        while True:
            await trio.sleep(HEARTBEAT_S)
            try:
                await progress(last)
            except _GONE:
                return  # the connection's reader sees it too, and cancels all of this

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repeat)
        try:
            answer = await work(tell)
        except Exception as error:  # bare again below: a nursery would wrap it in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return answer


def path_of(arguments: Mapping[str, Any]) -> str:
    """`path` from the mount's root, "" for all of it. PathRefused."""
    value = arguments.get("path", "")
    if not isinstance(value, str):
        raise PathRefused("the request's 'path' is no text")
    return safe_relative(value) if value else ""


def paths_of(arguments: Mapping[str, Any]) -> list[str]:
    """`paths`, or the one `path`; none means all. The root among them is all as well."""
    values = arguments.get("paths", [])
    if not isinstance(values, list):
        raise PathRefused("the request's 'paths' is no list")
    paths = [path_of({"path": value}) for value in values]
    return [] if "" in paths else paths


def globs_of(arguments: Mapping[str, Any]) -> list[str]:
    """`files`: patterns of paths inside steps; none is every file. PathRefused."""
    values = arguments.get("files", [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise PathRefused("the request's 'files' is no list of patterns")
    return values


def seconds_of(arguments: Mapping[str, Any]) -> float | None:
    """`seconds` is how long it may take; none is for ever. PathRefused."""
    value = arguments.get("seconds")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise PathRefused("the request's 'seconds' is no number of seconds")
    return float(value)
