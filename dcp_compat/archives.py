"""What `torch.save` writes of one tensor, in three pieces: what is before its bytes, the bytes, what is after.

DCP's `.distcp` file is one such ZIP archive after the other. `torch.save` copies nothing but sums every byte up
(CRC32), which takes longer than writing them to RAM. Here its own writer makes the archive with the bytes left out
(`torch.serialization.skip_data`), so that they can go from the tensor straight to the file, or lie there already.

With the sum the pieces are those of `torch.save`, bit for bit. Without, three fields differ that `torch.load` does not
look at (PyTorch builds its ZIP reader without them, and can leave them out itself: `set_crc32_options`). The mount sums
up each file itself, by CRC64NVME.
"""

from __future__ import annotations

import ctypes
import functools
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.serialization import skip_data

# APPNOTE.TXT 4.3 (PKWARE): signatures and offsets of the records that carry a CRC32.
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL = b"PK\x01\x02"
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_BYTES = 20
_CENTRAL_HEAD = struct.Struct("<4s6H3L5H2L")
_CENTRAL_CRC = 16
_ID_RECORD = ".data/serialization_id"


@dataclass(frozen=True)
class Archive:
    """`head` + the tensor's bytes + `tail`."""

    head: bytes
    payload_bytes: int
    tail: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.head) + self.payload_bytes + len(self.tail)


def can_be_split(tensor: torch.Tensor) -> bool:
    """True for a plain tensor on the CPU that is all of its storage: what `archive_of` and `bytes_of` take."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad)
        and not tensor.__dict__
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory, without a copy. The tensor has to live as long as this is used."""
    size = tensor.untyped_storage().nbytes()
    return memoryview((ctypes.c_char * size).from_address(tensor.untyped_storage().data_ptr())).cast("B")


def archive_of(tensor: torch.Tensor, *, crc32: bool) -> Archive:
    """The archive of a tensor for which `can_be_split` holds. With `crc32` it is that of `torch.save`."""
    archive = _skeleton(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
    if not crc32:
        return archive
    return Archive(archive.head, archive.payload_bytes, _summed(archive, zlib.crc32(bytes_of(tensor))))


def archive_like(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Archive:
    """The same for a tensor that is not there yet, without the sum."""
    return _skeleton(dtype, shape, stride)


@functools.lru_cache(maxsize=65536)
def _skeleton(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Archive:
    # Memory that is never touched costs nothing: the bytes are skipped.
    template = torch.empty_strided(shape, stride, dtype=dtype)
    sink = _Pieces()
    with skip_data():
        torch.save(template, sink)  # type: ignore[arg-type]  # it asks for write, seek and flush alone
    if sink.hole is None:
        raise RuntimeError("this PyTorch writes no archive whose bytes can be left out")
    return Archive(bytes(sink.before), sink.hole, bytes(sink.after))


class _Pieces(io.RawIOBase):
    """Takes an archive whose tensor's bytes are skipped by one seek."""

    def __init__(self) -> None:
        super().__init__()
        self.before = bytearray()
        self.after = bytearray()
        self.hole: int | None = None

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        (self.before if self.hole is None else self.after).extend(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence != io.SEEK_CUR or self.hole is not None or offset <= 0:
            raise io.UnsupportedOperation("only one hole is expected")
        self.hole = offset
        return len(self.before) + offset

    def writable(self) -> bool:
        return True


def _summed(archive: Archive, crc: int) -> bytes:
    """The tail with the sum of the tensor's bytes in it, and the fingerprint that PyTorch makes of all sums."""
    tail = bytearray(archive.tail)
    if tail[:4] != _DESCRIPTOR:
        raise RuntimeError("this PyTorch writes archives of another layout")
    struct.pack_into("<L", tail, 4, crc)
    entries = list(_central(tail, archive))
    combined = 0
    for entry in entries:
        if entry.is_payload:
            struct.pack_into("<L", tail, entry.at + _CENTRAL_CRC, crc)
        if entry.name != _ID_RECORD:
            combined = _hash_combine(combined, crc if entry.is_payload else entry.crc)
    # PyTorchStreamWriter::writeSerializationId (caffe2/serialize/inline_container.cc): 20 digits of the records' names,
    # then 20 of their sums.
    identity = entries[-1]
    text_at = identity.data_at - len(archive.head) - archive.payload_bytes
    tail[text_at + 20 : text_at + 40] = b"%020d" % combined
    identity_crc = zlib.crc32(tail[text_at : text_at + 40])
    struct.pack_into("<L", tail, text_at + 40 + 4, identity_crc)
    struct.pack_into("<L", tail, identity.at + _CENTRAL_CRC, identity_crc)
    return bytes(tail)


@dataclass(frozen=True)
class _Entry:
    at: int
    name: str
    crc: int
    data_at: int
    is_payload: bool


def _central(tail: bytearray, archive: Archive) -> Iterator[_Entry]:
    """The entries of the central directory, in the order in which their records were written."""
    before = len(archive.head) + archive.payload_bytes
    *_, count, _, start, _ = _END.unpack_from(tail, len(tail) - _END.size)
    if start == 0xFFFFFFFF or count == 0xFFFF:
        end64 = _END64.unpack_from(tail, len(tail) - _END.size - _LOCATOR_BYTES - _END64.size)
        count, start = end64[7], end64[9]
    at = start - before
    for _ in range(count):
        fields = _CENTRAL_HEAD.unpack_from(tail, at)
        if fields[0] != _CENTRAL:
            raise RuntimeError("this PyTorch writes archives of another layout")
        crc, name_bytes, extra_bytes, comment_bytes, header_at = (
            fields[7],
            fields[10],
            fields[11],
            fields[12],
            fields[16],
        )
        name = tail[at + _CENTRAL_HEAD.size :][:name_bytes].decode().partition("/")[2]
        data_at = 0
        if header_at >= before:  # its local header is in the tail, with the lengths of name and extra field at its end
            name_length, extra_length = struct.unpack_from("<2H", tail, header_at - before + 26)
            data_at = header_at + 30 + name_length + extra_length
        yield _Entry(at, name, crc, data_at, name == "data/0")
        at += _CENTRAL_HEAD.size + name_bytes + extra_bytes + comment_bytes


def _hash_combine(seed: int, value: int) -> int:
    """`hash_combine` of c10/util/hash.h."""
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & 0xFFFFFFFFFFFFFFFF
