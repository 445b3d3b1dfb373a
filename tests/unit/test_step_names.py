"""Which paths are steps, and which names may reach the tree."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.errors import PathRefused, SettingsError
from tierfs.settings import StepSettings
from tierfs.steps.names import (
    StepNames,
    StepPath,
    escape_namespace,
    safe_component,
    safe_relative,
    unescape_namespace,
)

NAMES = StepNames(StepSettings().patterns)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_5", 5),
        ("step-100", 100),
        ("step=7", 7),
        ("step12", 12),
        ("global_step500", 500),
        ("iter_0001000", 1000),
        ("checkpoint-42", 42),
        ("checkpoint_42", 42),
        ("epoch=3-step=900", 900),
        ("epoch=3-step=900.ckpt", 900),
        ("1234", 1234),
        ("0", 0),
    ],
)
def test_the_names_that_frameworks_use_are_steps(name: str, number: int) -> None:
    assert NAMES.locate(f"run/{name}") == StepPath("run", name, number, "")
    assert NAMES.locate(f"run/{name}/__0_0.distcp") == StepPath("run", name, number, "__0_0.distcp")


@pytest.mark.parametrize(
    "name",
    [
        "latest",
        "step_",
        "step_5.tmp",
        "xstep_5",
        "step_٣",
        "step_5\n",
        "12.orbax-checkpoint-tmp",
        "last.ckpt",
        "step_-1",
    ],
)
def test_other_names_are_not_steps(name: str) -> None:
    assert NAMES.locate(f"run/{name}/x") is None


@pytest.mark.parametrize(
    ("rel", "expected"),
    [
        ("", None),
        ("run", None),
        ("step_5", None),
        ("step_5/__0_0.distcp", None),
        ("5/6/x", StepPath("5", "6", 6, "x")),
        ("team/run/step_5/a/b", StepPath("team/run", "step_5", 5, "a/b")),
        # The leftmost is the step; what lies in it may have such names too.
        ("run/step_5/step_6/x", StepPath("run", "step_5", 5, "step_6/x")),
        # A number alone may be a date or a rank.
        ("run/2024/step_5/x", StepPath("run/2024", "step_5", 5, "x")),
        ("run/step_5/0/x", StepPath("run", "step_5", 5, "0/x")),
        ("run/5/0/x", StepPath("run", "5", 5, "0/x")),
        ("step_1/run/step_5", StepPath("step_1/run", "step_5", 5, "")),
    ],
)
def test_the_place_of_a_step_in_a_path(rel: str, expected: StepPath | None) -> None:
    found = NAMES.locate(rel)
    assert found == expected
    if found is not None:
        assert found.rel == rel
        assert rel.startswith(found.step_rel)


def test_only_deepspeed_keeps_a_latest_of_its_own() -> None:
    assert NAMES.has_own_latest("global_step10")
    assert not NAMES.has_own_latest("step_10")


def test_a_bad_pattern_is_named() -> None:
    with pytest.raises(SettingsError, match=r"step_\(") as caught:
        StepNames([r"step_("])
    assert caught.value.key == "steps.patterns"
    with pytest.raises(SettingsError, match=r"lacks the group \(\?P<step>"):
        StepNames([r"step_(\d+)"])


def test_a_pattern_whose_number_is_none_finds_no_step() -> None:
    names = StepNames([r"s(?P<step>.+)", r"t(?P<step>\d+)?"])
    assert names.locate("run/sx") is None
    assert names.locate("run/t") is None
    assert names.locate("run/t5") == StepPath("run", "t5", 5, "")


def test_a_name_too_long_for_a_manifest_is_no_step() -> None:
    assert NAMES.locate("run/step_" + "1" * 195) is not None
    assert NAMES.locate("run/step_" + "1" * 196) is None


def test_asking_again_is_cheap() -> None:
    # 0.1 us measured; the bound only catches a cache that is gone.
    NAMES.locate("team/run/step_5/__0_0.distcp")
    began = time.perf_counter()
    for _ in range(10_000):
        NAMES.locate("team/run/step_5/__0_0.distcp")
    assert time.perf_counter() - began < 0.1


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "x" * 256, "ü" * 128, "\ud800"])
def test_unsafe_components_are_refused(name: str) -> None:
    if name == "\ud800":
        name *= 64
    with pytest.raises(PathRefused):
        safe_component(name)


@pytest.mark.parametrize("path", ["", "/", "/etc", "a//b", "a/", "a/../b", "./a", "a/\0", "a/" + "x" * 256])
def test_unsafe_paths_are_refused(path: str) -> None:
    with pytest.raises(PathRefused):
        safe_relative(path)


def test_safe_names_pass_unchanged() -> None:
    for name in ("a", "...", ".metadata", "ü" * 127, "x" * 255, "\udcff"):
        assert safe_component(name) == name
    assert safe_relative("team/run/..x") == "team/run/..x"


components = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12
).filter(lambda name: name not in (".", ".."))
namespaces = st.one_of(
    st.lists(components, min_size=1, max_size=4).map("/".join),
    st.lists(st.sampled_from(["%", "2F", "25", "a", "%2F"]), min_size=1).map("".join),
)


@given(first=namespaces, second=namespaces)
def test_an_escaped_namespace_is_one_file_name_and_turns_back(first: str, second: str) -> None:
    flat = escape_namespace(first)
    assert len(flat.encode()) <= 240
    assert safe_component(flat) == flat
    assert unescape_namespace(flat) == first
    assert (escape_namespace(second) == flat) == (first == second)


def test_a_namespace_longer_than_a_file_name_still_has_one_of_its_own() -> None:
    deep = "/".join(["ü" * 100] * 5)
    first, second = escape_namespace(deep + "a"), escape_namespace(deep + "b")
    assert first != second
    assert len(first.encode()) <= 240
    with pytest.raises(PathRefused):
        unescape_namespace(first)


@pytest.mark.parametrize("flat", ["%2e", "a%", "%2F", "%2F..", "..", ""])
def test_what_is_no_escaped_namespace_is_refused(flat: str) -> None:
    with pytest.raises(PathRefused):
        unescape_namespace(flat)
