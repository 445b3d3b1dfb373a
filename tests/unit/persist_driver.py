"""A node with a RAM tier, the steps, and the parts that bring them to an object tier in memory.

Files of steps are real, programs are driven by `step_driver`. Stubs are `tierfs.hydrate`'s, so there are none here: a
step of the object tier is a directory with nothing in it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from awscrt.checksums import crc64nvme

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.checksum import from_text
from tierfs.objects.client import ObjectClient
from tierfs.persist import archiver, committing, deletions, parts, persister, putting_off
from tierfs.persist.archiver import Archiver
from tierfs.persist.deletions import Deletions
from tierfs.persist.index import ObjectIndex
from tierfs.persist.persister import Persister
from tierfs.settings import PersistSettings, Settings
from tierfs.steps.object_tier import NoObjectTier
from tierfs.steps.record import StepRecord
from unit.step_driver import Driver

WITHIN_S = 20
PART_BYTES = 2000


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a person would not notice."""
    for module in (putting_off, deletions):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.002)
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(persister, "LOOK_AGAIN_S", 0.002)
    for module in (persister, parts):
        monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr(archiver, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(committing, "YIELD_S", 5.0)
    monkeypatch.setattr(committing, "SINGLE_PUT_BYTES", PART_BYTES)


def settings(policy: str = "all", **values: Any) -> Settings:
    return Settings(persist=PersistSettings(policy=policy, settle_s=0.0, **values))


class Tier(NoObjectTier):
    """The object tier as steps know it, without hydration."""

    def __init__(self, persister: Persister) -> None:
        self._persister = persister
        self.completed = persister.completed  # type: ignore[method-assign]
        self.changed = persister.changed  # type: ignore[method-assign]
        self.removed = persister.removed  # type: ignore[method-assign]
        self.moved = persister.moved  # type: ignore[method-assign]

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        return not record.manifest.owed and (in_need or not self._persister.parts.owes(record))


class Node:
    """`restart` is what a new daemon does after SIGKILL."""

    def __init__(
        self,
        path: Path,
        client: ObjectClient,
        name: str = "n1",
        config: Settings | None = None,
        archive: ObjectClient | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.archive = archive
        self.driver = Driver(path, config or settings())
        self._attach()

    def restart(self) -> None:
        self.driver.restart()
        self._attach()

    def _attach(self) -> None:
        self.registry = self.driver.registry
        self.deletions = Deletions(self.registry, self.client)
        self.index = ObjectIndex(self.registry, self.client, self.deletions)
        self.archiver = (
            Archiver(self.registry, self.client, self.archive, self.index, self.deletions) if self.archive else None
        )
        self.persister = Persister(
            self.registry,
            self.client,
            self.index,
            self.deletions,
            node=self.name,
            hydrate=_no_hydration,
            is_stub=lambda ino: False,
            archiver=self.archiver,
        )
        self.registry.object_tier = Tier(self.persister)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.persister.run)
            if self.archiver is not None:
                await nursery.start(self.archiver.run)
            yield
            nursery.cancel_scope.cancel()

    async def drain(self, within_s: float = WITHIN_S) -> None:
        with trio.fail_after(within_s):
            async with self.running():
                await self.persister.drain()

    def record(self, step: str) -> StepRecord:
        return self.driver.record(step)


async def _no_hydration(ino: int) -> None:
    raise AssertionError("there are no stubs")


def listed(store: MemoryStore) -> list[str]:
    """The steps that are committed."""
    suffix = "/.tierfs/manifest.json"
    return sorted(key.removesuffix(suffix) for key in store.objects if key.endswith(suffix))


def manifest_of(store: MemoryStore, step: str) -> Any:
    return json.loads(store.objects[f"{step}/.tierfs/manifest.json"].data)


def check_listed(store: MemoryStore) -> None:
    """Whatever is committed is whole, and of one save; and a marker has all its data beside it."""
    for step in listed(store):
        for name, file in manifest_of(store, step)["files"].items():
            found = store.objects.get(f"{step}/{name}")
            assert found is not None, f"{step}/{name} is missing"
            assert len(found.data) == file["size_bytes"], f"{step}/{name} is short"
            assert int(crc64nvme(found.data)) == from_text(file["checksum"]), f"{step}/{name} has other bytes"


def left_over(store: MemoryStore) -> list[str]:
    """Objects that belong to no committed step, and uploads that nobody finishes."""
    steps = listed(store)
    found = []
    for key in store.keys(""):
        step = next((step for step in steps if key.startswith(step + "/")), None)
        inner = key[len(step) + 1 :] if step is not None else ""
        if step is None or (not inner.startswith(".tierfs/") and inner not in manifest_of(store, step)["files"]):
            found.append(key)
    return found + [f"upload of {upload.key}" for upload in store.uploads.values()]


def memory_node(tmp_path: Path, store: MemoryStore | None = None, name: str = "n1", **values: Any) -> Node:
    return Node(tmp_path / name, MemoryClient(store or MemoryStore()), name, **values)
