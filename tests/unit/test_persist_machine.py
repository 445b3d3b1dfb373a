"""Random saves, removals, crashes, faults and lost RAM tiers of two nodes over one object tier in memory.

After each single request's effect: what is committed is whole and of one save, a marker has all its data beside it, and
a committed step stays until somebody removes it or writes it again. At the end everything owed is there, and nothing
else. TIERFS_SOAK=1 runs it much longer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from persist_driver import Node, check_listed, left_over, listed, manifest_of, quickly, settings
from step_driver import FILES, MARKER, content

from rig.memory_client import MemoryClient, MemoryStore
from tierfs.crash_points import OBJECT_POINTS
from tierfs.errors import ObjectError, ObjectUnavailable

SOAK = os.environ.get("TIERFS_SOAK") == "1"
NODES = ("n1", "n2")
OWN = {"n1": ("a/step_1", "a/step_2", "a/b/step_1"), "n2": ("c/step_1", "c/step_20")}
SHARED = ("shared/step_1", "shared/step_2")


class Died(BaseException):
    """The daemon's SIGKILL."""


def has_died(error: BaseException) -> bool:
    """Also inside the exception group that a nursery makes of it."""
    return isinstance(error, Died) or any(has_died(each) for each in getattr(error, "exceptions", ()))


def check_markers(store: MemoryStore) -> None:
    for key, found in list(store.objects.items()):
        if key.endswith("/" + MARKER):
            metadata = pickle.loads(found.data)
            for info in metadata.storage_data.values():
                data = store.objects.get(f"{key.removesuffix(MARKER)}{info.relative_path}")
                assert data is not None, f"{key} is there, and {info.relative_path} is not"
                assert data.data == content(metadata.seed, info.relative_path, info.length), f"{key} has other data"


class Trouble:
    """What happens to the requests of one node: dies at one, some fail, before or after their effect."""

    def __init__(self) -> None:
        self.die_in = 0
        self.fail_every = 0
        self._random = random.Random(7)

    def __call__(self, when: str, what: str, key: str) -> None:
        if self.die_in > 0:
            self.die_in -= 1
            if self.die_in == 0:
                raise Died
        if self.fail_every and self._random.randrange(self.fail_every) == 0:
            raise ObjectUnavailable(f"{when} {what} of {key}: connection reset")


class OneDeath:
    """Dies at the nth passing of a point from now on."""

    def __init__(self, point: str, nth: int) -> None:
        self._point, self._left = point, nth

    def __call__(self, name: str) -> None:
        if name == self._point:
            self._left -= 1
            if self._left == 0:
                raise Died


class PersistMachine(RuleBasedStateMachine):
    """`saved` is the model: which save of each step the nodes hold, and so the object tier must in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierfs-persist-"))
        self.store = MemoryStore()
        self.store.watch = self.watch
        self.stays: set[str] = set()
        self.saved: dict[str, int] = {}
        self.trouble = {name: Trouble() for name in NODES}
        self.nodes: dict[str, Node] = {}
        for name in NODES:
            client = MemoryClient(self.store)
            client.fault = self.trouble[name]
            self.nodes[name] = Node(self.path / name, client, name, settings())
        self.seed = 0
        self.wrong = ""

    def watch(self) -> None:
        try:
            check_listed(self.store)
            check_markers(self.store)
            assert self.stays <= set(listed(self.store)), f"gone: {self.stays - set(listed(self.store))}"
        except AssertionError as error:
            # The persister survives any exception, so it is kept for the machine.
            self.wrong = self.wrong or str(error)
            raise

    def do(self, name: str, operation: Callable[[], Awaitable[Any]]) -> bool:
        """False when the node died of it, and was started again."""
        try:
            trio.run(operation)
        except BaseException as error:
            if not has_died(error):
                raise
            self.nodes[name].restart()
            self.trouble[name].die_in = 0
            return False
        finally:
            assert self.wrong == ""
        return True

    def save_on(self, name: str, step: str, seed: int) -> None:
        while not self.do(name, lambda: self.nodes[name].driver.save(step, seed)):
            pass

    # --- rules

    @rule(name=st.sampled_from(NODES), at=st.integers(0, 2))
    def save(self, name: str, at: int) -> None:
        step = OWN[name][at % len(OWN[name])]
        self.seed += 1
        self.stays.discard(step)
        self.save_on(name, step, self.seed)
        self.saved[step] = self.seed

    @rule(step=st.sampled_from(SHARED))
    def save_on_both(self, step: str) -> None:
        """The same bytes, as two replicas have them. Once: which one is newer is another test's question."""
        if step in self.saved:
            return
        self.seed += 1
        for name in NODES:
            self.save_on(name, step, self.seed)
        self.saved[step] = self.seed

    @rule(name=st.sampled_from(NODES), at=st.integers(0, 2))
    def add_file(self, name: str, at: int) -> None:
        step = OWN[name][at % len(OWN[name])]
        if step in self.saved:
            self.do(name, lambda: self.nodes[name].driver.write(f"{step}/more.json", b"{}" * at))

    @rule(name=st.sampled_from(NODES), at=st.integers(0, 2))
    def remove(self, name: str, at: int) -> None:
        step = OWN[name][at % len(OWN[name])]
        if step in self.saved:
            self.stays.discard(step)
            del self.saved[step]
            self.do(name, lambda: self.nodes[name].driver.rmtree(step))

    @rule(name=st.sampled_from(NODES), at=st.integers(0, 2))
    def rename(self, name: str, at: int) -> None:
        step, target = OWN[name][at % len(OWN[name])], OWN[name][(at + 1) % len(OWN[name])]
        if step in self.saved and target not in self.saved and not (self.nodes[name].driver.root / target).exists():
            driver = self.nodes[name].driver
            driver.mkdirs(target.rpartition("/")[0])
            self.stays -= {step, target}
            self.saved[target] = self.saved.pop(step)
            self.do(name, lambda: driver.rename(step, target))

    @rule(name=st.sampled_from(NODES), nth=st.integers(1, 4), point=st.sampled_from(OBJECT_POINTS))
    def die_at_point(self, name: str, nth: int, point: str) -> None:
        node = self.nodes[name]
        node.registry.crash = OneDeath(point, nth)  # type: ignore[assignment]
        self.persist(name)

    @rule(name=st.sampled_from(NODES), requests=st.integers(1, 60))
    def die_at_request(self, name: str, requests: int) -> None:
        self.trouble[name].die_in = requests
        self.persist(name)
        self.trouble[name].die_in = 0

    @rule(name=st.sampled_from(NODES), every=st.integers(2, 8))
    def persist_with_faults(self, name: str, every: int) -> None:
        self.trouble[name].fail_every = every
        self.persist(name, for_s=0.1)
        self.trouble[name].fail_every = 0

    @rule(name=st.sampled_from(NODES))
    def restart(self, name: str) -> None:
        self.nodes[name].restart()

    @rule(name=st.sampled_from(NODES))
    def persist(self, name: str, for_s: float = 2.0) -> None:
        async def some_time() -> None:
            with trio.move_on_after(for_s):
                async with self.nodes[name].running():
                    await self.nodes[name].persister.drain()

        self.do(name, some_time)
        self.stays |= set(listed(self.store)) & self.expected()

    @rule(die_in=st.integers(0, 80))
    @precondition(lambda self: any(step in self.saved for step in SHARED))
    def persist_both_at_once(self, die_in: int) -> None:
        self.trouble["n2"].die_in = die_in

        async def at_once() -> None:
            with trio.move_on_after(2):
                async with self.nodes["n1"].running(), self.nodes["n2"].running():
                    await self.nodes["n1"].persister.drain()
                    await self.nodes["n2"].persister.drain()

        if not self.do("n2", at_once):
            self.nodes["n1"].restart()
        self.trouble["n2"].die_in = 0
        self.stays |= set(listed(self.store)) & self.expected()

    @rule(name=st.sampled_from(NODES))
    def refresh(self, name: str) -> None:
        async def refresh() -> None:
            with contextlib.suppress(ObjectError):
                await self.nodes[name].index.refresh()

        self.do(name, refresh)
        records = self.nodes[name].registry.records.values()
        shown = {record.rel for record in records if not record.manifest.populated}
        assert shown <= set(listed(self.store)), "a step is shown that is not committed"

    def expected(self) -> set[str]:
        """Steps that stay once committed: nobody owes anything of them that would withdraw them."""
        owed = {record.rel for node in self.nodes.values() for record in node.persister.owed_records()}
        return set(self.saved) - owed

    def teardown(self) -> None:
        try:
            for name in NODES:
                self.trouble[name].fail_every = self.trouble[name].die_in = 0
                self.nodes[name].restart()  # a death that never came must not come now
                assert self.do(name, self.nodes[name].drain)
                assert self.do(name, self.nodes[name].persister.sweeper.sweep)
            assert set(listed(self.store)) == set(self.saved)
            for step, seed in self.saved.items():
                for inner, size in FILES.items():
                    assert self.store.objects[f"{step}/{inner}"].data == content(seed, inner, size)
                assert MARKER in manifest_of(self.store, step)["files"]
            assert left_over(self.store) == []
        finally:
            shutil.rmtree(self.path)


def test_nothing_half_is_ever_listed_and_everything_owed_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)
    run_state_machine_as_test(
        PersistMachine,
        settings=hypothesis_settings(
            max_examples=1500 if SOAK else 30,
            stateful_step_count=40 if SOAK else 20,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
