"""How all benchmarks compare: subject and baselines by turns in one run, the median of the ratios and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One line of the report. `ratio` is subject/baseline, the median over the rounds; `spread` its least and greatest.

    `goal` reads ">= 0.95" or "<= 0.65" and holds for the ratio, or for the value where there is no baseline;
    it is empty where nothing was promised.
    """

    what: str
    unit: str
    value: float
    against: str = ""
    baseline: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    goal: str = ""
    is_met: bool | None = field(init=False)

    def __post_init__(self) -> None:
        measured = self.value if self.ratio is None else self.ratio
        object.__setattr__(self, "is_met", _meets(measured, self.goal) if self.goal else None)


def _meets(measured: float, goal: str) -> bool:
    sign, limit = goal.split()
    return measured >= float(limit) if sign == ">=" else measured <= float(limit)


def compare(
    what: str,
    unit: str,
    subject: Callable[[], float],
    baselines: dict[str, Callable[[], float]],
    *,
    goals: dict[str, str] | None = None,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Measures `subject` and each baseline by turns, and gives one row for each baseline."""
    values: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in baselines}
    for turn in range(rounds):
        order: list[tuple[list[float], Callable[[], float]]] = [(values, subject)]
        order += [(others[name], measure) for name, measure in baselines.items()]
        for results, measure in order if turn % 2 == 0 else reversed(order):
            results.append(measure())
    return [pair(what, unit, values, name, results, (goals or {}).get(name, "")) for name, results in others.items()]


def pair(what: str, unit: str, values: list[float], against: str, baseline: list[float], goal: str = "") -> Row:
    """The row for values and baselines that were measured by turns: entry i of both belong to one round."""
    ratios = [value / other for value, other in zip(values, baseline, strict=True)]
    return Row(
        what=what,
        unit=unit,
        value=statistics.median(values),
        against=against,
        baseline=statistics.median(baseline),
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        goal=goal,
    )


def single(what: str, unit: str, values: list[float], goal: str = "") -> Row:
    """The row for something that has no baseline."""
    return Row(what=what, unit=unit, value=statistics.median(values), spread=(min(values), max(values)), goal=goal)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, one a line, with the goal beside what was measured."""
    heads = ("what", "measured", "baseline", "ratio (min-max)", "goal", "met")
    lines = [heads]
    for row in rows:
        unit = row.get("unit") or ""
        spread = row.get("spread")
        span = f" ({_short(spread[0])}-{_short(spread[1])})" if spread else ""
        baseline = row.get("baseline")
        lines.append(
            (
                str(row["what"]),
                f"{_short(row['value'])} {unit}",
                f"{_short(baseline)} {row.get('against') or ''}" if baseline is not None else "",
                f"{_short(row['ratio'])}{span}" if row.get("ratio") is not None else span.strip(" ()"),
                str(row.get("goal") or ""),
                {True: "yes", False: "NO", None: ""}[row.get("is_met")],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
