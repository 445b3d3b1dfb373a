"""Runs a function on N gloo ranks, as `torchrun` would, but in processes forked from one that has torch imported.

Importing torch costs seconds and a fork costs milliseconds, so that tests can start (and kill) trainers by the dozen.
The forking process never touches a checkpoint: who took part in a save are the ranks alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rig.network import enter

COLLECTIVE_TIMEOUT_S = 60
_context = multiprocessing.get_context("forkserver")
# The last ones are what the first DTensor imports: a second of each rank's time.
_PRELOADED = [
    *("torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "rig.checkpoints"),
    *("numpy.random", "torch._dynamo"),
]
_context.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """What the ranks of a test file import, too: by one process instead of by each. In vain once a job was started."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


def forked(function: Callable[..., Any], *arguments: Any) -> tuple[Connection, Connection, Any]:
    """Both ends of a pipe, and a started process that runs `function(theirs, *arguments)`."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=function, args=(theirs, *arguments))
    process.start()
    return ours, theirs, process


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: on a host of a network under test, with the mount of its node as its `root`."""

    namespace: Path
    root: Path
    interface: str = "eth0"


@dataclass(frozen=True)
class Table:
    """The seats of a job's ranks. They meet by a file, as ranks without seats do; all else goes over their network."""

    seats: Sequence[Seat]
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S


class RankFailed(AssertionError):
    """A rank raised or died; the message holds every rank's traceback or exit status."""


@dataclass
class Rank:
    """What the function on a rank gets as its first argument."""

    rank: int
    world: int
    _pipe: Connection
    root: Path = Path()
    """The mount of its node, where the job has a `Table`."""

    def report(self, event: Any) -> None:
        """Tells the test how far this rank is; read with `Job.next_event`."""
        self._pipe.send(("event", event))


class Job:
    """A started job. `function(rank, *arguments)` runs on each of `world` ranks, or on one rank a seat of `table`."""

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, world: int = 2, table: Table | None = None
    ) -> None:
        world = len(table.seats) if table else world
        self._directory = tempfile.TemporaryDirectory(prefix="tierfs-ranks-")
        self.processes = []
        self._pipes: list[Connection] = []
        self._answers: dict[int, tuple[str, Any]] = {}
        self._events: list[Any] = []
        for rank in range(world):
            store = f"{self._directory.name}/store"
            ours, theirs, process = forked(_run_rank, function, rank, world, store, table, arguments)
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def next_event(self, timeout_s: float = 60) -> Any:
        """The next thing that any rank reported. Fails when a rank ends or nothing comes."""
        deadline = time.monotonic() + timeout_s
        while not self._events:
            self._receive(deadline)
            if not self._events and self._answers:
                self.wait()
                raise RankFailed("the job ended without the event that was waited for")
        return self._events.pop(0)

    def wait(self, timeout_s: float = 120) -> list[Any]:
        """What the function returned on each rank, once all have; RankFailed when any raised or died."""
        deadline = time.monotonic() + timeout_s
        try:
            while len(self._answers) < len(self._pipes):
                self._receive(deadline)
        finally:
            self.kill()
        failures = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(self._answers.items()) if kind != "value"]
        if failures:
            raise RankFailed("\n".join(failures))
        return [self._answers[rank][1] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        """SIGKILLs the ranks that still run. Returns when they are gone."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(20)
        self._directory.cleanup()

    def _receive(self, deadline: float) -> None:
        waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._answers]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {[self._pipes.index(pipe) for pipe in waiting]} did not answer in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = self._pipes.index(pipe)
            try:
                kind, content = pipe.recv()
            except EOFError:
                self._answers[rank] = ("died", "ended without an answer")
                continue
            if kind == "event":
                self._events.append(content)
            else:
                self._answers[rank] = (kind, content)


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world: int = 2,
    table: Table | None = None,
    timeout_s: float = 120,
) -> list[Any]:
    """Runs `function(rank, *arguments)` on each rank to its end and returns what each returned."""
    return Job(function, *arguments, world=world, table=table).wait(timeout_s)


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    number: int,
    world: int,
    store: str,
    table: Table | None,
    arguments: tuple[Any, ...],
) -> None:
    timeout_s: float = COLLECTIVE_TIMEOUT_S
    rank = Rank(number, world, pipe)
    if table:
        seat = table.seats[number]
        enter(seat.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
        rank.root = seat.root
        timeout_s = table.collective_timeout_s

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=number,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, *arguments)
        dist.destroy_process_group()
        pipe.send(("value", value))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
