"""The URL of the settings that gets each event as JSON."""

from __future__ import annotations

import http.client
import json
import logging
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import trio

import tierfs
from tierfs.errors import TierfsError

log = logging.getLogger("tierfs.events")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
#: Answers after which the same request may succeed later; others (RFC 9110) say that it never will.
_MAY_PASS = frozenset({408, 425, 429, *range(500, 600)})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the event: it is a failure, and said."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Webhook:
    """`deliver` POSTs the event and tries again what may pass, for `retry_for_s`. By the proxies of the environment.

    The receiver may get an event twice, where its answer was lost: `id` is the same then.
    """

    name = "webhook"

    def __init__(self, url: str, token_file: Path | None, *, within_s: float, retry_for_s: float) -> None:
        self._url = url
        self._token_file = token_file
        self._within_s = within_s
        self._retry_for_s = retry_for_s
        self._opener = urllib.request.build_opener(_NoRedirects())
        self._limiter = trio.CapacityLimiter(1)
        self.retries = 0

    async def deliver(self, event: dict[str, Any]) -> None:
        """Returns once it was accepted (2xx); TierfsError otherwise."""
        body = json.dumps(event).encode()
        until, pause_s = time.monotonic() + self._retry_for_s, FIRST_PAUSE_S
        while True:
            problem, may_pass = await self._attempt(body)
            if not problem:
                return
            if not may_pass or time.monotonic() + pause_s > until:
                raise TierfsError(f"{self._shown} did not take it: {problem}")
            log.debug("%s did not take an event, tried again: %s", self._shown, problem)
            self.retries += 1
            await trio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    @property
    def _shown(self) -> str:
        """Without its query, in which a secret may stand."""
        return self._url.partition("?")[0]

    async def _attempt(self, body: bytes) -> tuple[str, bool]:
        """What is wrong, "" for nothing, and whether that may pass."""
        with trio.move_on_after(2 * self._within_s):  # a name's look-up has no bound of its own
            return await trio.to_thread.run_sync(self._post, body, limiter=self._limiter, abandon_on_cancel=True)
        return f"no answer within {2 * self._within_s:.0f} s", True

    def _post(self, body: bytes) -> tuple[str, bool]:
        headers = {"Content-Type": "application/json", "User-Agent": f"tierfs/{tierfs.__version__}"}
        try:
            if self._token_file is not None:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"  # it may be renewed
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with self._opener.open(request, timeout=self._within_s) as answer:
                answer.read(1 << 16)
                return "", True
        except urllib.error.HTTPError as error:
            with error:
                return f"HTTP {error.code} {error.reason}", error.code in _MAY_PASS
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(getattr(error, "reason", "") or error) or type(error).__name__, not isinstance(error, ValueError)
