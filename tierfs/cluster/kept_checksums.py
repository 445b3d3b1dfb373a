"""Checksums of versions, by chunks: a version names bytes for good, so what was summed up once stays true."""

from __future__ import annotations

from collections import OrderedDict

from tierfs.checksum import FileChecksum

#: How many are kept, and how many chunks of 16 MiB they may have together (some 10 TiB of files).
MOST_KEPT = 20_000
MOST_CHUNKS = 600_000


class KeptChecksums:
    """The ones that were asked for last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, FileChecksum] = OrderedDict()
        self._chunks = 0

    def get(self, version: str) -> FileChecksum | None:
        checksum = self._kept.get(version)
        if checksum is not None:
            self._kept.move_to_end(version)
        return checksum

    def keep(self, version: str, checksum: FileChecksum) -> None:
        if version in self._kept:
            return
        self._kept[version] = checksum
        self._chunks += len(checksum.chunks)
        while len(self._kept) > MOST_KEPT or (self._chunks > MOST_CHUNKS and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def forget(self, version: str) -> None:
        if version in self._kept:
            self._drop(version)

    def _drop(self, version: str) -> None:
        self._chunks -= len(self._kept.pop(version).chunks)
