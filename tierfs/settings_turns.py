"""When the turn of something comes, as a setting says it: `all`, each so many-th (`3`), or after so long (`30min`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierfs.errors import SettingsError
from tierfs.units import parse_duration

if TYPE_CHECKING:
    from tierfs.settings import Settings


@dataclass(frozen=True)
class Turn:
    """By count, by time, or both; 0 is not by that."""

    every_steps: int = 0
    every_s: float = 0.0


def parse_turn(text: str) -> Turn:
    """ValueError says what to write."""
    if text == "all":
        return Turn(every_steps=1)
    if re.fullmatch(r"[1-9][0-9]{0,8}", text, re.ASCII):
        return Turn(every_steps=int(text))
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0 or text.isdigit():
        raise ValueError("not a turn; write all, a number of steps such as 3, or a duration such as 30min")
    return Turn(every_s=seconds)


def check_turns(settings: Settings) -> None:
    """SettingsError where `persist.files`, in general or for a namespace, says no turn."""
    tables = {"persist.files": settings.persist.files}
    for glob, sections in settings.namespaces.items():
        tables[f'namespaces."{glob}".persist.files'] = sections.get("persist", {}).get("files", {})
    for dotted, table in tables.items():
        for pattern, text in table.items():
            try:
                if text != "off":
                    parse_turn(text)
                if pattern.startswith(("/", "./")) or pattern.endswith("/"):
                    raise ValueError("it matches no file; write a path inside the step such as model/*")
            except ValueError as error:
                raise SettingsError(f'{dotted}."{pattern}" = {text!r}: {error}', key=dotted) from None
