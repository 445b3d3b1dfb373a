"""The status page: the same that `tierfs status` and `tierfs nodes` tell, as one HTML document that loads nothing.

No script and no style from elsewhere: it works without a network, and what a name holds can't run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from tierfs.units import format_age, format_size, format_utc

REFRESH_S = 5
#: Steps of a namespace that are shown, the newest ones.
MOST_STEPS = 50

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a8a4a; --bad: #c33; --wait: #b80; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; } .dim { color: GrayText; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } .steps td:last-child { white-space: normal; min-width: 16rem; width: 100%; }
.scroll { overflow-x: auto; }
meter { width: 6rem; height: .8rem; vertical-align: middle; }
.good { color: var(--good); } .bad { color: var(--bad); } .wait { color: var(--wait); }
ul.problems { padding-left: 1.2rem; margin: .3rem 0; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

#: For the answer's head: only this very style.
CONTENT_SECURITY_POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'"

_LEVEL_CLASSES = {"object": "good", "replica": "good", "disk": "good"}


def render_page(status: Mapping[str, Any], nodes: Mapping[str, Any], now: float) -> str:
    """The whole document. `status` and `nodes` are as docs/cli.md has them; `now` is Unix time."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="refresh" content="{REFRESH_S}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(status['name'])}: tierfs</title>",
        f"<style>{_STYLE}</style></head><body>",
        *_head(status, now),
        *_problems(status["problems"]),
        *_nodes(nodes),
        *_namespaces(status),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(status: Mapping[str, Any], now: float) -> list[str]:
    ram = status["ram"]
    facts = [
        f"{format_size(ram['used_bytes'])} of {format_size(ram['size_bytes'])} RAM used "
        f"{_meter(ram['used_bytes'], ram['size_bytes'])}",
        f"up {format_age(status['uptime_s'])}" + _taken_over(status["takeovers"]),
    ]
    found = status.get("object")
    if found:
        owed = f"{format_size(found['bytes_owed'])} owed" if found["steps_owed"] else "nothing owed"
        state = _mark("reachable", "good") if found["reachable"] else _mark("can't be reached", "bad")
        facts.append(f"object tier {_text(found['url'])}: {state}, {owed}")
    disk = status.get("disk")
    if disk:
        owed = f"{format_size(disk['bytes_owed'])} owed" if disk["steps_owed"] else "nothing owed"
        is_well = disk["state"] == "ok" and not disk["problem"]
        state = _mark("in use", "good") if is_well else _mark(disk["problem"] or disk["state"], "bad")
        facts.append(f"disk tier {_text(disk['path'])}: {state}, {disk['steps']} steps, {owed}")
    cluster = status.get("cluster")
    if cluster:
        state = _mark("connected", "good") if cluster["connected"] else _mark("catalogue away", "bad")
        draining = ", " + _mark("draining", "wait") if cluster["draining"] else ""
        facts.append(f"node {_text(cluster['node'])} of {_text(cluster['cluster'])}: {state}{draining}")
    unmounted = "" if status["mounted"] else "<p>" + _mark("unmounted; it still sends what is owed", "wait") + "</p>"
    return [
        f"<h1>{_text(status['name'])} on {_text(status['mountpoint'])}</h1>",
        f'<p class="dim">tierfs {_text(status["version"])}, {format_utc(now)}</p>',
        unmounted,
        *(f"<p>{fact}</p>" for fact in facts),
    ]


def _taken_over(times: int) -> str:
    return f", taken over {times} time{'s' * (times != 1)}" if times else ""


def _problems(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    if not problems:
        return ['<h2 id="problems">Problems</h2>', "<p>" + _mark("none", "good") + "</p>"]
    lines = []
    for each in problems:
        style = "bad" if each["severity"] == "error" else "wait"
        path = f"{_text(each['path'])}: " if each.get("path") else ""
        lines.append(f"<li>{_mark(each['severity'], style)}: {path}{_text(each['message'])}</li>")
    return ['<h2 id="problems">Problems</h2>', '<ul class="problems">', *lines, "</ul>"]


def _nodes(nodes: Mapping[str, Any]) -> list[str]:
    if len(nodes["nodes"]) < 2:
        return []
    rows = []
    for node in nodes["nodes"]:
        lost = node["state"] == "lost"
        used = node["size_bytes"] - node["free_bytes"]
        room = "" if lost else f"{format_size(node['free_bytes'])} free {_meter(used, node['size_bytes'])}"
        state = "bad" if lost else "good" if node["state"] == "serving" else "wait"
        name = f"<b>{_text(node['node'])}</b>" if node["this"] else _text(node["node"])
        since = f", {format_age(node['lost_s'])} ago" if node["lost_s"] is not None else ""
        rows.append([name, _mark(node["state"] + since, state), room, _text(node["domain"]), _text(node["version"])])
    return [
        '<h2 id="nodes">Nodes</h2>',
        *_table("nodes", ["Node", "State", "Room", "Domain", "Version"], rows),
    ]


def _namespaces(status: Mapping[str, Any]) -> list[str]:
    parts = []
    has_objects, has_cluster = status.get("object") is not None, status.get("cluster") is not None
    for namespace in status["namespaces"]:
        steps = sorted(namespace["steps"], key=lambda step: step["number"], reverse=True)
        latest = f"latest is {_text(namespace['latest'])}" if namespace["latest"] else "no whole step"
        titles = ["Step", "State", "Survives", "Size", "In RAM here"]
        titles += ["Copies"] * has_cluster + ["Object tier"] * has_objects + ["Age", "Note"]
        rows = [_step(step, has_cluster=has_cluster, has_objects=has_objects) for step in steps[:MOST_STEPS]]
        parts += [
            f"<h2>{_text(namespace['namespace'] or '/')}</h2>",
            f'<p class="dim">{latest}, {len(steps)} step{"s" * (len(steps) != 1)}</p>',
            *_table("steps", titles, rows),
        ]
        if len(steps) > MOST_STEPS:
            parts.append(f'<p class="dim">and {len(steps) - MOST_STEPS} older ones</p>')
    return parts or ['<p class="dim">no steps yet</p>']


def _step(step: Mapping[str, Any], *, has_cluster: bool, has_objects: bool) -> list[str]:
    size = step["bytes"]
    in_ram = step["ram_bytes"] if step["stubs"] else size
    state = "good" if step["state"] == "complete" else "wait"
    level = _mark(step["level"], _LEVEL_CLASSES.get(step["level"], "dim")) if step["state"] == "complete" else ""
    marks = [mark for mark, is_so in (("latest", step["latest"]), ("pinned", step["pinned"])) if is_so]
    row = [
        _text(step["step"]),
        _mark(step["state"], state),
        level,
        format_size(size),
        f"{format_size(in_ram)} {_meter(in_ram, size)}",
    ]
    if has_cluster:
        row.append(_copies(step.get("replica")))
    if has_objects:
        row.append(_in_objects(step["object"], size))
    note = ", ".join([*marks, step["note"]] if step["note"] else marks)
    return [*row, format_age(step["age_s"]), _text(note)]


def _copies(found: Mapping[str, Any] | None) -> str:
    if found is None or found["state"] == "none":
        return ""
    if found["state"] == "lost":
        return _mark("lost", "bad")
    whole = found["state"] == "replicated"
    return _mark(f"{found['copies']} of {found['wanted']}", "good" if whole else "wait")


def _in_objects(found: Mapping[str, Any] | None, size: int) -> str:
    if found is None or found["state"] == "none":
        return ""
    if found["state"] == "persisted":
        return f"{format_size(found['bytes'])} {_meter(size, size)}"
    sent = f"{format_size(found['bytes_sent'])} {_meter(found['bytes_sent'], found['bytes'])}"
    return f"{_mark(found['state'], 'wait')} {sent}"


def _table(name: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Cells are HTML."""
    head = "".join(f"<th>{title}</th>" for title in titles)
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return [f'<div class="scroll"><table class="{name}"><tr>{head}</tr>', *lines, "</table></div>"]


def _meter(part: float, whole: float) -> str:
    share = min(1.0, part / whole) if whole else 0.0
    return f'<meter value="{share:.3f}" title="{share:.0%}">{share:.0%}</meter>'


def _mark(text: str, style: str) -> str:
    return f'<span class="{style}">{_text(text)}</span>'


def _text(text: str) -> str:
    """Names come from programs: markup and what can't be sent or seen is written out."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )
    return escape(shown)
