"""Where what lies in the catalogue. Keys are relative to the cluster's prefix, which the store puts before them.

    cluster                          the catalogue's own identity
    nodes/NODE                       NodeRecord, on the node's lease
    t/PATH                           TreeRecord: directories (also steps, and inside them), files outside of steps,
                                     names claimed with O_EXCL
    c/NAMESPACE/STEP                 StepState: which generation is complete, and how durable it is
    xp/NAMESPACE/STEP/GENERATION/NODE/PAGE   Part: what this node wrote, frozen once it is complete
    xp/NAMESPACE/STEP/GENERATION/NODE+/PAGE  files that it added afterwards
    xh/NAMESPACE/STEP/NODE           Holding: what this node has in RAM, whole and verified
    o/ID                             Operation: a rename or a removal that all nodes make on their own files too

`nodes/`, `t/`, `c/` and `o/` are watched by every node, so they are few and small; `xp/` and `xh/` grow with the square
of the cluster and are read when needed. etcd keeps the order of changes only within one watch, and that spans a range
of keys: so what is watched lies together, and what is not comes after all of it (x). A namespace is one component
(`escape_namespace`).
"""

from __future__ import annotations

from tierfs.errors import PathRefused, RecordDamaged
from tierfs.steps.names import escape_namespace, safe_component, safe_relative

CLUSTER = "cluster"
NODES = "nodes/"
TREE = "t/"
STATES = "c/"
PARTS = "xp/"
HOLDINGS = "xh/"
OPERATIONS = "o/"
WATCHED = (CLUSTER, NODES, TREE, STATES, OPERATIONS)
#: Ends the node's name in keys of files that were added to a complete generation.
ADDED = "+"


def node_key(node: str) -> str:
    return NODES + safe_component(node)


def tree_key(path: str) -> str:
    return TREE + safe_relative(path)


def tree_below(path: str) -> str:
    """The prefix of everything below a directory."""
    return f"{TREE}{safe_relative(path)}/"


def step_part(namespace: str, step: str) -> str:
    return f"{escape_namespace(namespace)}/{safe_component(step)}"


def state_key(namespace: str, step: str) -> str:
    return STATES + step_part(namespace, step)


def parts_prefix(namespace: str, step: str, generation: int | None = None) -> str:
    prefix = f"{PARTS}{step_part(namespace, step)}/"
    return prefix if generation is None else f"{prefix}{generation:08d}/"


def part_prefix(namespace: str, step: str, generation: int, node: str, *, added: bool = False) -> str:
    """The pages of one part lie below it."""
    return f"{parts_prefix(namespace, step, generation)}{safe_component(node)}{ADDED if added else ''}/"


def part_key(namespace: str, step: str, generation: int, node: str, page: int, *, added: bool = False) -> str:
    return f"{part_prefix(namespace, step, generation, node, added=added)}{page:04d}"


def holdings_prefix(namespace: str, step: str) -> str:
    return f"{HOLDINGS}{step_part(namespace, step)}/"


def holding_key(namespace: str, step: str, node: str) -> str:
    return holdings_prefix(namespace, step) + safe_component(node)


def operation_key(name: str) -> str:
    return OPERATIONS + safe_component(name)


def path_of_tree_key(key: str) -> str:
    """RecordDamaged for a key that names no path."""
    try:
        return safe_relative(key.removeprefix(TREE))
    except PathRefused as error:
        raise RecordDamaged(f"the catalogue's key {key!r} names no path: {error.message}") from None
