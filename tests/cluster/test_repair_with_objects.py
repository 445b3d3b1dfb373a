"""Repair where a step has copies on nodes and in the object tier: each makes the others good."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.checkpoints import MIB
from rig.cluster import Cluster, Node
from rig.cluster_steps import check_everywhere, wait_replicated, write_together
from rig.instance import TIERFS, tierfs
from rig.plain_steps import shard_names

pytestmark = pytest.mark.alone
NODES = 2
STORE = Path(tempfile.gettempdir()) / f"tierfs-repair-{os.getpid()}"
OPTIONS = {"object": f"file://{STORE}", "persist_policy": "all"}
SIZES = [5 * MIB, 3 * MIB, 300_000, 2 * MIB]


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[Path]:
    shutil.rmtree(STORE, ignore_errors=True)
    STORE.mkdir()
    yield STORE
    shutil.rmtree(STORE, ignore_errors=True)


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage")


def repaired(node: Node, step: str, *arguments: str, code: int) -> list[tuple[str, str]]:
    """(file, action) of a repair that ends with this exit code."""
    command = [TIERFS, "repair", node.mountpoint / step, *arguments, "--json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}{done.stderr}\n{node.log(40)}"
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["checked"] == 1
    return [(each["path"].removeprefix(f"{step}/"), each["action"]) for each in answer["actions"]]


def test_what_is_whole_anywhere_makes_all_copies_good(nodes: Cluster, run: str, store: Path) -> None:
    step, names = f"{run}/step_1", shard_names(4)
    write_together(nodes.nodes, step, 1, SIZES)
    wait_replicated(nodes.nodes, step)
    for node in nodes:
        tierfs("wait", node.mountpoint / step, "--level", "object", "--timeout", "40")
    assert repaired(nodes[0], step, code=0) == []

    for node in nodes:
        copies = [path for path in node.ram_path.rglob("step_1/*") if path.stat().st_size == SIZES[0]]
        assert copies
        damage(copies[0])
    assert repaired(nodes[0], step, code=0) == [(names[0], "fetched again")]  # from the object tier
    assert repaired(nodes[1], step, code=0) == [(names[0], "fetched again")]  # from the other node, or there

    damage(next(path for path in store.rglob(names[0]) if path.is_file()))
    for arguments in (["--dry-run"], []):
        assert repaired(nodes[0], step, *arguments, code=len(arguments)) == [(names[0], "sent again")]
    damage(next(path for path in store.rglob(names[1]) if path.is_file()))
    assert repaired(nodes[0], step, code=1) == [(names[1], "left")], "the other node sends it"
    assert repaired(nodes[1], step, code=0) == [(names[1], "sent again")]
    for node in nodes:
        tierfs("verify", "--tier", "all", node.mountpoint / step)
    check_everywhere(nodes.nodes, step, 1, SIZES)
