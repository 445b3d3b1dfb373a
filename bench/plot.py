"""Ratios against their goals as a picture: an SVG without anything to install.

    python bench/plot.py RESULT.json > RESULT.svg

One line a ratio: a dot at the median, a bar from the least to the greatest, a tick at the goal. Green is met, red is
missed, grey was promised nothing. The axis is logarithmic, with 1 (as fast as the baseline) in its middle.
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path
from typing import Any

LEAST, MOST = 1 / 16, 16.0
LEFT, WIDTH, LINE, TOP = 560, 480, 22, 64
COLOURS = {True: "#2a7d3f", False: "#b3261e", None: "#6b6b6b"}


def svg(report: dict[str, Any]) -> str:
    rows = [row for row in report["rows"] if row.get("ratio") is not None]
    height = TOP + LINE * len(rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(_title(report))}</text>',
    ]
    power = LEAST
    while power <= MOST:
        x, weight = _x(power), 2 if power == 1 else 1
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP - 14}" y2="{height - 16}" stroke="#ddd" stroke-width="{weight}"/>'
        )
        parts.append(f'<text x="{x}" y="{TOP - 20}" text-anchor="middle" fill="#555">{power:g}</text>')
        power *= 2
    for number, row in enumerate(rows):
        parts += _line(row, TOP + LINE * number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(report: dict[str, Any]) -> str:
    machine = report["machine"]
    when = f"{report.get('date', '')} {report.get('commit', '')}".strip()
    return f"ratio to the baseline of the same run: {machine['cpus']} CPUs, {machine['memory_gib']} GiB, {when}"


def _line(row: dict[str, Any], y: int) -> list[str]:
    colour = COLOURS[row.get("is_met")]
    least, most = row.get("spread") or (row["ratio"], row["ratio"])
    name = f"{row['what']} / {row.get('against') or ''}"
    parts = [
        f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name[:84])}</text>',
        f'<line x1="{_x(least)}" x2="{_x(most)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3" opacity="0.4"/>',
        f'<circle cx="{_x(row["ratio"])}" cy="{y}" r="4" fill="{colour}"/>',
        f'<text x="{LEFT + WIDTH + 14}" y="{y + 4}" fill="{colour}">{row["ratio"]:.3g}</text>',
    ]
    if row.get("goal"):
        goal = _x(float(row["goal"].split()[1]))
        parts.append(f'<line x1="{goal}" x2="{goal}" y1="{y - 8}" y2="{y + 8}" stroke="black" stroke-width="2"/>')
    return parts


def _x(ratio: float) -> float:
    at = math.log2(min(max(ratio, LEAST), MOST) / LEAST) / math.log2(MOST / LEAST)
    return round(LEFT + at * WIDTH, 1)


if __name__ == "__main__":
    sys.stdout.write(svg(json.loads(Path(sys.argv[1]).read_text())))
