"""Parts of the daemon that may fail without taking the mount along are begun again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from tierfs.errors import TierfsError

log = logging.getLogger("tierfs.daemon")

PAUSE_S = 10.0

Part = Callable[..., Awaitable[Any]]


async def run_again(
    parts: Sequence[Part],
    what: str,
    *,
    started: Callable[[], None],
    failed: Callable[[str], None],
    pause_s: float = PAUSE_S,
) -> None:
    """Start the parts (each as `nursery.start` wants it), one after the other, and all of them again when one fails.

    A TierfsError (an address that another program has) is logged once, in its own words. Anything else is nobody's
    mistake but ours, and is logged with its traceback. `failed` gets a sentence for people.
    Runs until cancelled. A save in RAM must not suffer from what goes wrong on the way to the object tier.
    """
    logged = ""
    while True:
        try:
            async with trio.open_nursery() as nursery:
                for part in parts:
                    await nursery.start(part)
                started()
        except Exception as error:
            if reasons := _told(error):
                message = f"{what} can't run: {'; '.join(reasons)}. It is tried again every {pause_s:.0f} s"
                if message != logged:
                    log.error("%s", message)
                logged = message
            else:
                message = (
                    f"{what} failed in a way that nobody thought of, and is begun again in {pause_s:.0f} s; see the log"
                )
                log.exception("%s", message)
            failed(message)
        await trio.sleep(pause_s)


def _told(error: BaseException) -> list[str]:
    """What the errors say to people; empty where one of them is none that was foreseen."""
    if isinstance(error, TierfsError):
        return [error.message]
    told: list[str] = []
    for part in getattr(error, "exceptions", ()):
        said = _told(part)
        if not said:
            return []
        told += [each for each in said if each not in told]
    return told
