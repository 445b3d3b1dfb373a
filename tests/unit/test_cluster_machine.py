"""Three nodes that save, save again, give up and remove steps, while the catalogue's answers get lost, nodes are cut
off, restart, or lose their RAM: the real publishing, commit and following against a catalogue in memory.

A committed step is of one save, whatever happened; one generation is committed once; what was removed stays away;
`latest` names a step that is all there. TIERFS_SOAK=1 runs it much longer.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.unit.cluster_writers import WritingNode
from tests.unit.step_driver import MARKER, Handle, Metadata, content
from tierfs.catalog import keys
from tierfs.catalog.memory import MemoryServer
from tierfs.catalog.records import FileRecord, Part, StepState, from_bytes
from tierfs.catalog.store import Put
from tierfs.cluster.step_files import merge
from tierfs.cluster.versions import whole_version
from tierfs.errors import CatalogUnavailable, CommitRefused, TierfsError
from tierfs.hydrate.stubs import read_mark

SOAK = os.environ.get("TIERFS_SOAK") == "1"
NODES = ("a", "b", "c")
SHARDS = {node: f"__{rank}_0.distcp" for rank, node in enumerate(NODES)}
SIZES = {name: 1000 + 500 * rank for rank, name in enumerate(SHARDS.values())}
STEPS = ("run/step_1", "run/step_2")
#: A part of a save that goes on only so long has failed (by the tests' clock).
WITHIN_S = 120.0


async def _without_thread(work: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """The clock of the tests would jump ahead of a thread; and each run of one example is to be the same."""
    await trio.lowlevel.checkpoint()
    return work(*args)


class WatchedServer(MemoryServer):
    """Notes what must never be put."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def apply(self, operations: Any) -> bool:
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(keys.STATES):
                self._check_state(operation)
        return super().apply(operations)

    def _check_state(self, put: Put) -> None:
        before = self.keys.get(put.key)
        if before is None:
            return
        old, new = from_bytes(StepState, before.value), from_bytes(StepState, put.value)
        if new.generation < old.generation:
            self.wrong.append(f"{put.key} went back from generation {old.generation} to {new.generation}")
        if new.generation == old.generation and (new.node, new.completed_at) != (old.node, old.completed_at):
            self.wrong.append(f"{put.key} was committed twice in generation {new.generation}")

    def files(self, step: str, generation: int) -> dict[str, FileRecord]:
        namespace, _, name = step.rpartition("/")
        prefix = keys.parts_prefix(namespace, name, generation)
        parts: dict[bool, dict[str, dict[str, FileRecord]]] = {False: {}, True: {}}
        for key, value in self.keys.items():
            if key.startswith(prefix):
                node = key.removeprefix(prefix).partition("/")[0]
                part = parts[node.endswith("+")].setdefault(node.removesuffix("+"), {})
                part.update(from_bytes(Part, value.value).files)
        return merge((namespace, name), generation, 0, parts[False], parts[True]).files

    def states(self) -> dict[str, StepState]:
        return {
            key.removeprefix(keys.STATES): from_bytes(StepState, value.value)
            for key, value in self.keys.items()
            if key.startswith(keys.STATES)
        }


class ClusterMachine(RuleBasedStateMachine):
    """`removed` are steps that a program removed and nobody wrote since; `unsure` those that a node wrote while it
    could not tell the others."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierfs-cluster-"))
        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.server = WatchedServer()
        self.nodes: dict[str, WritingNode] = {}
        self.tiers = 0
        self.seed = 0
        self.removed: set[str] = set()
        self.unsure: set[str] = set()
        self.held: dict[str, tuple[str, Handle]] = {}
        for name in NODES:
            self._make(name)

    def _make(self, name: str) -> None:
        self.tiers += 1
        node = WritingNode(name, self.path / f"{name}{self.tiers}", self.server, self.nodes)
        node.registry.settings.cluster.wait_s = 3.0
        self.nodes[name] = node

    def teardown(self) -> None:
        for node in self.nodes.values():
            for handle in list(node.driver.handles):
                os.close(handle.fd)
        shutil.rmtree(self.path)

    # --- running

    def do(self, work: Callable[[], Awaitable[Any]]) -> None:
        """With all nodes running; until what it leads to is done."""

        async def main() -> None:
            with trio.fail_after(WITHIN_S):
                async with AsyncExitStack() as stack:
                    for node in self.nodes.values():
                        await stack.enter_async_context(node.running())
                    await work()
                    await self._settle()

        with mock.patch("trio.to_thread.run_sync", _without_thread):
            trio.run(main, clock=self.clock)

    async def _settle(self) -> None:
        self.server.lose_answers = 0
        for node in self.connected():
            await node.view.until(lambda node=node: node.view.connected, within_s=10)  # type: ignore[misc]
        for pause_s in (0.5, 2.5, 0.1):
            await trio.sleep(pause_s)
            for node in self.connected():
                await node.flushed()
                await node.caught_up()

    def connected(self) -> list[WritingNode]:
        return [node for node in self.nodes.values() if not node.store.cut_off]

    async def _write(self, name: str, step: str, seed: int) -> None:
        node = self.nodes[name]
        self.removed.discard(step)
        if node.store.cut_off:
            self.unsure.add(step)
        await node.shards(step, seed, {SHARDS[name]: SIZES[SHARDS[name]]})
        if node.store.cut_off:
            self.unsure.add(step)

    def _with_fault(self, name: str, fault: str, at: int) -> None:
        node, asked = self.nodes[name], 0

        async def hook(when: str, call: str) -> None:
            nonlocal asked
            if when != "answer" or call not in ("txn", "range"):
                return
            asked += 1
            if asked == at:
                node.store.hook = None
                if fault == "cut":
                    node.store.cut_off = True
                raise CatalogUnavailable("the answer was lost")

        node.store.hook = hook if fault != "none" else None

    # --- programs

    @rule(
        step=st.sampled_from(STEPS),
        coordinator=st.sampled_from(NODES),
        sick=st.sampled_from(NODES),
        fault=st.sampled_from(["none", "none", "lost", "cut"]),
        at=st.integers(1, 8),
    )
    def save(self, step: str, coordinator: str, sick: str, fault: str, at: int) -> None:
        self.seed += 1
        seed = self.seed

        async def work() -> None:
            self._with_fault(sick, fault, at)
            async with trio.open_nursery() as nursery:
                for name in NODES:
                    if name not in self.held:
                        nursery.start_soon(self._write, name, step, seed)
            with suppress(CommitRefused, OSError):
                if not self.held:  # ranks wait for each other before one of them writes the marker
                    await self.nodes[coordinator].finish(step, seed, SIZES)
            self.nodes[sick].store.hook = None

        self.do(work)

    @rule(step=st.sampled_from(STEPS), name=st.sampled_from(NODES))
    def save_a_part(self, step: str, name: str) -> None:
        """And then the program dies."""
        if name in self.held:
            return
        self.seed += 1
        seed = self.seed

        async def work() -> None:
            await self._write(name, step, seed)

        self.do(work)

    @rule(step=st.sampled_from(STEPS), name=st.sampled_from(NODES))
    def hold_open(self, step: str, name: str) -> None:
        node = self.nodes[name]
        if name in self.held:
            return

        async def work() -> None:
            await self._write(name, step, -1)
            handle = await node.driver.open(f"{step}/{SHARDS[name]}", truncate=True)
            self.held[name] = step, handle

        self.do(work)

    @rule(coordinator=st.sampled_from(NODES), step=st.sampled_from(STEPS))
    def commit_what_is_open(self, coordinator: str, step: str) -> None:
        """A marker that comes too early: while a file that it names is open."""
        if not any(held == step for held, _ in self.held.values()):
            return

        async def work() -> None:
            before = self.server.states().get(step)
            with suppress(CommitRefused, OSError):
                await self.nodes[coordinator].finish(step, -2, SIZES)
            after = self.server.states().get(step)
            name = next(name for name, (held, _) in self.held.items() if held == step)
            if self.nodes[name] in self.connected() and step not in self.unsure:
                same = before is None or after is None or after.completed_at == before.completed_at
                assert same and (before is not None or after is None), "committed with a file that is open"

        if self.nodes[coordinator].store.cut_off:
            return
        self.do(work)

    @rule()
    def close_all(self) -> None:
        async def work() -> None:
            for name, (_, handle) in self.held.items():
                self.nodes[name].driver.close(handle)
            self.held.clear()

        self.do(work)

    @rule(step=st.sampled_from(STEPS), name=st.sampled_from(NODES))
    def remove(self, step: str, name: str) -> None:
        node = self.nodes[name]

        async def work() -> None:
            if self.held or not (node.root / step).is_dir():
                return
            try:
                await node.showing.show_listing(step)
                await node.driver.rmtree(step)
            except (OSError, TierfsError):
                return
            if not any(self._has_unknown(other, step) for other in self.nodes.values()):
                self.removed.add(step)
                self.unsure.discard(step)

        self.do(work)

    def _has_unknown(self, node: WritingNode, step: str) -> bool:
        """It was made there without the catalogue, so it is another step of that name; or will be removed later."""
        namespace, _, name = step.rpartition("/")
        record = node.registry.records.get((namespace, name))
        return node.store.cut_off or (record is not None and not record.manifest.joined)

    @rule(name=st.sampled_from(NODES))
    def give_up(self, name: str) -> None:
        """Hours pass without a change: what was begun over a complete step is put back."""
        if self.held:
            return

        async def work() -> None:
            await self.nodes[name].driver.settle(seconds=10_000)

        self.do(work)

    # --- faults

    @rule(name=st.sampled_from(NODES), away=st.booleans())
    def cut(self, name: str, away: bool) -> None:
        self.nodes[name].store.cut_off = away
        self.do(trio.lowlevel.checkpoint)

    @rule(name=st.sampled_from(NODES))
    def restart(self, name: str) -> None:
        if name not in self.held:
            self.nodes[name].restart()
            self.do(trio.lowlevel.checkpoint)

    @rule(name=st.sampled_from(NODES))
    def lose_ram(self, name: str) -> None:
        if name in self.held:
            return
        self._make(name)
        self.unsure.update(STEPS)
        self.do(trio.lowlevel.checkpoint)

    # --- what must hold

    @invariant()
    def nothing_forbidden_was_put(self) -> None:
        assert not self.server.wrong

    @invariant()
    def committed_steps_are_of_one_save(self) -> None:
        for step, state in self.server.states().items():
            files = self.server.files(step, state.generation)
            if state.marker is None:
                continue
            marker = self._bytes(files[state.marker])
            if marker is None:
                continue
            metadata: Metadata = pickle.loads(marker)
            for info in metadata.storage_data.values():
                assert info.relative_path in files, f"{step}: {info.relative_path} is not listed"
                data = self._bytes(files[info.relative_path])
                wanted = content(metadata.seed, info.relative_path, info.length)
                assert data is None or data == wanted, f"{step}: {info.relative_path} is not of save {metadata.seed}"

    def _bytes(self, file: FileRecord) -> bytes | None:
        for node in self.nodes.values():
            path = node.copies.path(file.version)
            if path is not None:
                return path.read_bytes()
        return None

    @invariant()
    def what_is_loaded_is_of_one_save(self) -> None:
        for node in self.nodes.values():
            for step in STEPS:
                directory = node.root / step
                if not (directory / MARKER).is_file() or read_mark(directory / MARKER) is not None:
                    continue
                metadata: Metadata = pickle.loads((directory / MARKER).read_bytes())
                for info in metadata.storage_data.values():
                    path = directory / info.relative_path
                    if metadata.seed > 0 and path.is_file() and whole_version(path) is not None:
                        wanted = content(metadata.seed, info.relative_path, info.length)
                        assert path.read_bytes() == wanted, (
                            f"{node.name}: {step}/{info.relative_path} is of another save"
                        )

    @invariant()
    def removed_steps_stay_away(self) -> None:
        for step in self.removed:
            assert step not in self.server.states() and keys.tree_key(step) not in self.server.keys
            for node in self.connected():
                assert not (node.root / step).exists(), f"{step} is back on {node.name}"

    @invariant()
    def latest_is_all_there(self) -> None:
        states = self.server.states()
        for node in self.connected():
            step = f"run/{node.driver.latest()}"
            state = states.get(step)
            if state is None or step in self.unsure or any(held == step for held, _ in self.held.values()):
                continue
            assert state.level != "lost", f"latest of {node.name} names {step}, which is lost"
            for inner, file in self.server.files(step, state.generation).items():
                assert self._bytes(file) is not None, f"latest of {node.name} names {step}; nobody has {inner}"


@pytest.mark.timeout(900 if SOAK else 120)
def test_three_nodes_never_mix_saves() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        ClusterMachine,
        settings=settings(
            max_examples=400 if SOAK else 12,
            stateful_step_count=25 if SOAK else 12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
