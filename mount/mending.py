"""Parts of the daemon that may fail without taking the mount along are begun again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

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

    What failed is nobody's mistake but ours, so it is logged with its traceback; `failed` gets a sentence for people.
    Runs until cancelled. A save in RAM must not suffer from what goes wrong on the way to the object tier.
    """
    while True:
        try:
            async with trio.open_nursery() as nursery:
                for part in parts:
                    await nursery.start(part)
                started()
        except Exception:
            message = (
                f"{what} failed in a way that nobody thought of, and is begun again in {pause_s:.0f} s; see the log"
            )
            log.exception("%s", message)
            failed(message)
        await trio.sleep(pause_s)
