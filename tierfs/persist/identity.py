"""Is this the object tier that was there before?

A share that is not mounted is an empty directory, and an empty directory looks like a tier that was emptied.
So a tier carries an id, written when it is first used, and each node remembers the id of the tier it uses.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import suppress
from pathlib import Path

from tierfs.errors import ObjectExists, ObjectMissing, ObjectStoreMissing
from tierfs.json_fields import Fields, Wrong
from tierfs.objects.client import ObjectClient
from tierfs.persist.local_state import object_path
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

KEY = ".tierfs/tier.json"
_MOST_BYTES = 4096


class TierIdentity:
    """Of the tier that `client` speaks to, as this node remembers it below `meta`."""

    def __init__(self, meta: Path, client: ObjectClient, note: str = "id.json") -> None:
        self._note = object_path(meta, note)
        self._client = client

    async def check(self) -> None:
        """ObjectStoreMissing where this node used a tier here, and another one or none is there now; ObjectError."""
        known, found = self._known(), await self.found()
        if found and known in ("", found):
            if not known:
                self._remember(found)
            return
        if known:
            there = "another one is there" if found else f"its {KEY} is not there"
            raise ObjectStoreMissing(
                f"{self._client.url} is not the object tier that this node used before ({there}): is a share not "
                f"mounted, or the URL changed? Nothing is sent, and nothing is taken for deleted. If it was emptied on "
                f"purpose, remove {self._note}"
            )

    async def establish(self) -> None:
        """The same, and a tier that is used for the first time gets its id."""
        await self.check()
        if not self._known():
            body = json.dumps({"version": 1, "id": uuid.uuid4().hex}).encode("ascii") + b"\n"
            with suppress(ObjectExists):
                await self._client.put(KEY, body, only_if_absent=True)
            await self.check()

    async def found(self) -> str:
        """The id that lies there now; "" where none does."""
        try:
            data, _ = await self._client.get(KEY, most_bytes=_MOST_BYTES)
            return Fields(json.loads(data), KEY).text("id")
        except ObjectMissing:
            return ""
        except (Wrong, ValueError, RecursionError):
            return "damaged"

    def _known(self) -> str:
        with suppress(OSError, Wrong, ValueError, RecursionError):
            fields = Fields(json.loads(self._note.read_bytes()), str(self._note))
            if fields.text("url") == self._client.url:
                return fields.text("id")
        return ""

    def _remember(self, found: str) -> None:
        try:
            write_whole(self._note, json.dumps({"url": self._client.url, "id": found}).encode("ascii"))
        except OSError as error:
            log.warning("the object tier's id can't be remembered: %s", error, extra={"tier": "object"})
