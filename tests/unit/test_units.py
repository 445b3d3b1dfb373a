"""Sizes, rates, durations and ages as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("3G", 3 << 30),
        ("3GiB", 3 << 30),
        ("3 gib", 3 << 30),
        ("1.5M", 3 << 19),
        ("3GB", 3 * 10**9),
        ("1TB", 10**12),
        ("10b", 10),
        (" 64k ", 64 << 10),
    ],
)
def test_a_bare_letter_is_a_power_of_1024_and_an_si_name_of_1000(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "3Q", "G", "-1", "3iB", "1.5", "1 2", "0x10", "nan", "inf", "1e3", "٣", "9999999P"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_size(text)


def test_a_share_is_a_size_or_a_percentage() -> None:
    assert units.parse_share("50%", 1000) == 500
    assert units.parse_share("12.5 %", 1000) == 125
    assert units.parse_share("100%", 1000) == 1000
    assert units.parse_share("1K", 0) == 1024
    for text in ("0%", "101%", "%", "-1%"):
        with pytest.raises(ValueError):
            units.parse_share(text, 1000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("30s", 30),
        ("1.5s", 1.5),
        ("5m", 300),
        ("5 min", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2d", 172800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5x", "5 5", "5s5", "-3s", "1h-3"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1 << 30, "1 GiB"),
        (int(1.2 * (1 << 30)), "1.2 GiB"),
        (480 << 20, "480 MiB"),
        (1000 << 30, "1000 GiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_a_size_is_shown_with_three_figures(size: int, text: str) -> None:
    assert units.format_size(size) == text


@given(st.integers(0, 2**60))
def test_an_exact_size_is_read_back_the_same(size: int) -> None:
    assert units.parse_size(units.format_size_exactly(size)) == size


@given(st.integers(0, 2**62))
def test_a_shown_size_is_never_wide_and_reads_back_close(size: int) -> None:
    text = units.format_size(size)
    assert len(text) <= 8
    assert units.parse_size(text) == pytest.approx(size, rel=0.06)


def test_rates_durations_and_ages() -> None:
    assert units.format_rate(1.2 * (1 << 30), 0.41) == "2.9 GiB/s"
    assert units.format_rate(5, 0) == "-"
    shown = [units.format_duration(seconds) for seconds in (0, 0.0012, 0.05, 0.41, 12.34, 59.97, 125, 3780, 187200)]
    assert shown == ["0 s", "1.2 ms", "50 ms", "0.41 s", "12.3 s", "1 min", "2 min 5 s", "1 h 3 min", "2 d 4 h"]
    assert [units.format_age(seconds) for seconds in (-5, 3.9, 60, 3600)] == ["0 s", "3 s", "1 min", "1 h"]
    assert units.format_utc(1767225600.1234) == "2026-01-01T00:00:00.123Z"
    assert units.format_utc(1767225599.9999) == "2026-01-01T00:00:00.000Z"
