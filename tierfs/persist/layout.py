"""Where a step lies in the object tier: `<namespace>/<step>/<path>` under the very names that the mount shows.

What tierfs adds lies in `<step>/.tierfs/`: a node file for each node that sent files, and `manifest.json`, the commit.
Keys are relative to the store's prefix. Names go both ways through here, so that none from a bucket reaches a path, and
none from the tree a key, without having been looked at.
"""

from __future__ import annotations

from tierfs.errors import PathRefused
from tierfs.steps.names import StepNames, safe_component, safe_relative

#: The directory of a step, and of the whole store, that is tierfs's own.
OWN = ".tierfs"
MANIFEST = f"{OWN}/manifest.json"
NODES = f"{OWN}/nodes/"
PARTS = f"{OWN}/parts/"
_NODE_SUFFIX = ".json"
#: Amazon S3's limit of a key, UTF-8 bytes. The store's prefix counts too, so a little is left for it.
KEY_BYTES = 900


def step_prefix(namespace: str, step: str) -> str:
    """What the keys of all objects of the step begin with. Of other things too, maybe: see `inner_of`."""
    return _checked(f"{safe_relative(namespace)}/{safe_component(step)}") + "/"


def file_key(namespace: str, step: str, inner: str) -> str:
    """The key of a file of the step. PathRefused for a name that no object can have, or that is tierfs's own."""
    if is_own(safe_relative(inner)):
        raise PathRefused(f"{inner!r} can't be persisted: the directory {OWN} of a step is tierfs's own")
    return _checked(step_prefix(namespace, step) + inner)


def manifest_key(namespace: str, step: str) -> str:
    return step_prefix(namespace, step) + MANIFEST


def node_key(namespace: str, step: str, node: str) -> str:
    return _checked(f"{step_prefix(namespace, step)}{NODES}{safe_component(node)}{_NODE_SUFFIX}")


def part_key(namespace: str, step: str, node: str) -> str:
    return _checked(f"{step_prefix(namespace, step)}{PARTS}{safe_component(node)}{_NODE_SUFFIX}")


def is_own(inner: str) -> bool:
    """The path inside a step is of what tierfs adds."""
    return inner == OWN or inner.startswith(OWN + "/")


def node_of(inner: str) -> str | None:
    """The node whose node file has this path inside a step; None for what is no node file."""
    return _node_in(inner, NODES)


def part_of(inner: str) -> str | None:
    """The same of part files."""
    return _node_in(inner, PARTS)


def _node_in(inner: str, folder: str) -> str | None:
    if not inner.startswith(folder) or not inner.endswith(_NODE_SUFFIX):
        return None
    node = inner[len(folder) : -len(_NODE_SUFFIX)]
    return node if node and "/" not in node else None


def inner_of(names: StepNames, namespace: str, step: str, key: str) -> str | None:
    """The path inside the step of the object with this key; None for what belongs to another step or to none.

    `run/5/` may hold the objects of the step `5` and of steps whose namespace is `run/5`.
    """
    where = names.locate(key)
    if where is None or (where.namespace, where.step) != (namespace, step) or not where.inner:
        return None
    return where.inner


def is_safe(key: str) -> bool:
    """The key could be a path: safe components between single '/'."""
    try:
        safe_relative(key)
        _checked(key)
    except PathRefused:
        return False
    return True


def _checked(key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise PathRefused(f"{key!r} can't be persisted: object stores take UTF-8 names only") from None
    if size > KEY_BYTES:
        raise PathRefused(f"{key[:80]!r}… can't be persisted: an object's key has at most {KEY_BYTES} bytes")
    return key
