"""What nobody finishes in the object tier is cleared away: uploads in parts, and the objects of steps never committed.

Only what tierfs itself put there. A directory without `.tierfs/` is a person's, who may import it one day.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

import trio

from tierfs.errors import ObjectError
from tierfs.objects.client import ObjectClient
from tierfs.persist.deletions import Deletions
from tierfs.persist.layout import MANIFEST, is_own
from tierfs.persist.stored_step import abort_uploads, look
from tierfs.persist.upload_journal import StepJournal, all_journals
from tierfs.persist.walking import step_directories
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.persist")

EVERY_S = 86400.0
#: After a failure.
RETRY_S = 600.0
#: Another node may still be at an upload or a step that is younger.
ABANDONED_AFTER_S = 86400.0


class Sweeper:
    """`is_busy` says of which steps this node is sending something, or owes it, `is_part` which are wanted as they are:
    some of their files were sent, and retention says when these go."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        deletions: Deletions,
        *,
        node: str,
        is_busy: Callable[[Key], bool],
        is_part: Callable[[Key], bool],
    ) -> None:
        self.registry = registry
        self.client = client
        self.deletions = deletions
        self._node = node
        self._is_busy = is_busy
        self._is_part = is_part

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """At start and daily, until cancelled."""
        task_status.started()
        while True:
            try:
                await self.sweep()
                wait_s = EVERY_S
            except ObjectError as error:
                log.info("the object tier can't be swept yet: %s", error.message, extra={"tier": "object"})
                wait_s = RETRY_S
            except Exception:
                log.exception("sweeping the object tier failed; tried again later", extra={"tier": "object"})
                wait_s = RETRY_S
            await trio.sleep(wait_s * random.uniform(1.0, 1.2))

    async def sweep(self) -> None:
        """One round. ObjectError."""
        now = time.time()
        journalled: set[str] = set()
        for journal in list(all_journals(self.registry.tier.meta)):
            key = journal.namespace, journal.step
            if self._is_busy(key) or self.deletions.is_owed(key):
                journalled |= {upload_id for _, upload_id in journal.uploads()}
            else:
                await self._drop(journal)
        for upload in await self.client.list_uploads(""):
            if upload.upload_id not in journalled and now - upload.started > ABANDONED_AFTER_S:
                log.info("an upload that nobody finished is aborted: %s", upload.key, extra={"tier": "object"})
                await self.client.abort_upload(upload.key, upload.upload_id)
        await self._sweep_uncommitted(now)

    async def _drop(self, journal: StepJournal) -> None:
        """Nobody owes the step any more."""
        await abort_uploads(self.client, self.registry.names, journal.namespace, journal.step)
        if not self._is_busy((journal.namespace, journal.step)):
            journal.drop()

    async def _sweep_uncommitted(self, now: float) -> None:
        """Steps that a node began and never committed, once newer ones of their namespace are committed."""
        committed: dict[str, float] = {}
        uncommitted: list[Key] = []
        for found in await step_directories(self.client, self.registry.names):
            if found.manifest is None:
                if found.has_own and not self._is_part(found.key):
                    uncommitted.append(found.key)
            else:
                newest = committed.get(found.key[0], 0.0)
                committed[found.key[0]] = max(newest, found.manifest.modified)
        for key in uncommitted:
            if self._is_busy(key) or self.deletions.is_owed(key):
                continue
            stored = await look(self.client, self.registry.names, *key, read=False)
            last = max((info.modified for info in stored.objects.values()), default=now)
            if (
                MANIFEST not in stored.objects
                and any(is_own(inner) for inner in stored.objects)
                and now - last > ABANDONED_AFTER_S
                and committed.get(key[0], 0.0) > last
                and not self._is_busy(key)
            ):
                log.warning(
                    "a step that was never committed is deleted from the object tier",
                    extra={"namespace": key[0], "step": key[1], "tier": "object"},
                )
                self.deletions.owe(key, "leftover")
