"""`tierfs sizing`: how large the RAM tier of a node has to be. docs/sizing.md explains the formula."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, dataclass
from typing import Any

from mount.cli.read_commands import add_json

BYTES_A_PARAMETER = 14.0
"""bf16 weights (2), and in float32 a master copy of them (4) and Adam's two moments (8)."""

MARGIN = 0.10
"""Over the shards: small files, ends of pages, room that an evicted step is still giving back, a guess too low."""

_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kmbt]?)", re.IGNORECASE | re.ASCII)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Sizing:
    """Bytes. `shard_bytes` is what the ranks of one node write of a step, `step_bytes` what the step takes there."""

    checkpoint_bytes: int
    nodes: int
    copies: int
    shard_bytes: int
    step_bytes: int
    steps: int
    size_bytes: int
    network_bytes: int


def size_tier(checkpoint_bytes: int, *, nodes: int, replicas: int, kept: int, waiting: int = 0) -> Sizing:
    """What a node needs to keep `kept` complete steps, write one more, and let `waiting` wait for the object tier."""
    copies = min(replicas, nodes)
    shard = -(-checkpoint_bytes // nodes)
    steps = kept + 1 + waiting
    return Sizing(
        checkpoint_bytes=checkpoint_bytes,
        nodes=nodes,
        copies=copies,
        shard_bytes=shard,
        step_bytes=shard * copies,
        steps=steps,
        size_bytes=int(shard * copies * steps * (1 + MARGIN)),
        network_bytes=shard * (copies - 1),
    )


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    sizing = subparsers.add_parser(
        "sizing",
        help="how large the RAM tier of a node has to be",
        description="Works out the size of each node's RAM tier from the model, or from the size of one whole\n"
        "checkpoint, the number of ranks, the copies and the steps that are kept. Nothing has to be mounted.",
        epilog="examples:\n"
        "  tierfs sizing --parameters 70B --world-size 64\n"
        "  tierfs sizing --checkpoint 980GB --world-size 64 --ranks-per-node 4 --steps 3",
    )
    what = sizing.add_mutually_exclusive_group(required=True)
    what.add_argument("--parameters", metavar="N", type=_count, help="of the model: 70B, 1.5T, 350M")
    what.add_argument("--checkpoint", metavar="SIZE", type=_size, help="of one whole step, all ranks together")
    sizing.add_argument(
        "--bytes-per-parameter",
        metavar="B",
        type=_positive,
        default=BYTES_A_PARAMETER,
        help="what a checkpoint has of each (default 14: bf16 weights, float32 master weights, Adam's moments)",
    )
    sizing.add_argument("--world-size", metavar="N", type=_whole, required=True, help="ranks of the job")
    sizing.add_argument("--ranks-per-node", metavar="N", type=_whole, default=8, help="default 8")
    sizing.add_argument("--replicas", metavar="N", type=_whole, default=2, help="replication.replicas (default 2)")
    sizing.add_argument("--steps", metavar="N", type=_whole, default=2, help="retention.ram_steps (default 2)")
    sizing.add_argument(
        "--waiting", metavar="N", type=int, default=0, help="complete steps that wait for the object tier (default 0)"
    )
    add_json(sizing)
    sizing.set_defaults(run=run_sizing)


def run_sizing(arguments: argparse.Namespace) -> int:
    from mount.cli.tables import print_json
    from tierfs.units import format_size

    checkpoint = arguments.checkpoint or int(arguments.parameters * arguments.bytes_per_parameter)
    nodes = -(-arguments.world_size // arguments.ranks_per_node)
    found = size_tier(
        checkpoint, nodes=nodes, replicas=arguments.replicas, kept=arguments.steps, waiting=max(0, arguments.waiting)
    )
    if arguments.json:
        print_json(asdict(found))
        return 0
    waiting = f", {arguments.waiting} waiting for the object tier" if arguments.waiting > 0 else ""
    copies = f"{found.copies} cop{'ies' if found.copies > 1 else 'y'}"
    facts = {
        "checkpoint": format_size(found.checkpoint_bytes),
        "nodes": f"{found.nodes}, each writes {format_size(found.shard_bytes)} of a step",
        "a step": f"{format_size(found.step_bytes)} on each node ({copies})",
        "steps": f"{found.steps}: {arguments.steps} kept, 1 being written{waiting}",
        "network": f"{format_size(found.network_bytes)} into and out of each node a save",
        "size": f"{format_size(found.size_bytes)} on each node: -o size={-(-found.size_bytes // (1 << 20))}MiB",
    }
    print("\n".join(f"{name:<10}  {value}" for name, value in facts.items()))
    return 0


def _count(text: str) -> float:
    match = _COUNT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"not a number of parameters, such as 70B or 1.5T: {text!r}")
    return float(match[1]) * _FACTORS[match[2].lower()]


def _size(text: str) -> int:
    from tierfs.units import parse_size

    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size == 0:
        raise argparse.ArgumentTypeError("a checkpoint has some bytes")
    return size


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1000:
        raise argparse.ArgumentTypeError(f"not a number of bytes from 0 to 1000: {text!r}")
    return number


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a whole number from 1 on: {text!r}")
    return int(text)
