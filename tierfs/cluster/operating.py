"""Renames and removals that another node made: every node makes them on its own files too, once.

How far they were applied is noted in the tier, since an operation stays in the catalogue for a while, and its path may
stand for something else by the next start.
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path

from tierfs.catalog.records import Operation
from tierfs.cluster import placing
from tierfs.cluster.making import version_at
from tierfs.cluster.showing import Showing
from tierfs.cluster.view import Seen, View
from tierfs.steps.moves import Moves, drop
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.cluster")

NAME = "%operations.json"


class Operating:
    """Used from the trio thread. `directory_moved` is what the steps are told after a rename of a directory."""

    def __init__(
        self,
        registry: StepRegistry,
        view: View,
        showing: Showing,
        directory_moved: Callable[[str, str], None] | None = None,
    ) -> None:
        self._registry = registry
        self._view = view
        self._showing = showing
        self._copies = showing.copies
        self._root = registry.root
        self._directory_moved = directory_moved or Moves(registry, {}).directory_moved
        self._path: Path = registry.tier.meta / NAME
        self._cluster_id, self._applied = self._read()
        self._failed: set[int] = set()

    async def apply(self, seen: Seen[Operation] | None) -> None:
        """OSError: to be tried again."""
        if seen is None:
            return  # it is gone from the catalogue: all had the time to see it
        if not self._cluster_id or self._cluster_id != self._view.cluster_id:
            return  # made before this node belonged to the cluster
        operation, revision = seen.record, seen.mod_revision
        if operation.node == self._copies.node or (revision <= self._applied and revision not in self._failed):
            return
        self._failed.add(revision)
        self._applied_up_to(revision)  # one that fails is tried again by the caller, and holds up no other
        if operation.kind == "rename":
            await self._showing.place_tree(operation.target.rpartition("/")[0])
            for record in self._rename(operation, revision):
                await self._showing.maker.mark_anew(record)
        elif operation.kind == "unlink":
            self._unlink(operation)
        else:
            self._remove(operation, revision)
        self._failed.discard(revision)

    async def all_read(self, revision: int) -> None:
        """The catalogue was read as a whole: what it had of operations up to that revision was told before."""
        if self._cluster_id != self._view.cluster_id:
            self._cluster_id = self._view.cluster_id
            self._applied = 0
        self._applied_up_to(revision)

    def _rename(self, operation: Operation, revision: int) -> list[StepRecord]:
        """The steps that have other names now."""
        old, new = operation.path, operation.target
        info = placing.look(self._root, old)
        if info is None or not self._is_older(old, revision):
            return []
        is_directory = stat.S_ISDIR(info.st_mode)
        if not is_directory and operation.version and version_at(self._root / old)[0] != operation.version:
            return []
        moved: list[StepRecord] = []
        placing.rename(self._root, old, new)
        self._copies.moved(self._root / old, self._root / new)
        if is_directory:
            before = {record.key: record for record in self._registry.records.values()}
            self._directory_moved(old, new)
            for key, record in before.items():
                if record.key != key:
                    self._copies.step_moved(key, record.key)
                    self._registry.save_or_later(record)
                    moved.append(record)
        else:
            self._file_moved(old, new)
        self._showing.tell(old)
        self._showing.tell(new)
        return moved

    def _is_older(self, rel: str, revision: int) -> bool:
        """What has the name here had it before the operation: not a step that was made again since."""
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None else None
        return record is None or record.manifest.joined < revision

    def _file_moved(self, old: str, new: str) -> None:
        source, target = self._registry.names.locate(old), self._registry.names.locate(new)
        record = self._registry.at(source) if source is not None else None
        entry = None
        if record is not None and source is not None:
            entry = record.manifest.files.get(source.inner)
            drop(self._registry, record, source.inner)
            record.touch()
        now_in = self._registry.at_or_new(target) if target is not None and target.inner else None
        if now_in is not None and target is not None and entry is not None:
            now_in.manifest.files[target.inner] = entry
            now_in.touch()

    def _unlink(self, operation: Operation) -> None:
        info = placing.look(self._root, operation.path)
        if info is None or not stat.S_ISREG(info.st_mode) or not operation.version:
            return
        if version_at(self._root / operation.path)[0] != operation.version:
            return  # written again since
        where = self._registry.names.locate(operation.path)
        record = self._registry.at(where) if where is not None and where.inner else None
        if record is not None and where is not None:
            if where.inner in record.open_names():
                return
            self._showing.remove_file(record, where.inner)
            record.touch()
            self._registry.judge_soon(record)
            return
        placing.remove_file(self._root, operation.path)
        self._showing.maker.on_replaced(info.st_ino)
        self._showing.tell(operation.path)

    def _remove(self, operation: Operation, revision: int) -> None:
        """Steps at or below the path that were known to the catalogue before; the directories go with their keys."""
        path = operation.path
        for record in list(self._registry.records.values()):
            is_there = record.rel == path or record.rel.startswith(path + "/")
            if is_there and 0 < record.manifest.joined < revision:
                key = record.key
                self._registry.remove(record)
                self._copies.forget_step(key)

    # --- how far

    def _applied_up_to(self, revision: int) -> None:
        if revision <= self._applied:
            return
        self._applied = max(self._applied, revision)
        value = {"cluster": self._cluster_id, "applied": self._applied}
        try:
            write_whole(self._path, json.dumps(value).encode("ascii"))
        except OSError as error:
            log.warning("%s can't be written: %s", self._path, error)

    def _read(self) -> tuple[str, int]:
        try:
            value = json.loads(self._path.read_bytes())
            cluster, applied = value["cluster"], value["applied"]
        except FileNotFoundError:
            return "", 0
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s can't be read: %s; operations of before are taken for applied", self._path, error)
            return "", 0
        return (cluster, applied) if isinstance(cluster, str) and isinstance(applied, int) else ("", 0)
