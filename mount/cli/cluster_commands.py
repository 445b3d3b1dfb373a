"""`tierfs nodes` and `tierfs drain`: the nodes that share the namespace."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mount.cli.object_commands import seconds
from mount.cli.read_commands import DEGRADED, add_json

_STATE_STYLES = {"serving": "green", "draining": "yellow", "lost": "red"}
_TRANSPORTS = {"verbs": "RDMA", "tcp": "TCP"}


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    nodes = subparsers.add_parser(
        "nodes",
        help="the nodes that share this namespace",
        description="Lists the nodes of the cluster that a mount belongs to: their addresses, failure domains, room\n"
        "in RAM, and which of them hold copies of each other's files.",
        epilog="examples:\n"
        "  tierfs nodes\n"
        "  tierfs nodes /ckpt --json | jq -r '.nodes[] | select(.state == \"lost\") | .node'\n\n"
        "exit codes: 0 all nodes are there, 3 a node is lost or the catalogue is away, 4 not mounted",
    )
    nodes.add_argument("directory", metavar="DIR", nargs="?", help="mount point or name; may be left out for one")
    add_json(nodes)
    nodes.set_defaults(run=run_nodes)

    drain = subparsers.add_parser(
        "drain",
        help="hand what only this node holds to others, before it goes",
        description="Takes no more copies for other nodes, and returns once everything that this node holds is held\n"
        "by others too, or is in the object tier. Then the node may be stopped, and no step is lost. What programs\n"
        "write until then is handed over as well.",
        epilog="examples:\n"
        "  tierfs drain && tierfs umount /ckpt\n"
        "  tierfs drain /ckpt --timeout 90     within the notice of a spot interruption\n"
        "  tierfs drain /ckpt --stop           it stays after all\n\n"
        "exit codes: 0 nothing is left here alone, 1 something is (named), 2 the node is alone, 4 not mounted",
    )
    drain.add_argument("directory", metavar="DIR", nargs="?", help="mount point or name; may be left out for one")
    drain.add_argument("--timeout", type=seconds, metavar="S", help="give up after S seconds, or 5min (default: never)")
    drain.add_argument("--stop", action="store_true", help="the node stays after all, and takes copies again")
    add_json(drain)
    drain.set_defaults(run=run_drain)


def run_nodes(arguments: argparse.Namespace) -> int:
    from mount.cli.client import request
    from mount.cli.tables import Screen, print_json

    answer = request(arguments.directory, "nodes")
    if arguments.json:
        print_json(answer)
    else:
        sys.stdout.write(render_nodes(answer, Screen.of(sys.stdout)))
    all_there = answer["connected"] and all(node["state"] != "lost" for node in answer["nodes"])
    return 0 if all_there else DEGRADED


def render_nodes(answer: dict[str, Any], screen: Any) -> str:
    from mount.cli.tables import Cell, Column, plain, render_table
    from tierfs.units import format_age, format_size

    rows = []
    for node in answer["nodes"]:
        lost = f" {format_age(node['lost_s'])} ago" if node.get("lost_s") is not None else ""
        rows.append(
            [
                Cell(node["node"] + (" (this)" if node["this"] else ""), "bold" if node["this"] else ""),
                Cell(node["state"] + lost, _STATE_STYLES.get(node["state"], "")),
                ", ".join(node["addresses"]) or "-",
                node["domain"] or "-",
                format_size(node["size_bytes"]) if node["size_bytes"] else "-",
                format_size(node["free_bytes"]) if node["state"] != "lost" else "-",
                ", ".join(node["partners"]) or "-",
                node["version"] or "-",
                _TRANSPORTS.get(node.get("transport", ""), "-"),
            ]
        )
    columns = [
        Column("NODE"),
        Column("STATE"),
        Column("ADDRESS"),
        Column("DOMAIN"),
        Column("RAM", right=True),
        Column("FREE", right=True),
        Column("COPIES ON"),
        Column("VERSION"),
        Column("BY"),
    ]
    if not any(node.get("transport") == "verbs" for node in answer["nodes"]):
        columns.pop()  # by TCP, all of them
        rows = [row[:-1] for row in rows]
    table = render_table(columns, rows, screen)
    if answer["connected"]:
        return table
    return plain(f"the catalogue {answer['catalog']} can't be reached: as it was last seen", screen) + "\n" + table


def run_drain(arguments: argparse.Namespace) -> int:
    from mount.cli.client import request
    from mount.cli.object_commands import count_of, shown
    from mount.cli.progress import ProgressLine
    from mount.cli.tables import print_json
    from tierfs.units import format_size

    if arguments.stop:
        stopped = request(arguments.directory, "drain-node", stop=True)
        if arguments.json:
            print_json(stopped)
        else:
            print("the node stays, and takes copies again" if stopped["stopped"] else "the node was not draining")
        return 0
    with ProgressLine("draining", enabled=not arguments.json) as line:
        answer = request(arguments.directory, "drain-node", seconds=arguments.timeout, on_progress=line.show)
    left = answer["left"]
    if arguments.json:
        print_json(answer)
    elif left:
        print(f"tierfs: only this node still holds {count_of(len(left), 'step or file')}, "
              f"{format_size(answer['bytes_left'])}:", file=sys.stderr)  # fmt: skip
        for path in left:
            print(f"  {shown(path)}", file=sys.stderr)
    else:
        handed = (
            f"{count_of(answer['steps'], 'step')} held by others too" if answer["steps"] else "others hold all of it"
        )
        print(f"drained: {handed}; this node may be stopped")
    return 1 if left else 0
