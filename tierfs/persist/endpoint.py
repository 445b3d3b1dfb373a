"""What this node found out of the object store as a whole, before it sends anything there."""

from __future__ import annotations

import logging

from tierfs.errors import TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.persist.identity import TierIdentity

log = logging.getLogger("tierfs.persist")


class Endpoint:
    """`conditional_put`: whether it refuses to overwrite where it is asked to; None before it was probed."""

    def __init__(self, client: ObjectClient, identity: TierIdentity, what: str = "the object tier") -> None:
        self._what = what
        self._client = client
        self._identity = identity
        self.conditional_put: bool | None = None

    async def probe_at_start(self) -> None:
        """So that what is missing is known before the first step is owed. What can't be reached is tried again then."""
        try:
            await self.probe_once()
        except TierfsError as error:
            log.warning("%s can't be used yet: %s", self._what, error.message, extra={"tier": "object"})

    async def probe_once(self) -> None:
        """Until it succeeded once. ObjectError."""
        if self.conditional_put is not None:
            return
        await self._identity.check()
        found = await self._client.probe()
        if found.writable:
            await self._identity.establish()
        self.conditional_put = found.conditional_put
        for note in found.notes:
            log.warning("%s", note, extra={"tier": "object"})
