"""What lies on the disk of one step, and the manifest beside it: written last, and read as strictly as a stranger's.

The body is the object tier's manifest (sizes, times, owners, CRC64NVME of each 16 MiB and of the whole); the line
before it has the body's own checksum, and what only a node's own disk has to tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from tierfs.catalog.records import check_version
from tierfs.checksum import from_text, to_text
from tierfs.errors import DiskError, ObjectCorrupt, PathRefused, RecordDamaged
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest, read_manifest
from tierfs.steps.names import safe_relative

VERSION = 1
#: Of a step of 100,000 files; what is above is not one of ours.
MAX_BYTES = 300 << 20


@dataclass(frozen=True)
class DiskStep:
    """A step that lies whole in `directory`: all of its files, or of a step of several nodes those that this one held.

    `step` names those files, `marker` is the step's, which may be another node's file. `owed` says why the step had to
    go to the object tier when it was copied, "" where it had not. `versions` are those that files had in the cluster,
    by the path inside the step, and `cluster` is the catalogue that had the step then, "" for none.
    """

    directory: Path
    step: ObjectManifest
    node: str
    stored_at: float
    owed: str = ""
    marker: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.step.namespace, self.step.step

    @property
    def size_bytes(self) -> int:
        return self.step.size_bytes

    def file(self, inner: str) -> ObjectFile | None:
        return self.step.files.get(inner)


def to_bytes(stored: DiskStep) -> bytes:
    body = stored.step.to_bytes()
    head = {
        "version": VERSION,
        "namespace": stored.step.namespace,
        "step": stored.step.step,
        "node": stored.node,
        "stored_at": stored.stored_at,
        "owed": stored.owed,
        "marker": stored.marker,
        "versions": dict(stored.versions),
        "cluster": stored.cluster,
        "body": to_text(int(crc64nvme(body))),
    }
    return json.dumps(head, sort_keys=True).encode("ascii") + b"\n" + body


def from_bytes(data: bytes, directory: Path) -> DiskStep:
    """DiskError for anything but a whole and sound manifest."""
    line, _, body = data.partition(b"\n")
    try:
        fields = Fields(json.loads(line, parse_constant=refuse_constant), "the manifest")
        written_in = fields.integer("version")
        if written_in != VERSION:
            raise Wrong(f"version {written_in} is unknown, this program knows {VERSION}")
        key = fields.text("namespace"), fields.text("step")
        node, stored_at, owed = fields.text("node"), fields.seconds("stored_at"), fields.text("owed")
        marker, cluster = fields.text_or_none("marker"), fields.text("cluster")
        versions = {safe_relative(inner): _version(text) for inner, text in fields.mapping("versions").items()}
        checksum = from_text(fields.text("body"))
        fields.end()
        if int(crc64nvme(body)) != checksum:
            raise Wrong("its checksum is another")
        step = read_manifest(body, *key)
        if marker is not None:
            safe_relative(marker)
        if not versions.keys() <= step.files.keys():
            raise Wrong("it has versions of files that it does not name")
    except (ValueError, RecursionError, Wrong, PathRefused, RecordDamaged, ObjectCorrupt) as error:
        told = error.message if isinstance(error, ObjectCorrupt) else str(error)
        raise DiskError(f"the manifest in {directory} is damaged: {told}") from None
    return DiskStep(directory, step, node, stored_at, owed, marker, versions, cluster)


def _version(value: object) -> str:
    if not isinstance(value, str):
        raise Wrong("a version is no text")
    return check_version(value)
