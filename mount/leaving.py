"""The time between the end of a mount and the end of its daemon, in which it sends what is still owed.

The daemon runs `Leaving.send` once its mount is gone. Meanwhile its control socket answers, so that `tierfs status` can
tell of it, and a new mount of the instance can make it stop: what is then still owed is the next daemon's to send.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class Leaving:
    """`is_sending` from the end of the mount to the end of the daemon."""

    def __init__(self) -> None:
        self.is_sending = False
        self._scope: trio.CancelScope | None = None

    async def send(self, drain: Callable[[], Awaitable[object]], *, within_s: float) -> bool:
        """Runs `drain` until it returns, for `within_s` at most. False when it was stopped, or the time was up."""
        self.is_sending = True
        with trio.move_on_after(within_s) as self._scope:
            await drain()
            return True
        return False

    def stop(self) -> bool:
        """Ends `send`. False when it does not run: the mount is still there, or programs still use its files."""
        if self._scope is None:
            return False
        self._scope.cancel()
        return True
