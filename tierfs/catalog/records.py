"""What tierfs keeps in the catalogue, as values: strict both ways, since any node, or a person, may have written them.

Times are Unix seconds, sizes bytes, paths relative to the mount or (in parts) to the step. A **version** names the
bytes of a sealed file for good: `NODE/TOKEN`, made by the node where they were written, kept as an attribute of the
inode.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar, cast

from tierfs.checksum import from_text
from tierfs.errors import PathRefused, RecordDamaged
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.steps.names import safe_component, safe_relative

#: A value is at most so large when unpacked: what is above is none of ours.
MOST_UNPACKED_BYTES = 64 << 20
#: Files a page of a part; with long names about 300 KiB compressed.
FILES_A_PAGE = 2000

_VERSION = re.compile(r"[^/\0]{1,200}/[0-9a-f]{1,40}")

Level = Literal["complete", "replicated", "lost"]
LEVELS = ("complete", "replicated", "lost")
TreeKind = Literal["dir", "file", "link", "claim"]
TREE_KINDS = ("dir", "file", "link", "claim")
OperationKind = Literal["rename", "unlink", "remove"]
OPERATION_KINDS = ("rename", "unlink", "remove")


@dataclass(frozen=True)
class NodeRecord:
    """A member. `tier` is the id of its RAM tier: another one under the same name has lost what the first one held.
    `state` is serving or draining."""

    node: str
    addresses: tuple[str, ...]
    tier: str
    domain: str = ""
    size_bytes: int = 0
    free_bytes: int = 0
    version: str = ""
    started_at: float = 0.0
    state: str = "serving"
    mountpoint: str = ""


@dataclass(frozen=True)
class FileRecord:
    """A sealed file. `opened_at` is the catalogue's revision that its node knew when it was opened for writing: of two
    nodes' files under one name the higher is the newer. `checksum` is `crc64nvme:<base64>`, None while not known."""

    size_bytes: int
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    version: str
    checksum: str | None = None
    opened_at: int = 0

    @property
    def node(self) -> str:
        """Where it was written."""
        return self.version.partition("/")[0]


@dataclass(frozen=True)
class TreeRecord:
    """A name outside of any step's files. `file` is for kind file, `target` for link. `node` made it."""

    kind: TreeKind
    node: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: str = ""
    file: FileRecord | None = None


@dataclass(frozen=True)
class Part:
    """One page of the files that `node` wrote into this generation."""

    node: str
    generation: int
    files: dict[str, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class StepState:
    """A complete step. `parts` counts files by node: whose parts make it. `marker_file` describes the marker itself.
    `level` is for `generation` as a whole: complete, replicated, or lost (a file of it has no holder any more)."""

    number: int
    generation: int
    completed_at: float
    node: str
    marker: str | None
    marker_file: FileRecord | None
    parts: dict[str, int]
    files: int
    bytes: int
    level: Level = "complete"
    note: str = ""


@dataclass(frozen=True)
class Holding:
    """What a node holds of a step's generation: the parts (by the node that wrote them) it has whole, and single
    files by version."""

    generation: int
    parts: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """rename: `path` → `target`; unlink: the file at `path`, if it has `version`; remove: the step or tree there."""

    kind: OperationKind
    node: str
    path: str
    target: str = ""
    version: str = ""
    at: float = 0.0


Record = NodeRecord | TreeRecord | Part | StepState | Holding | Operation
_R = TypeVar("_R", NodeRecord, TreeRecord, Part, StepState, Holding, Operation)


def check_version(version: str) -> str:
    """`version` unchanged where it can name bytes; else RecordDamaged."""
    if not _VERSION.fullmatch(version):
        raise RecordDamaged(f"{version[:80]!r} names no version of a file")
    return version


def to_bytes(record: Record) -> bytes:
    """The same bytes for equal records."""
    value: dict[str, Any] = asdict(record)
    if isinstance(record, Part):
        value["files"] = {inner: _file_as_list(file) for inner, file in sorted(record.files.items())}
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False).encode("ascii")
    return b"z" + zlib.compress(text, 6) if len(text) > 512 else text


def from_bytes(kind: type[_R], data: bytes) -> _R:
    """Raises RecordDamaged for anything that `to_bytes` does not make of a record of that kind."""
    try:
        value = json.loads(_unpacked(data), parse_constant=refuse_constant)
        return cast("_R", _READERS[kind](Fields(value, kind.__name__)))
    except (ValueError, RecursionError, zlib.error, Wrong, PathRefused) as error:
        raise RecordDamaged(f"a {kind.__name__} of the catalogue is damaged: {error}") from None


def _unpacked(data: bytes) -> bytes:
    if data[:1] != b"z":
        return data
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data[1:], MOST_UNPACKED_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof or unpacker.unused_data:
        raise Wrong("it is cut, or larger than any of ours")
    return text


def _file_as_list(file: FileRecord) -> list[Any]:
    return [
        file.size_bytes, file.mtime_ns, file.mode, file.uid, file.gid, file.version, file.checksum, file.opened_at
    ]  # fmt: skip


def _file_from_list(value: object, where: str) -> FileRecord:
    if not isinstance(value, list) or len(value) != 8:
        raise Wrong(f"{where} is no file")
    names = ("size_bytes", "mtime_ns", "mode", "uid", "gid", "version", "checksum", "opened_at")
    return _file(dict(zip(names, value, strict=True)), where)


def _file(value: object, where: str) -> FileRecord:
    fields = Fields(value, where)
    checksum = fields.text_or_none("checksum")
    if checksum is not None:
        from_text(checksum)
    file = FileRecord(
        size_bytes=fields.integer("size_bytes"),
        mtime_ns=fields.integer("mtime_ns", least=-(1 << 63)),
        mode=_mode(fields),
        uid=_id(fields, "uid"),
        gid=_id(fields, "gid"),
        version=check_version(fields.text("version")),
        checksum=checksum,
        opened_at=fields.integer("opened_at"),
    )
    if file.size_bytes >= 1 << 63:
        raise Wrong(f"{where} is larger than any file")
    fields.end()
    return file


def _mode(fields: Fields) -> int:
    # Never setuid, setgid or sticky: other nodes make files of what stands here.
    return fields.integer("mode") & 0o777


def _id(fields: Fields, name: str) -> int:
    value = fields.integer(name)
    if value >= (1 << 32) - 1:
        raise Wrong(f"{name} is no id")
    return value


def _node(fields: Fields) -> NodeRecord:
    addresses = fields.any("addresses")
    if not isinstance(addresses, list) or not all(isinstance(each, str) for each in addresses):
        raise Wrong("addresses is no list of texts")
    record = NodeRecord(
        node=safe_component(fields.text("node")),
        addresses=tuple(addresses),
        tier=fields.text("tier"),
        domain=fields.text("domain"),
        size_bytes=fields.integer("size_bytes"),
        free_bytes=fields.integer("free_bytes"),
        version=fields.text("version"),
        started_at=fields.seconds("started_at"),
        state=fields.text("state"),
        mountpoint=fields.text("mountpoint"),
    )
    fields.end()
    return record


def _tree(fields: Fields) -> TreeRecord:
    kind = fields.text("kind")
    if kind not in TREE_KINDS:
        raise Wrong(f"the kind {kind!r} is unknown")
    file = fields.any("file")
    record = TreeRecord(
        kind=cast("TreeKind", kind),
        node=safe_component(fields.text("node")),
        mode=_mode(fields),
        uid=_id(fields, "uid"),
        gid=_id(fields, "gid"),
        mtime_ns=fields.integer("mtime_ns", least=-(1 << 63)),
        target=fields.text("target"),
        file=_file(file, "file") if file is not None else None,
    )
    if (record.kind == "file") != (record.file is not None) or (record.kind == "link") != bool(record.target):
        raise Wrong(f"a {record.kind} does not look so")
    fields.end()
    return record


def _part(fields: Fields) -> Part:
    part = Part(
        node=safe_component(fields.text("node")),
        generation=fields.integer("generation"),
        files={
            safe_relative(inner): _file_from_list(value, f"files[{inner[:80]!r}]")
            for inner, value in fields.mapping("files").items()
        },
    )
    fields.end()
    return part


def _state(fields: Fields) -> StepState:
    level, marker, marker_file = fields.text("level"), fields.text_or_none("marker"), fields.any("marker_file")
    if level not in LEVELS:
        raise Wrong(f"the level {level!r} is unknown")
    state = StepState(
        number=fields.integer("number"),
        generation=fields.integer("generation", least=1),
        completed_at=fields.seconds("completed_at"),
        node=safe_component(fields.text("node")),
        marker=safe_relative(marker) if marker is not None else None,
        marker_file=_file(marker_file, "marker_file") if marker_file is not None else None,
        parts=_counts(fields.mapping("parts")),
        files=fields.integer("files"),
        bytes=fields.integer("bytes"),
        level=cast("Level", level),
        note=fields.text("note"),
    )
    fields.end()
    return state


def _counts(value: Mapping[str, object]) -> dict[str, int]:
    if not all(type(count) is int and count >= 0 for count in value.values()):
        raise Wrong("parts does not count files")
    return {safe_component(node): cast("int", count) for node, count in value.items()}


def _holding(fields: Fields) -> Holding:
    parts, versions = fields.texts("parts"), fields.texts("versions")
    holding = Holding(
        generation=fields.integer("generation"),
        parts=tuple(sorted(safe_component(node) for node in parts)),
        versions=tuple(sorted(check_version(version) for version in versions)),
    )
    fields.end()
    return holding


def _operation(fields: Fields) -> Operation:
    kind, target = fields.text("kind"), fields.text("target")
    if kind not in OPERATION_KINDS:
        raise Wrong(f"the operation {kind!r} is unknown")
    operation = Operation(
        kind=cast("OperationKind", kind),
        node=safe_component(fields.text("node")),
        path=safe_relative(fields.text("path")),
        target=safe_relative(target) if target else "",
        version=fields.text("version"),
        at=fields.seconds("at"),
    )
    if (operation.kind == "rename") != bool(operation.target):
        raise Wrong("only a rename has a target")
    fields.end()
    return operation


_READERS: dict[type, Callable[[Fields], Record]] = {
    NodeRecord: _node,
    TreeRecord: _tree,
    Part: _part,
    StepState: _state,
    Holding: _holding,
    Operation: _operation,
}
