"""How many requests at a time, how fast, and how often again: the decisions, without processes and without waiting."""

from __future__ import annotations

from collections import defaultdict

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tierfs.errors import (
    NoRoom,
    ObjectCorrupt,
    ObjectDenied,
    ObjectError,
    ObjectMissing,
    ObjectStoreFull,
    ObjectThrottled,
    ObjectUnavailable,
    TierfsError,
)
from tierfs.objects.bandwidth import Bandwidth
from tierfs.objects.limits import Concurrency, RequestSlots
from tierfs.objects.retries import DENIED_PAUSE_S, LEAST_PAUSE_S, MOST_CORRUPT, MOST_PAUSE_S, RetryPlan

PASSING = (ObjectThrottled, ObjectUnavailable, ObjectDenied, ObjectStoreFull, ObjectCorrupt)


@given(st.floats(0, 1000), st.lists(st.tuples(st.sampled_from(PASSING), st.floats(0, 60)), min_size=1), st.floats(0, 1))
def test_no_plan_outlasts_its_budget_or_pauses_longer_than_agreed(
    budget_s: float, failures: list[tuple[type[ObjectError], float]], share: float
) -> None:
    plan = RetryPlan(budget_s, pick=lambda low, high: low + share * (high - low))
    began = now = 1000.0
    corrupt = 0
    for kind, lasted_s in failures:
        corrupt += kind is ObjectCorrupt
        pause_s = plan.pause_after(kind("failed"), now)
        if pause_s is None:
            spent = now + MOST_PAUSE_S + DENIED_PAUSE_S > began + budget_s
            assert spent or corrupt == MOST_CORRUPT
            return
        assert corrupt < MOST_CORRUPT
        assert now + pause_s <= began + budget_s
        assert pause_s <= MOST_PAUSE_S + DENIED_PAUSE_S
        assert kind is not ObjectDenied or pause_s >= DENIED_PAUSE_S
        now += pause_s + lasted_s


def test_pauses_double_up_to_the_longest() -> None:
    plan = RetryPlan(1e9, pick=lambda low, high: high)
    pauses = [plan.pause_after(ObjectUnavailable("reset"), 0.0) for _ in range(200)]
    assert pauses[:3] == [LEAST_PAUSE_S, 2 * LEAST_PAUSE_S, 4 * LEAST_PAUSE_S]
    assert pauses[-1] == MOST_PAUSE_S


@pytest.mark.parametrize("error", [ObjectMissing("none"), ObjectError("odd"), NoRoom("full")])
def test_what_does_not_pass_is_final(error: TierfsError) -> None:
    assert RetryPlan(1e9).pause_after(error, 0.0) is None


def test_concurrency_is_halved_once_for_requests_throttled_together_and_recovers_slowly() -> None:
    concurrency = Concurrency(16, 0.0)
    for _ in range(16):
        concurrency.throttled(began=1.0, now=2.0)
    assert concurrency.allowed == 8
    concurrency.throttled(began=2.5, now=3.0)
    assert concurrency.allowed == 4
    for now in range(10, 20):
        concurrency.throttled(began=now, now=now)
    assert concurrency.allowed == 1
    for tenth in range(190, 19 * 10 + 99):
        concurrency.succeeded(tenth / 10)
    assert concurrency.allowed == 1
    for second in range(29, 29 + 10 * 40):
        concurrency.succeeded(float(second))
        assert concurrency.allowed <= 2 + (second - 29) / 10
    assert concurrency.allowed == 16


async def test_urgent_requests_go_first_and_have_slots_of_their_own() -> None:
    slots = RequestSlots(4)
    order: list[str] = []
    finish: dict[str, trio.Event] = defaultdict(trio.Event)

    async def request(name: str, urgent: bool) -> None:
        async with slots.slot(urgent=urgent):
            order.append(name)
            await finish[name].wait()

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(request, f"upload{number}", False)
            await trio.testing.wait_all_tasks_blocked()
        for number in range(2):
            nursery.start_soon(request, f"read{number}", True)
            await trio.testing.wait_all_tasks_blocked()
        assert order == ["upload0", "upload1", "upload2", "upload3", "read0"]
        while len(order) < 8 or slots.in_use:
            finish[next(name for name in order if not finish[name].is_set())].set()
            await trio.testing.wait_all_tasks_blocked()
    assert order[5:] == ["read1", "upload4", "upload5"]
    assert slots.in_use == 0


async def test_a_cancelled_request_gives_its_slot_or_its_place_back() -> None:
    slots = RequestSlots(1)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def request() -> None:
                async with slots.slot():
                    await trio.sleep_forever()

            for _ in range(3):
                nursery.start_soon(request)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert slots.in_use == 0
    with trio.fail_after(1):
        async with slots.slot():
            pass


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(0, 5)), min_size=1, max_size=50))
def test_bytes_never_pass_faster_than_allowed(pieces: list[tuple[int, float]]) -> None:
    rate, now, taken = 1 << 20, 0.0, 0
    bandwidth = Bandwidth(rate, clock=lambda: now)
    for size, later_s in pieces:
        now += later_s
        now += bandwidth.take(size)
        taken += size
        assert taken <= rate * (now + 0.25) + 1


def test_no_limit_never_waits() -> None:
    assert Bandwidth(0).take(1 << 40) == 0
