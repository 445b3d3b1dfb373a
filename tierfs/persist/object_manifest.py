"""What the object tier says of a step: one node file for each node that sent files, and one manifest, the commit.

The manifest is a pure function of the node files, so that two nodes that commit at once write the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierfs.checksum import CHUNK_BYTES


@dataclass(frozen=True)
class ObjectFile:
    """One file of a step as an object. Checksums are CRC64NVME; `chunks` are those of each `chunk_bytes`."""

    size_bytes: int
    checksum: int
    chunks: tuple[int, ...]
    mtime_ns: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True)
class ObjectManifest:
    """A whole step in the object tier. `files` by the path inside the step; `marker` is one of them."""

    namespace: str
    step: str
    number: int
    generation: int
    completed_at: float
    marker: str | None
    files: Mapping[str, ObjectFile]
    chunk_bytes: int = CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())
