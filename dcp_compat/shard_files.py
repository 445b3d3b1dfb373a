"""Writes DCP's shard files without copying: the tensors' own memory goes to the kernel, many pieces a call."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    _item_size,
    _OverlappingCpuLoader,
    _SerialCpuLoader,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_compat.archives import archive_of, bytes_of, can_be_split
from dcp_compat.mounts import tell_size

#: writev(2) takes 1,024 pieces at most (IOV_MAX, <limits.h>).
_PIECES = 1024
#: More than this is written before more is gathered, so that what an accelerator's tensors were copied to is let go.
_GATHER_BYTES = 64 << 20
#: The frame of one tensor's archive is some 1.2 KiB, by its name and shape; half as much again for long shapes.
_FRAME_BYTES = 1800


class ShardFile:
    """An open shard file. What is added is written in the order in which it comes; `offset` is the next one's place."""

    def __init__(self, fd: int, offset: int = 0) -> None:
        self._fd = fd
        self._pieces: list[memoryview] = []
        self._gathered = 0
        self._kept: list[Any] = []
        self.offset = offset

    def add(self, *pieces: bytes | memoryview, keep: Any = None) -> None:
        """`keep` is held until its pieces are written. OSError."""
        for piece in pieces:
            view = memoryview(piece)
            self._pieces.append(view)
            self._gathered += len(view)
            self.offset += len(view)
        self._kept.append(keep)
        if self._gathered >= _GATHER_BYTES or len(self._pieces) >= _PIECES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added. OSError."""
        pieces, self._pieces, self._gathered = self._pieces, [], 0
        while pieces:
            written = os.writev(self._fd, pieces[:_PIECES])
            done = 0
            while done < len(pieces) and written >= len(pieces[done]):
                written -= len(pieces[done])
                done += 1
            pieces = pieces[done:]
            if written:
                pieces[0] = pieces[0][written:]
        self._kept.clear()


def write_shard(
    path: Path,
    storage_key: str,
    items: list[WriteItem],
    planner: SavePlanner,
    *,
    crc32: bool,
    sync: bool,
    copy_ahead_bytes: int,
    on_tierfs: bool,
) -> list[WriteResult]:
    """One file with these items, as the stock writer lays it out: objects first, then the tensors. OSError."""
    results = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        if on_tierfs:
            tell_size(fd, sum(_item_size(item) + _FRAME_BYTES for item in tensors))
        file = ShardFile(fd)
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(add_object(file, storage_key, item, planner.resolve_data(item)))
        for tensor, item in _loaded(tensors, planner, copy_ahead_bytes):
            results.append(add_tensor(file, storage_key, item, tensor, crc32=crc32))
        file.flush()
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    return results


def add_object(file: ShardFile, storage_key: str, item: WriteItem, data: object) -> WriteResult:
    """An object that the planner has pickled."""
    if not isinstance(data, io.BytesIO):
        raise TypeError(f"the planner gave a {type(data).__name__} for the object {item.index.fqn}")
    at = file.offset
    file.add(data.getbuffer(), keep=data)
    return written(item, storage_key, at, file.offset - at)


def add_tensor(file: ShardFile, storage_key: str, item: WriteItem, tensor: torch.Tensor, *, crc32: bool) -> WriteResult:
    """A tensor in the CPU's memory."""
    at = file.offset
    if can_be_split(tensor):
        archive = archive_of(tensor, crc32=crc32)
        file.add(archive.head, bytes_of(tensor), archive.tail, keep=tensor)
    else:  # a subclass, say, which pickles as it likes
        stream = io.BytesIO()
        torch.save(tensor, stream)
        file.add(stream.getbuffer(), keep=stream)
    return written(item, storage_key, at, file.offset - at)


def written(item: WriteItem, storage_key: str, at: int, length: int) -> WriteResult:
    """What DCP keeps of an item: where it lies."""
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(storage_key, at, length))


def _loaded(
    items: list[WriteItem], planner: SavePlanner, copy_ahead_bytes: int
) -> Iterator[tuple[torch.Tensor, WriteItem]]:
    """The items' tensors in the CPU's memory, each all of its storage; copies off an accelerator run ahead."""
    loader: Any
    if copy_ahead_bytes > 0 and torch.cuda.is_available():
        loader = _OverlappingCpuLoader(planner.resolve_data, inflight_threshhold=copy_ahead_bytes)
    else:
        loader = _SerialCpuLoader(planner.resolve_data)
    for item in items:
        loader.add(_item_size(item), item)
    loader.start_loading()
    yield from loader.values()
