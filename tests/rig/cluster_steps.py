"""Steps that several nodes write together without a trainer, and what must hold of steps on every node."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from rig.cluster import BOUND_S, Node
from rig.instance import wait_until
from rig.plain_steps import check_step, content, shard_names, write_marker

T = TypeVar("T")


def write_shards(step: Path, seed: int, sizes: Sequence[int], numbers: Iterable[int]) -> None:
    """Some of a step's shards, as one of its writers does it."""
    step.mkdir(parents=True, exist_ok=True)
    names = shard_names(len(sizes))
    for number in numbers:
        with (step / names[number]).open("wb") as file:
            file.write(content(seed, number, sizes[number]))
            file.flush()
            os.fsync(file.fileno())


def write_together(nodes: Sequence[Node], step: str, seed: int, sizes: Sequence[int]) -> None:
    """Each node writes every so many-th shard, all at the same time, and the first one then the marker."""
    on_each(
        nodes,
        lambda node: write_shards(
            node.mountpoint / step, seed, sizes, range(nodes.index(node), len(sizes), len(nodes))
        ),
    )
    write_marker(nodes[0].mountpoint / step, len(sizes))


def on_each(nodes: Sequence[Node], function: Callable[[Node], T]) -> list[T]:
    """What it returned for each node, asked for at the same time; raises what one of them raised."""
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        return list(pool.map(function, nodes))


def check_everywhere(nodes: Sequence[Node], step: str, seed: int, sizes: Sequence[int]) -> None:
    on_each(nodes, lambda node: check_step(node.mountpoint / step, seed, sizes))


def sums(directory: Path) -> dict[str, int]:
    """A checksum of each file below it, read through the mount."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): crc32(path.read_bytes()) for path in files}


def soon(claim: Callable[[], object], what: str, *, within_s: float = 5) -> None:
    """For what other nodes see by the catalogue's news. An error counts as "not yet"."""
    errors: list[OSError] = []

    def holds() -> object:
        try:
            return claim()
        except OSError as error:
            errors[:] = [error]
            return False

    try:
        wait_until(holds, what, within_s)
    except AssertionError as error:
        raise AssertionError(f"{error} {errors}") from None


def level(node: Node, step: str) -> str:
    """The level that the node tells of `namespace/step`; "" while it is not complete there. A level that is not true
    any more, since a holder is gone, is told with the number of copies."""
    namespace, _, name = step.rpartition("/")
    found = node.step(name, namespace)
    if found.get("state") != "complete":
        return ""
    replica = found.get("replica") or {"copies": 1, "wanted": 2}
    if found["level"] == "replica" and replica["copies"] < replica["wanted"]:
        return f"replica, but {replica['copies']} copies"
    return str(found["level"])


def wait_replicated(nodes: Sequence[Node], *steps: str, within_s: float = BOUND_S) -> float:
    """Until every one of the nodes says so of every step; returns the seconds that it took."""
    begin = time.monotonic()

    def told() -> dict[str, dict[str, str]]:
        return {node.node_id: {step: level(node, step) for step in steps} for node in nodes}

    try:
        wait_until(
            lambda: all(found == "replica" for each in told().values() for found in each.values()),
            f"{steps} are replicated",
            within_s,
            every_s=0.1,
        )
    except AssertionError as error:
        raise AssertionError(f"{error}: {told()}") from None
    return time.monotonic() - begin


def latest(node: Node, namespace: str = "run") -> str:
    """What `latest` names there; "" for nothing."""
    try:
        return os.readlink(node.mountpoint / namespace / "latest")
    except FileNotFoundError:
        return ""


def wait_latest(nodes: Sequence[Node], expected: str, namespace: str = "run", *, within_s: float = 10) -> None:
    def told() -> dict[str, str]:
        return {node.node_id: latest(node, namespace) for node in nodes}

    try:
        wait_until(lambda: set(told().values()) == {expected}, f"latest is {expected!r} everywhere", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}: {told()}") from None
