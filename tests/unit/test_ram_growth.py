"""The pure decisions of the RAM tier: room for growing shards, when to look again, the ballast's size, pressure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfs.ram import growth
from tierfs.ram.growth import Growth, RoomRules
from tierfs.ram.tmpfs import HUGE_PAGE

MIB, GIB = 1 << 20, 1 << 30
RULES = RoomRules(runway_bytes=256 * MIB, first_extent_bytes=64 * MIB)

sizes = st.integers(0, 64 * GIB)
rates = st.floats(0, 50e9)
shards = st.builds(
    lambda size, ahead, expected, rate, quiet: Growth(size, size + ahead, expected, rate, quiet),
    sizes,
    st.integers(0, GIB),
    st.none() | sizes,
    rates,
    st.floats(0, 3600),
)
rules = st.builds(RoomRules, st.integers(0, 4 * GIB), st.integers(0, GIB))


@given(shards, rules, sizes, sizes)
def test_room_is_never_taken_away_never_more_than_is_free_and_always_whole_huge_pages(
    shard: Growth, rules: RoomRules, free: int, ahead: int
) -> None:
    spare = growth.spare_bytes(free, ahead)
    end = growth.room_end(shard, rules, free, spare)
    assert end >= shard.given_bytes
    assert end - max(shard.given_bytes, shard.size_bytes) <= free
    if end > shard.given_bytes and end % HUGE_PAGE:
        assert (end - max(shard.given_bytes, shard.size_bytes)) % HUGE_PAGE == 0  # as much as is free, to a page


@given(st.integers(growth.SMALL_BYTES, 8 * GIB), st.integers(0, 8 * GIB))
def test_an_expected_shard_is_given_all_of_it_and_little_more(expected: int, size: int) -> None:
    end = growth.room_end(
        Growth(min(size, expected - 1), min(size, expected - 1), expected, 1e9), RULES, 16 * GIB, 16 * GIB
    )
    assert expected <= end < expected + HUGE_PAGE


@given(st.integers(0, growth.SMALL_BYTES - 1), st.none() | st.integers(0, growth.SMALL_BYTES - 1), rates)
def test_a_small_file_of_unknown_or_small_size_is_given_nothing(size: int, expected: int | None, rate: float) -> None:
    assert growth.room_end(Growth(size, size, expected, rate), RULES, GIB, GIB) == size


@given(st.floats(0.01e9, 20e9))
def test_a_steady_writer_never_meets_the_end_of_its_runway_once_it_has_one(rate: float) -> None:
    """Simulated: looks come as late as asked for and 5 ms more; the runway then still has something left."""
    size, given_to = 2 * MIB, 2 * MIB
    given_to = growth.room_end(Growth(size, given_to, None, rate), RULES, 64 * GIB, 64 * GIB)
    for _ in range(200):
        look = growth.look_after_s([Growth(size, given_to, None, rate)], RULES, 1 << 50) + 0.005
        size += int(rate * look)
        assert size <= given_to
        given_to = growth.room_end(Growth(size, given_to, None, rate), RULES, 1 << 50, 1 << 50)


@given(st.lists(shards, max_size=5), rules, sizes)
def test_looks_are_neither_a_busy_loop_nor_rare(growing: list[Growth], rules: RoomRules, free: int) -> None:
    assert growth.SHORTEST_LOOK_S <= growth.look_after_s(growing, rules, free) <= growth.LONGEST_LOOK_S


@given(st.floats(growth.HOT_RATE, 20e9), st.integers(0, 2 * GIB))
def test_room_is_given_in_few_large_parts_however_little_is_left(rate: float, free: int) -> None:
    """Each part given makes the writer wait, so one must last."""
    size = given_to = 2 * MIB
    parts = 0
    while size < GIB:
        end = growth.room_end(
            Growth(size, given_to, None, rate), RULES, free, growth.spare_bytes(free, given_to - size)
        )
        parts += end > given_to
        free -= end - given_to
        given_to = end
        size += 4 * MIB
        if size > given_to:
            free, given_to = free - (size - given_to), size
        free = max(0, free)
    assert parts <= GIB // (growth.LEAST_AHEAD_BYTES // 2) + 1


def test_an_empty_file_gets_room_only_where_a_guess_is_allowed() -> None:
    assert growth.room_end(Growth(0, 0, None, 0.0), RULES, GIB, GIB) == 0
    assert growth.room_end(Growth(0, 0, None, 0.0, guess_bytes=128 * MIB), RULES, GIB, GIB) == 128 * MIB
    assert growth.room_end(Growth(0, 0, None, 0.0, guess_bytes=128 * MIB), RULES, 200 * MIB, 200 * MIB) == 50 * MIB


@given(rates, st.integers(0, GIB), st.floats(0, 10))
def test_a_rate_rises_at_once_and_lies_between_the_old_and_the_new(previous: float, grown: int, elapsed: float) -> None:
    rate = growth.blended_rate(previous, grown, elapsed)
    if elapsed > 0:
        now = grown / max(elapsed, growth.SHORTEST_LOOK_S)
        assert min(previous, now) * 0.999 <= rate <= max(previous, now) * 1.001
        assert rate >= min(now, grown / growth.SHORTEST_LOOK_S) * 0.999


@given(st.none() | sizes, sizes, sizes, sizes, sizes, sizes)
def test_ballast_and_data_fit_the_tier_and_the_last_tenth_of_memory_is_left_alone(
    limit: int | None, size: int, data: int, held: int, total: int, available: int
) -> None:
    target = growth.ballast_target(
        limit_bytes=limit,
        size_bytes=size,
        data_bytes=data,
        held_bytes=held,
        total_memory=total,
        available_memory=available,
    )
    assert target % HUGE_PAGE == 0
    assert 0 <= target <= max(0, size - data)
    assert limit is None or target <= limit
    if target > held:
        assert available - (target - held) >= int(total * growth.MEMORY_MARGIN)


def test_ballast_gives_memory_back_only_where_memory_is_short() -> None:
    def target(available: int) -> int:
        return growth.ballast_target(
            limit_bytes=None,
            size_bytes=50 * GIB,
            data_bytes=0,
            held_bytes=20 * GIB,
            total_memory=100 * GIB,
            available_memory=available,
        )

    assert target(30 * GIB) == 40 * GIB
    assert target(7 * GIB) == 20 * GIB
    assert target(4 * GIB) == 14 * GIB


@given(st.lists(shards, max_size=5), rules, sizes)
def test_no_room_is_missing_when_all_that_is_expected_fits(growing: list[Growth], rules: RoomRules, free: int) -> None:
    missing = growth.missing_bytes(growing, rules, free)
    assert missing >= 0
    assert growth.missing_bytes(growing, rules, free + missing) == 0


def test_the_rest_of_an_expected_shard_is_missing_before_it_is_written() -> None:
    shard = Growth(size_bytes=10 * MIB, given_bytes=64 * MIB, expected_bytes=GIB, rate=1e9)
    assert growth.missing_bytes([shard], RULES, 100 * MIB) == GIB - 164 * MIB


@given(st.lists(st.floats(0, 20e9), min_size=1, max_size=200), st.integers(0, 64 * GIB))
def test_shards_of_unknown_size_never_hold_more_ahead_than_they_leave(rates: list[float], free: int) -> None:
    """However many begin at once: a writer that begins after them finds half of the room, less a page for each."""
    ahead = 0
    for rate in rates:
        spare = growth.spare_bytes(free, ahead)
        guess = growth.first_guess(RULES, spare)
        for shard in (Growth(0, 0, None, 0.0, guess_bytes=guess), Growth(2 * MIB, 2 * MIB, None, rate)):
            end = growth.room_end(shard, RULES, free, growth.spare_bytes(free, ahead))
            free, ahead = free - (end - shard.given_bytes), ahead + end - shard.given_bytes
    assert ahead <= free + 2 * len(rates) * HUGE_PAGE
