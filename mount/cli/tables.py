"""Tables, blocks of facts and JSON on a terminal or in a pipe.

Colour only on a terminal and without NO_COLOR (https://no-color.org); other than ASCII only where the stream's
encoding has it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


@dataclass(frozen=True)
class Screen:
    """What the reader of a stream can show."""

    colour: bool
    unicode: bool

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] | None = None) -> Screen:
        environ = os.environ if environ is None else environ
        colour = stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "") != "dumb"
        try:
            "✓─…".encode(stream.encoding or "ascii")
            unicode = True
        except (UnicodeEncodeError, LookupError):
            unicode = False
        return cls(colour, unicode)

    def paint(self, text: str, style: str) -> str:
        """`text` in a style of STYLES; unchanged where there is no colour or no style."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.colour and style and text else text

    def mark(self, fine: bool) -> str:
        return ("✓" if fine else "✗") if self.unicode else ("ok" if fine else "no")


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell with a style; plain text may be given in its place."""

    text: str
    style: str = ""


def render_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]], screen: Screen) -> str:
    """The table's lines, with a heading. Columns that are empty in every row are left out; so is space at line ends."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    cells = [[Cell(plain(cell.text, screen), cell.style) for cell in row] for row in cells]
    kept = [index for index in range(len(columns)) if any(row[index].text for row in cells)]
    widths = {index: max(len(columns[index].title), *(len(row[index].text) for row in cells)) for index in kept}

    def line(row: Sequence[Cell]) -> str:
        parts = []
        for index in kept:
            space = " " * (widths[index] - len(row[index].text))
            painted = screen.paint(row[index].text, row[index].style)
            parts.append(space + painted if columns[index].right else painted + space)
        return "  ".join(parts).rstrip()

    heading = [Cell(column.title, "dim") for column in columns]
    return "\n".join(line(row) for row in [heading, *cells]) + "\n"


def render_facts(facts: Iterable[tuple[str, str | Cell]], screen: Screen) -> str:
    """`name  value` lines with the values below each other; facts without a value are left out."""
    kept = [(name, value if isinstance(value, Cell) else Cell(value)) for name, value in facts]
    kept = [(name, value) for name, value in kept if value.text]
    width = max((len(name) for name, _ in kept), default=0)
    return "".join(
        f"{screen.paint(name.ljust(width), 'dim')}  {screen.paint(plain(value.text, screen), value.style)}\n"
        for name, value in kept
    )


def plain(text: str, screen: Screen) -> str:
    """Names as they may be shown: control characters escaped, and others too where the stream can't show them."""
    shown = "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )
    return shown if screen.unicode else shown.encode("ascii", "backslashreplace").decode()


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """The value as one JSON document: one line in a pipe, indented on a terminal."""
    stream = stream or sys.stdout
    print(json.dumps(value, indent=2 if stream.isatty() else None), file=stream)
