"""Work with a running account of it: for commands that show progress while several things go on at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import trio

Progress = Callable[[dict[str, Any]], Awaitable[None]]
T = TypeVar("T")

#: Often enough for a progress bar.
EVERY_S = 0.2


async def reporting(
    work: Callable[[], Awaitable[T]],
    report: Callable[[], dict[str, Any]],
    progress: Progress,
) -> T:
    """Do the work, and meanwhile and at its end tell what `report` says. What either raises is raised as it is.

    Nobody to tell any more (`progress` raises) ends the work.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async def tell() -> None:
        try:
            while True:
                await progress(report())
                await trio.sleep(EVERY_S)
        except Exception as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            results.append(await work())
        except Exception as error:
            errors.append(error)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    await progress(report())
    return results[0]


async def all_of(jobs: Iterable[Callable[[], Awaitable[None]]], *, at_once: int) -> None:
    """Run the jobs, so many at a time; the first that fails ends the others and is raised as it is."""
    errors: list[Exception] = []
    slots = trio.Semaphore(at_once)

    async def run(job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception as error:
            errors.append(error)
            nursery.cancel_scope.cancel()
        finally:
            slots.release()

    async with trio.open_nursery() as nursery:
        for job in jobs:
            await slots.acquire()
            nursery.start_soon(run, job)
    if errors:
        raise errors[0]
