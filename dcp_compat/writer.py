"""`TieredStorageWriter`: DCP's own writer for the mount. What it writes is what `FileSystemWriter` writes.

It adds what a path can't say: the tiers and the durability of one step, waiting for a level, room made ahead, and
writing without a copy or a sum that nobody reads.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcp_compat.mounts import LEVELS, is_tierfs, reaches, wish
from dcp_compat.saved_step import SavedStep
from dcp_compat.shard_files import write_shard
from dcp_compat.stager import TieredStager
from dcp_compat.steps import namespace_path, step_number, step_path

log = logging.getLogger("tierfs.dcp")

#: One core alone writes to RAM at half the speed of two (bench/dcp_writers.py: 0.17 and 0.075 s for 512 MiB); four were
#: no better where it was measured. Each thread is one more file.
_MOST_THREADS = 2


class TieredStorageWriter(FileSystemWriter):
    """As `FileSystemWriter`, whose options it takes by name, with:

    `path`, or `namespace` and `step`: `/ckpt/run1/step_500` is the same as `namespace="run1", step=500`. `root` is the
    mount ($TIERFS_ROOT, else /ckpt). With a path the step is inferred from its name.

    `tiers`: where this step may go, such as `("ram", "replica", "object")`; whether `object` is among them goes ahead
    of `persist.policy`. None leaves it to the settings.

    `durability`: what the save waits for (`ram`, `replica` or `object`), instead of `durability.commit`.

    `thread_count`: files that are written at a time, where the state dict has so many tensors; by default two, or one
    where this rank has but one core.

    `crc32`: sum up each tensor's bytes as `torch.save` does, so that the files are the same bit for bit. Nothing that
    loads them looks at it, and it takes longer than writing.

    `stager`: for `async_save`, which then copies the tensors into the checkpoint's file itself (`TieredStager`).

    Raises ValueError for what is no tier, or a namespace without a step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str | os.PathLike[str] | None = None,
        step: int | None = None,
        root: str | os.PathLike[str] | None = None,
        tiers: Iterable[str] | None = None,
        durability: str | None = None,
        thread_count: int | None = None,
        crc32: bool = False,
        stager: TieredStager | None = None,
        **stock: Any,
    ) -> None:
        if (path is None) == (namespace is None):
            raise ValueError("a writer needs a path, or a namespace and a step")
        if path is None:
            if step is None:
                raise ValueError(f"which step of {namespace}? Give step=, or a path")
            assert namespace is not None
            path = step_path(namespace, step, root=root)
        super().__init__(path, thread_count=thread_count or default_threads(), **stock)
        self.crc32 = crc32
        self.stager = stager
        self.tiers = _checked(tiers)
        if durability is not None:
            reaches("ram", durability)
        self.durability = durability
        self._saved: SavedStep | None = None
        self._on_tierfs = False

    @property
    def step(self) -> int | None:
        """The step's number, by its name."""
        return step_number(Path(self.path))

    def begin(
        self,
        step: int,
        *,
        tiers: Iterable[str] | None = None,
        durability: str | None = None,
    ) -> TieredStorageWriter:
        """The same writer for another step of its namespace; tiers and durability are those of this step."""
        self.reset(step_path(namespace_path(Path(self.path).absolute().parent), step))
        self.tiers = _checked(tiers)
        if durability is not None:
            reaches("ram", durability)
        self.durability = durability
        return self

    @property
    def saved(self) -> SavedStep:
        """The step that was saved last, on any rank. RuntimeError before a save has ended."""
        if self._saved is None:
            if not Path(self.path).is_dir():
                raise RuntimeError(f"{self.path} is not saved yet")
            self._saved = SavedStep(Path(self.path))
        return self._saved

    def wait(self, level: str = "object", timeout_s: float | None = None) -> None:
        """Until the step that was saved is as durable as `level`: `SavedStep.wait`."""
        self.saved.wait(level, timeout_s)

    # --- what DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._saved = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        self._saved = None
        step = Path(self.path)
        self._on_tierfs = is_tierfs(step)
        if self._on_tierfs and step_number(step) is not None:
            wish(step, "tiers", ",".join(self.tiers or ()))
            wish(step, "durability", self.durability or "")
        return plan

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return super().stage(state_dict) if self.stager is None else self.stager.stage(state_dict)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self.stager is None or not self.stager.has_staged:
            return super().write_data(plan, planner)
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = self.stager.write(plan, planner, Path(self.path) / name, name, crc32=self.crc32, sync=self.sync_files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_data(self, planner: SavePlanner, file_queue: queue.Queue[Any]) -> Future[list[WriteResult]]:
        if self.transforms.extensions or self.serialization_format != SerializationFormat.TORCH_SAVE:
            return super()._write_data(planner, file_queue)
        results: list[list[WriteResult]] = []
        failures: list[BaseException] = []

        def write() -> None:
            while not failures:
                try:
                    path, storage_key, items = file_queue.get_nowait()
                except queue.Empty:
                    return
                try:
                    results.append(self._write_file(Path(path), storage_key, items, planner))
                except BaseException as error:  # raised again by the caller's thread
                    failures.append(error)

        threads = [threading.Thread(target=write, name="tierfs-dcp-write") for _ in range(1, self.thread_count)]
        for thread in threads:
            thread.start()
        write()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for of_file in results for result in of_file])
        return future

    def _write_file(
        self, path: Path, storage_key: str, items: Sequence[Any], planner: SavePlanner
    ) -> list[WriteResult]:
        return write_shard(
            path,
            storage_key,
            list(items),
            planner,
            crc32=self.crc32,
            sync=self.sync_files,
            copy_ahead_bytes=self.per_thread_copy_ahead if self.thread_count == 1 else 0,
            on_tierfs=self._on_tierfs,
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stock, self.fs = self.fs, _AtOnce()
        try:
            super().finish(metadata, results)
        finally:
            self.fs = stock
        self._saved = SavedStep(Path(self.path))


class _AtOnce(FileSystem):
    """For the marker: it takes the old one's place by its rename alone.

    The stock writer removes the old one first. Of two jobs that save one step at once, as one does that was taken for
    dead, the later would remove the marker of the earlier, and then find that its own was renamed already.
    """

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass


def default_threads() -> int:
    """As many as the rank has cores, of those that the ranks of its node share ($LOCAL_WORLD_SIZE, as torchrun sets
    it), but no more than help."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdigit() else 1)
    return max(1, min(_MOST_THREADS, cores))


def _checked(tiers: Iterable[str] | None) -> tuple[str, ...] | None:
    if tiers is None:
        return None
    wanted = tuple(tiers)
    if isinstance(tiers, str) or any(tier not in LEVELS for tier in wanted) or "ram" not in wanted:
        raise ValueError(f"tiers={tiers!r}: a step is in 'ram', and may go to 'replica' and 'object'")
    return wanted
