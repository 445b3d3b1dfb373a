"""Finds the steps of the object tier by listings with a delimiter: namespaces, nested ones too, down to each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from tierfs.objects.client import ObjectClient
from tierfs.objects.store import ObjectInfo
from tierfs.persist.layout import MANIFEST, NODES, OWN, PARTS, is_safe, step_prefix
from tierfs.persist.reporting import all_of
from tierfs.steps.names import StepNames, StepPath

#: Listings side by side; the client bounds the requests.
AT_ONCE = 16
#: Nested namespaces are followed so far down. A person may keep any tree in the bucket.
DEPTH = 8


@dataclass(frozen=True)
class StepDirectory:
    """A directory of the object tier that is a step by its name. `manifest` is the object, `has_own` any of ours;
    `is_begun` where a node has begun to send all of it, `has_parts` where some did so with a part of its files."""

    where: StepPath
    manifest: ObjectInfo | None
    has_own: bool
    is_begun: bool
    has_parts: bool

    @property
    def key(self) -> tuple[str, str]:
        return self.where.namespace, self.where.step


async def step_directories(client: ObjectClient, names: StepNames) -> list[StepDirectory]:
    """All of them. ObjectError: then nothing is known, for what is missing would look as if it were gone."""
    steps: list[StepPath] = []
    level = [""]
    for _ in range(DEPTH):
        below: list[str] = []
        await all_of((partial(_list, client, names, directory, below, steps) for directory in level), at_once=AT_ONCE)
        level = below
    found: list[StepDirectory] = []
    await all_of((partial(_look, client, where, found) for where in steps), at_once=AT_ONCE)
    return sorted(found, key=lambda step: (step.where.namespace, step.where.number, step.where.step))


async def _list(
    client: ObjectClient, names: StepNames, directory: str, below: list[str], steps: list[StepPath]
) -> None:
    listing = await client.list_all(f"{directory}/" if directory else "", delimiter="/")
    for rel in _directories(listing.prefixes):
        where = names.locate(rel)
        if where is None:
            below.append(rel)
        elif where.inner == "":
            steps.append(where)
            # A name of digits may be a namespace of steps with better names (`2026/step_5`).
            if where.step.isdigit():
                below.append(rel)


def _directories(prefixes: Iterable[str]) -> list[str]:
    """What could be directories of the mount, without what is tierfs's own."""
    found = [prefix.rstrip("/") for prefix in prefixes]
    return [rel for rel in found if rel.rpartition("/")[2] != OWN and is_safe(rel)]


async def _look(client: ObjectClient, where: StepPath, found: list[StepDirectory]) -> None:
    prefix = step_prefix(where.namespace, where.step)
    listing = await client.list_all(f"{prefix}{OWN}/", delimiter="/")
    manifest = next((info for info in listing.objects if info.key == prefix + MANIFEST), None)
    has_own = bool(listing.objects or listing.prefixes)
    is_begun, has_parts = (prefix + folder in listing.prefixes for folder in (NODES, PARTS))
    found.append(StepDirectory(where, manifest, has_own, is_begun, has_parts))
