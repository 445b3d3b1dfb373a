"""Pages of the documentation as a reader meets them: headings, blocks of commands, and what is said to come of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(`{3,})(\w*)$")
_HEADING = re.compile(r"^#{1,6} (.+)$")


@dataclass(frozen=True)
class Block:
    """A fenced ```sh block. `expected` is the ```text block after it with nothing between, "" where there is none."""

    page: str
    heading: str
    line: int
    code: str
    expected: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """One a line, without comments; lines that go on, and documents for standard input, belong to their command."""
        found: list[str] = []
        end = ""
        is_open = False
        for line in self.code.splitlines():
            if end:
                found[-1] += f"\n{line}"
                end = "" if line == end else end
                continue
            text = re.sub(r"(^|\s)#.*$", "", line).rstrip()
            if is_open:
                found[-1] += f"\n{text}"
            elif text:
                found.append(text)
            is_open = text.endswith("\\")
            if here := re.search(r"<<-?'?(\w+)'?$", text):
                end = here[1]
        return found


def blocks(page: Path, name: str) -> list[Block]:
    """Every sh block of the page, in order."""
    return list(_blocks(page.read_text().splitlines(), name))


def below(page: Path, heading: str) -> list[Block]:
    """The blocks of one section, of which there is one at least."""
    found = [block for block in blocks(page, page.name) if block.heading == heading]
    assert found, f"{page.name} has no commands below {heading!r}"
    return found


def _blocks(lines: list[str], name: str) -> Iterator[Block]:
    heading, held = "", None
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := _HEADING.match(line):
            heading = found[1]
        if fence := _FENCE.match(line):
            end = lines.index(fence[1], at + 1)
            code = "\n".join(lines[at + 1 : end]) + "\n"
            if fence[2] == "text" and held is not None:
                held = Block(held.page, held.heading, held.line, held.code, code)
            if held is not None:
                yield held
                held = None
            if fence[2] == "sh":
                held = Block(name, heading, at + 1, code)
            at = end
        elif line.strip() and held is not None:
            yield held
            held = None
        at += 1
    if held is not None:
        yield held


def differences(expected: str, printed: str) -> list[str]:
    """Lines of `expected` that `printed` lacks, in their order. `…` is anything, the width of space is not told."""
    left = [" ".join(line.split()) for line in printed.splitlines()]
    missing = []
    for line in filter(None, (" ".join(each.split()) for each in expected.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        at = next((at for at, each in enumerate(left) if pattern.fullmatch(each)), None)
        if at is None:
            missing.append(line)
        else:
            del left[: at + 1]
    return missing
