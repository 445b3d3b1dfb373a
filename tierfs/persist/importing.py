"""Import in place: a checkpoint that other means put at a step's place in the object tier becomes a step of it.

Its objects stay as they are (beside those of a step of SageMaker's library DCP's metadata is put). They are judged as a
step in RAM would be, by the framework's own marker, read once for their checksums, and committed with a node file and a
manifest of this node.
"""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from tierfs.errors import (
    CommitRefused,
    NotAStep,
    NotFound,
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    PathRefused,
    StepBusy,
)
from tierfs.objects.client import ObjectClient
from tierfs.objects.store import ObjectInfo
from tierfs.persist.layout import inner_of, is_own, is_safe, manifest_key, node_key, part_of, step_prefix
from tierfs.persist.object_manifest import (
    MAX_BYTES,
    NodeFile,
    ObjectDirectory,
    ObjectFile,
    ObjectManifest,
    SentObject,
    merge,
    read_manifest,
)
from tierfs.persist.reading_back import ReadBack
from tierfs.persist.reporting import Progress, all_of, reporting
from tierfs.persist.stored_step import look
from tierfs.sagemaker.layout import DCP_METADATA, METADATA
from tierfs.sagemaker.metadata import for_dcp
from tierfs.steps.completion import judge
from tierfs.steps.manifest import Manifest
from tierfs.steps.markers import MAX_DCP_BYTES
from tierfs.steps.names import StepPath, safe_relative
from tierfs.steps.overwrite import remove_tree
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.persist")

FILES_AT_ONCE = 4
#: Stands for the node in the node file: none sent these objects.
NODE = "imported"


@dataclass
class Import:
    """What is found at a step's place: its objects by their path inside the step, and the marker among them."""

    where: StepPath
    objects: Mapping[str, ObjectInfo]
    marker: str | None = None
    files: dict[str, ObjectFile] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for info in self.objects.values())


class Importing:
    """Imports into the steps of one mount."""

    def __init__(self, registry: StepRegistry, client: ObjectClient) -> None:
        self._registry = registry
        self._client = client

    async def run(self, rel: str, *, force: bool, progress: Progress) -> tuple[ObjectManifest, str]:
        """Make a step of what lies there; returns what was committed, and its ETag. Raises what `read` does."""
        node_file = await self.read(rel, force=force, progress=progress)
        manifest = merge([node_file])
        key = manifest_key(manifest.namespace, manifest.step)
        try:
            etag = await self._client.put(key, manifest.to_bytes(), only_if_absent=not force)
        except ObjectExists:
            # Our own, whose answer was lost, or one of a node that was faster.
            data, etag = await self._client.get(key, most_bytes=MAX_BYTES)
            if not read_manifest(data, manifest.namespace, manifest.step).has_same_bytes(manifest):
                raise StepBusy(f"another node committed {manifest.namespace}/{manifest.step} meanwhile") from None
        # After the commit, unlike with a step that is sent: what is not committed and has a node file is a leftover
        # of that node's and is swept, and these objects are somebody's own.
        await self._client.put(node_key(manifest.namespace, manifest.step, NODE), node_file.to_bytes())
        log.info(
            "imported in the object tier",
            extra={"namespace": manifest.namespace, "step": manifest.step, "file": "", "tier": "object"},
        )
        return manifest, etag

    async def read(self, rel: str, *, force: bool, progress: Progress) -> NodeFile:
        """Judge and read what lies there; what comes back is to be committed as it is.

        Raises NotAStep, NotFound, StepBusy where there is a step of that name, CommitRefused where files are missing
        or short (`force` takes them as they are), ObjectError.
        """
        where = self._registry.names.locate(safe_relative(rel))
        if where is None or where.inner:
            raise NotAStep(f"{rel} can't be imported: it is no step's directory, such as run1/step_100")
        await self._refuse_known(where, force=force)
        if not force:
            await self._refuse_part(where)
        found = Import(where, await self._with_marker(where, await self._list(where)))
        if not found.objects:
            raise NotFound(f"there is no object below {where.step_rel}/ in the object tier {self._client.url}")
        await self._judge(found, force=force)
        reader = ReadBack(self._client)
        jobs = [partial(self._sum_up, found, inner, reader) for inner in sorted(found.objects)]
        await reporting(
            lambda: all_of(jobs, at_once=FILES_AT_ONCE),
            lambda: {
                "files": len(found.files),
                "files_total": len(found.objects),
                "bytes": reader.passed_bytes,
                "bytes_total": found.size_bytes,
                "path": where.step_rel,
            },
            progress,
        )
        if await self._list(where) != found.objects:
            raise StepBusy(f"{where.step_rel} changed in the object tier while it was read; import it once it is quiet")
        return self._node_file(found)

    async def _refuse_known(self, where: StepPath, *, force: bool) -> None:
        record = self._registry.at(where)
        if record is not None and (record.manifest.persisted is not None or not record.manifest.populated):
            raise StepBusy(f"{where.step_rel} is a step of the object tier already; there is nothing to import")
        if record is not None or self._is_here(where):
            raise StepBusy(f"{where.step_rel} exists in this mount; import under another name, or remove it first")
        try:
            data, _ = await self._client.get(manifest_key(where.namespace, where.step), most_bytes=MAX_BYTES)
            read_manifest(data, where.namespace, where.step)
        except ObjectMissing:
            return
        except ObjectCorrupt as error:
            if force:
                return
            raise StepBusy(f"{error.message}; --force imports what lies beside it anew") from None
        raise StepBusy(f"{where.step_rel} is committed in the object tier already; there is nothing to import")

    async def _refuse_part(self, where: StepPath) -> None:
        """Some frameworks' last file is among few that may well go without the rest."""
        stored = await look(self._client, self._registry.names, where.namespace, where.step, read=False)
        if any(part_of(inner) is not None for inner in stored.objects):
            raise CommitRefused(
                f"{where.step_rel} can't be imported: a node sent only some of its files there (persist.files). "
                f"--force imports these as they are"
            )

    def _is_here(self, where: StepPath) -> bool:
        return os.path.lexists(self._registry.root / where.step_rel)

    async def _list(self, where: StepPath) -> dict[str, ObjectInfo]:
        listing = await self._client.list_all(step_prefix(where.namespace, where.step))
        found: dict[str, ObjectInfo] = {}
        for info in listing.objects:
            if info.key.endswith("/") and info.size_bytes == 0:
                continue  # consoles make such objects for "folders"
            if not is_safe(info.key):
                raise PathRefused(f"{info.key!r} can't be the name of a file, so {where.step_rel} can't be imported")
            inner = inner_of(self._registry.names, where.namespace, where.step, info.key)
            if inner is not None and not is_own(inner):
                found[inner] = info
        return found

    async def _with_marker(self, where: StepPath, objects: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
        """A step that the SageMaker library saved in its layout for Ray has the names of the mount, and lacks only
        DCP's metadata: the one object that an import adds."""
        if DCP_METADATA in objects or METADATA not in objects:
            return objects
        data, _ = await self._client.get(objects[METADATA].key, most_bytes=MAX_DCP_BYTES)
        translated = await trio.to_thread.run_sync(for_dcp, data)
        key = step_prefix(where.namespace, where.step) + DCP_METADATA
        with suppress(ObjectExists):
            await self._client.put(key, translated.data, only_if_absent=True)
        return await self._list(where)

    async def _judge(self, found: Import, *, force: bool) -> None:
        """Hold the marker against the listing, by the rules of steps in RAM: in a tree of empty files of the sizes."""
        with self._scratch_tree() as top:
            await trio.to_thread.run_sync(_lay_out, top, found.objects)
            for inner, info in found.objects.items():
                if self._registry.rules.match(inner) is not None and info.size_bytes <= MAX_DCP_BYTES:
                    await self._fetch(info, top / inner)
            where = found.where
            record = StepRecord(Manifest(where.namespace, where.step, where.number), top)
            verdict = await trio.to_thread.run_sync(judge, record, self._registry.rules)
        found.marker = verdict.marker
        if verdict.marker is None and not force:
            raise CommitRefused(
                f"{where.step_rel} can't be imported: {verdict.why_not}. --force imports it as it is, where you know "
                f"that it is whole"
            )

    async def _fetch(self, info: ObjectInfo, path: Path) -> None:
        if info.size_bytes == 0:
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            await self._client.read_range(info.key, 0, info.size_bytes, fd)
        finally:
            os.close(fd)

    @contextmanager
    def _scratch_tree(self) -> Iterator[Path]:
        # What lies here and no manifest names is removed by the next daemon, if this one dies.
        top = self._registry.tier.generations / f"import.{uuid.uuid4().hex}"
        top.mkdir(mode=0o700)
        try:
            yield top
        finally:
            remove_tree(top)

    async def _sum_up(self, found: Import, inner: str, reader: ReadBack) -> None:
        info = found.objects[inner]
        read = await reader.checksum(info.key, info.size_bytes)
        uid, gid = self._owner(found.where.namespace)
        found.files[inner] = ObjectFile(
            size_bytes=read.size_bytes,
            checksum=read.full,
            chunks=read.chunks,
            mtime_ns=max(0, int(info.modified * 1e9)),
            mode=0o644,
            uid=uid,
            gid=gid,
        )

    def _owner(self, namespace: str) -> tuple[int, int]:
        """Who has the namespace's directory here gets the files, else the daemon's user."""
        try:
            info = os.lstat(self._registry.root / namespace)
        except OSError:
            return os.geteuid(), os.getegid()
        return (info.st_uid, info.st_gid) if stat.S_ISDIR(info.st_mode) else (os.geteuid(), os.getegid())

    def _node_file(self, found: Import) -> NodeFile:
        where = found.where
        uid, gid = self._owner(where.namespace)
        newest = max(found.objects.values(), key=lambda info: info.modified).modified
        node_file = NodeFile(
            node=NODE,
            namespace=where.namespace,
            step=where.step,
            number=where.number,
            generation=1,
            completed_at=max(0.0, newest),
            marker=found.marker,
            directory=ObjectDirectory(max(0, int(newest * 1e9)), 0o755, uid, gid),
            objects={inner: SentObject(file, found.objects[inner].etag) for inner, file in found.files.items()},
        )
        try:
            # What other nodes would refuse to read must not be committed: say a file and a directory of one name.
            read_manifest(merge([node_file]).to_bytes(), where.namespace, where.step)
        except ObjectCorrupt as error:
            raise CommitRefused(f"{where.step_rel} can't be imported: {error.message}") from None
        return node_file


def _lay_out(top: Path, objects: Mapping[str, ObjectInfo]) -> None:
    """Empty files of the objects' sizes, which take no room."""
    for inner, info in objects.items():
        path = top / inner
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                file.truncate(info.size_bytes)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise CommitRefused(f"can't be imported: {inner!r} is a file and a directory there") from None
