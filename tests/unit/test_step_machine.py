"""Random writers, crashes of writers and of the daemon, moves and evictions, against a simple model.

After each step of the machine: where a marker is in sight all files that it names are whole and of one save; no
complete step is lost; `latest` names a complete step; nothing is left over. TIERFS_SOAK=1 runs it much longer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from step_driver import FILES, MARKER, Driver, Program, content

from tierfs.crash_points import POINTS
from tierfs.errors import CommitRefused
from tierfs.settings import Settings

SOAK = os.environ.get("TIERFS_SOAK") == "1"
STEPS = ("run/step_1", "run/step_2", "run/step_3", "run/step_10")
NAMES = tuple(FILES)


class Died(BaseException):
    """The daemon's SIGKILL: nothing of the daemon's runs on after it."""


class OneDeath:
    """Dies at the nth passing of a point from now on."""

    def __init__(self, point: str, nth: int) -> None:
        self._point, self._left = point, nth

    def __call__(self, name: str) -> None:
        if name == self._point:
            self._left -= 1
            if self._left == 0:
                raise Died


class Writer:
    """A program that saves a step, file by file."""

    def __init__(self, step: str, seed: int) -> None:
        self.step, self.seed = step, seed
        self.program = Program()
        self.written: set[str] = set()


class StepMachine(RuleBasedStateMachine):
    """`saved` is the model: which save each step holds, where it holds one whole; of the `removed` ones a program
    removed files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tierfs-steps-"))
        self.driver = Driver(self.path / "ram", _settings())
        self.saved: dict[str, int] = {}
        self.removed: set[str] = set()
        self.writers: list[Writer] = []
        self.seed = 0
        self.death: tuple[str, int] | None = None

    def teardown(self) -> None:
        for writer in self.writers:
            writer.program.kill()
        for handle in list(self.driver.handles):
            os.close(handle.fd)
        shutil.rmtree(self.path)

    def do(self, operation: Callable[[], Awaitable[Any]]) -> bool:
        """What a program asks for; when the daemon dies of it, the kernel asks the next one again. True when done."""
        if self.death is not None:
            self.driver.registry.crash = OneDeath(*self.death)  # type: ignore[assignment]
            self.death = None
        for _ in range(2):
            try:
                trio.run(operation)
                return True
            except Died:
                self.restart()
            except (CommitRefused, FileNotFoundError):
                return False
        raise AssertionError("died twice")

    def restart(self) -> None:
        self.driver.restart()

    def settle(self, seconds: float) -> None:
        async def settle() -> None:
            await self.driver.settle(seconds=seconds)

        self.do(settle)

    # --- programs

    @initialize()
    def begin(self) -> None:
        self.seed += 1
        seed = self.seed
        assert self.do(lambda: self.driver.save(STEPS[0], seed))
        self.saved[STEPS[0]] = seed

    @rule(step=st.sampled_from(STEPS))
    def start_save(self, step: str) -> None:
        if len(self.writers) > 2 or any(writer.step == step for writer in self.writers):
            return
        self.seed += 1
        writer = Writer(step, self.seed)
        self.writers.append(writer)

        async def start() -> None:
            self.driver.mkdirs(step, pid=writer.program.pid)
            self.driver.lookup(f"{step}/{MARKER}", pid=writer.program.pid)

        self.do(start)

    @rule(data=st.data(), name=st.sampled_from(NAMES), how=st.sampled_from(["truncate", "in place", "by rename"]))
    @precondition(lambda self: self.writers)
    def write_file(self, data: st.DataObject, name: str, how: str) -> None:
        self._write(data.draw(st.sampled_from(self.writers)), name, how)

    def _write(self, writer: Writer, name: str, how: str) -> None:
        rel, size, pid = f"{writer.step}/{name}", FILES[name], writer.program.pid
        bytes_ = content(writer.seed, name, size)

        async def write() -> None:
            if not (self.driver.root / writer.step).is_dir():
                self.driver.mkdirs(writer.step, pid=pid)
            if how == "by rename":
                await self.driver.write(f"{rel}.part", bytes_, pid=pid)
                await self.driver.rename(f"{rel}.part", rel, pid=pid)
                return
            handle = await self.driver.open(rel, pid=pid, truncate=how == "truncate")
            os.ftruncate(handle.fd, 0)
            os.pwrite(handle.fd, bytes_, 0)
            self.driver.close(handle)

        if self.do(write):
            writer.written.add(name)

    @rule(data=st.data())
    @precondition(lambda self: self.writers)
    def finish_save(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self.writers)))

    def _finish(self, writer: Writer) -> None:
        there = {name for name in NAMES if (self.driver.root / writer.step / name).exists()}
        if writer.step not in self.saved and there - writer.written:
            return  # left by a save that never ended: nobody can tell them from its own, and DCP writes them all anew

        async def finish() -> None:
            rel, pid = writer.step, writer.program.pid
            if self.driver.loaded(rel) == writer.seed:
                return  # the daemon died after the rename, and this is the rename again
            await self.driver.finish(rel, writer.seed, pid=pid)

        done = self.do(finish)
        assert not done or writer.written == set(NAMES), "a marker was accepted whose files were not all written"
        if done:
            self.saved[writer.step] = writer.seed
            self.removed.discard(writer.step)
            self.settle(0)
        else:
            assert not (writer.written == set(NAMES) and self._is_its(writer)), "a whole save was refused"
        self.end(writer)

    def _is_its(self, writer: Writer) -> bool:
        """All files are there as it wrote them."""
        for name, size in FILES.items():
            path = self.driver.root / writer.step / name
            if not path.exists() or path.read_bytes() != content(writer.seed, name, size):
                return False
        return True

    @rule(step=st.sampled_from(STEPS), written=st.integers(0, len(NAMES) + 1), point=st.sampled_from(POINTS))
    def save_all_or_die(self, step: str, written: int, point: str) -> None:
        """A save over whatever is there, in which the program may die after some files, and the daemon at a point."""
        if any(writer.step == step for writer in self.writers):
            return
        self.start_save(step)
        if not self.writers or self.writers[-1].step != step:
            return
        self.death = point, 1
        writer = self.writers[-1]
        for name in NAMES[:written]:
            self._write(writer, name, "truncate")
        if written > len(NAMES):
            self._finish(writer)
        else:
            self.end(writer)

    @rule(data=st.data())
    @precondition(lambda self: self.writers)
    def kill_writer(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.writers)))

    def end(self, writer: Writer) -> None:
        writer.program.kill()
        self.writers.remove(writer)
        if not any(other.step == writer.step for other in self.writers):
            self.settle(400)

    @rule(step=st.sampled_from(STEPS), name=st.sampled_from(NAMES))
    def remove_file(self, step: str, name: str) -> None:
        if (self.driver.root / step / name).exists() and self.do(lambda: self.driver.unlink(f"{step}/{name}")):
            self.removed.add(step)

    @rule(step=st.sampled_from(STEPS))
    def remove_step(self, step: str) -> None:
        if any(writer.step == step for writer in self.writers) or not (self.driver.root / step).exists():
            return

        async def remove() -> None:
            if (self.driver.root / step).exists():
                await self.driver.rmtree(step)

        self.do(remove)
        self.saved.pop(step, None)
        self.removed.discard(step)

    @rule(step=st.sampled_from(STEPS))
    def add_small_file(self, step: str) -> None:
        if (self.driver.root / step).is_dir():
            self.do(lambda: self.driver.write(f"{step}/config.json", b"{}"))

    @rule(step=st.sampled_from(STEPS), name=st.sampled_from(NAMES))
    def open_without_a_change(self, step: str, name: str) -> None:
        if not (self.driver.root / step / name).exists():
            return

        async def touch() -> None:
            self.driver.close(await self.driver.open(f"{step}/{name}"))

        self.do(touch)

    @rule(old=st.sampled_from(STEPS), new=st.sampled_from(STEPS))
    def move(self, old: str, new: str) -> None:
        if not (self.driver.root / old).exists() or (self.driver.root / new).exists():
            return
        if any(writer.step in (old, new) for writer in self.writers):
            return
        assert self.do(lambda: self.driver.rename(old, new))
        if old in self.saved:
            self.saved[new] = self.saved.pop(old)
        if old in self.removed:
            self.removed.remove(old)
            self.removed.add(new)

    @rule(step=st.sampled_from(STEPS))
    def evict(self, step: str) -> None:
        if any(writer.step == step for writer in self.writers) or not (self.driver.root / step).exists():
            return
        assert self.do(lambda: self.driver.operations.evict(step, force=True))
        self.saved.pop(step, None)
        self.removed.discard(step)

    # --- the daemon

    @rule()
    def daemon_dies_between_requests(self) -> None:
        self.restart()

    @rule(point=st.sampled_from(POINTS), nth=st.integers(1, 2))
    def daemon_will_die(self, point: str, nth: int) -> None:
        self.death = point, nth

    @rule(seconds=st.sampled_from([0.0, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.settle(seconds)

    # --- what must hold

    @invariant()
    def what_a_load_finds_is_whole(self) -> None:
        for step in STEPS:
            if step in self.removed:
                continue  # a program removed a file of it, and the marker stays in sight
            found = self.driver.loaded(step)
            if found is not None:
                assert found == self.saved.get(step), f"{step} shows save {found}, {self.saved.get(step)} was saved"

    @invariant()
    def no_complete_step_is_lost(self) -> None:
        busy = {writer.step for writer in self.writers} | self.removed
        for step, seed in self.saved.items():
            if step in busy:
                continue
            if self.driver.record(step).manifest.overwrite is not None:
                self.settle(400)
            elif self.driver.state(step) != "complete":
                self.settle(0)
            assert self.driver.state(step) == "complete", f"{step}: {self.driver.record(step).manifest.note}"
            assert self.driver.loaded(step) == seed

    @invariant()
    def latest_names_a_complete_step(self) -> None:
        complete = [record for record in self.driver.registry.records.values() if record.is_complete]
        named = self.driver.latest()
        if complete:
            newest = max(complete, key=lambda record: record.manifest.number)
            assert named == newest.manifest.step

    @invariant()
    def nothing_is_left_over(self) -> None:
        kept = {
            Path(record.manifest.overwrite.old_directory).name
            for record in self.driver.registry.records.values()
            if record.manifest.overwrite is not None
        }
        assert set(self.driver.old_generations()) == kept


def _settings() -> Settings:
    made = Settings()
    made.steps.checksums = False
    made.steps.overwrite_idle_s = 300
    return made


@pytest.mark.timeout(3600 if SOAK else 120)
def test_steps_hold_their_promises_whatever_happens() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StepMachine,
        settings=settings(
            max_examples=5000 if SOAK else 50,
            stateful_step_count=50 if SOAK else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
