"""A shard that is open for writing, as the RAM tier knows it: how far it is written, and what it was given ahead."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tierfs.ram import growth
from tierfs.ram.growth import Growth
from tierfs.ram.tmpfs import HUGE_PAGE

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Shard:
    nodeid: int
    fd: int
    since: float
    size_bytes: int
    given_bytes: int
    expected_bytes: int | None
    seen_at: float
    rate: float = 0.0
    grown_at: float = field(default=0.0)
    sparse: bool = False
    guess_bytes: int = 0
    times_set: bool = False  # by a program, which so says that it has written what it wanted
    ended_times: tuple[int, int] | None = None  # atime and mtime in ns, where it ended while a thread gave it room

    def growth(self) -> Growth:
        quiet = self.seen_at - self.grown_at
        return Growth(self.size_bytes, self.given_bytes, self.expected_bytes, self.rate, quiet, self.guess_bytes)


def unwritten_bytes(shard: Shard) -> int:
    """Room that a shard holds beyond its end."""
    state = os.fstat(shard.fd)
    return max(0, state.st_blocks * 512 - -(-state.st_size // _PAGE) * _PAGE)


def look(shard: Shard, now: float) -> None:
    """Bring what is known of a shard up to date."""
    state = os.fstat(shard.fd)
    held = state.st_blocks * 512
    # A file made long by truncate, whose bytes come later and anywhere: no runway helps it.
    shard.sparse = held + HUGE_PAGE < state.st_size
    grown = state.st_size - shard.size_bytes
    shard.rate = 0.0 if shard.sparse else growth.blended_rate(shard.rate, max(0, grown), now - shard.seen_at)
    if grown:
        shard.grown_at = now
    shard.size_bytes, shard.seen_at = state.st_size, now
    # Its writer may have cut it, which also drops what was given beyond its end.
    if held + HUGE_PAGE < shard.given_bytes:
        shard.given_bytes = state.st_size
    shard.given_bytes = max(shard.given_bytes, state.st_size)
