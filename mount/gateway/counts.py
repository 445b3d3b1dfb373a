"""What the gateway has done, for `tierfs status`: counted here, and left in a file that the daemon reads."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trio

from mount.runtime import write_atomically

log = logging.getLogger("tierfs.gateway")

_WRITE_EVERY_S = 1.0


@dataclass
class Counts:
    """Since this gateway began. Answers of 4xx are `refused`, of 5xx `failed`; the bytes are those of bodies."""

    started_at: float = field(default_factory=time.time)
    connections: int = 0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def answered(self, status: int) -> None:
        self.requests += 1
        self.refused += 400 <= status < 500
        self.failed += status >= 500

    async def keep(self, path: Path) -> None:
        """Leaves them at `path` whenever they changed, once a second at most."""
        kept = ""
        while True:
            text = json.dumps(asdict(self))
            if text != kept:
                try:
                    write_atomically(path, text)
                    kept = text
                except OSError as error:
                    log.warning("what was served can't be told: %s", error)
            await trio.sleep(_WRITE_EVERY_S)
