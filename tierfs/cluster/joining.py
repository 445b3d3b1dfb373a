"""Coming (back) to the catalogue: what is here and what is there are brought together, without bringing back the dead.

A step that has `joined` was in the catalogue; where that lacks its directory now, or has another one of its name,
another node removed it meanwhile. Unless the catalogue itself is another one than before: then it was lost, and
everything here is published anew. What differs in files and commits is the publisher's to settle, step by step.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from tierfs.catalog.keys import holding_key, parts_prefix, state_key, tree_key
from tierfs.catalog.records import Holding, to_bytes
from tierfs.catalog.store import Compare, Put
from tierfs.cluster.local_files import read_joined
from tierfs.cluster.publishing import Publisher
from tierfs.errors import CatalogUnavailable
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.steps.names import StepNames
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.whole_files import write_whole

if TYPE_CHECKING:
    from tierfs.cluster.view import View

log = logging.getLogger("tierfs.cluster")

NAME = "cluster.json"
#: So many steps or paths are looked at in one go.
_AT_ONCE = 32


@dataclass(frozen=True)
class Identity:
    """What a RAM tier knows of its cluster. `tier` names the tier itself; `cluster` the catalogue that it was last
    brought together with ("": none yet), as the node `node`."""

    tier: str
    cluster: str = ""
    node: str = ""


def read_identity(meta: Path) -> Identity:
    """What is noted; a tier without a note gets one. OSError."""
    path = meta / NAME
    try:
        fields = Fields(json.loads(path.read_bytes(), parse_constant=refuse_constant), NAME)
        identity = Identity(fields.text("tier"), fields.text("cluster"), fields.text("node"))
        fields.end()
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError, Wrong) as error:
        # The tier counts as new: what it has is published, what it should have and has not is said to be lost.
        log.error("%s can't be read, and is made anew: %s", path, error)
    else:
        return identity
    identity = Identity(uuid.uuid4().hex)
    write_identity(meta, identity)
    return identity


def write_identity(meta: Path, identity: Identity) -> None:
    """OSError."""
    write_whole(meta / NAME, json.dumps(asdict(identity)).encode("ascii"))


async def join(
    registry: StepRegistry, view: View, publisher: Publisher, *, on_path_deleted: Callable[[str], None]
) -> None:
    """At start, and after each time that the view read everything (`reset`). May be interrupted and done again.

    `on_path_deleted` is told of names outside of steps that other nodes removed, what lies deepest first. CatalogError;
    OSError (ENOSPC) where nothing can be noted.
    """
    meta = registry.tier.meta
    identity = read_identity(meta)
    if not view.connected:
        raise CatalogUnavailable("the catalogue can't be reached")
    cluster = view.cluster_id
    is_known = identity.cluster == cluster
    if not is_known:
        _begin_anew(registry, view, publisher, identity)
    if not is_known or identity.node != publisher.node:
        await _tell_what_was_lost(registry, view, publisher)
    for at, record in enumerate(_in_order(registry)):
        if at % _AT_ONCE == _AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
        if registry.records.get(record.key) is record:
            _join_step(view, publisher, record)
    names, root = registry.names, registry.root
    complete = {record.rel for record in registry.records.values() if record.is_complete and record.manifest.joined}
    found = await trio.to_thread.run_sync(lambda: list(_names_outside(root, names, complete)))
    for at, (rel, joined) in enumerate(found):
        if at % _AT_ONCE == _AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
        if is_known and joined and rel not in view.tree:
            log.info("%s was removed by another node", rel)
            on_path_deleted(rel)
        else:
            publisher.tree_changed(rel)
    if not is_known or identity.node != publisher.node:
        write_identity(meta, Identity(identity.tier, cluster, publisher.node))


def _begin_anew(registry: StepRegistry, view: View, publisher: Publisher, identity: Identity) -> None:
    """Another catalogue: nothing here was in it, and what was removed is not in it either.

    But for what was made here after it since this node began to follow it.
    """
    if identity.cluster:
        log.warning("the catalogue is another one than this node knew; what is here is published anew")
    for record in registry.records.values():
        seen = view.tree.get(record.rel)
        if seen is not None and seen.create_revision == record.manifest.joined:
            continue
        if record.manifest.joined:
            record.manifest.joined = 0
            registry.save_or_later(record)
        publisher.parts.step_gone(record.key)
    for entry in publisher.journal:
        if entry.kind != "alone":
            publisher.journal.done(entry)
    publisher.names.made.clear()


def _join_step(view: View, publisher: Publisher, record: StepRecord) -> None:
    joined = record.manifest.joined
    seen = view.tree.get(record.rel)
    if joined and joined <= view.revision and (seen is None or seen.create_revision != joined):
        log.info("the step was removed by another node", extra=publisher.registry.extra(record))
        publisher.on_deleted(record)
    else:
        publisher.changed(record)


def _in_order(registry: StepRegistry) -> list[StepRecord]:
    """Complete ones in the order of their completion, so that commits that are owed are made in it; then the others."""
    return sorted(
        registry.records.values(),
        key=lambda record: (not record.is_complete, record.manifest.completed_at or 0.0, record.key),
    )


def _names_outside(root: Path, names: StepNames, complete: set[str]) -> Iterator[tuple[str, int]]:
    """Names outside of steps, and directories inside of those that are not complete, with when they joined.

    What lies below comes before its directory where it is to be removed, so this goes from the deepest up; the
    publisher makes what stands above first anyway. Blocking.
    """
    found: list[tuple[str, int]] = []
    pending = [""]
    while pending:
        directory = pending.pop()
        try:
            entries = list(os.scandir(root / directory))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            rel = f"{directory}/{entry.name}" if directory else entry.name
            where = names.locate(rel)
            is_directory = entry.is_dir(follow_symlinks=False)
            if is_directory and rel not in complete:
                pending.append(rel)
            if where is None:
                try:
                    found.append((rel, read_joined(root / rel)))
                except OSError:
                    continue
            elif is_directory and where.inner:
                found.append((rel, 0))
    yield from sorted(found, reverse=True)


async def _tell_what_was_lost(registry: StepRegistry, view: View, publisher: Publisher) -> None:
    """Parts under this node's name that its tier does not have: written by an earlier tier, which is gone."""
    node = publisher.node

    def is_lacking(key: Key) -> bool:
        record = registry.records.get(key)
        return (record is None or not record.manifest.populated) and not registry.object_tier.may_come_back(key)

    for key, seen in list(view.states.items()):
        tree = view.tree.get("/".join(key))
        if node in seen.record.parts and is_lacking(key) and tree is not None:
            await publisher.store.txn(
                _compares(key, seen.mod_revision, tree.create_revision),
                [Put(holding_key(*key, node), to_bytes(Holding(seen.record.generation)))],
            )
    for rel, tree in list(view.tree.items()):
        where = registry.names.locate(rel)
        if where is None or where.inner or tree.record.kind != "dir":
            continue
        key = where.namespace, where.step
        if is_lacking(key) and key not in view.states:
            await _give_up_parts(publisher, key, tree.create_revision)


async def _give_up_parts(publisher: Publisher, key: Key, created: int) -> None:
    """Of generations that are not complete: what was sealed there is gone."""
    prefix = parts_prefix(*key)
    found, _ = await publisher.store.range(prefix)
    generations = set()
    for value in found:
        generation, _, rest = value.key.removeprefix(prefix).partition("/")
        if generation.isascii() and generation.isdigit() and rest.partition("/")[0] == publisher.node:
            generations.add(int(generation))
    for each in sorted(generations):
        await publisher.parts.put(key, each, {}, _compares(key, 0, created), added=False)


def _compares(key: Key, state: int, created: int) -> list[Compare]:
    return [
        Compare(state_key(*key), "mod", "equal", state),
        Compare(tree_key("/".join(key)), "create", "equal", created),
    ]
