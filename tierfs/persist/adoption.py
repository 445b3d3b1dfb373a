"""Steps of a slower tier become steps of this node's tree: a directory and a record, with no file in it yet."""

from __future__ import annotations

import os
import stat
import time
from pathlib import PurePosixPath

from tierfs.persist.object_manifest import ObjectManifest
from tierfs.steps.manifest import Manifest, Persisted
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry


def persisted_as(manifest: ObjectManifest, etag: str) -> Persisted:
    return Persisted(
        generation=manifest.generation,
        etag=etag,
        at=time.time(),
        bytes=manifest.size_bytes,
        files=len(manifest.files),
    )


def adopt(registry: StepRegistry, manifest: ObjectManifest, etag: str | None) -> StepRecord | None:
    """Show the step in the tree; its files come when somebody looks into it. None where something has its name.

    Without an ETag it is not in the object tier, as far as is known: the local disk has it.

    The manifest is saved first: a directory that no manifest tells of would be a step that somebody began to write.
    Raises OSError (ENOSPC) with nothing changed that matters.
    """
    local = Manifest(
        namespace=manifest.namespace,
        step=manifest.step,
        number=manifest.number,
        state="complete",
        generation=manifest.generation,
        created_at=manifest.completed_at,
        changed_at=manifest.completed_at,
        completed_at=manifest.completed_at,
        bytes=manifest.size_bytes,
        marker=manifest.marker,
        persisted=persisted_as(manifest, etag) if etag is not None else None,
        populated=False,
    )
    record = StepRecord(local, registry.root / manifest.namespace / manifest.step)
    if os.path.lexists(record.directory) or not _make_namespace(registry, manifest):
        return None
    registry.save(record)
    _make_directory(registry, record, manifest)
    registry.records[record.key] = record
    registry.invalidate(manifest.namespace, manifest.step)
    return record


def is_copy(record: StepRecord) -> bool:
    """The step was adopted and nobody saved it here since: what RAM has of it came from the object tier.

    A step that is saved begins before it completes; an adopted one is said to have done both at once.
    """
    return record.manifest.created_at == record.manifest.completed_at


def describe_anew(registry: StepRegistry, record: StepRecord, manifest: ObjectManifest, etag: str) -> None:
    """Another save of the step was committed, of which nothing is here but the directory. Raises OSError."""
    local = record.manifest
    local.generation, local.created_at, local.completed_at = (
        manifest.generation,
        manifest.completed_at,
        manifest.completed_at,
    )
    local.bytes, local.marker = manifest.size_bytes, manifest.marker
    local.persisted = persisted_as(manifest, etag)
    registry.save(record)


def _make_namespace(registry: StepRegistry, manifest: ObjectManifest) -> bool:
    """The directories above the step, with the owner of the step's. False where one of them is something else."""
    for parent in [*reversed(PurePosixPath(manifest.namespace).parents), PurePosixPath(manifest.namespace)]:
        path = registry.root / parent
        try:
            found = path.lstat()
        except FileNotFoundError:
            path.mkdir(mode=0o700)
            _own(path, manifest, manifest.directory.mode | stat.S_IRWXU)
            above = parent.parent.as_posix()
            registry.invalidate("" if above == "." else above, parent.name)
        else:
            if not stat.S_ISDIR(found.st_mode):
                return False
    return True


def _make_directory(registry: StepRegistry, record: StepRecord, manifest: ObjectManifest) -> None:
    namespace = record.directory.parent
    before = namespace.stat()
    record.directory.mkdir(mode=0o700)
    _own(record.directory, manifest, manifest.directory.mode)
    at = manifest.directory.mtime_ns
    os.utime(record.directory, ns=(at, at))
    # Nobody made the step just now, so the namespace is as old as it was.
    os.utime(namespace, ns=(before.st_atime_ns, before.st_mtime_ns))


def _own(path: os.PathLike[str], manifest: ObjectManifest, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, manifest.directory.uid, manifest.directory.gid)
    os.chmod(path, mode)  # noqa: PTH101 - a path of any kind
