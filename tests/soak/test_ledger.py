"""What a load may give is what the soak judges by: it must refuse what no save promised, and no more."""

from __future__ import annotations

import time

from soak.ledger import STALE_S, Ledger
from soak.weather import Weather
from soak.work import failure, same


def test_a_save_that_was_cut_off_may_be_there_or_not_but_what_was_whole_must_stay() -> None:
    ledger = Ledger()
    ledger.begin("run/step_1", "plain", 1)
    ledger.failed("run/step_1")
    entry = ledger.get("run/step_1")
    assert entry is not None and not entry.must and entry.seeds == (1,)
    ledger.begin("run/step_1", "plain", 2)
    ledger.saved("run/step_1", 2)
    ledger.begin("run/step_1", "plain", 3)
    ledger.failed("run/step_1")
    entry = ledger.get("run/step_1")
    assert entry is not None and entry.must and entry.seeds == (2, 3)
    ledger.begin("run/step_1", "plain", 4)
    ledger.saved("run/step_1", 4)
    entry = ledger.get("run/step_1")
    assert entry is not None and entry.seeds == (4,)
    assert entry.may_hold(time.monotonic()) == {1, 2, 3, 4} - {1} | set(entry.former)
    assert entry.may_hold(time.monotonic() + STALE_S) == {4}


def test_what_was_durable_before_a_change_is_not_so_after_it_until_told_again() -> None:
    ledger = Ledger()
    for number in (1, 2):
        ledger.begin(f"run/step_{number}", "plain", number)
        ledger.saved(f"run/step_{number}", number)
    before = ledger.versions()
    ledger.begin("run/step_2", "plain", 3)
    ledger.saved("run/step_2", 3)
    ledger.told({"run/step_1": "replica", "run/step_2": "replica"}, before)
    assert ledger.is_durable("run/step_1") and not ledger.is_durable("run/step_2")
    assert ledger.lose_what_is_not_durable({"run/step_1"}) == ["run/step_2"]
    assert ledger.get("run/step_1").must and not ledger.get("run/step_2").must  # type: ignore[union-attr]


def test_what_is_changed_is_not_held_and_what_is_held_is_not_lost_sight_of() -> None:
    ledger = Ledger()
    ledger.begin("run/step_1", "plain", 1)
    assert not ledger.hold("run/step_1", True)
    ledger.saved("run/step_1", 1)
    assert ledger.hold("run/step_1", True) and not ledger.hold("run/step_1", True)
    assert ledger.hold("run/step_1", False)
    ledger.remove("run/step_1")
    assert not ledger.hold("run/step_1", True)


def test_a_fault_excuses_only_what_it_touches_and_only_for_a_while() -> None:
    weather = Weather()
    with weather.spell("cut-node", 2):
        assert weather.felt("cut-node", node=2, since=time.monotonic())
        assert not weather.felt("cut-node", node=3, since=time.monotonic())
        assert not weather.felt("lose-node", since=time.monotonic())
        assert weather.now() == ["cut-node"]
    assert weather.felt("cut-node", since=time.monotonic())
    assert not weather.felt("cut-node", since=time.monotonic() + 60)


def test_two_looks_are_the_same_only_with_one_generation_and_its_marker() -> None:
    look = ["1", "complete", (7, 1), ["replica", "ram"]]
    assert same(look, ["1", "complete", (7, 1), ["object", "object"]])
    assert not same(look, ["2", "complete", (7, 1), ["replica", "ram"]])
    assert not same(look, ["1", "complete", (8, 1), ["replica", "ram"]])
    assert not same([2, 2, [2, 2]], [2, 2, [2, 2]]), "of a step that is not there nothing is known"


def test_an_error_is_told_with_the_errno_that_it_was_caused_by() -> None:
    caused = RuntimeError("the save failed")
    caused.__cause__ = OSError(28, "full")
    assert failure(caused)["name"] == "ENOSPC" and "the save failed" in failure(caused)["failure"]
    assert failure(ValueError("no call"))["name"] == ""
