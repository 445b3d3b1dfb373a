"""Strict reading of JSON that a crash, another version or a stranger wrote: each member typed, none unknown."""

from __future__ import annotations

from typing import NoReturn, cast


class Wrong(Exception):
    """What is wrong and where; the caller makes its own error of it."""


def refuse_constant(name: str) -> NoReturn:
    """For `json.loads(parse_constant=…)`: NaN and the infinities are no JSON."""
    raise ValueError(f"{name} is not allowed")


class Fields:
    """The members of one JSON object, each taken with its type; ends by refusing those that nobody took."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(f"{where} is not an object")
        self._value = dict(value)
        self._where = where

    def add(self, members: dict[str, object]) -> None:
        """What an older version did not write yet."""
        self._value = {**members, **self._value}

    def _take(self, key: str) -> object:
        if key not in self._value:
            raise Wrong(f"{self._where} lacks {key!r}")
        return self._value.pop(key)

    def _refuse(self, key: str, wanted: str, value: object) -> NoReturn:
        raise Wrong(f"{self._where}: {key!r} must be {wanted}, not {str(value)[:80]!r}")

    def integer(self, key: str, *, least: int = 0) -> int:
        value = self._take(key)
        if type(value) is not int or not least <= value < 1 << 64:
            self._refuse(key, f"a whole number from {least}", value)
        return value

    def seconds(self, key: str) -> float:
        value = self._take(key)
        if type(value) not in (int, float) or not 0 <= cast("float", value) < 1e18:
            self._refuse(key, "seconds", value)
        return float(cast("float", value))

    def seconds_or_none(self, key: str) -> float | None:
        if self._value.get(key, 0) is None:
            del self._value[key]
            return None
        return self.seconds(key)

    def flag(self, key: str) -> bool:
        value = self._take(key)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str):
            self._refuse(key, "a text", value)
        return value

    def text_or_none(self, key: str) -> str | None:
        if self._value.get(key, 0) is None:
            del self._value[key]
            return None
        return self.text(key)

    def texts(self, key: str) -> set[str]:
        value = self._take(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self._refuse(key, "a list of texts", value)
        return set(value)

    def mapping(self, key: str) -> dict[str, object]:
        value = self._take(key)
        if not isinstance(value, dict):
            self._refuse(key, "an object", value)
        return value

    def any(self, key: str) -> object:
        return self._take(key)

    def end(self) -> None:
        if self._value:
            raise Wrong(f"{self._where} has unknown members: {', '.join(sorted(self._value))[:200]}")
