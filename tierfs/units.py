"""Sizes, rates, durations and ages: the one place that reads and writes them as text.

Sizes: a bare letter and the IEC name both mean powers of 1024 (`3G` = `3GiB` = 3 * 2^30), as in mount(8) and
`dd`; the SI name means powers of 1000 (`3GB` = 3 * 10^9). Letter case is ignored. Text for people is always IEC.
"""

from __future__ import annotations

import datetime
import math
import re

_LETTERS = "kmgtp"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmgtp])?(ib|b)?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|s|min|m|h|d)? *", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LARGEST_SIZE = 2**63 - 1  # loff_t, the kernel's file size


def parse_size(text: str) -> int:
    """Bytes of `4096`, `64M`, `1.5 GiB`, `3GB`. ValueError when it is none of these."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, letter, suffix = match.group(1), (match.group(2) or "").lower(), (match.group(3) or "").lower()
    if suffix == "ib" and not letter:
        raise ValueError(f"not a size: {text!r}")
    base = 1000 if suffix == "b" else 1024
    factor: int = base ** (_LETTERS.index(letter) + 1) if letter else 1
    if "." in number:
        if factor == 1:
            raise ValueError(f"not a whole number of bytes: {text!r}")
        size = int(float(number) * factor)
    else:
        size = int(number) * factor
    if size > _LARGEST_SIZE:
        raise ValueError(f"larger than any file: {text!r}")
    return size


def parse_share(text: str, total_bytes: int) -> int:
    """Bytes of a size, or of a percentage (over 0, up to 100) of `total_bytes`. ValueError otherwise."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return parse_size(text)
    percent = float(match.group(1))
    if not 0 < percent <= 100:
        raise ValueError(f"not a percentage from 0 to 100: {text!r}")
    return int(total_bytes * percent / 100)


def is_percentage(text: str) -> bool:
    return _PERCENT.fullmatch(text.strip()) is not None


def parse_duration(text: str) -> float:
    """Seconds of `30`, `30s`, `5min`, `1h30m`, `250ms`, `2d`. ValueError when it is none of these."""
    stripped = text.strip().lower()
    total, position = 0.0, 0
    while position < len(stripped):
        match = _DURATION_PART.match(stripped, position)
        if match is None:
            raise ValueError(f"not a duration: {text!r}")
        unit = match.group(2) or ""
        if not unit and (position or match.end() < len(stripped)):
            raise ValueError(f"not a duration: {text!r}")
        total += float(match.group(1)) * _SECONDS[unit]
        position = match.end()
    if not stripped or not math.isfinite(total):
        raise ValueError(f"not a duration: {text!r}")
    return total


def format_size(size_bytes: float) -> str:
    """`0 B`, `512 B`, `1.5 KiB`, `64 MiB`, `3.2 GiB`: three figures, and a whole number without `.0`."""
    value, sign = abs(size_bytes), "-" if size_bytes < 0 else ""
    if round(value) < 1024:
        return f"{sign}{round(value)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        # 1023.95 would be written 1024.0, so it belongs to the next unit already
        if value < 1023.95 or unit == "PiB":
            break
    digits = 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f}".removesuffix(".0") + f" {unit}"


def format_size_exactly(size_bytes: int) -> str:
    """A size that `parse_size` reads back to the same number: `3GiB`, `64MiB`, `4097`."""
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def format_rate(size_bytes: float, seconds: float) -> str:
    """`2.9 GiB/s`; `-` when no time passed, since no rate can be told."""
    if seconds <= 0:
        return "-"
    return f"{format_size(size_bytes / seconds)}/s"


def format_duration(seconds: float) -> str:
    """`0.41 s`, `12.3 s`, `2 min 5 s`, `1 h 3 min`, `2 d 4 h`; under a tenth of a second in `ms`."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return _two_units(round(seconds))


def format_age(seconds: float) -> str:
    """How long ago, in whole units: `3 s`, `2 min 5 s`, `1 h 3 min`. Clocks that jumped back give `0 s`."""
    return _two_units(max(0, int(seconds)))


def _two_units(seconds: int) -> str:
    parts: list[tuple[int, str]] = []
    rest = seconds
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, length)
        parts.append((count, unit))
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    shown = parts[first : first + 2]
    return " ".join(f"{count} {unit}" for position, (count, unit) in enumerate(shown) if count or position == 0)


def format_utc(unix_s: float) -> str:
    """RFC 3339 in UTC with milliseconds: `2026-01-01T00:00:00.123Z`."""
    whole, milliseconds = divmod(math.floor(unix_s * 1000 + 0.5), 1000)
    moment = datetime.datetime.fromtimestamp(whole, tz=datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{milliseconds:03d}Z"


def format_local(unix_s: float) -> str:
    """The reader's own time, to the second: `2026-01-01 00:00:00`."""
    return f"{datetime.datetime.fromtimestamp(unix_s).astimezone():%Y-%m-%d %H:%M:%S}"
