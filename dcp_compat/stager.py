"""`TieredStager`: for `async_save`, copies the tensors into the checkpoint's file itself, which waits for them mapped.

The stock stagers copy to memory of their own, and a thread writes that to the file later: each byte is moved twice and
lies in RAM twice. Here it is moved once.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Shard

from dcp_compat.archives import archive_of
from dcp_compat.shard_files import ShardFile, add_object, add_tensor, written
from dcp_compat.stage_file import Kind, Slot, StageFile, kind_of, remove_leftovers, slots_of
from dcp_compat.steps import namespace_path

log = logging.getLogger("tierfs.dcp")

#: A tensor of the state dict, by the keys that lead to it.
Path_ = tuple[Any, ...]


class Staged:
    """One staged copy: the file, and which tensor lies in which slot of it."""

    def __init__(self, file: StageFile, placed: dict[Path_, Slot]) -> None:
        self.file = file
        self.placed = placed
        self.tensors = {path: file.tensor(slot) for path, slot in placed.items()}
        self._at = {tensor.data_ptr(): path for path, tensor in self.tensors.items()}
        self.beside: dict[Path_, torch.Tensor] = {}
        self.used: set[Path_] = set()

    def path_at(self, tensor: torch.Tensor) -> Path_ | None:
        """The slot whose bytes the tensor is, all of them."""
        path = self._at.get(tensor.data_ptr())
        if path is None:
            return None
        is_all = Kind(tensor.dtype, tuple(tensor.shape)) == self.placed[path].kind and tensor.is_contiguous()
        return path if is_all else None


class TieredStager(AsyncStager):
    """Lives as long as the training, and is given to each save's writer:

        stager = TieredStager(namespace="run1")
        stager.prepare(state_dict)                  # before the first save; later ones are prepared meanwhile
        writer = TieredStorageWriter(namespace="run1", step=step, stager=stager)
        future = dcp.async_save(state_dict, storage_writer=writer)

    Between two saves it holds the room of this rank's next shard in the RAM tier. Where there is no room, and for what
    has no place in a file (other tensor classes than `DTensor`), the copy goes to plain memory and is written later.

    It is for saves by a thread, one at a time: `AsyncCheckpointerType.PROCESS` would copy all of it again.
    """

    _synchronize_after_execute = False

    def __init__(self, namespace: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> None:
        self._directory = namespace_path(namespace, root)
        self._ready: tuple[StageFile, dict[Path_, Slot]] | None = None
        self._staged: Staged | None = None
        self._preparing: threading.Thread | None = None
        #: The tensors of the state dict, and whether no other rank has them; those that go straight to the file.
        self._kinds: dict[Path_, tuple[Kind, bool]] = {}
        self._wanted: dict[Path_, Kind] = {}
        #: Of tensors that several ranks have, those that this one saved last time, and those that it did not.
        self._mine: set[Path_] = set()
        self._others: set[Path_] = set()
        self._has_cleaned = False

    def prepare(self, state_dict: dict[str, Any]) -> None:
        """Has the file for a save of such a state dict ready. OSError for anything but a lack of room."""
        self._want(self._leaves(state_dict))
        self._join()
        self._make_ready()

    def close(self) -> None:
        """Gives the room back."""
        self._join()
        if self._ready is not None:
            self._ready[0].discard()
            self._ready = None
        if self._staged is not None:
            self._staged.file.discard()
            self._staged = None

    # --- what async_save calls

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state dict, whose tensors lie in the file. The state dict may be changed when it returns."""
        leaves = self._leaves(state_dict)
        self._want(leaves)
        self._join()
        if self._staged is not None:  # of a save that failed
            self._staged.file.discard()
            self._staged = None
        if self._ready is None or {path: slot.kind for path, slot in self._ready[1].items()} != self._wanted:
            self._make_ready()
        if self._ready is not None:
            self._staged, self._ready = Staged(*self._ready), None
        staged = self._copied(state_dict, ())
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        assert isinstance(staged, dict)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copy is made."""

    # --- what the writer calls

    @property
    def has_staged(self) -> bool:
        return self._staged is not None

    def write(
        self, plan: SavePlan, planner: SavePlanner, target: Path, storage_key: str, *, crc32: bool, sync: bool
    ) -> list[WriteResult]:
        """Makes the staged file `target`; what else the plan has for this rank goes behind the tensors. OSError."""
        staged, self._staged = self._staged, None
        assert staged is not None
        results = []
        try:
            file = ShardFile(staged.file.fd, staged.file.size_bytes)
            os.lseek(staged.file.fd, staged.file.size_bytes, os.SEEK_SET)
            beside = {tensor.data_ptr(): path for path, tensor in staged.beside.items()}
            mine: set[Path_] = set()
            for item in plan.items:
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    results.append(add_object(file, storage_key, item, data))
                    continue
                assert isinstance(data, torch.Tensor)
                tensor = data.detach()
                path = staged.path_at(tensor)
                if path is None:
                    mine.update({beside[tensor.data_ptr()]} if tensor.data_ptr() in beside else ())
                    alone = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
                    results.append(add_tensor(file, storage_key, item, alone, crc32=crc32))
                    continue
                staged.used.add(path)
                slot = staged.placed[path]
                if crc32:
                    tail = archive_of(staged.tensors[path], crc32=True).tail
                    staged.file.tail_of(slot).copy_(torch.frombuffer(bytearray(tail), dtype=torch.uint8))
                results.append(written(item, storage_key, slot.at, slot.archive.size_bytes))
            file.flush()
            staged.file.move(target)
            if sync:
                os.fsync(staged.file.fd)
            staged.file.close()
        except BaseException:
            staged.file.discard()
            raise
        self._mine = (self._mine | mine) - (staged.placed.keys() - staged.used)
        self._others = (staged.placed.keys() | staged.beside.keys()) - staged.used - mine
        self._preparing = threading.Thread(target=self._prepare_next, name="tierfs-dcp-stage", daemon=True)
        self._preparing.start()
        return results

    # --- the next file

    def _want(self, leaves: dict[Path_, torch.Tensor]) -> None:
        self._kinds = {}
        for path, leaf in leaves.items():
            local, is_mine = _local(leaf)
            kind = kind_of(local)
            if kind is not None:
                self._kinds[path] = kind, is_mine
        self._choose()

    def _choose(self) -> None:
        """Which of them go straight to the file. The rest goes beside it: other ranks may save it."""
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        self._wanted = {
            path: kind
            for path, (kind, is_mine) in self._kinds.items()
            if path not in self._others and (alone or is_mine or path in self._mine)
        }

    def _prepare_next(self) -> None:
        self._choose()
        self._make_ready()

    def _make_ready(self) -> None:
        if self._ready is not None:
            self._ready[0].discard()
            self._ready = None
        if not self._wanted:
            return
        writer = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._has_cleaned:
            remove_leftovers(self._directory)
            self._has_cleaned = True
        slots = slots_of(self._wanted.values())
        try:
            file = StageFile(self._directory, slots, writer=writer)
        except OSError as error:
            log.warning("no room for the next save's file, which is staged in plain memory: %s", error)
            return
        self._ready = file, dict(zip(self._wanted, slots, strict=True))

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    # --- the copy

    def _leaves(self, state_dict: dict[str, Any]) -> dict[Path_, torch.Tensor]:
        found: dict[Path_, torch.Tensor] = {}
        _walk(state_dict, (), found.__setitem__)
        return found

    def _copied(self, value: Any, path: Path_) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(each, (*path, key)) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(each, (*path, index)) for index, each in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        local, _ = _local(value)
        target = self._target(path, local)
        if target is None:
            is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            return value.detach().to("cpu", copy=True) if is_plain else copy.deepcopy(value.detach())
        target.copy_(local.detach(), non_blocking=True)
        if not isinstance(value, DTensor):
            return target
        shape, stride = value.size(), value.stride()
        return DTensor.from_local(
            target, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride
        )

    def _target(self, path: Path_, local: torch.Tensor) -> torch.Tensor | None:
        if self._staged is not None and path in self._staged.tensors:
            return self._staged.tensors[path]
        kind = kind_of(local)
        if kind is None:
            return None
        beside = torch.empty(kind.shape, dtype=kind.dtype, pin_memory=torch.cuda.is_available())
        if self._staged is not None:
            self._staged.beside[path] = beside
        return beside


def _walk(value: Any, path: Path_, told: Callable[[Path_, torch.Tensor], None]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _walk(each, (*path, key), told)
    elif type(value) in (list, tuple):
        for index, each in enumerate(value):
            _walk(each, (*path, index), told)
    elif isinstance(value, torch.Tensor):
        told(path, value)


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """This rank's part, and whether no other rank has it."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(), all(isinstance(placement, Shard) for placement in tensor.placements)
    return tensor, False
