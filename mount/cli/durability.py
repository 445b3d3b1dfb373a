"""What `status`, `ls` and `stat` show of the object tier: levels, what is not durable yet, and why it waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_SENDING = 8
_MOST_NAMESPACES = 5
_LEVEL_STYLES = {"object": "green", "replica": "green", "disk": "green", "ram": ""}


def level_cell(step: Mapping[str, Any]) -> Any:
    """`object`, `ram`, and on the way `ram, 45% sent` or `ram, waiting`; "" where there is no object tier."""
    from mount.cli.tables import Cell

    level, found = step.get("level") or "", step.get("object")
    replica = step.get("replica")
    if replica is not None and replica["state"] in ("copying", "lost") and level != "object":
        if replica["state"] == "lost":
            return Cell("lost: a file has no copy left", "red")
        return Cell(f"{level}, {replica['copies']} of {replica['wanted']} copies", "yellow")
    disk = step.get("disk")
    if disk is not None and (found is None or found["state"] in ("none", "persisted")):
        on_its_way = {
            "copying": f"{level}, {_share(disk['bytes_done'], disk['bytes'])} on the disk",
            "owed": f"{level}, disk owed",
            "waiting": f"{level}, disk waiting",
        }
        if disk["state"] in on_its_way:
            return Cell(on_its_way[disk["state"]], "yellow")
    if found is None:
        if disk is not None:
            return Cell(level, _LEVEL_STYLES.get(level, ""))
        if replica is not None:
            return Cell(level, _LEVEL_STYLES.get(level, ""))
        # Steps of a mount without an object tier have `object` null; files have no state of their own.
        return Cell(level if step.get("type") == "file" else "", _LEVEL_STYLES.get(level, ""))
    state = found.get("state", "none")
    if state == "sending":
        return Cell(f"{level}, {_share(found.get('bytes_sent', 0), found.get('bytes', 0))} sent", "yellow")
    if state in ("owed", "waiting"):
        return Cell(f"{level}, {state}", "yellow")
    if step.get("part"):
        return Cell(f"{level}, {part_of(step['part'])}", "yellow" if step["part"]["state"] != "sent" else "")
    if (step.get("archive") or {}).get("state", "none") != "none":
        return Cell(f"{level}, {archive_of(step['archive'])}", _LEVEL_STYLES.get(level, ""))
    return Cell(level, _LEVEL_STYLES.get(level, ""))


def part_of(part: Mapping[str, Any]) -> str:
    """How much of a step lies in the object tier without the rest, or is to."""
    if part["state"] == "sent":
        return f"part: {part['files']} of {part['of']} files"
    return f"part: {part['state']}"


def archive_of(archive: Mapping[str, Any]) -> str:
    return {"done": "archived", "owed": "archive owed", "waiting": "archive waits"}.get(archive["state"], "archiving")


def in_ram(step: Mapping[str, Any]) -> str:
    """How much of a step that has stubs is in RAM; "" where all of it is."""
    from tierfs.units import format_size

    return format_size(step.get("ram_bytes") or 0) if step.get("stubs") or step.get("populated") is False else ""


def leaving_fact(status: Mapping[str, Any]) -> Any:
    """Of an instance that was unmounted, and whose daemon still sends what is owed."""
    from mount.cli.tables import Cell

    if status.get("mounted", True):
        return ""
    return Cell(f"still sending what is owed; a new mount of {status['name']} goes on with it", "yellow")


def cluster_facts(status: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Lines of the block at the top about the other nodes; none where the node is alone."""
    from mount.cli.tables import Cell

    found = status.get("cluster")
    if not found:
        return []
    lost = f", lost: {', '.join(found['lost'])}" if found["lost"] else ""
    draining = ", this one is draining" if found["draining"] else ""
    count = f"{found['nodes']} node{'s' * (found['nodes'] != 1)}"
    nodes = f"{count} of {found['cluster']}, this is {found['node']}{lost}{draining}"
    waiting = f"; {found['pending']} changes wait for it" if found["pending"] else ""
    away = Cell(f"{found['catalog']} can't be reached{waiting}", "red")
    return [
        ("cluster", Cell(nodes, "yellow" if lost or draining else "")),
        ("catalogue", Cell(found["catalog"]) if found["connected"] else away),
        *_rdma_facts(found.get("transport") or {}),
    ]


def _rdma_facts(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """None where there is no device and none was asked for."""
    from mount.cli.tables import Cell

    if not found.get("devices"):
        return [("RDMA", Cell(f"none: {found['reason']}", "yellow"))] if found.get("transport") == "verbs" else []
    names = ", ".join(each["name"] for each in found["devices"])
    peers = found["peers"].items()
    by_tcp = [f"{node} by TCP ({peer['reason']})" for node, peer in peers if peer["reason"]]
    return [("RDMA", Cell("; ".join([names, *by_tcp]), "yellow" if by_tcp else ""))]


def gateway_facts(status: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The line of the gateway for SageMaker's library, where it is on."""
    from mount.cli.tables import Cell
    from tierfs.units import format_size

    found = status.get("gateway")
    if not found:
        return []
    at = ", ".join(found["addresses"])
    if found["pid"] is None:
        return [("gateway", Cell(f"{at}, does not serve now", "yellow"))]
    names = [each["namespace"] for each in found["namespaces"]]
    more = len(names) - _MOST_NAMESPACES
    shown = ", ".join(names[:_MOST_NAMESPACES]) + (f" and {more} more" if more > 0 else "")
    told = ""
    if found["requests"] is not None:
        failed = f", {found['failed']} failed" if found["failed"] else ""
        received, sent = format_size(found["received_bytes"]), format_size(found["sent_bytes"])
        told = f", {found['requests']} requests{failed}, {received} received, {sent} sent"
    return [("gateway", f"{at}{told}{', namespaces: ' + shown if shown else ''}")]


def disk_facts(status: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The line of the local disk, where there is a tier of it."""
    from mount.cli.tables import Cell
    from tierfs.units import format_size

    found = status.get("disk")
    if not found:
        return []
    if found["state"] != "ok":
        return [("disk tier", Cell(f"{found['path']}: {found['problem'] or 'being read'}", "red"))]
    size = f" of {format_size(found['size_bytes'])}" if found["size_bytes"] else ""
    steps = f"{found['steps']} step{'s' * (found['steps'] != 1)}"
    owed = f", {found['steps_owed']} to be copied ({format_size(found['bytes_owed'])})" if found["steps_owed"] else ""
    traffic = f", {format_size(found['bytes_written'])} written, {format_size(found['bytes_read'])} read"
    trouble = f"; {found['problem']}" if found["problem"] else ""
    text = f"{found['path']}, {steps}, {format_size(found['used_bytes'])}{size}{owed}{traffic}{trouble}"
    return [("disk tier", Cell(text, "red" if trouble else "yellow" if owed else ""))]


def object_facts(status: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Lines of the block at the top."""
    from mount.cli.tables import Cell
    from tierfs.units import format_size

    found = status.get("object")
    if not found:
        return []
    reachable = "" if found.get("reachable", True) else "; can't be reached now"
    one = "; without conditional PUT" if found.get("conditional_put") is False else ""
    traffic = (
        f", {format_size(found.get('bytes_sent', 0))} sent, {format_size(found.get('bytes_received', 0))} received"
    )
    trouble = [
        f"{found[key]} {word}" for key, word in (("retries", "retries"), ("throttled", "slowed down")) if found.get(key)
    ]
    owed = []
    if found.get("steps_owed"):
        owed.append(f"{found['steps_owed']} step{'s' * (found['steps_owed'] != 1)}, {format_size(found['bytes_owed'])}")
    if parts := found.get("parts_owed"):
        owed.append(f"some files of {parts} step{'s' * (parts != 1)}")
    if found.get("deletions_owed"):
        owed.append(f"{found['deletions_owed']} deletion{'s' * (found['deletions_owed'] != 1)} to do")
    return [
        (
            "object tier",
            Cell(f"{found['url']}{reachable}{one}{traffic}" + "".join(f", {each}" for each in trouble), "")
            if found.get("reachable", True)
            else Cell(f"{found['url']}{reachable}", "red"),
        ),
        ("not durable", Cell("; ".join(owed), "yellow") if owed else "nothing: all that is owed is in the object tier"),
        *_archive_facts(found.get("archive")),
    ]


def _archive_facts(archive: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    from mount.cli.tables import Cell

    if not archive:
        return []
    owed = f", {archive['steps_owed']} owed" if archive["steps_owed"] else ""
    problem = f"; {archive['problem']}" if archive["problem"] else ""
    text = f"{archive['url']}, {archive['steps_done']} of the steps here are there{owed}{problem}"
    return [("archive", Cell(text, "yellow" if owed or problem else ""))]


def render_durability(status: Mapping[str, Any], screen: Any) -> str:
    """What is being sent, and each namespace's newest durable step; "" without an object tier."""
    from mount.cli.tables import Cell, Column, plain, render_table
    from tierfs.units import format_age, format_size

    found = status.get("object")
    if not found:
        return ""
    rows = []
    for namespace in status.get("namespaces", []):
        newest, age = namespace.get("newest_persisted"), namespace.get("newest_persisted_age_s")
        owed = namespace.get("bytes_owed") or 0
        rows.append(
            [
                namespace["namespace"] or "/",
                newest or Cell("none", "yellow"),
                format_age(age) if age is not None else "-",
                Cell(format_size(owed), "yellow" if owed else ""),
            ]
        )
    text = ""
    if rows:
        columns = [
            Column("NAMESPACE"),
            Column("NEWEST DURABLE"),
            Column("AGE", right=True),
            Column("NOT DURABLE", right=True),
        ]
        text += "\n" + render_table(columns, rows, screen)
    sending = found.get("sending", [])
    if sending:
        text += "\n"
    for each in sending[:_MOST_SENDING]:
        text += plain(_sending(each), screen) + "\n"
    if len(sending) > _MOST_SENDING:
        text += f"and {len(sending) - _MOST_SENDING} more steps\n"
    return text


def _sending(each: Mapping[str, Any]) -> str:
    from tierfs.units import format_age, format_size

    done, total = each.get("bytes") or 0, each.get("bytes_total") or 0
    amount = f"{_share(done, total)} of {format_size(total)}"
    if each["state"] == "waiting":
        again = f"; next try in {format_age(each['next_try_in_s'])}" if each.get("next_try_in_s") is not None else ""
        return f"waiting: {each['path']}, {amount} sent: {each.get('error') or 'no reason given'}{again}"
    if each["state"] == "sending":
        return f"sending: {each['path']}, {amount}"
    return f"owed: {each['path']}, {format_size(total)}"


def _share(done: int, total: int) -> str:
    return f"{min(done, total) / total:.0%}" if total else "0%"
