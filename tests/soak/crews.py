"""Processes that do what they are told, one a node or a gloo job over several; they may be killed at any moment."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rig.network import enter
from rig.ranks import Seat, forked, preload
from soak.work import WORK, failure

preload("soak.work")
COLLECTIVE_S = 20.0
READY_S = 120.0
_starting = threading.Lock()


class CrewDied(Exception):
    """A process ended without an answer; `rank` is the first that did."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} ended without an answer")
        self.rank = rank


class CrewHangs(Exception):
    """No answer in time."""


class Crew:
    """One process a seat. With `is_job` they are ranks of a gloo job. Raises CrewDied where one ends at its start."""

    def __init__(self, seats: Sequence[Seat], *, is_job: bool = False) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tierfs-soak-")
        store = f"{self._directory.name}/store" if is_job else ""
        self._pipes: list[Connection] = []
        self._processes = []
        for rank, seat in enumerate(seats):
            with _starting:  # the fork server's client is not made for several threads
                ours, theirs, process = forked(_serve, rank, len(seats), seat, store)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._answers(READY_S)
        except BaseException:
            self.kill()
            raise

    def order(self, work: str, *arguments: Any, timeout_s: float) -> list[dict[str, Any]]:
        """What each process answered. One whose answer is an error is in `failure`; CrewDied, CrewHangs."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((work, arguments))
            except OSError:
                raise CrewDied(rank) from None
        return self._answers(timeout_s)

    def strike(self, rank: int) -> None:
        """SIGKILL for one of them, whatever it does now."""
        with contextlib.suppress(ProcessLookupError):
            if self._processes[rank].is_alive() and self._processes[rank].pid:
                os.kill(self._processes[rank].pid, signal.SIGKILL)

    def stack(self) -> str:
        """Where in the kernel each of them is."""
        told = []
        for process in self._processes:
            with contextlib.suppress(OSError):
                told.append(f"{process.pid}: {Path(f'/proc/{process.pid}/stack').read_text().split(chr(10))[:6]}")
        return "; ".join(told)

    def kill(self) -> None:
        for rank in range(len(self._processes)):
            self.strike(rank)
        for process in self._processes:
            process.join(20)
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CrewHangs(f"no answer within {timeout_s:g} s: {self.stack()}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    raise CrewDied(rank) from None
        return [answers[rank] for rank in range(len(self._pipes))]


def _serve(pipe: Connection, rank: int, world: int, seat: Seat, store: str) -> None:
    enter(seat.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DCP tells of each marker that is not there
    try:
        if store:
            timeout = timedelta(seconds=COLLECTIVE_S)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        pipe.send({"ready": True})
        while True:
            work, arguments = pipe.recv()
            try:
                answer = WORK[work](seat.root, *arguments)
            except BaseException as error:  # DCP's CheckpointException is no Exception
                answer = failure(error)
            pipe.send(answer)
    except (EOFError, OSError):
        return  # who gives the orders is gone
