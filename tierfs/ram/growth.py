"""Decides, without touching anything: how much room a growing shard gets now, when to look again, how large the
ballast should be, and whether room runs low. All sizes are bytes, all rates bytes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfs.ram.tmpfs import HUGE_PAGE

MIB = 1 << 20

# A file below this is given nothing ahead: markers, logs and configurations end before room could help them, and
# room costs each a huge page to be cleared and trimmed again.
SMALL_BYTES = MIB

# A guess at a shard's size is never more than this.
MOST_GUESSED_BYTES = 4 << 30

# Less than this is not given ahead to a shard of unknown size: its writer waits while it is given.
LEAST_AHEAD_BYTES = 16 * MIB

# A writer's room should last this long: several times what the daemon may be late by.
RUNWAY_S = 0.1

# A shard that grows faster than this counts as being saved now; filling the ballast waits for it.
HOT_RATE = 32 * MIB

# Bounds of the time between two looks at growing shards. At 5 GB/s a first extent of 64 MiB lasts 13 ms.
SHORTEST_LOOK_S = 0.001
LONGEST_LOOK_S = 0.1

# The share of all memory that the ballast never takes; and where it starts to give memory back.
MEMORY_MARGIN = 0.10
MEMORY_SHORT = 0.05


@dataclass(frozen=True)
class Growth:
    """One growing shard, as last seen.

    `given_bytes` is the offset up to which it has room, `guess_bytes` what it may get before its size says anything.
    """

    size_bytes: int
    given_bytes: int
    expected_bytes: int | None
    rate: float
    quiet_s: float = 0.0
    guess_bytes: int = 0

    @property
    def is_hot(self) -> bool:
        return self.rate > HOT_RATE


@dataclass(frozen=True)
class RoomRules:
    """The settings that decide how far ahead a shard is given room."""

    runway_bytes: int
    first_extent_bytes: int


def spare_bytes(free_bytes: int, ahead_bytes: int) -> int:
    """What shards of unknown size may share of the free room, where such shards hold `ahead_bytes` that they may never
    write: as much as they hold stays free, for a writer that begins now meets ENOSPC where all is given away."""
    return max(0, free_bytes - ahead_bytes)


def room_end(shard: Growth, rules: RoomRules, free_bytes: int, spare_bytes: int) -> int:
    """The offset up to which the shard should have room; what it has when it needs no more now.

    A shard within its expected size gets all of that, but never more than is free. Any other gets a runway, renewed
    when half of it is used; before its size says anything, no more than the guess. Of these each is a part of what may
    be spared.
    """
    if shard.expected_bytes is not None and shard.size_bytes <= shard.expected_bytes >= SMALL_BYTES:
        wanted = shard.expected_bytes
        if shard.size_bytes < wanted or shard.given_bytes >= wanted:
            return _within(shard, wanted, free_bytes)
    if shard.size_bytes < SMALL_BYTES:
        guess = min(shard.guess_bytes, _part(spare_bytes))
        return _within(shard, guess, free_bytes) if guess > shard.given_bytes else shard.given_bytes
    runway = runway_bytes(shard.rate, rules, spare_bytes)
    if shard.given_bytes - shard.size_bytes > runway // 2:
        return shard.given_bytes
    return _within(shard, shard.size_bytes + runway, free_bytes)


def _part(spare_bytes: int) -> int:
    """What one shard of unknown size is given ahead at most. Others may grow beside it, and it may be about to end."""
    part = spare_bytes // 4
    return part if part >= LEAST_AHEAD_BYTES else 0


def first_guess(rules: RoomRules, spare_bytes: int) -> int:
    """What a shard of unknown size is given before its first write: an eighth of what may be spared, from a runway to
    4 GiB.

    Most of it is used or comes back at close for 10 ms a GiB, while a writer that runs out of it meets cold memory.
    """
    guess = max(rules.first_extent_bytes, rules.runway_bytes, min(spare_bytes // 8, MOST_GUESSED_BYTES))
    return min(guess, _part(spare_bytes))


def runway_bytes(rate: float, rules: RoomRules, spare_bytes: int) -> int:
    """How far ahead of a writer of this rate the room should reach.

    `first_extent_bytes` for a slow one; `runway_bytes` for one that is being saved now, or what lasts RUNWAY_S at its
    rate where that is more. To give room is to wait for the write(2) that the shard's writer is in, which may be
    of a hundred MiB, and the first look sees a writer slowed down by having no room: so much at once, and seldom.
    But never more than a quarter of what may be spared.
    """
    wanted = max(rate * RUNWAY_S, rules.runway_bytes, rules.first_extent_bytes)
    return int(min(wanted if rate > HOT_RATE else rules.first_extent_bytes, _part(spare_bytes)))


def _needed_soon(shard: Growth, rules: RoomRules) -> int:
    """What a shard beyond all expectation will write within RUNWAY_S, and not less than a first extent."""
    return int(max(min(shard.rate * RUNWAY_S, rules.runway_bytes), rules.first_extent_bytes))


def _within(shard: Growth, wanted_end: int, free_bytes: int) -> int:
    """The end rounded up to huge pages, but never beyond what is free, and never less than there is."""
    end = -(-wanted_end // HUGE_PAGE) * HUGE_PAGE
    start = max(shard.given_bytes, shard.size_bytes)
    reachable = start + max(0, free_bytes) // HUGE_PAGE * HUGE_PAGE
    return max(shard.given_bytes, min(end, reachable))


def look_after_s(shards: Sequence[Growth], rules: RoomRules, spare_bytes: int) -> float:
    """How long to wait before looking at the growing shards again.

    A growing shard: when half of its runway will be used, so that it may double its speed meanwhile. One with room for
    all that is expected of it: seldom. One that does not grow: soon, and ever less often while nothing happens to it.
    """
    soonest = LONGEST_LOOK_S
    for shard in shards:
        if shard.expected_bytes is not None and shard.size_bytes < shard.expected_bytes <= shard.given_bytes:
            soonest = min(soonest, LONGEST_LOOK_S / 2)
            continue
        if shard.quiet_s > 0 or shard.rate <= 0:
            soonest = min(soonest, max(SHORTEST_LOOK_S, shard.quiet_s / 4))
            continue
        runway = runway_bytes(shard.rate, rules, spare_bytes)
        if not runway:
            continue  # Nothing to give; looking more often would not help.
        left = shard.given_bytes - shard.size_bytes - runway // 2
        soonest = min(soonest, max(SHORTEST_LOOK_S, left / shard.rate))
    return soonest


def blended_rate(previous: float, grown_bytes: int, elapsed_s: float) -> float:
    """The rate after one more look. Rises at once, since being late costs speed; falls over some 0.2 s."""
    if elapsed_s <= 0:
        return previous
    now = grown_bytes / max(elapsed_s, SHORTEST_LOOK_S)  # what a shorter time shows is mostly chance
    if now >= previous:
        return now
    keep = max(0.0, 1 - elapsed_s / 0.2)
    return previous * keep + now * (1 - keep)


def ballast_target(
    *,
    limit_bytes: int | None,
    size_bytes: int,
    data_bytes: int,
    held_bytes: int,
    total_memory: int,
    available_memory: int,
) -> int:
    """How much the ballast should hold, in whole huge pages.

    All free room of the tier (`size_bytes` less `data_bytes`), no more than the setting `limit_bytes` (None: as much
    as fits), and never the last MEMORY_MARGIN of memory. Where memory got short (MEMORY_SHORT) it gives back what
    makes up the margin; between the two marks it stays as it is, so that it does not follow each move of the others.
    """
    room = max(0, size_bytes - data_bytes)
    if limit_bytes is not None:
        room = min(room, limit_bytes)
    margin = int(total_memory * MEMORY_MARGIN)
    spare = available_memory - margin
    between_the_marks = total_memory * MEMORY_SHORT <= available_memory < margin
    memory = held_bytes if between_the_marks else max(0, held_bytes + spare)
    return min(room, memory) // HUGE_PAGE * HUGE_PAGE


def missing_bytes(shards: Sequence[Growth], rules: RoomRules, free_bytes: int) -> int:
    """How many bytes of room the growing shards will need soon that are not there; 0 when there is enough.

    Soon: the rest of the expected size, or the next runway of a shard that grows past what anyone expected.
    """
    needed = 0
    for shard in shards:
        end = shard.size_bytes
        if shard.expected_bytes is not None:
            end = max(end, shard.expected_bytes)
        beyond_expected = shard.expected_bytes is None or shard.size_bytes > shard.expected_bytes
        if shard.size_bytes >= SMALL_BYTES and beyond_expected:
            end = max(end, shard.size_bytes + _needed_soon(shard, rules))
        needed += max(0, end - max(shard.given_bytes, shard.size_bytes))
    return max(0, needed - free_bytes)
