"""The manifest: what this node knows about its part of a step, as one JSON file in the RAM tier.

A manifest is replaced whole by a rename, so a reader sees the old one or the new one, whatever kills the writer. It is
not fsynced: it lies in the same tmpfs as the bytes it describes and lives exactly as long. What is read is
checked in full, since a wrong manifest could name a half step complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tierfs.checksum import from_text
from tierfs.errors import ManifestDamaged, PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.steps.names import escape_namespace, safe_component, safe_relative
from tierfs.whole_files import UNFINISHED, write_whole

VERSION = 3
#: Version 1 knew nothing of the object tier, nor which files of an overwrite begin with the old bytes; version 2
#: nothing of other nodes.
_KNOWN_VERSIONS = (1, 2, 3)
#: A step of 100,000 files has a manifest of about 15 MB; what is above this is not one of ours.
MAX_BYTES = 256 << 20
_SUFFIX = ".json"

State = Literal["writing", "complete", "abandoned"]
STATES = ("writing", "complete", "abandoned")


@dataclass(frozen=True)
class FileEntry:
    """One file as it was when last looked at. `checksum` is `crc64nvme:<base64>`, None while not computed."""

    size_bytes: int
    mtime_ns: int
    ino: int
    checksum: str | None = None
    sealed: bool = False


@dataclass
class Overwrite:
    """A generation being written over a complete one.

    `participants` maps the process ids that took part (decimal text) to their start times in clock ticks since boot
    (field 22 of /proc/PID/stat), which together name a process for good. `old_directory` is where the old generation's
    hard links lie, relative to the RAM tier; `old_files` are its files by their path inside the step.
    `removed_only`: so far files were only removed, nothing was written. `copied` are files that were opened for writing
    without being truncated, so that their new inode, whose number it gives, begins with the old bytes.
    """

    generation: int
    started_at: float
    participants: dict[str, int] = field(default_factory=dict)
    old_directory: str = ""
    old_files: dict[str, FileEntry] = field(default_factory=dict)
    removed_only: bool = False
    copied: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Persisted:
    """The step's committed copy in the object tier: which generation it holds, and the ETag of its manifest there."""

    generation: int
    etag: str
    at: float
    bytes: int
    files: int


@dataclass
class Manifest:
    """This node's part of a step. Times are Unix seconds, `files` is keyed by the path inside the step.

    `marker` is the path inside the step of the file that completed it; `added` are those of `files` that came after it
    and so are no part of what was committed; `note` is a sentence for people.

    `owed` says why the step, as it is now, has to go to the object tier (`policy` or `demand`; "" is not owed), and
    `persisted` what is there. `populated` is False for a step of the object tier whose stubs are not made yet: its
    directory is there, `files` is empty, `bytes` is what it holds in the object tier.

    `joined` is the revision at which the catalogue of a cluster got the step's directory, as this node knows it; 0 when
    it was not published.
    """

    namespace: str
    step: str
    number: int
    state: State = "writing"
    generation: int = 1
    created_at: float = 0.0
    changed_at: float = 0.0
    completed_at: float | None = None
    pinned: bool = False
    bytes: int = 0
    files: dict[str, FileEntry] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    marker: str | None = None
    overwrite: Overwrite | None = None
    note: str = ""
    owed: str = ""
    persisted: Persisted | None = None
    populated: bool = True
    joined: int = 0
    version: int = VERSION


@dataclass(frozen=True)
class ManifestProblem:
    """A manifest that could not be read: for `status` and the log."""

    path: Path
    message: str


def manifest_path(meta: Path, namespace: str, step: str) -> Path:
    """Where a step's manifest lies below the RAM tier's `meta` directory."""
    return meta / escape_namespace(namespace) / (safe_component(step) + _SUFFIX)


def save_manifest(meta: Path, manifest: Manifest) -> None:
    """Write the manifest, replacing an earlier one at once. Raises OSError (ENOSPC: the old one stays)."""
    path = manifest_path(meta, manifest.namespace, manifest.step)
    data = json.dumps(_as_json(manifest), separators=(",", ":"), allow_nan=False).encode("ascii")
    # Two threads that save the same step don't write into one file.
    write_whole(path, data, writer=str(threading.get_native_id()))


def delete_manifest(meta: Path, namespace: str, step: str) -> None:
    """Remove a step's manifest, and its namespace's directory with the last one. None there is no error."""
    path = manifest_path(meta, namespace, step)
    path.unlink(missing_ok=True)
    # ENOTEMPTY is the usual case, and a concurrent save makes the directory again.
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def load_manifest(path: Path) -> Manifest:
    """Read and check one manifest. Raises ManifestDamaged (says what is wrong where), FileNotFoundError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ManifestDamaged(f"the manifest {path} can't be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ManifestDamaged(f"the manifest {path} is larger than {MAX_BYTES} bytes")
    try:
        value = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestDamaged(f"the manifest {path} is not JSON: {error}") from None
    try:
        return _manifest(value)
    except (Wrong, PathRefused) as error:
        raise ManifestDamaged(f"the manifest {path} is damaged: {error}") from None


def load_all(meta: Path) -> tuple[list[Manifest], list[ManifestProblem]]:
    """Every manifest below `meta`, by namespace and number; those that can't be read are told, not raised.

    A missing `meta` holds none. What an interrupted save left is skipped (`remove_unfinished` removes it).
    """
    manifests: list[Manifest] = []
    problems: list[ManifestProblem] = []
    for path in _manifest_files(meta, _SUFFIX, hidden=False):
        try:
            manifest = load_manifest(path)
            if manifest_path(meta, manifest.namespace, manifest.step) != path:
                raise ManifestDamaged(
                    f"the manifest {path} is of {manifest.namespace}/{manifest.step} and lies in the wrong place"
                )
        except FileNotFoundError:
            continue
        except ManifestDamaged as error:
            problems.append(ManifestProblem(path, error.message))
        else:
            manifests.append(manifest)
    manifests.sort(key=lambda manifest: (manifest.namespace, manifest.number, manifest.step))
    return manifests, problems


def remove_unfinished(meta: Path) -> int:
    """Remove what interrupted saves left; how many. Only at start, while nothing saves."""
    found = _manifest_files(meta, UNFINISHED, hidden=True)
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _manifest_files(meta: Path, suffix: str, *, hidden: bool) -> list[Path]:
    try:
        directories = sorted(entry.path for entry in os.scandir(meta) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [
        Path(directory, name)
        for directory in directories
        for name in sorted(os.listdir(directory))
        if name.endswith(suffix) and name.startswith(".") == hidden
    ]


# --- to and from JSON. By hand, since dataclasses.asdict copies deeply and alone takes 5 ms for a thousand files.


def _files_as_json(files: Mapping[str, FileEntry]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "size_bytes": entry.size_bytes,
            "mtime_ns": entry.mtime_ns,
            "ino": entry.ino,
            "checksum": entry.checksum,
            "sealed": entry.sealed,
        }
        for name, entry in files.items()
    }


def _as_json(manifest: Manifest) -> dict[str, Any]:
    value = dict(vars(manifest))
    value["files"] = _files_as_json(manifest.files)
    value["added"] = sorted(manifest.added)
    if manifest.overwrite is not None:
        overwrite = dict(vars(manifest.overwrite))
        overwrite["old_files"] = _files_as_json(manifest.overwrite.old_files)
        value["overwrite"] = overwrite
    if manifest.persisted is not None:
        value["persisted"] = dict(vars(manifest.persisted))
    return value


def _files(value: dict[str, object], where: str) -> dict[str, FileEntry]:
    files = {}
    for name, entry in value.items():
        fields = Fields(entry, f"{where}[{name!r}]")
        checksum = fields.text_or_none("checksum")
        if checksum is not None:
            try:
                from_text(checksum)
            except ValueError as error:
                raise Wrong(f"{where}[{name!r}]: {error}") from None
        files[safe_relative(name)] = FileEntry(
            size_bytes=fields.integer("size_bytes"),
            mtime_ns=fields.integer("mtime_ns", least=-(1 << 63)),
            ino=fields.integer("ino"),
            checksum=checksum,
            sealed=fields.flag("sealed"),
        )
        fields.end()
    return files


def _inodes(value: dict[str, object]) -> dict[str, int]:
    found = {}
    for name, ino in value.items():
        if type(ino) is not int or ino < 0:
            raise Wrong(f"overwrite.copied[{name!r}] is no inode number")
        found[safe_relative(name)] = ino
    return found


def _overwrite(value: object, version: int) -> Overwrite | None:
    if value is None:
        return None
    fields = Fields(value, "overwrite")
    if version == 1:
        fields.add({"copied": {}})
    participants: dict[str, int] = {}
    for pid, ticks in fields.mapping("participants").items():
        if not (pid.isascii() and pid.isdigit() and type(ticks) is int and ticks >= 0):
            raise Wrong(f"overwrite: the participant {pid!r} has no start time")
        participants[pid] = ticks
    overwrite = Overwrite(
        generation=fields.integer("generation"),
        started_at=fields.seconds("started_at"),
        participants=participants,
        old_directory=fields.text("old_directory"),
        old_files=_files(fields.mapping("old_files"), "overwrite.old_files"),
        removed_only=fields.flag("removed_only"),
        copied=_inodes(fields.mapping("copied")),
    )
    if overwrite.old_directory:
        safe_relative(overwrite.old_directory)
    fields.end()
    return overwrite


def _persisted(value: object) -> Persisted | None:
    if value is None:
        return None
    fields = Fields(value, "persisted")
    persisted = Persisted(
        generation=fields.integer("generation"),
        etag=fields.text("etag"),
        at=fields.seconds("at"),
        bytes=fields.integer("bytes"),
        files=fields.integer("files"),
    )
    fields.end()
    return persisted


def _manifest(value: object) -> Manifest:
    fields = Fields(value, "the manifest")
    version = fields.integer("version")
    if version not in _KNOWN_VERSIONS:
        raise Wrong(f"version {version} is unknown, this program knows {VERSION}")
    if version == 1:
        fields.add({"owed": "", "persisted": None, "populated": True})
    if version < 3:
        fields.add({"joined": 0})
    state = fields.text("state")
    if state not in STATES:
        raise Wrong(f"the state {state!r} is unknown")
    manifest = Manifest(
        namespace=safe_relative(fields.text("namespace")),
        step=safe_component(fields.text("step")),
        number=fields.integer("number"),
        state=cast("State", state),
        generation=fields.integer("generation"),
        created_at=fields.seconds("created_at"),
        changed_at=fields.seconds("changed_at"),
        completed_at=fields.seconds_or_none("completed_at"),
        pinned=fields.flag("pinned"),
        bytes=fields.integer("bytes"),
        files=_files(fields.mapping("files"), "files"),
        added=fields.texts("added"),
        marker=fields.text_or_none("marker"),
        overwrite=_overwrite(fields.any("overwrite"), version),
        note=fields.text("note"),
        owed=fields.text("owed"),
        persisted=_persisted(fields.any("persisted")),
        populated=fields.flag("populated"),
        joined=fields.integer("joined"),
    )
    if manifest.marker is not None:
        safe_relative(manifest.marker)
    fields.end()
    return manifest
