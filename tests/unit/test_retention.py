"""What retention may evict, and in which order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tierfs.settings import RetentionSettings
from tierfs.steps.retention import StepFacts, choose_evictions


def step(number: int, *, namespace: str = "run", at: float | None = None, size: int = 10) -> StepFacts:
    return StepFacts(
        namespace=namespace,
        step=f"step_{number}",
        number=number,
        completed_at=float(number) if at is None else at,
        bytes=size,
        pinned=False,
        open_handles=0,
        only_copy_owed=False,
        state="complete",
    )


def chosen(steps: list[StepFacts], wanted: int, *, keep: int = 2, most: int = 0) -> list[str]:
    policy = RetentionSettings(ram_steps=keep, ram_max_steps=most)
    return [f"{facts.namespace}/{facts.number}" for facts in choose_evictions(steps, lambda _: policy, wanted)]


def test_the_oldest_go_first_and_only_until_enough_is_free() -> None:
    steps = [step(number) for number in (3, 1, 5, 2, 4)]
    assert chosen(steps, 0) == []
    assert chosen(steps, 1) == ["run/1"]
    assert chosen(steps, 11) == ["run/1", "run/2"]
    assert chosen(steps, 1000) == ["run/1", "run/2", "run/3"]


def test_namespaces_share_the_burden_by_age() -> None:
    steps = [step(number, namespace="a", at=number * 10) for number in range(1, 5)]
    steps += [step(number, namespace="b", at=number * 10 + 5) for number in range(1, 5)]
    assert chosen(steps, 31) == ["a/1", "b/1", "a/2", "b/2"]


def test_a_maximum_is_held_even_when_no_room_is_wanted() -> None:
    steps = [step(number) for number in range(1, 6)]
    assert chosen(steps, 0, most=3) == ["run/1", "run/2"]
    assert chosen(steps, 15, most=4) == ["run/1", "run/2"]
    assert chosen(steps, 0, keep=4, most=1) == ["run/1", "run/2", "run/3", "run/4"]


def test_training_that_went_back_keeps_what_it_saved_last() -> None:
    assert chosen([step(100, at=1), step(200, at=2), step(110, at=3)], 1, keep=1) == ["run/100"]


def test_what_latest_names_goes_last_and_a_maximum_spares_it_after_the_newest() -> None:
    went_back = [step(100, at=1), step(50, at=2), step(60, at=3), step(70, at=4)]
    assert chosen(went_back, 1, keep=1) == ["run/50"]
    assert chosen(went_back, 1000, keep=1) == ["run/50", "run/60", "run/100"]
    assert chosen(went_back, 1000, keep=3) == ["run/100"]
    assert chosen(went_back, 0, keep=2, most=2) == ["run/50", "run/60"]
    assert chosen(went_back, 0, keep=2, most=1) == ["run/50", "run/60", "run/100"]


facts = st.builds(
    StepFacts,
    namespace=st.sampled_from(["a", "b/c", "d"]),
    step=st.just(""),
    number=st.integers(0, 50),
    completed_at=st.one_of(st.none(), st.floats(0, 100)),
    bytes=st.integers(0, 100),
    pinned=st.booleans(),
    open_handles=st.sampled_from([0, 0, 0, 1, 7]),
    only_copy_owed=st.sampled_from([False, False, True]),
    state=st.sampled_from(["complete", "complete", "complete", "writing", "abandoned"]),
)
some_steps = st.lists(facts, max_size=25).map(
    lambda found: [replace(each, step=f"step_{each.number}_{at}") for at, each in enumerate(found)]
)


@given(
    steps=some_steps,
    keep=st.integers(0, 4),
    most=st.integers(0, 5),
    wanted=st.integers(0, 500),
    order=st.randoms(use_true_random=False),
)
def test_nothing_protected_ever_goes_and_nothing_goes_in_vain(
    steps: list[StepFacts], keep: int, most: int, wanted: int, order: object
) -> None:
    policy = RetentionSettings(ram_steps=keep, ram_max_steps=most)
    evicted = choose_evictions(steps, lambda _: policy, wanted)
    assert len(set(evicted)) == len(evicted)
    for one in evicted:
        assert one.state == "complete"
        assert not one.pinned
        assert not one.open_handles
        assert not one.only_copy_owed
    complete = [one for one in steps if one.state == "complete" and one.completed_at is not None]
    for namespace in {one.namespace for one in steps}:
        newest = sorted(
            (one for one in complete if one.namespace == namespace),
            key=lambda one: (one.completed_at, one.number, one.step),
        )
        latest = max(newest, key=lambda one: (one.number, one.completed_at, one.step), default=None)
        if not most:
            assert not set(newest[-keep:] if keep else []) & set(evicted)
        elif newest:
            worth = list(dict.fromkeys([newest[-1], latest, *reversed(newest)]))
            above = worth[most:]
            assert {one for one in above if not (one.pinned or one.open_handles or one.only_copy_owed)} <= set(evicted)
            assert not set(worth[: min(keep, most)]) & set(newest[-keep:] if keep else []) & set(evicted)
        if latest in evicted and not most:
            before = evicted[: evicted.index(latest)]
            spare = newest[: len(newest) - keep] if keep else newest
            may_go = {one for one in spare if one.bytes and not (one.pinned or one.open_handles or one.only_copy_owed)}
            assert may_go - {latest} <= set(before)
    # The last one taken was needed, unless a maximum forced it.
    if evicted and not most:
        assert sum(one.bytes for one in evicted[:-1]) < wanted
        assert all(one.bytes for one in evicted)
    order.shuffle(shuffled := list(steps))  # type: ignore[attr-defined]
    assert choose_evictions(shuffled, lambda _: policy, wanted) == evicted
