"""Every link between pages leads somewhere: to a file, and to a heading in it."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from tests.conftest import repository

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^(`{3,})\w*$.*?^\1$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]+`(?!\])")


def pages() -> list[Path]:
    """Those that git knows, or would: not what lies below .venv."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(listed, cwd=repository(), capture_output=True, text=True, check=True, timeout=60)
    return [path for name in done.stdout.split("\0") if name and (path := repository() / name).is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, no punctuation, hyphens for spaces; one that comes again is numbered."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", _FENCED.sub("", page.read_text()), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (named := anchor + f"-{number}" * bool(number)) in found:
            number += 1
        found.add(named)
    return found


def test_links_between_pages_lead_somewhere() -> None:
    wrong, checked = [], 0
    for page in pages():
        for target in _LINK.findall(_CODE.sub("", _FENCED.sub("", page.read_text()))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            checked += 1
            if not path.exists():
                wrong.append(f"{page.relative_to(repository())}: {target}: no such file")
            elif anchor and path.suffix == ".md" and anchor not in anchors(path):
                wrong.append(f"{page.relative_to(repository())}: {target}: no such heading")
    assert wrong == []
    assert checked > 100


def test_the_index_names_every_page() -> None:
    index = repository() / "docs" / "index.md"
    named = {(index.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(index.read_text())}
    assert [page.name for page in sorted((repository() / "docs").glob("*.md")) if page not in named | {index}] == []
