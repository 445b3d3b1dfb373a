"""Directory listings that go on where they stopped, also after the directory changed or the daemon was replaced.

The kernel asks for a listing piece by piece and names the place to go on from by a number that we gave it. The number
of an entry is a hash of its name, and entries are listed in the order of their numbers: a number means the same in
another process, and entries that come or go do not move the others. Two names in one directory with the same 62-bit
hash would share a number; of such a pair one may be left out where a piece ends between them, and with a million
files in a directory the odds of having a pair at all are one in ten million.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict

# Places of "." and "..", which come first. Place 0 is the start.
DOT, DOTDOT = 1, 2
_FIRST = 3
_KEPT = 64


def place_of(name: bytes) -> int:
    """The number of an entry: positive as a signed 64-bit offset, and the same in every process."""
    return _FIRST + (int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2)


class Listings:
    """Sorted listings of the directories being read; a few are kept, since one listing takes many requests."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, list[tuple[int, bytes]]] = OrderedDict()

    def after(self, nodeid: int, directory_fd: int, place: int) -> list[tuple[int, bytes]]:
        """The (place, name) pairs behind `place`. Place 0 reads the directory anew."""
        entries = self._kept.get(nodeid)
        if entries is None or place == 0:
            entries = self._kept[nodeid] = _read(directory_fd)
            self._kept.move_to_end(nodeid)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return entries[bisect_right(entries, (place, b"\xff" * 256)) :]

    def drop(self, nodeid: int) -> None:
        self._kept.pop(nodeid, None)


def _read(directory_fd: int) -> list[tuple[int, bytes]]:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
    try:
        names = [os.fsencode(name) for name in os.listdir(fd)]
    finally:
        os.close(fd)
    return sorted((place_of(name), name) for name in names)
