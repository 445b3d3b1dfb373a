"""One step as the object tier has it at a moment: its objects, its manifest if it is committed, and its node files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from tierfs.errors import ObjectCorrupt, ObjectMissing
from tierfs.objects.client import ObjectClient
from tierfs.objects.store import ObjectInfo
from tierfs.persist.layout import MANIFEST, inner_of, manifest_key, node_key, node_of, part_key, part_of, step_prefix
from tierfs.persist.object_manifest import (
    MAX_BYTES,
    NodeFile,
    ObjectManifest,
    SentObject,
    read_manifest,
    read_node_file,
)
from tierfs.persist.part_file import PartFile, read_part_file
from tierfs.persist.reporting import all_of
from tierfs.steps.names import StepNames

log = logging.getLogger("tierfs.persist")

#: Small files that are fetched side by side.
AT_ONCE = 8


@dataclass
class StoredStep:
    """`objects` by the path inside the step, without what belongs to steps whose names begin alike. `manifest` is None
    where none is there or it is not sound (`has_manifest` tells). Node and part files
    that are not sound are left out."""

    objects: Mapping[str, ObjectInfo]
    manifest: ObjectManifest | None = None
    nodes: dict[str, NodeFile] = field(default_factory=dict)
    parts: dict[str, PartFile] = field(default_factory=dict)

    @property
    def has_manifest(self) -> bool:
        return MANIFEST in self.objects

    @property
    def manifest_etag(self) -> str:
        return self.objects[MANIFEST].etag

    @property
    def node_count(self) -> int:
        """How many nodes have a node file."""
        return sum(node_of(inner) is not None for inner in self.objects)

    def node_info(self, node: str) -> ObjectInfo | None:
        return next((info for inner, info in self.objects.items() if node_of(inner) == node), None)

    def holds(self, inner: str, size_bytes: int, etag: str) -> bool:
        """There is an object of this size and with this ETag."""
        info = self.objects.get(inner)
        return info is not None and (info.size_bytes, info.etag) == (size_bytes, etag)

    def holds_all_of(self, manifest: ObjectManifest) -> bool:
        """Each file that the manifest names is there in its size. A listing tells no more without node files."""
        return all(
            (info := self.objects.get(inner)) is not None and info.size_bytes == file.size_bytes
            for inner, file in manifest.files.items()
        )

    def known(self, inner: str) -> list[SentObject]:
        """What nodes say they sent under this name, as far as it is what lies there."""
        told = [*self.nodes.values(), *(part.sent for part in self.parts.values())]
        found = [sent for node_file in told if (sent := node_file.objects.get(inner)) is not None]
        return [sent for sent in found if self.holds(inner, sent.file.size_bytes, sent.etag)]


async def look(
    client: ObjectClient,
    names: StepNames,
    namespace: str,
    step: str,
    *,
    read: bool = True,
    only: str | None = None,
    kept: StoredStep | None = None,
) -> StoredStep:
    """List the step's objects, and with `read` fetch its manifest and node files (`only` that of this node): not those
    again that an earlier look (`kept`) found unchanged. ObjectError."""
    listing = await client.list_all(step_prefix(namespace, step))
    objects = {
        inner: info for info in listing.objects if (inner := inner_of(names, namespace, step, info.key)) is not None
    }
    stored = StoredStep(objects)
    if read:
        jobs = []
        for inner, info in objects.items():
            part = part_of(inner)
            if part is not None and only in (None, part):
                jobs.append(partial(_read_part_file, client, stored, namespace, step, part))
            node = node_of(inner)
            if node is None or (only is not None and node != only):
                continue
            if kept is not None and node in kept.nodes and kept.objects[inner].etag == info.etag:
                stored.nodes[node] = kept.nodes[node]
            else:
                jobs.append(partial(_read_node_file, client, stored, namespace, step, node))
        if stored.has_manifest and kept is not None and kept.manifest and kept.manifest_etag == stored.manifest_etag:
            stored.manifest = kept.manifest
        elif stored.has_manifest:
            jobs.append(partial(_read_manifest, client, stored, namespace, step))
        await all_of(jobs, at_once=AT_ONCE)
    return stored


async def abort_uploads(client: ObjectClient, names: StepNames, namespace: str, step: str) -> None:
    """Have the store forget all unfinished uploads of the step. ObjectError."""
    for upload in await client.list_uploads(step_prefix(namespace, step)):
        if inner_of(names, namespace, step, upload.key) is not None:
            await client.abort_upload(upload.key, upload.upload_id)


async def _read_manifest(client: ObjectClient, stored: StoredStep, namespace: str, step: str) -> None:
    try:
        data, _ = await client.get(manifest_key(namespace, step), most_bytes=MAX_BYTES)
        stored.manifest = read_manifest(data, namespace, step)
    except ObjectMissing:
        stored.objects = {inner: info for inner, info in stored.objects.items() if inner != MANIFEST}
    except ObjectCorrupt as error:
        log.warning("%s", error.message, extra={"namespace": namespace, "step": step, "tier": "object"})


async def _read_part_file(client: ObjectClient, stored: StoredStep, namespace: str, step: str, node: str) -> None:
    with _missing_or_damaged(namespace, step):
        data, _ = await client.get(part_key(namespace, step, node), most_bytes=MAX_BYTES)
        stored.parts[node] = read_part_file(data, namespace, step)


async def _read_node_file(client: ObjectClient, stored: StoredStep, namespace: str, step: str, node: str) -> None:
    with _missing_or_damaged(namespace, step):
        data, _ = await client.get(node_key(namespace, step, node), most_bytes=MAX_BYTES)
        stored.nodes[node] = read_node_file(data, namespace, step)


@contextlib.contextmanager
def _missing_or_damaged(namespace: str, step: str) -> Iterator[None]:
    """What went since it was listed is left out, and what is damaged too, which is said."""
    try:
        yield
    except ObjectMissing:
        pass
    except ObjectCorrupt as error:
        log.warning("%s", error.message, extra={"namespace": namespace, "step": step, "tier": "object"})
