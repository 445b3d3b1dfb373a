"""What each kind of setting accepts, as text or as a TOML value, and what is said of anything else."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierfs.settings import OFF, SettingKey
from tierfs.units import format_size_exactly, is_percentage, parse_duration, parse_share, parse_size

# By name, since only one of the two is there for a type checker to look at.
toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

INSTANCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")
_SIZE_HELP = "bytes or a number with KiB, MiB, GiB or TiB"
_SHARE_HELP = "bytes or a number with KiB, MiB, GiB, TiB or %"


def parse_value(key: SettingKey, value: Any, memory_bytes: Callable[[], int] | None = None) -> Any:
    """The value of a setting from its text or its TOML value. ValueError says what is wrong and what to write."""
    parsed = _parse(key, value, memory_bytes)
    if key.kind in ("int", "size", "share", "duration") and parsed < key.least:
        least = format_size_exactly(key.least) if key.kind in ("size", "share") else str(key.least)
        raise ValueError(f"must be at least {least}")
    return parsed


def memory_size(memory_bytes: Callable[[], int] | None) -> int:
    """What a percentage is of: the given function's answer, else what this machine lets the process have."""
    if memory_bytes is not None:
        return memory_bytes()
    from tierfs.ram.tmpfs import total_memory_bytes  # late, so that `tierfs --help` doesn't pay for it

    return total_memory_bytes()


def _parse(key: SettingKey, value: Any, memory_bytes: Callable[[], int] | None) -> Any:
    # bool is an int in Python, but `size = true` is a mistake
    number = isinstance(value, int) and not isinstance(value, bool)
    text = value.strip() if isinstance(value, str) else None
    if key.kind == "bool":
        if isinstance(value, bool):
            return value
        if text is not None and text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError("not a yes or no; write true or false")
    if key.kind == "choice":
        return _parse_choice(key, value)
    if key.kind == "int":
        if number:
            return value
        if text is not None and re.fullmatch(r"-?[0-9]+", text, re.ASCII):
            return int(text)
        raise ValueError("not a whole number")
    if key.kind in ("size", "share", "room"):
        return _parse_size_of(key, value if number else text, memory_bytes, switched_off=value is False)
    if key.kind == "duration":
        if number or isinstance(value, float):
            return float(value)
        try:
            return parse_duration(text or "")
        except ValueError as error:
            raise ValueError("not a duration; write seconds or a number with s, min, h or d") from error
    if key.kind in ("texts", "patterns"):
        return _parse_list(key, value)
    if key.kind == "table":
        return _parse_table(key, value)
    if text is None:
        raise ValueError("not a text; write it in quotes")
    if key.kind == "path":
        return _parse_path(text)
    if key.kind == "command":
        return _checked_command(text)
    if key.kind == "name" and not INSTANCE_NAME.fullmatch(text):
        raise ValueError("not a name; use up to 64 letters, digits, _ - and ., not starting with - or .")
    if key.kind == "url":
        _check_url(text)
    if key.kind == "catalog" and text and not re.fullmatch(r"etcd://[^\s/,@]+:\d+(,[^\s/,@]+:\d+)*", text):
        raise ValueError("not a catalogue; write etcd://host:port, several with commas, or leave it empty")
    if key.kind == "addresses" and text and not re.fullmatch(r"[^\s,]*:\d+(\s*,\s*[^\s,]*:\d+)*", text):
        raise ValueError("not an address; write HOST:PORT, several with commas, or :PORT")
    if key.kind == "endpoint" and text and not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", text):
        raise ValueError("not an endpoint; write http://host:port or https://host")
    return text


def _checked_command(text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"not a command that can be split into words: {error}") from None
    return text


def _parse_choice(key: SettingKey, value: Any) -> str:
    chosen = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value).strip().lower()
    words = {"on": _TRUE, "off": _FALSE}
    for word, synonyms in words.items():
        if word in key.choices and chosen in synonyms:
            return word
    if chosen in key.choices:
        return chosen
    if "on" not in key.choices and "auto" in key.choices and chosen in _TRUE:
        return "auto"  # passthrough = on: wanted where the machine can, which is what auto does
    choices = f"one of {', '.join(key.choices)}" if len(key.choices) > 1 else f"{key.choices[0]}, the only choice"
    raise ValueError(f"must be {choices}")


def _parse_size_of(
    key: SettingKey, value: Any, memory_bytes: Callable[[], int] | None, *, switched_off: bool
) -> int | str:
    if key.kind == "room":
        if switched_off or (isinstance(value, str) and value.lower() in _FALSE):
            return OFF
        if isinstance(value, str) and value.lower() in ("auto", *_TRUE):
            return "auto"
    share = key.kind in ("share", "room")
    try:
        if isinstance(value, str):
            total = memory_size(memory_bytes) if share and is_percentage(value) else 0
            size = parse_share(value, total) if share else parse_size(value)
        elif isinstance(value, int):
            size = value
        else:
            raise ValueError
    except ValueError as error:
        other = "auto, off, or " if key.kind == "room" else ""
        raise ValueError(f"not a size; write {other}{_SHARE_HELP if share else _SIZE_HELP}") from error
    if key.kind == "room":
        if size < 0:
            raise ValueError("must be at least 0")
        return str(size)
    return size


def _parse_list(key: SettingKey, value: Any) -> list[str]:
    if isinstance(value, str):
        value = _parse_toml(value) if value.lstrip().startswith("[") else value.split()
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise ValueError('not a list of texts; write ["one", "two"]')
    if unknown := [entry for entry in value if key.choices and entry not in key.choices]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(key.choices)}")
    if key.kind == "patterns":
        for pattern in value:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if "step" not in compiled.groupindex:
                raise ValueError(f"{pattern!r} has no group `step`; write the number as (?P<step>\\d+)")
    return list(value)


def _parse_table(key: SettingKey, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            value = _parse_toml(value)
        else:
            pairs = [entry.rpartition("=") for entry in value.split()]
            value = {name: entry for name, _, entry in pairs}
    if not isinstance(value, dict) or not all(value):
        raise ValueError('not a table; write { name = "value" }')
    table = {}
    for name, entry in value.items():
        chosen = OFF if entry is False else str(entry)
        if key.choices and chosen not in (*key.choices, OFF):
            raise ValueError(f"{name} must be one of {', '.join((*key.choices, OFF))}, not {entry!r}")
        table[name] = chosen
    return table


def _parse_toml(text: str) -> Any:
    try:
        return toml.loads(f"value = {text}")["value"]
    except toml.TOMLDecodeError as error:
        raise ValueError(f"not a TOML value: {error}") from error


def _parse_path(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError("not an absolute path; write it from / or ~")
    return path


def _check_url(text: str) -> None:
    if not text:
        return
    # Compatible servers allow '_' and capitals in names of buckets.
    if not re.fullmatch(r"file:///.*[^/].*|s3://[A-Za-z0-9][A-Za-z0-9._-]+(/.*)?", text):
        raise ValueError("not an object tier; write file:///path or s3://bucket/prefix")
    parts = text.partition("://")[2].strip("/").split("/")
    if ".." in parts or (text.startswith("s3:") and ("" in parts or "." in parts)):
        raise ValueError("its path must not hold '..', nor a prefix '.' or two slashes side by side")
