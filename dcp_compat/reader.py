"""`TieredStorageReader`: DCP's own reader for the mount. Without a step it loads the newest whole one it can read.

Which one is decided by rank 0 and told to all others, also when one of them can't read it: then all go back to the one
before, and say which and why.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dcp_compat.steps import list_steps, namespace_path, step_path
from tierfs.errors import NotFound

log = logging.getLogger("tierfs.dcp")

_T = TypeVar("_T")


class TieredStorageReader(FileSystemReader):
    """As `FileSystemReader`, with:

    `path`, or `namespace` with `step` or without: `namespace="run1"` is its newest whole step over all tiers that every
    rank can read. `root` is the mount ($TIERFS_ROOT, else /ckpt). After the load `path` is the step that was loaded,
    and `skipped` says why newer ones were not.

    `process_group`: of the ranks that load together, as given to `dcp.load`; it needs a backend for the CPU. `no_dist`
    as there.

    Raises NotFound when there is no step that all can read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str | os.PathLike[str] | None = None,
        step: int | None = None,
        root: str | os.PathLike[str] | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        **stock: Any,
    ) -> None:
        if (path is None) == (namespace is None):
            raise ValueError("a reader needs a path, or a namespace with or without a step")
        self._namespace: Path | None = None
        if namespace is not None:
            if step is None:
                path = self._namespace = namespace_path(namespace, root)
            else:
                path = step_path(namespace, step, root=root)
        assert path is not None
        super().__init__(path, **stock)
        self.skipped: list[tuple[Path, str]] = []
        self._group = process_group
        self._no_dist = no_dist
        self._chosen = False
        self._with_ranks = False
        self._candidates: list[tuple[str, bool]] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._namespace = None
        if self._namespace is not None:
            self.path = self._namespace
        self.skipped, self._chosen, self._candidates = [], False, None

    # --- what DCP calls, on all ranks

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._namespace is None:
            return super().read_metadata(*args, **kwargs)
        by_rank = kwargs.get("rank") is not None
        if not self._chosen or (by_rank and not self._with_ranks):
            return self._walk(lambda: self._metadata_of_chosen(kwargs), by_rank=by_rank)
        return self._metadata_of_chosen(kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._namespace is None:
            return super().read_data(plan, planner)
        failure = self._tried(lambda: super(TieredStorageReader, self).read_data(plan, planner))[1]
        while (why := self._first_failure(failure)) is not None:
            self._skip(why)
            metadata = self._walk(lambda: self._metadata_of_chosen({"rank": self.rank}), by_rank=self._with_ranks)
            failure = self._tried(lambda md=metadata: self._read_anew(md, planner))[1]  # type: ignore[misc]
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- walking back

    def _walk(self, read: Callable[[], Metadata], *, by_rank: bool) -> Metadata:
        """The marker of the newest step that all ranks can read. NotFound."""
        while True:
            self._agree()
            if self._with_ranks and not by_rank:
                # Each rank has a marker of its own: DCP asks for that one next, where this one is not there.
                raise FileNotFoundError(f"{self.path} has no marker of all ranks")
            metadata, failure = self._tried(read)
            why = self._first_failure(failure)
            if why is None:
                assert metadata is not None
                self._chosen = True
                return metadata
            self._skip(why)

    def _agree(self) -> None:
        """Rank 0 says which step is next."""
        assert self._namespace is not None
        found: list[Any] = [None]
        if self._is_first():
            found = [self._next()]
        if self._is_together():
            dist.broadcast_object_list(found, group_src=0, group=self._group)
        if found[0] is None:
            reasons = "; ".join(f"{path.name}: {why}" for path, why in self.skipped)
            raise NotFound(f"{self._namespace} holds no whole step that can be read{': ' if reasons else ''}{reasons}")
        name, self._with_ranks = found[0]
        self.path = self._namespace / name

    def _next(self) -> tuple[str, bool] | None:
        assert self._namespace is not None
        if self._candidates is None:
            self._candidates = []
            for step in reversed(list_steps(self._namespace)):
                with_ranks = not (step.path / ".metadata").exists() and (step.path / "__0.metadata").exists()
                self._candidates.append((step.path.name, with_ranks))
        gone = {path.name for path, _ in self.skipped}
        return next((found for found in self._candidates if found[0] not in gone), None)

    def _skip(self, why: str) -> None:
        self.skipped.append((Path(self.path), why))
        self._chosen = False
        log.warning("%s can't be loaded, trying the step before it: %s", self.path, why)

    def _metadata_of_chosen(self, kwargs: dict[str, Any]) -> Metadata:
        return super().read_metadata(**({"rank": kwargs.get("rank")} if self._with_ranks else {}))

    def _read_anew(self, metadata: Metadata, planner: LoadPlanner) -> None:
        """Another step than the one that the plan was made for, which may be cut into other pieces."""
        self.set_up_storage_reader(metadata, self._is_first(), rank=self.rank, use_collectives=self.use_collectives)
        state_dict = getattr(planner, "original_state_dict", None)
        if state_dict is None:
            raise RuntimeError(f"{type(planner).__name__} does not tell what it loads: name an older step")
        given: dict[str, Any] = {"metadata": metadata, "is_coordinator": self._is_first()}
        known = inspect.signature(planner.set_up_planner).parameters
        planner.set_up_planner(state_dict, **{key: value for key, value in given.items() if key in known})
        plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
        super().read_data(plan, planner)

    def _tried(self, work: Callable[[], _T]) -> tuple[_T | None, str]:
        """What it returns, or why it failed."""
        try:
            return work(), ""
        except Exception as error:  # each of them is a step that can't be read; the reason is told
            return None, f"{type(error).__name__}: {error}"

    def _first_failure(self, mine: str) -> str | None:
        """Of any rank; the same on all of them."""
        if not self._is_together():
            return mine or None
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, mine, group=self._group)
        return next((f"on rank {rank}: {why}" for rank, why in enumerate(told) if why), None)

    def _is_together(self) -> bool:
        return not self._no_dist and dist.is_available() and dist.is_initialized()

    def _is_first(self) -> bool:
        return not self._is_together() or dist.get_rank(self._group) == 0
