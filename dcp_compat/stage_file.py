"""A shard file that is mapped before its tensors are known: they are copied into it, and it is the checkpoint's file.

Everything that takes time is done ahead, in the background between two saves: the room is taken out of the ballast,
the pages are mapped, page-locked where there is CUDA, and the frames of the tensors' archives are written. What is left
for the save is the copy. Until then the file lies in the namespace under a hidden name; a rename puts it into its step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import mmap
import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcp_compat.archives import Archive, archive_like
from dcp_compat.mounts import tell_size

log = logging.getLogger("tierfs.dcp")

#: PyTorch aligns what it allocates for the CPU so, and so its archives (`torch.serialization` `.storage_alignment`).
_ALIGNMENT = 64
#: include/uapi/asm-generic/mman-common.h, Linux 5.14: fails where a store would be a SIGBUS.
_MADV_POPULATE_WRITE = 23
_PREFIX = ".tierfs-stage"
_ZEROS = bytes(4 << 20)


@dataclass(frozen=True)
class Kind:
    """What a tensor of the state dict is like; its bytes are contiguous in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Slot:
    """Where a tensor's archive begins in the file, and its bytes."""

    kind: Kind
    archive: Archive
    at: int

    @property
    def payload_at(self) -> int:
        return self.at + len(self.archive.head)

    @property
    def end(self) -> int:
        return self.at + self.archive.size_bytes


def slots_of(kinds: Iterable[Kind]) -> list[Slot]:
    """One archive after the other, each with its tensor's bytes at a multiple of 64."""
    slots, end = [], 0
    for kind in kinds:
        archive = archive_like(kind.dtype, kind.shape, _contiguous(kind.shape))
        payload_at = -(-(end + len(archive.head)) // _ALIGNMENT) * _ALIGNMENT
        slot = Slot(kind, archive, payload_at - len(archive.head))
        slots.append(slot)
        end = slot.end
    return slots


class StageFile:
    """A file in `directory` with a mapping of `slots`. OSError (ENOSPC: there is no room); nothing is left then."""

    def __init__(self, directory: Path, slots: list[Slot], *, writer: int) -> None:
        self.slots = slots
        self.size_bytes = max((slot.end for slot in slots), default=0)
        self._registered = 0
        self.path, self.fd = _create(directory, writer)
        try:
            tell_size(self.fd, self.size_bytes)
            self._map()
        except BaseException:
            self.discard()
            raise

    def _map(self) -> None:
        if not self.size_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)
            return
        os.ftruncate(self.fd, self.size_bytes)
        mapping = mmap.mmap(self.fd, self.size_bytes)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            for at in range(0, self.size_bytes, len(_ZEROS)):  # an older kernel
                os.pwrite(self.fd, _ZEROS[: self.size_bytes - at], at)
        for slot in self.slots:
            mapping[slot.at : slot.payload_at] = slot.archive.head
            mapping[slot.end - len(slot.archive.tail) : slot.end] = slot.archive.tail
        # The tensors that are made of it keep the mapping alive.
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._lock_pages()

    def _lock_pages(self) -> None:
        if not torch.cuda.is_available():
            return
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cuda.cudaHostRegister(self._bytes.data_ptr(), self.size_bytes, 0))
        if error:
            log.warning("the staging file's pages can't be locked (CUDA error %d): copies to it are slower", error)
        else:
            self._registered = self._bytes.data_ptr()

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes as a tensor: what is copied into it is in the file."""
        flat = self._bytes[slot.payload_at : slot.payload_at + slot.kind.size_bytes]
        # Not `view`: the storage would be all of the file, and the stock writer would clone it.
        alone = torch.frombuffer(flat.numpy(), dtype=slot.kind.dtype)
        return alone.view(slot.kind.shape)

    def tail_of(self, slot: Slot) -> torch.Tensor:
        """The bytes behind the tensor's, to be changed."""
        return self._bytes[slot.payload_at + slot.kind.size_bytes : slot.end]

    def move(self, target: Path) -> None:
        """Gives it its name in the step, in place of what has it. OSError."""
        self.path.rename(target)
        self.path = target

    def close(self) -> None:
        """Nothing is written to it any more. The tensors stay readable."""
        self._unlock_pages()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def discard(self) -> None:
        """It was for nothing."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _unlock_pages(self) -> None:
        if self._registered:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._registered)
            self._registered = 0


def _create(directory: Path, writer: int) -> tuple[Path, int]:
    """A new file, locked: it is in use, as `remove_leftovers` sees. Again where that of another rank was quicker than
    the lock."""
    while True:
        path = directory / f"{_prefix()}{writer}-{uuid.uuid4().hex[:8]}.tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def remove_leftovers(directory: Path) -> None:
    """Those of processes of this node that were killed, of whatever rank: nobody has them locked. The next job may have
    fewer ranks."""
    for path in directory.glob(f"{glob.escape(_prefix())}*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                log.debug("%s is in use", path)
            finally:
                os.close(fd)


def _prefix() -> str:
    return f"{_PREFIX}-{socket.gethostname()}-"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def kind_of(tensor: torch.Tensor) -> Kind | None:
    """None for a tensor that has no place in a file by its own bytes alone."""
    is_plain: Any = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return Kind(tensor.dtype, tuple(tensor.shape))
