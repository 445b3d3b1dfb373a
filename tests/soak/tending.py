"""What people and schedulers do to nodes in use, and what memory does: filling, evicting, draining, a damaged copy."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rig.cluster import Node
from rig.cluster_jobs import seats
from rig.instance import TIERFS
from soak.crews import Crew, CrewDied, CrewHangs
from soak.field import Field, steps_of
from soak.saving import Trainer

COMMAND_S = 90.0
MENDED_WITHIN_S = 60.0


def command(node: Node, *arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, answer, and what it said, of a `tierfs` command with `--json`."""
    words = [str(TIERFS), *map(str, arguments), "--json"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S)
    try:
        answer = json.loads(done.stdout) if done.stdout else {}
    except json.JSONDecodeError:  # several documents, one a line
        answer = {"lines": done.stdout.splitlines()}
    return done.returncode, answer, done.stderr


def fill_tier(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """A program on one node takes all room that there is, and gives it back."""
    node = dice.choice(field.nodes.nodes)
    with field.weather.spell("fill-tier", node.number, what=f"fill-tier {node.node_id}"):
        field.report.fault("fill-tier", f"fill-tier {node.node_id}")
        filler = f"plain-{node.number}/filler"
        try:
            crew = Crew(seats([node]).seats)
        except (CrewDied, CrewHangs) as error:
            field.violate("a filler starts", node=node.node_id, evidence=str(error))
            return
        try:
            (node.mountpoint / filler).parent.mkdir(exist_ok=True)
            (answer,) = crew.order("fill", filler, timeout_s=COMMAND_S)
            if answer.get("errno") != 28:
                field.violate("a full tier says ENOSPC", node=node.node_id, path=filler, evidence=f"{answer}")
            time.sleep(dice.uniform(0, 6))
            (answer,) = crew.order("unlink", filler, timeout_s=COMMAND_S)
            if answer:
                field.violate("what fills can be removed", node=node.node_id, path=filler, evidence=f"{answer}")
        except (CrewDied, CrewHangs, OSError) as error:
            field.violate("a filler lives", node=node.node_id, path=filler, evidence=repr(error))
        finally:
            crew.kill()


def evict(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """Steps that are in the object tier leave a node's RAM; who reads them next has them fetched."""
    node = dice.choice(field.nodes.nodes)
    there = [f"{step['namespace']}/{step['step']}" for step in steps_of(node) if step["level"] == "object"]
    chosen = dice.sample(there, min(3, len(there)))
    field.report.fault("evict", f"evict {node.node_id} {' '.join(chosen)}")
    for path in chosen:
        code, _, said = command(node, "evict", node.mountpoint / path)
        entry = field.ledger.get(path)
        if code not in (0, 1) and entry is not None and not entry.changing and not entry.removed:
            field.violate("evict ends with 0 or 1", node=node.node_id, path=path, evidence=f"{code} {said}")


def drain(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """What only this node holds goes to others, while its trainers go on; then it stays after all."""
    node = dice.choice(field.nodes.nodes)
    with field.weather.spell("drain", node.number, what=f"drain {node.node_id}"):
        field.report.fault("drain", f"drain {node.node_id}")
        code, answer, said = command(node, "drain", node.mountpoint, "--timeout", "40")
        if code not in (0, 1):
            field.violate("drain ends with 0 or 1", node=node.node_id, evidence=f"{code} {said}")
        elif code == 1:
            field.report.allow(f"drain: {said.strip()[:60]}")
        time.sleep(dice.uniform(0, 3))
        code, answer, said = command(node, "drain", node.mountpoint, "--stop")
        if code != 0 or not answer.get("stopped"):
            field.violate("a drain can be stopped", node=node.node_id, evidence=f"{code} {answer} {said}")


def damage(field: Field, dice: random.Random, trainers: Sequence[Trainer]) -> None:
    """A byte of one copy in RAM changes. Others never see it, `verify` names it, `repair` makes it good."""
    found = _copy(field, dice)
    if found is None:
        field.report.count("damages for which no step was ready")
        return
    node, path, file = found
    try:
        with field.weather.spell("damage", node.number, what=f"damage {node.node_id} {path}"):
            field.report.fault("damage", f"damage {node.node_id} {path}/{file.name}")
            field.damaged.add((node.number, path))
            _flip(file, dice)
            witness = dice.choice(field.nodes.others(node))
            _find(field, witness, node, path, file.name)
            _mend(field, node, path, file.name)
            field.damaged.discard((node.number, path))
    finally:
        field.damaged.discard((node.number, path))
        field.ledger.hold(path, False)


def _copy(field: Field, dice: random.Random) -> tuple[Node, str, Path] | None:
    """A file of a step that has two good copies and all its checksums; nobody changes it from now on."""
    node = dice.choice(field.nodes.nodes)
    ready = []
    for step in steps_of(node):
        replica = step.get("replica") or {}
        if step["checksummed"] == step["files"] and replica.get("state") == "replicated" and not step["overwriting"]:
            ready.append(f"{step['namespace']}/{step['step']}")
    dice.shuffle(ready)
    for path in ready:
        entry = field.ledger.get(path)
        if entry is None or not field.ledger.hold(path, True):
            continue
        copies = [file for file in _copies_on(node, path) if file.suffix in (".distcp", ".safetensors")]
        if copies and field.ledger.is_durable(path):
            return node, path, dice.choice(copies)
        field.ledger.hold(path, False)
    return None


def _copies_on(node: Node, path: str) -> list[Path]:
    """Files with bytes in the node's RAM, by the step's own name there."""
    directory = node.ram_path / "root" / path
    found = []
    for file in sorted(directory.glob("*")) if directory.is_dir() else ():
        info = file.stat()
        if info.st_size and info.st_blocks * 512 >= info.st_size and not _is_stub(file):
            found.append(file)
    return found


def _is_stub(file: Path) -> bool:
    return any(name.endswith("tierfs.stub") for name in os.listxattr(file))


def _flip(file: Path, dice: random.Random) -> None:
    """By the RAM tier's own path: as memory would, past everything that looks at writes."""
    info = file.stat()
    with file.open("r+b") as opened:
        where = dice.randrange(info.st_size)
        opened.seek(where)
        byte = opened.read(1)[0]
        opened.seek(where)
        opened.write(bytes([byte ^ 1 << dice.randrange(8)]))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def _find(field: Field, witness: Node, node: Node, path: str, name: str) -> None:
    code, answer, said = command(witness, "verify", "--tier", "replica", witness.mountpoint / path)
    bad = [(each["path"], each["reason"]) for each in answer.get("bad", ())]
    named = [where for where, reason in bad if where.endswith(f"/{name}") and node.node_id in reason]
    if not named:
        evidence = f"verify on {witness.node_id} ended with {code} and named {bad} {said}"
        _judge(field, "a damaged copy is found", node, path, evidence)
    else:
        field.report.count("damaged copies found by verify")


def _mend(field: Field, node: Node, path: str, name: str) -> None:
    deadline, told = time.monotonic() + MENDED_WITHIN_S, []
    while time.monotonic() < deadline:
        code, answer, said = command(node, "repair", node.mountpoint / path)
        told.append(f"{code} {answer} {said}")
        if code == 0:
            field.report.count("damaged copies made good by repair")
            return
        time.sleep(2)
    _judge(field, "a damaged copy is mended", node, path, f"not within {MENDED_WITHIN_S:g} s: {told[-2:]}")


def _judge(field: Field, rule: str, node: Node, path: str, evidence: str) -> None:
    """Where the object store is away meanwhile, or the step was changed, it may be left."""
    if field.weather.felt("s3-down", "s3-kill", "s3-errors", "s3-cut", "s3-stall", "s3-slow", since=time.monotonic()):
        field.report.allow(f"{rule}: not under faults of the object store")
    else:
        field.violate(rule, node=node.node_id, path=path, evidence=evidence)


Tending = Callable[[Field, random.Random, Sequence[Trainer]], None]
TENDING: dict[str, Tending] = {
    function.__name__.replace("_", "-"): function for function in (fill_tier, evict, drain, damage)
}
