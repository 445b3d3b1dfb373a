"""Sends the steps that are owed to the object tier: oldest first, those asked for ahead, each until it is there.

What fails is put off and tried again, and says why; nothing here is in the way of a save in RAM.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from tierfs.errors import TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.persist.archiver import Archiver
from tierfs.persist.committing import YIELD_S, Committed, OlderThanCommitted, StepCommit, Yielding
from tierfs.persist.deletions import Deletions
from tierfs.persist.endpoint import Endpoint
from tierfs.persist.index import ObjectIndex
from tierfs.persist.joint_commit import JointCommit, Memory, Waiting
from tierfs.persist.local_step import LocalStep, Superseded
from tierfs.persist.parts import Parts
from tierfs.persist.policy import Policy
from tierfs.persist.putting_off import PutOff
from tierfs.persist.surplus import Surplus
from tierfs.persist.sweeping import Sweeper
from tierfs.steps import wishes
from tierfs.steps.manifest import Persisted
from tierfs.steps.news import reached
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_duration, format_rate, format_size

log = logging.getLogger("tierfs.persist")

#: Steps whose files are in flight at a time. They are committed in the order in which they began.
STEPS_AT_ONCE = 2
#: Another node is at the same step, or the step changed: look again soon.
LOOK_AGAIN_S = 1.0
#: What nobody tells of (a program closes its last file) is looked at so often.
TICK_S = 1.0


@dataclass(frozen=True)
class StepProgress:
    """`state` is owed, sending, or waiting (to be tried again at `next_try_at`, Unix seconds, because of `error`)."""

    state: str
    bytes_sent: int
    bytes_total: int
    error: str = ""
    next_try_at: float = 0.0


@dataclass
class _Run:
    """A step that is being sent."""

    key: Key
    record: StepRecord
    commit: StepCommit
    before: list[trio.Event]
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    finished: trio.Event = field(default_factory=trio.Event)


class Persister:
    """See the module. `hydrate` and `is_stub` are of inodes."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        index: ObjectIndex,
        deletions: Deletions,
        *,
        node: str,
        hydrate: Callable[[int], Awaitable[None]],
        is_stub: Callable[[int], bool],
        archiver: Archiver | None = None,
    ) -> None:
        self.registry = registry
        self.client = client
        self.index = index
        self.deletions = deletions
        self.deletions.told = self._deleted
        self.deletions.is_awaited = self._is_awaited
        self.policy = Policy(registry)
        self.sweeper = Sweeper(registry, client, deletions, node=node, is_busy=self._is_busy, is_part=index.parts_there)
        self.archiver = archiver
        self.surplus = Surplus(registry, index, deletions, archiver, is_stub=is_stub, is_busy=self._is_busy)
        self._node = node
        self._hydrate = hydrate
        self._is_stub = is_stub
        self._runs: dict[Key, _Run] = {}
        #: Of steps that several nodes persist: where this one is.
        self._memories: dict[Key, Memory] = {}
        index.begun_elsewhere = self._begun_elsewhere
        self.put_off = PutOff()
        self._yielding_until: dict[Key, float] = {}
        self.endpoint = Endpoint(client, index.identity)
        self.parts = Parts(
            registry,
            client,
            index,
            deletions,
            self.endpoint,
            node=node,
            hydrate=hydrate,
            is_stub=is_stub,
            is_whole=lambda key: key in self._runs or self._is_awaited(key),
        )
        self.parts.told = self._look_again
        self.parts.sent = self.surplus.delete
        if archiver is not None:
            archiver.settled = self.surplus.delete
        self._draining = 0
        self._wake = trio.Event()
        self._news = trio.Event()

    # --- told by steps

    def completed(self, record: StepRecord) -> None:
        """The step, or a new generation of it, is complete; whoever says so saves its manifest."""
        manifest = record.manifest
        if manifest.persisted is None and not self.registry.is_shared(record):
            # Saved anew under a name that the object tier knows: what is newer has the higher generation.
            manifest.generation = max(manifest.generation, self.index.generation_there(record.key) + 1)
        why = self.policy.why_owed(record)
        manifest.owed = (manifest.owed or why) if why else ""
        self.put_off.forget(record.key)
        self.parts.completed(record, is_whole=bool(manifest.owed))
        self._look_again()

    def changed(self, record: StepRecord) -> None:
        """Files were added to a complete step, or small ones changed or removed."""
        manifest = record.manifest
        self.put_off.changed(record.key)
        self.parts.changed(record)
        if not manifest.owed and manifest.persisted is not None and self._policy_of(record) != "none":
            manifest.owed = "policy"
            record.unsaved = True
        self._look_again()

    def removed(self, record: StepRecord) -> None:
        """The step is gone from the tree by somebody's wish: so it goes from the object tier, unless protected."""
        self._leaves(record.key, record, "removed")

    def moved(self, namespace: str, step: str, record: StepRecord | None) -> None:
        """The step has another name now, or is none."""
        key = (namespace, step)
        if record is None:
            self._leaves(key, None, "moved")
            return
        manifest = record.manifest
        was_there = manifest.persisted is not None or bool(manifest.owed)
        holds_stubs = not manifest.populated or any(self._is_stub(entry.ino) for entry in manifest.files.values())
        in_part = self.parts.is_there(key)
        manifest.persisted = None
        if not record.is_complete or self._policy_of(record) == "none":
            manifest.owed = ""
        elif was_there:
            manifest.owed = manifest.owed or "policy"
        else:
            manifest.owed = self.policy.why_owed(record)
        record.unsaved = True
        self.registry.save_or_later(record)
        self.deletions.moved(key, record.key)
        self.parts.moved(key, record)
        if self.archiver is not None:
            self.archiver.moved(key, record)
        # Until it is there under its new name the old one is its only copy, or has the bytes of its stubs.
        if (was_there or in_part or self.index.generation_there(key)) and (manifest.owed or not holds_stubs):
            self._leaves(key, record, "moved", until=record.key if manifest.owed else None)
        self._look_again()

    def _leaves(self, key: Key, record: StepRecord | None, why: str, *, until: Key | None = None) -> None:
        run = self._runs.get(key)
        if run is not None:
            run.scope.cancel()
        self.put_off.forget(key)
        self._memories.pop(key, None)
        there = self.index.generation_there(key) > 0 or self.parts.is_there(key)
        sending = run.finished if run is not None else self.parts.finished(key)
        self.parts.left(key)
        known = record is not None and (record.manifest.persisted is not None or bool(record.manifest.owed))
        if self.registry.settings.for_namespace(key[0]).persist.protected:
            return
        if self.archiver is not None:
            self.archiver.removed(key)
        if run is not None or there or known or why == "moved":
            marker = record.manifest.marker if record is not None else None
            self.deletions.owe(key, why, marker=marker, after=sending, until=until)
        self._look_again()

    # --- asked

    def owe(self, record: StepRecord, why: str) -> None:
        """The step is to be persisted (`demand`: soon, ahead of others). No effect where it is, or is not complete."""
        if record.is_persisted or not record.is_complete:
            return
        record.manifest.owed = "demand" if why == "demand" else record.manifest.owed or why
        self.put_off.forget(record.key)
        self.registry.save_or_later(record)
        self._look_again()

    async def wait_persisted(self, record: StepRecord) -> None:
        """Until the step, as it is now, is committed there; or was removed or written again, or nobody owes it."""
        key, generation = record.key, record.manifest.generation
        while not record.is_persisted:
            if (
                self.registry.records.get(key) is not record
                or not record.is_complete
                or record.manifest.generation != generation
                or not record.manifest.owed
            ):
                return
            news = self._news
            with trio.move_on_after(TICK_S):  # the step may be overwritten, of which nobody tells
                await news.wait()

    def progress(self, record: StepRecord) -> StepProgress | None:
        """How far the sending of an owed step is; None where it is not owed."""
        if not record.manifest.owed or not record.is_complete:
            return None
        total = record.manifest.bytes
        run = self._runs.get(record.key)
        if run is not None:
            total = run.commit.bytes_total or total
            return StepProgress("sending", min(run.commit.bytes_done, total), total)
        failure = self.put_off.failure(record.key)
        if failure is not None and failure.message:
            return StepProgress("waiting", 0, total, failure.message, failure.next_try_at)
        return StepProgress("owed", 0, total)

    def owed_records(self) -> list[StepRecord]:
        """In the order in which they go."""
        found = [record for record in self.registry.records.values() if record.manifest.owed and record.is_complete]
        return sorted(found, key=self._order)

    def bytes_owed(self) -> int:
        return sum(record.manifest.bytes for record in self.owed_records())

    async def drain(self) -> None:
        """Until nothing is owed, steps and deletions. Steps do not wait to settle meanwhile.

        Of a step of several nodes this one owes what it has to send, and the commit if that is its part.
        """
        self._draining += 1
        self.parts.draining = True
        self._look_again()
        try:
            while self._own_work() or self.parts.has_work() or self.deletions.owed():
                news = self._news
                with trio.move_on_after(TICK_S):
                    await news.wait()
        finally:
            self._draining -= 1
            self.parts.draining = self._draining > 0

    def _own_work(self) -> bool:
        return any(
            (memory := self._memories.get(record.key)) is None or not memory.is_idle for record in self.owed_records()
        )

    def problems(self) -> list[dict[str, str]]:
        """For `status`: what keeps owed steps from the object tier, what concerns all of them in one line."""
        found = [*self.deletions.problems(), *self.put_off.problems(), *self.parts.problems()]
        found += self.archiver.problems() if self.archiver is not None else []
        if self.endpoint.conditional_put is False:
            message = "the object tier ignores conditional writes: only one node may persist to it"
            found.append({"severity": "warning", "message": message, "path": ""})
        return found

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send what is owed and delete what is to go, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.deletions.run)
            nursery.start_soon(self.sweeper.run)
            nursery.start_soon(self.parts.run)
            nursery.start_soon(self.endpoint.probe_at_start)
            task_status.started()
            while True:
                wake = self._wake = trio.Event()
                wait_s = self._start_due(nursery)
                with trio.move_on_after(wait_s):
                    await wake.wait()

    def _start_due(self, nursery: trio.Nursery) -> float:
        """Begin what may begin; returns in how many seconds to look again at the latest."""
        wait_s = float("inf")
        for record in self.owed_records():
            if record.key in self._runs:
                continue
            if len(self._runs) >= STEPS_AT_ONCE:
                break
            due_s = self._due_in_s(record)
            if due_s > 0:
                wait_s = min(wait_s, due_s)
                continue
            run = _Run(record.key, record, self._commit_of(record), [other.finished for other in self._runs.values()])
            self._runs[record.key] = run
            nursery.start_soon(self._run, run)
        return wait_s

    def _commit_of(self, record: StepRecord) -> StepCommit:
        local = LocalStep(self.registry, record, hydrate=self._hydrate, is_stub=self._is_stub)
        conditional_put = self.endpoint.conditional_put is not False
        if self.registry.is_shared(record):
            memory = self._memories.setdefault(record.key, Memory())
            return JointCommit(
                self.registry, self.client, local, self._node, conditional_put=conditional_put, memory=memory
            )
        yield_until = self._yielding_until.setdefault(record.key, time.monotonic() + YIELD_S)
        return StepCommit(
            self.registry, self.client, local, self._node, conditional_put=conditional_put, yield_until=yield_until
        )

    def _due_in_s(self, record: StepRecord) -> float:
        if self.parts.is_running(record.key):
            self.parts.stop(record.key)
            return TICK_S
        if self.deletions.is_owed(record.key):
            return TICK_S
        if record.writers or record.lock.locked() or any(not entry.sealed for entry in record.manifest.files.values()):
            return TICK_S
        pause_s = self.put_off.pause_s(record.key)
        settings = self.registry.settings.for_namespace(record.manifest.namespace)
        if self._draining or record.manifest.owed == "demand" or settings.durability.commit == "object":
            return pause_s
        return max(pause_s, settings.persist.settle_s - record.idle_s)

    def _order(self, record: StepRecord) -> tuple[bool, float, float, Key]:
        """Those asked for first; what failed after what did not, the one that failed longest ago first."""
        failure = self.put_off.failure(record.key)
        failed_at = failure.failed_at if failure is not None else 0.0
        return record.manifest.owed != "demand", failed_at, record.manifest.completed_at or 0.0, record.key

    async def _run(self, run: _Run) -> None:
        record, key = run.record, run.key
        began = time.monotonic()

        async def my_turn() -> None:
            for earlier in run.before:
                await earlier.wait()

        try:
            with run.scope:
                await self.endpoint.probe_once()
                run.commit.conditional_put = self.endpoint.conditional_put is not False
                committed = await run.commit.run(my_turn)
                self._yielding_until.pop(key, None)
                self._record(run, committed, time.monotonic() - began)
        except Waiting as error:
            log.debug("%s", error.message, extra=self._extra(key))
            self.put_off.for_now(key, self._memories.setdefault(key, Memory()).pause_s * random.uniform(0.75, 1.25))
        except Superseded:
            self.put_off.for_now(key, LOOK_AGAIN_S)
        except Yielding as error:
            log.info("%s", error.message, extra=self._extra(key))
            self.put_off.for_now(key, LOOK_AGAIN_S * random.uniform(1.0, 3.0))
        except OlderThanCommitted as error:
            self._give_up(record, error.message)
        except TierfsError as error:
            self.put_off.failed(key, error)
        except Exception as error:
            log.exception("persisting a step failed; tried again later", extra=self._extra(key))
            self.put_off.failed(key, error)
        finally:
            self._runs.pop(key, None)
            run.finished.set()
            self._look_again()

    def _record(self, run: _Run, committed: Committed, took_s: float) -> None:
        record, manifest = run.record, run.record.manifest
        self.index.committed(committed.manifest, committed.etag)
        if self.registry.records.get(run.key) is not record:
            return  # it was removed or renamed just now, and its deletion is owed
        self.put_off.forget(record.key)
        self._memories.pop(record.key, None)
        self.parts.left(record.key)
        manifest.persisted = Persisted(
            generation=run.commit.local.generation,
            etag=committed.etag,
            at=time.time(),
            bytes=committed.manifest.size_bytes,
            files=len(committed.manifest.files),
        )
        if run.commit.local.is_current():
            manifest.owed = ""
        else:
            self.put_off.for_now(record.key, LOOK_AGAIN_S)
        self.registry.save_or_later(record)
        self.registry.crash("persist:recorded")
        run.commit.forget_journal()
        size, sent = committed.manifest.size_bytes, committed.sent_bytes
        took = f" in {format_duration(took_s)} ({format_rate(sent, took_s)})" if sent else ""
        self.registry.lines.write(
            manifest.namespace,
            f"persisted: {len(committed.manifest.files)} files, {format_size(size)}, {format_size(sent)} sent{took}",
            step=manifest.number,
        )
        log.info("step is persisted", extra=self._extra(record.key))
        took_all_s = manifest.persisted.at - manifest.completed_at if manifest.completed_at else None
        self.registry.news.tell(
            reached(
                *record.key,
                "object",
                generation=manifest.persisted.generation,
                size_bytes=size,
                files=manifest.persisted.files,
                seconds=took_all_s,
            )
        )
        if self.archiver is not None:
            self.archiver.persisted(manifest.namespace)
        self.surplus.delete(manifest.namespace)
        self.registry.make_room(0)

    def _begun_elsewhere(self, record: StepRecord) -> None:
        """Another node has begun to persist a step of which this one holds a part."""
        wished = wishes.tiers_of(record.directory)
        if not record.manifest.owed and self._policy_of(record) != "none" and (wished is None or "object" in wished):
            self.owe(record, "policy")

    def _give_up(self, record: StepRecord, message: str) -> None:
        """The object tier has what is newer: nobody owes it this."""
        record.manifest.owed = ""
        record.manifest.persisted = None
        self.registry.save_or_later(record)
        self.registry.problem("warning", message, record.rel)
        log.warning("%s", message, extra=self._extra(record.key))

    def _deleted(self, key: Key, why: str) -> None:
        """A step is gone from the object tier; after a crash the record may not say so yet."""
        self.index.forget(key)
        self.parts.deleted(key)
        record = self.registry.records.get(key)
        if (
            record is not None
            and why == "retention"
            and record.manifest.persisted is not None
            and not self._runs.get(key)
        ):
            self.surplus.lose(record)
        self._look_again()

    # --- parts of the above

    def _is_awaited(self, key: Key) -> bool:
        """The step is on its way to the object tier."""
        record = self.registry.records.get(key)
        return record is not None and bool(record.manifest.owed)

    def _is_busy(self, key: Key) -> bool:
        """The step's objects are this node's business now, not the sweeper's."""
        record = self.registry.records.get(key)
        if key in self._runs or (record is not None and bool(record.manifest.owed)):
            return True
        return self.parts.is_running(key) or (record is not None and self.parts.owes(record))

    def _policy_of(self, record: StepRecord) -> str:
        return self.registry.settings.for_namespace(record.manifest.namespace).persist.policy

    def _look_again(self) -> None:
        self._wake.set()
        self.parts.look_again()
        news, self._news = self._news, trio.Event()
        news.set()

    def _extra(self, key: Key) -> dict[str, str]:
        return {"namespace": key[0], "step": key[1], "tier": "object"}
