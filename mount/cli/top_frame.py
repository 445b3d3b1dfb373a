"""What `tierfs top` draws: one frame of an instance from its status now and the one before. Only computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mount.cli.tables import Cell, Screen, plain
from tierfs.units import format_age, format_local, format_size

#: From so many columns on bars and texts are as long as they may be.
WIDE_COLUMNS = 100
_MOST_NODES = 12
_MOST_PROBLEMS = 3
_GAP = "  "


@dataclass(frozen=True)
class Snapshot:
    """What an instance told; `at` is Unix time. `nodes` is None where it is alone."""

    status: Mapping[str, Any]
    nodes: Mapping[str, Any] | None
    at: float


@dataclass(frozen=True)
class _Column:
    """`worth`: where there is no room for all, those that are worth least are left out."""

    title: str
    worth: int
    right: bool = False


def render_frame(now: Snapshot, before: Snapshot | None, screen: Screen, columns: int, rows: int) -> list[str]:
    """The lines, none longer than `columns` and not more than `rows`; the newest steps, and those that move, stay."""
    frame = _Frame(now, before, screen, columns)
    head = [*frame.head(), *frame.problems(), "", *frame.nodes()]
    steps = frame.steps(max(1, rows - len(head)))
    return (head + steps)[:rows]


class _Frame:
    def __init__(self, now: Snapshot, before: Snapshot | None, screen: Screen, columns: int) -> None:
        self._now, self._before, self._screen, self._columns = now, before, screen, columns
        self._status = now.status
        self._bar_width = 10 if columns >= WIDE_COLUMNS else 6
        self._seconds = now.at - before.at if before is not None else 0.0
        self._old_steps = {} if before is None else {_key(step): step for step in before.status["steps"]}

    # --- what concerns the instance

    def head(self) -> list[str]:
        status, ram = self._status, self._status["ram"]
        title = f"{status['name']} on {status['mountpoint']}"
        clock = format_local(self._now.at).partition(" ")[2]
        lines = [
            self._spread(Cell(title, "bold"), Cell(f"up {format_age(status['uptime_s'])}  {clock}", "dim")),
            self._cells(
                [
                    Cell("RAM"),
                    self._bar(ram["used_bytes"], ram["size_bytes"]),
                    Cell(f"{format_size(ram['used_bytes'])} of {format_size(ram['size_bytes'])}"),
                    Cell(f"{self._requests()} requests/s" if self._seconds else "", "dim"),
                ]
            ),
        ]
        if not status["mounted"]:
            lines.append(self._cells([Cell("unmounted; still sending what is owed", "yellow")]))
        found = status.get("object")
        if found:
            reach = Cell("object tier", "") if found["reachable"] else Cell("object tier away", "red")
            owed = f"{format_size(found['bytes_owed'])} owed" if found["steps_owed"] else "nothing owed"
            lines.append(
                self._cells(
                    [reach, Cell(owed, "yellow" if found["steps_owed"] else "green"), *self._traffic("object"),
                     Cell(self._lag("object"), "dim")]
                )
            )  # fmt: skip
        disk = status.get("disk")
        if disk:
            is_well = disk["state"] == "ok" and not disk["problem"]
            owed = f"{format_size(disk['bytes_owed'])} owed" if disk["steps_owed"] else "nothing owed"
            lines.append(
                self._cells(
                    [Cell("disk", "") if is_well else Cell("disk fails", "red"),
                     Cell(owed, "yellow" if disk["steps_owed"] else "green"),
                     Cell(f"{disk['steps']} steps, {format_size(disk['used_bytes'])}"), Cell(self._lag("disk"), "dim")]
                )
            )  # fmt: skip
        cluster = status.get("cluster")
        if cluster:
            reach = Cell(f"{cluster['nodes']} nodes", "") if cluster["connected"] else Cell("catalogue away", "red")
            short = cluster["under_replicated"]
            copies = Cell(f"{short} steps lack copies", "yellow") if short else Cell("all copied", "green")
            draining = Cell("draining" if cluster["draining"] else "", "yellow")
            lines.append(
                self._cells([reach, copies, draining, *self._traffic("cluster"), Cell(self._lag("replica"), "dim")])
            )
        return lines

    def _requests(self) -> str:
        if self._before is None:
            return "-"
        names = self._status["requests"].keys() - {"bytes_read", "bytes_written", "resent", "takeovers"}
        now, then = (sum(found["requests"].get(name, 0) for name in names) for found in (
            self._status, self._before.status))  # fmt: skip
        return f"{max(0, now - then) / self._seconds:.0f}"

    def _traffic(self, part: str) -> list[Cell]:
        """Bytes a second out and in, of the object tier or of other nodes."""
        now, then = self._status[part], (self._before.status.get(part) if self._before is not None else None)
        if not then or self._seconds <= 0 or "bytes_sent" not in now:
            return []
        arrows = ("↑", "↓") if self._screen.unicode else ("out", "in")
        return [
            Cell(f"{arrow} {format_size(max(0, now[name] - then.get(name, 0)) / self._seconds)}/s")
            for arrow, name in zip(arrows, ("bytes_sent", "bytes_received"), strict=True)
        ]

    def _lag(self, level: str) -> str:
        """How much older the newest step of that level is than the newest complete one, of all namespaces the worst."""
        worst = 0.0
        for namespace in self._status["namespaces"]:
            whole = [step for step in namespace["steps"] if step["state"] == "complete" and step["completed_at"]]
            newest = max((step["completed_at"] for step in whole), default=None)
            safe = max((step["completed_at"] for step in whole if _has(step, level)), default=None)
            if newest is not None and safe is None:
                return "no step yet"
            if newest is not None and safe is not None:
                worst = max(worst, newest - safe)
        return f"lag {format_age(worst)}"

    def problems(self) -> list[str]:
        found = self._status["problems"]
        lines = [
            self._cells([Cell(f"{each['severity']}:", "red" if each["severity"] == "error" else "yellow"),
                         Cell((f"{each['path']}: " if each.get("path") else "") + each["message"])])
            for each in found[:_MOST_PROBLEMS]
        ]  # fmt: skip
        if len(found) > _MOST_PROBLEMS:
            lines.append(self._cells([Cell(f"and {len(found) - _MOST_PROBLEMS} more problems", "yellow")]))
        return lines

    def nodes(self) -> list[str]:
        if self._now.nodes is None or len(self._now.nodes["nodes"]) < 2:
            return []
        styles = {"serving": "green", "draining": "yellow", "joining": "yellow", "lost": "red"}
        found = sorted(self._now.nodes["nodes"], key=lambda node: (node["state"] == "serving", node["node"]))
        rows = []
        for node in found[:_MOST_NODES]:
            is_lost = node["state"] == "lost"
            used = node["size_bytes"] - node["free_bytes"]
            since = f" {format_age(node['lost_s'])} ago" if node["lost_s"] is not None else ""
            rows.append(
                [
                    Cell(node["node"], "bold" if node["this"] else ""),
                    Cell(node["state"] + since, styles.get(node["state"], "")),
                    Cell("") if is_lost else self._bar(used, node["size_bytes"]),
                    Cell("" if is_lost else f"{format_size(node['free_bytes'])} free"),
                    Cell(node["domain"], "dim"),
                ]
            )
        titles = [_Column("NODE", 9), _Column("STATE", 8), _Column("RAM", 3), _Column("ROOM", 6), _Column("DOMAIN", 1)]
        lines = self._table(titles, rows)
        if len(found) > _MOST_NODES:
            lines.append(self._cells([Cell(f"and {len(found) - _MOST_NODES} more, all serving", "dim")]))
        return [*lines, ""]

    # --- steps

    def steps(self, most: int) -> list[str]:
        steps = sorted(self._status["steps"], key=_order)
        if not steps:
            return [self._cells([Cell("no steps yet", "dim")])]
        has_objects, has_cluster = self._status.get("object") is not None, self._status.get("cluster") is not None
        columns = [
            _Column("STEP", 10),
            _Column("STATE", 7),
            _Column("SIZE", 6, right=True),
            _Column("IN RAM", 3),
            *([_Column("COPIES", 5)] if has_cluster else []),
            *([_Column("OBJECT TIER", 8)] if has_objects else []),
            _Column("RATE", 4, right=True),
            _Column("AGE", 2, right=True),
        ]
        shown = steps[: most - 1] if len(steps) < most else steps[: max(1, most - 2)]
        rows = [self._step(step, has_objects=has_objects, has_cluster=has_cluster) for step in shown]
        lines = self._table(columns, rows)
        if len(shown) < len(steps):
            lines.append(self._cells([Cell(f"and {len(steps) - len(shown)} more steps", "dim")]))
        return lines

    def _step(self, step: Mapping[str, Any], *, has_objects: bool, has_cluster: bool) -> list[Cell]:
        size = step["bytes"]
        here = step["ram_bytes"] if step["stubs"] else size
        name = f"{step['namespace']}/{step['step']}" if step["namespace"] else step["step"]
        cells = [
            Cell(name, "bold" if step["latest"] else ""),
            Cell(step["state"], "green" if step["state"] == "complete" else "yellow"),
            Cell(format_size(size)),
            self._bar(here, size),
        ]
        if has_cluster:
            cells.append(_copies(step.get("replica")))
        if has_objects:
            cells.append(self._in_objects(step.get("object")))
        return [*cells, Cell(self._rate(step)), Cell(format_age(step["age_s"]), "dim")]

    def _in_objects(self, found: Mapping[str, Any] | None) -> Cell:
        if found is None or found["state"] == "none":
            return Cell("")
        if found["state"] == "persisted":
            bar = self._bar(1, 1)
            return Cell(bar.text, "green")
        bar = self._bar(found["bytes_sent"], found["bytes"])
        share = min(1.0, found["bytes_sent"] / found["bytes"]) if found["bytes"] else 0.0
        return Cell(
            f"{bar.text} {share:.0%}" if found["state"] == "sending" else f"{bar.text} {found['state']}", "yellow"
        )

    def _rate(self, step: Mapping[str, Any]) -> str:
        """How fast it moves now: written, sent, or brought back."""
        old = self._old_steps.get(_key(step))
        if old is None or self._seconds <= 0:
            return ""
        moved = 0
        if step["state"] == "writing":
            moved = step["bytes"] - old["bytes"]
        elif (step.get("object") or {}).get("state") == "sending":
            moved = step["object"]["bytes_sent"] - (old.get("object") or {}).get("bytes_sent", 0)
        elif step["stubs"] or old["stubs"]:
            moved = step["ram_bytes"] - old["ram_bytes"]
        return f"{format_size(moved / self._seconds)}/s" if moved > 0 else ""

    # --- drawing

    def _bar(self, part: float, whole: float) -> Cell:
        share = min(1.0, max(0.0, part / whole)) if whole else 0.0
        full = round(share * self._bar_width)
        on, off = ("█", "░") if self._screen.unicode else ("#", ".")
        return Cell(on * full + off * (self._bar_width - full))

    def _table(self, columns: Sequence[_Column], rows: Sequence[Sequence[Cell]]) -> list[str]:
        """Columns that are empty are left out, then those worth least until the rest fits."""
        rows = [[Cell(plain(cell.text, self._screen), cell.style) for cell in row] for row in rows]
        kept = [at for at in range(len(columns)) if any(row[at].text for row in rows)]
        widths = {at: max(len(columns[at].title), *(len(row[at].text) for row in rows)) for at in kept}
        while len(kept) > 1 and sum(widths[at] for at in kept) + len(_GAP) * (len(kept) - 1) > self._columns:
            kept.remove(min(kept, key=lambda at: columns[at].worth))

        def line(row: Sequence[Cell]) -> str:
            cells = []
            for at in kept:
                space = " " * (widths[at] - len(row[at].text))
                text = space + row[at].text if columns[at].right else row[at].text + space * (at != kept[-1])
                cells.append(Cell(text, row[at].style))
            return self._cells(cells)

        return [line([Cell(column.title, "dim") for column in columns]), *(line(row) for row in rows)]

    def _cells(self, cells: Sequence[Cell]) -> str:
        """One line of these; what is beyond the last column is cut off, without the styles being cut."""
        left = self._columns
        parts: list[str] = []
        for cell in (cell for cell in cells if cell.text):
            if parts:
                if left <= len(_GAP):
                    break
                parts.append(_GAP)
                left -= len(_GAP)
            text = plain(cell.text, self._screen)[:left]
            parts.append(self._screen.paint(text, cell.style))
            left -= len(text)
            if left <= 0:
                break
        return "".join(parts)

    def _spread(self, one: Cell, other: Cell) -> str:
        """Left and right; where there is no room for both, only the left one."""
        space = self._columns - len(plain(one.text, self._screen)) - len(other.text)
        if space < len(_GAP):
            return self._cells([one])
        painted = self._screen.paint(plain(one.text, self._screen), one.style)
        return painted + " " * space + self._screen.paint(other.text, other.style)


def _key(step: Mapping[str, Any]) -> tuple[str, str]:
    return step["namespace"], step["step"]


def _order(step: Mapping[str, Any]) -> tuple[int, float]:
    """What moves comes first, then the newest."""
    in_objects = (step.get("object") or {}).get("state", "none")
    in_copies = (step.get("replica") or {}).get("state", "none")
    moves = step["state"] != "complete" or in_objects in ("sending", "waiting", "owed") or in_copies == "copying"
    return not moves, -(step["completed_at"] or float("inf"))


def _has(step: Mapping[str, Any], level: str) -> bool:
    if level == "object":
        return bool(step["level"] == "object")
    if level == "disk":
        return bool((step.get("disk") or {}).get("state") == "stored")
    return step["level"] in ("replica", "object") or (step.get("replica") or {}).get("state") == "replicated"


def _copies(found: Mapping[str, Any] | None) -> Cell:
    if found is None or found["state"] == "none":
        return Cell("")
    if found["state"] == "lost":
        return Cell("lost", "red")
    return Cell(f"{found['copies']} of {found['wanted']}", "green" if found["state"] == "replicated" else "yellow")
