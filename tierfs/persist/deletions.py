"""Steps that are to go from the object tier. What is owed to go survives the daemon, and goes in an order that never
shows half a step: the manifest first, then the markers, the data, and the node files last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from tierfs.errors import ObjectDenied, PathRefused, TierfsError
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.objects.client import ObjectClient
from tierfs.objects.store import BATCH_KEYS
from tierfs.persist.layout import is_own, manifest_key
from tierfs.persist.local_state import all_of_kind, state_path
from tierfs.persist.stored_step import abort_uploads, look
from tierfs.persist.upload_journal import StepJournal
from tierfs.steps.names import safe_component, safe_relative
from tierfs.steps.registry import StepRegistry
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.persist")

Key = tuple[str, str]

_KIND = "deletions"
_SUFFIX = ".json"
#: After a failure: doubled up to the second figure, with up to half as much again at random.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
#: A step that waits for another one is looked at so often.
LOOK_AGAIN_S = 0.5
#: Data that arrived late (a request of a daemon that died) is deleted with another round, at most so many.
ROUNDS = 5


@dataclass
class Owed:
    """`why` is `removed`, `moved`, `retention` or `leftover`.

    `after` has to be set first: something is being sent. It waits while the step `until`, which has the same bytes, is
    on its way to the object tier."""

    why: str
    marker: str | None
    after: trio.Event | None = None
    until: Key | None = None
    #: When that was decided (Unix time). 0 where that is not known any more.
    at: float = 0.0
    attempts: int = 0
    next_try_at: float = 0.0
    error: str = ""


class Deletions:
    """While a step's deletion is owed the index ignores it, and what is saved anew under its name waits.

    `told` is called with each step that is gone from the object tier.
    """

    def __init__(self, registry: StepRegistry, client: ObjectClient) -> None:
        self.registry = registry
        self.client = client
        self.told: Callable[[Key, str], None] = lambda key, why: None
        #: Whether a step is on its way to the object tier.
        self.is_awaited: Callable[[Key], bool] = lambda key: False
        #: When the last deletion of a step ended (monotonic): a listing that began before is out of date.
        self.ended_at: dict[Key, float] = {}
        self._owed: dict[Key, Owed] = {}
        self._wake = trio.Event()
        self._load()

    def owe(
        self,
        key: Key,
        why: str,
        *,
        marker: str | None = None,
        after: trio.Event | None = None,
        until: Key | None = None,
    ) -> None:
        """The step is to go; returns once a successor would know. Never raises for lack of room (it is said)."""
        if until is not None and self._waits_for(until, key):
            until = None  # two steps changed places: one of them has to go first
        self._owed[key] = Owed(why, marker, after, until, time.time())
        self._note(key)
        self._wake.set()

    def moved(self, old: Key, new: Key) -> None:
        """A step has another name: what waits for it waits for that."""
        for key, owed in self._owed.items():
            if owed.until == old:
                owed.until = None if self._waits_for(new, key) else new
                self._note(key)

    def _waits_for(self, step: Key, key: Key) -> bool:
        """A save of the step can't be sent before the deletion of `key` is done."""
        at: Key | None = step
        while at is not None and at != key:
            owed = self._owed.get(at)
            at = owed.until if owed is not None else None
        return at is not None

    def _note(self, key: Key) -> None:
        owed = self._owed[key]
        value = {"namespace": key[0], "step": key[1], "why": owed.why, "marker": owed.marker, "at": owed.at}
        value |= {"until_namespace": owed.until[0], "until_step": owed.until[1]} if owed.until is not None else {}
        try:
            write_whole(self._path(key), json.dumps(value).encode("ascii"))
        except OSError as error:
            log.warning("an owed deletion can't be noted: %s", error, extra=_extra(key))

    def is_owed(self, key: Key) -> bool:
        return key in self._owed

    def why(self, key: Key) -> str:
        found = self._owed.get(key)
        return found.why if found is not None else ""

    def owed(self) -> list[Key]:
        return list(self._owed)

    def problems(self) -> list[dict[str, str]]:
        failed = [(key, owed) for key, owed in self._owed.items() if owed.error]
        if not failed:
            return []
        key, owed = failed[0]
        message = f"{len(failed)} steps can't be deleted from the object tier yet: {owed.error}"
        return [{"severity": "warning", "message": message, "path": "/".join(key) if len(failed) == 1 else ""}]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Delete what is owed, until cancelled."""
        task_status.started()
        while True:
            wake = self._wake = trio.Event()
            now = time.monotonic()
            for key, owed in list(self._owed.items()):
                if owed.until is not None and self.is_awaited(owed.until):
                    owed.next_try_at = now + LOOK_AGAIN_S
                elif self._owed.get(key) is owed and owed.next_try_at <= now:
                    await self._try(key, owed)
            waits = [owed.next_try_at for owed in self._owed.values()]
            with trio.move_on_after(max(0.0, min(waits) - time.monotonic()) if waits else float("inf")):
                await wake.wait()

    async def _try(self, key: Key, owed: Owed) -> None:
        try:
            if owed.after is not None:
                await owed.after.wait()
            is_saved_anew = self.registry.cluster.shares and await self._is_saved_anew(key, owed)
            if not is_saved_anew:
                await self._delete(key, owed)
        except TierfsError as error:
            self._put_off(owed, error.message)
            log.warning("a step can't be deleted yet: %s", error.message, extra=_extra(key))
            return
        except Exception as error:
            self._put_off(owed, str(error))
            log.exception("deleting a step failed; tried again later", extra=_extra(key))
            return
        if self._owed.get(key) is owed:
            del self._owed[key]
            self.ended_at[key] = time.monotonic()
            path = self._path(key)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
            if is_saved_anew:
                log.info("not deleted: another node has persisted a newer save of it", extra=_extra(key))
                return
            log.info("deleted from the object tier (%s)", owed.why, extra=_extra(key))
            where = self.registry.names.locate("/".join(key))
            self.registry.lines.write(
                key[0], f"deleted from the object tier: {owed.why}", step=where.number if where is not None else None
            )
            self.told(key, owed.why)

    def _put_off(self, owed: Owed, error: str) -> None:
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(owed.attempts, 16))
        owed.attempts += 1
        owed.error = error
        owed.next_try_at = time.monotonic() + pause_s * random.uniform(1.0, 1.5)

    async def _is_saved_anew(self, key: Key, owed: Owed) -> bool:
        """Another node has begun to persist what was saved under the name since: that clears what is left of the old
        save. This daemon may have died in between, or the store was away."""
        if not owed.at:
            return False
        stored = await look(self.client, self.registry.names, *key)
        told = [*stored.nodes.values(), *(part.sent for part in stored.parts.values())]
        times = [node_file.completed_at for node_file in told]
        return max([*times, stored.manifest.completed_at if stored.manifest is not None else 0.0]) > owed.at

    async def _delete(self, key: Key, owed: Owed) -> None:
        # Not only where one is listed: a commit whose answer was lost may have come after the listing.
        await self.client.delete([manifest_key(*key)])
        self.registry.crash("delete:manifest")
        for _ in range(ROUNDS):
            stored = await look(self.client, self.registry.names, *key, read=False)
            if not stored.objects:
                break
            gates = [inner for inner in stored.objects if inner == owed.marker or self.registry.rules.match(inner)]
            data = [inner for inner in stored.objects if inner not in gates and not is_own(inner)]
            own = [inner for inner in stored.objects if is_own(inner)]
            for batch in (gates, data):
                await self._delete_keys([stored.objects[inner].key for inner in batch])
            self.registry.crash("delete:data")
            await self._delete_keys([stored.objects[inner].key for inner in own])
        with contextlib.suppress(ObjectDenied):  # not every key may list uploads, and the step itself is gone
            await abort_uploads(self.client, self.registry.names, *key)
        StepJournal.open(self.registry.tier.meta, *key).drop()

    async def _delete_keys(self, keys: list[str]) -> None:
        for at in range(0, len(keys), BATCH_KEYS):
            await self.client.delete(keys[at : at + BATCH_KEYS])

    def _load(self) -> None:
        for path in list(all_of_kind(self.registry.tier.meta, _KIND, _SUFFIX)):
            with contextlib.suppress(OSError, Wrong, PathRefused, ValueError, RecursionError):
                fields = Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), str(path))
                key = safe_relative(fields.text("namespace")), safe_component(fields.text("step"))
                if self._path(key) == path:
                    owed = Owed(fields.text("why"), fields.text_or_none("marker"))
                    with contextlib.suppress(Wrong):  # earlier programs did not note it
                        owed.at = fields.seconds("at")
                    with contextlib.suppress(Wrong):  # most wait for nothing
                        until = fields.text("until_namespace"), fields.text("until_step")
                        owed.until = safe_relative(until[0]), safe_component(until[1])
                    self._owed[key] = owed

    def _path(self, key: Key) -> Path:
        return state_path(self.registry.tier.meta, _KIND, *key, _SUFFIX)


def _extra(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "step": key[1], "tier": "object"}
