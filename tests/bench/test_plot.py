"""The picture of the ratios: sound XML whatever the rows hold, with a place on the axis for each."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

ROWS: list[dict[str, Any]] = [
    {
        "what": "write a < b & c",
        "against": "tmpfs",
        "ratio": 1.0,
        "spread": [0.5, 2.0],
        "goal": ">= 0.5",
        "is_met": True,
    },
    {"what": "seconds, without a baseline", "value": 3, "ratio": None},
    {"what": "save", "against": None, "ratio": 0.9, "spread": None, "goal": "<= 0.65", "is_met": False},
    {"what": "off the axis", "against": "x", "ratio": 229.0, "spread": [200, 300], "goal": "", "is_met": None},
]


def test_each_ratio_has_its_place_and_its_goal() -> None:
    from plot import COLOURS, LEFT, WIDTH, svg

    drawn = ET.fromstring(svg({"rows": ROWS, "machine": {"cpus": 2, "memory_gib": 24}, "date": "today", "commit": "c"}))
    space = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.attrib["cx"]), dot.attrib["fill"]) for dot in drawn.iter(f"{space}circle")]
    assert dots[0] == (LEFT + WIDTH / 2, COLOURS[True]), "1 is in the middle"
    assert dots[1][1] == COLOURS[False] and dots[1][0] < dots[0][0]
    assert dots[2] == (LEFT + WIDTH, COLOURS[None])
    goals = [line for line in drawn.iter(f"{space}line") if line.attrib["stroke"] == "black"]
    assert [float(line.attrib["x1"]) < LEFT + WIDTH / 2 for line in goals] == [True, True]
    assert "write a < b & c / tmpfs" in [text.text for text in drawn.iter(f"{space}text")]
