"""What the object tier says of a step: one node file for each node that sent files, and one manifest, the commit.

The manifest is a pure function of the node files, so that two nodes that commit at once write the same. Neither names a
host's path, and the manifest holds no ETags: equal bytes sent twice may get different ones. Both are read as strictly
as if a stranger had written them, for one who may write to the bucket can.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tierfs.checksum import CHUNK_BYTES, MIB, combine, from_base64, from_text, to_base64, to_text
from tierfs.errors import ObjectCorrupt, PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.layout import is_own
from tierfs.steps.names import safe_component, safe_relative

VERSION = 1
#: A manifest of 100,000 files has about 30 MB; what is above this is not one of ours.
MAX_BYTES = 256 << 20
#: Permissions only: a setuid file must not come out of a bucket.
MODE_BITS = 0o777


@dataclass(frozen=True)
class ObjectFile:
    """One file of a step as an object. Checksums are CRC64NVME; `chunks` are those of each `chunk_bytes`."""

    size_bytes: int
    checksum: int
    chunks: tuple[int, ...]
    mtime_ns: int
    mode: int
    uid: int
    gid: int

    def has_same_bytes(self, other: ObjectFile) -> bool:
        return (self.size_bytes, self.checksum) == (other.size_bytes, other.checksum)


@dataclass(frozen=True)
class ObjectDirectory:
    """The step's own directory, to be made again as it was."""

    mtime_ns: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True)
class ObjectManifest:
    """A whole step in the object tier. `files` by the path inside the step; `marker` is one of them."""

    namespace: str
    step: str
    number: int
    generation: int
    completed_at: float
    marker: str | None
    files: Mapping[str, ObjectFile]
    directory: ObjectDirectory = ObjectDirectory(0, 0o755, 0, 0)
    chunk_bytes: int = CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def age(self) -> tuple[int, float]:
        """Of two different ones of the same step the greater is the newer."""
        return self.generation, self.completed_at

    def has_same_bytes(self, other: ObjectManifest) -> bool:
        """Both describe the same save: the same names with the same bytes."""
        return self.files.keys() == other.files.keys() and all(
            file.has_same_bytes(other.files[inner]) for inner, file in self.files.items()
        )

    def to_bytes(self) -> bytes:
        value = {"version": VERSION, **_head(self), "files": {name: _file(file) for name, file in self.files.items()}}
        return _dumped(value)


@dataclass(frozen=True)
class SentObject:
    """A file that a node sent, and the ETag that the store gave the object."""

    file: ObjectFile
    etag: str


@dataclass(frozen=True)
class NodeFile:
    """What one node sent of a step. Without `objects` it says only that the node has begun to."""

    node: str
    namespace: str
    step: str
    number: int
    generation: int
    completed_at: float
    marker: str | None
    directory: ObjectDirectory
    objects: Mapping[str, SentObject]
    chunk_bytes: int = CHUNK_BYTES

    @property
    def age(self) -> tuple[int, float]:
        return self.generation, self.completed_at

    def to_bytes(self) -> bytes:
        objects = {name: {**_file(sent.file), "etag": sent.etag} for name, sent in self.objects.items()}
        return _dumped({"version": VERSION, "node": self.node, **_head(self), "files": objects})


def merge(node_files: Iterable[NodeFile]) -> ObjectManifest:
    """The manifest of what these nodes sent; of a name that two sent, what the newer one (then the first by name) did.

    At least one is needed, and all are of one step.
    """
    by_worth = sorted(node_files, key=lambda found: (-found.generation, -found.completed_at, found.node))
    first = by_worth[0]
    files: dict[str, ObjectFile] = {}
    for node_file in by_worth:
        for inner, sent in node_file.objects.items():
            files.setdefault(inner, sent.file)
    holder = next((found for found in by_worth if found.marker is not None), first)
    return ObjectManifest(
        namespace=first.namespace,
        step=first.step,
        number=first.number,
        generation=first.generation,
        completed_at=first.completed_at,
        marker=holder.marker,
        files=files,
        directory=holder.directory,
        chunk_bytes=first.chunk_bytes,
    )


def read_manifest(data: bytes, namespace: str, step: str) -> ObjectManifest:
    """Raises ObjectCorrupt for what is no whole and sound manifest of that step."""
    try:
        fields = _opened(data, "the manifest")
        head = _read_head(fields, namespace, step)
        files = {
            name: file for name, file, _ in _read_files(fields.mapping("files"), head["chunk_bytes"], with_etags=False)
        }
        fields.end()
        _check_tree(files, head["marker"])
        return ObjectManifest(files=files, **head)
    except (Wrong, PathRefused) as error:
        raise ObjectCorrupt(f"the manifest of {namespace}/{step} in the object tier is damaged: {error}") from None


def read_node_file(data: bytes, namespace: str, step: str) -> NodeFile:
    """Raises ObjectCorrupt for what is no sound node file of that step."""
    try:
        fields = _opened(data, "the node file")
        node = safe_component(fields.text("node"))
        head = _read_head(fields, namespace, step)
        objects = {
            name: SentObject(file, etag)
            for name, file, etag in _read_files(fields.mapping("files"), head["chunk_bytes"], with_etags=True)
        }
        fields.end()
        return NodeFile(node=node, objects=objects, **head)
    except (Wrong, PathRefused) as error:
        raise ObjectCorrupt(f"a node file of {namespace}/{step} in the object tier is damaged: {error}") from None


# --- to JSON. Sorted and without spaces: the same facts are the same bytes.


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _head(of: ObjectManifest | NodeFile) -> dict[str, Any]:
    return {
        "namespace": of.namespace,
        "step": of.step,
        "number": of.number,
        "generation": of.generation,
        "completed_at": of.completed_at,
        "marker": of.marker,
        "directory": dict(vars(of.directory)),
        "chunk_bytes": of.chunk_bytes,
    }


def _file(file: ObjectFile) -> dict[str, Any]:
    return {
        "size_bytes": file.size_bytes,
        "checksum": to_text(file.checksum),
        "chunks": [to_base64(chunk) for chunk in file.chunks],
        "mtime_ns": file.mtime_ns,
        "mode": file.mode,
        "uid": file.uid,
        "gid": file.gid,
    }


# --- from JSON


def _opened(data: bytes, what: str) -> Fields:
    try:
        value = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"it is not JSON: {error}") from None
    fields = Fields(value, what)
    version = fields.integer("version")
    if version != VERSION:
        raise Wrong(f"version {version} is unknown, this program knows {VERSION}")
    return fields


def _read_head(fields: Fields, namespace: str, step: str) -> dict[str, Any]:
    if (fields.text("namespace"), fields.text("step")) != (namespace, step):
        raise Wrong("it is of another step than the one it lies in")
    marker = fields.text_or_none("marker")
    directory = Fields(fields.any("directory"), "directory")
    head: dict[str, Any] = {
        "namespace": namespace,
        "step": step,
        "number": fields.integer("number"),
        "generation": fields.integer("generation", least=1),
        "completed_at": fields.seconds("completed_at"),
        "marker": None if marker is None else safe_relative(marker),
        "directory": ObjectDirectory(**_read_owner(directory)),
        "chunk_bytes": fields.integer("chunk_bytes", least=MIB),
    }
    directory.end()
    if head["chunk_bytes"] > 1 << 30:
        raise Wrong("chunk_bytes is above 1 GiB")
    return head


def _read_owner(fields: Fields) -> dict[str, int]:
    found = {
        "mtime_ns": fields.integer("mtime_ns", least=-(1 << 62)),
        "mode": fields.integer("mode"),
        "uid": fields.integer("uid"),
        "gid": fields.integer("gid"),
    }
    if found["mode"] > MODE_BITS or max(found["uid"], found["gid"]) >= (1 << 32) - 1 or found["mtime_ns"] >= 1 << 62:
        raise Wrong("a mode, an owner or a time is out of range")
    return found


def _read_files(
    value: dict[str, object], chunk_bytes: int, *, with_etags: bool
) -> Iterable[tuple[str, ObjectFile, str]]:
    for name, entry in value.items():
        if is_own(safe_relative(name)):
            raise Wrong(f"it names the file {name!r}")
        fields = Fields(entry, f"files[{name!r}]")
        size = fields.integer("size_bytes")
        chunks = fields.any("chunks")
        try:
            checksum = from_text(fields.text("checksum"))
            if not isinstance(chunks, list) or not all(isinstance(chunk, str) for chunk in chunks):
                raise Wrong(f"files[{name!r}]: chunks is no list of texts")
            sums = tuple(from_base64(chunk) for chunk in chunks)
        except ValueError as error:
            raise Wrong(f"files[{name!r}]: {error}") from None
        if size >= 1 << 62 or len(sums) != -(-size // chunk_bytes):
            raise Wrong(f"files[{name!r}]: {len(sums)} chunks for {size} bytes")
        if _combined(sums, size, chunk_bytes) != checksum:
            raise Wrong(f"files[{name!r}]: the checksums of the chunks are not that of the whole")
        etag = fields.text("etag") if with_etags else ""
        file = ObjectFile(size_bytes=size, checksum=checksum, chunks=sums, **_read_owner(fields))
        fields.end()
        yield name, file, etag


def _combined(chunks: tuple[int, ...], size_bytes: int, chunk_bytes: int) -> int:
    whole = done = 0
    for chunk in chunks:
        length = min(chunk_bytes, size_bytes - done)
        whole = combine(whole, chunk, length)
        done += length
    return whole


def _check_tree(files: Mapping[str, ObjectFile], marker: str | None) -> None:
    """The names can stand beside each other in one directory tree, and the marker is among them."""
    if marker is not None and marker not in files:
        raise Wrong(f"its marker {marker!r} is none of its files")
    for name in files:
        directory = name.rpartition("/")[0]
        while directory:
            if directory in files:
                raise Wrong(f"{directory!r} is a file and a directory")
            directory = directory.rpartition("/")[0]
