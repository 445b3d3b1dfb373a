"""A daemon without keeper, control socket and workers: the real channel, file system, steps and hydration.

    python stub_daemon.py FUSE_FD TIER fresh|takeover KIND PASSTHROUGH

Objects lie beside the tier (`stub_objects.py`). What a test wants of it is asked by getxattr(2) on the mount:
`user.test.status`, `user.test.persist:STEP`, `user.test.evict:STEP`, `user.test.hydrate:PATH`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from mount.channel import Channel
from mount.nodes import raise_descriptor_limit
from tests.mount.stub_objects import LocalClient, load_manifest, save_manifest
from tierfs.checksum import checksum_fd
from tierfs.errors import TierfsError
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import ObjectSource
from tierfs.logs import NamespaceLog
from tierfs.persist.object_manifest import ObjectDirectory, ObjectFile, ObjectManifest
from tierfs.ram.tier import RamTier
from tierfs.ram.tmpfs import read_grant
from tierfs.settings import RamSettings, Settings
from tierfs.steps.manifest import FileEntry, Manifest, Persisted
from tierfs.steps.object_tier import NoObjectTier
from tierfs.steps.operations import StepOperations
from tierfs.steps.record import StepRecord
from tierfs.steps.recovery import recover
from tierfs.steps.registry import StepRegistry
from tierfs.steps.tracker import Steps
from tierfs.steps.upkeep import Upkeep


class Objects(NoObjectTier):
    """The object tier of the steps, without its persisting half."""

    def __init__(self, hydration: Hydration) -> None:
        self._hydration = hydration

    def is_stub(self, ino: int) -> bool:
        return self._hydration.is_stub(ino)

    def ram_bytes(self, record: StepRecord) -> int:
        return self._hydration.ram_bytes(record)

    def evict(self, record: StepRecord) -> bool:
        return self._hydration.evict(record)

    def may_leave_ram(self, record: StepRecord, *, in_need: bool = False) -> bool:
        return record.is_persisted

    async def populate(self, record: StepRecord) -> None:
        await self._hydration.populate(record)

    async def hydrate(self, ino: int) -> None:
        await self._hydration.hydrate(ino)


def adopt(registry: StepRegistry, objects: Path) -> None:
    """As the index does: a directory and a record for each step that the tier holds."""
    for path in sorted((objects / "manifests").glob("**/*.json")):
        namespace, step = str(path.parent.relative_to(objects / "manifests")), path.stem
        if (namespace, step) in registry.records:
            continue
        found = load_manifest(objects, namespace, step)
        directory = registry.root / namespace / step
        directory.mkdir(parents=True)
        manifest = Manifest(
            namespace,
            step,
            found.number,
            state="complete",
            completed_at=found.completed_at,
            bytes=found.size_bytes,
            marker=found.marker,
            persisted=Persisted(1, "etag", found.completed_at, found.size_bytes, len(found.files)),
            populated=False,
        )
        record = StepRecord(manifest, directory)
        registry.records[record.key] = record
        registry.save(record)


def persist(registry: StepRegistry, objects: Path, record: StepRecord) -> None:
    """Send a complete step, all at once."""
    files = {}
    for inner in list(record.manifest.files):
        source, target = record.directory / inner, objects / "data" / record.rel / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        with source.open("rb") as file:
            summed = checksum_fd(file.fileno())
        info = source.lstat()
        files[inner] = ObjectFile(
            info.st_size, summed.full, summed.chunks, info.st_mtime_ns, info.st_mode & 0o777, info.st_uid, info.st_gid
        )
        record.manifest.files[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino, summed.text, True)
    manifest = record.manifest
    directory = ObjectDirectory(record.directory.stat().st_mtime_ns, 0o755, 0, 0)
    save_manifest(
        objects,
        ObjectManifest(
            *record.key, manifest.number, manifest.generation, time.time(), manifest.marker, files, directory
        ),
    )
    manifest.persisted = Persisted(manifest.generation, "etag", time.time(), manifest.bytes, len(files))
    registry.save(record)


def main() -> None:
    fuse_fd, base, mode, kind, passthrough = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    raise_descriptor_limit()
    channel = Channel(
        fuse_fd,
        base / "channel.state",
        kind=kind,
        passthrough=passthrough == "on",
        resend=True,
        takeover=mode == "takeover",
    )
    import pyfuse3
    import trio

    from mount.filesystem import TierFs

    objects = base.parent / "objects"
    config = json.loads((base.parent / "config.json").read_text())
    settings = Settings(ram=RamSettings(ballast="off"), size=config["size"], debug_crash_at=config.get("crash_at", ""))
    settings.retention.ram_steps = config.get("ram_steps", 0)
    tier = RamTier(base, settings.ram, settings.size, read_grant(base))
    registry = StepRegistry(tier, settings, NamespaceLog(base.parent / "log.d"))
    registry.open_handles = lambda nodeid: channel.handles(nodeid).opens
    tier.on_pressure = registry.make_room
    recover(registry)

    async def manifest_of(namespace: str, step: str) -> ObjectManifest:
        await trio.lowlevel.checkpoint()
        return load_manifest(objects, namespace, step)

    hydration = Hydration(registry, ObjectSource(LocalClient(objects), manifest_of))  # type: ignore[arg-type]
    hydration.serve_objects(manifest_of)
    hydration.scan()
    registry.object_tier = Objects(hydration)
    adopt(registry, objects)
    steps = Steps(registry)
    operations = StepOperations(registry)

    class Files(TierFs):
        async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
            if not name.startswith(b"user.test."):
                return await super().getxattr(inode, name, ctx)
            what, _, rel = os.fsdecode(name).removeprefix("user.test.").partition(":")
            try:
                return json.dumps(await self.asked(what, rel)).encode()
            except TierfsError as error:
                self.log.warning("asked for %s: %s", name, error.message)
                raise pyfuse3.FUSEError(error.errno) from None

        async def asked(self, what: str, rel: str) -> Any:
            if what == "status":
                return {
                    "pid": os.getpid(),
                    "counters": channel.counters(),
                    "passthrough": channel.info().passthrough,
                    "free": tier.usage().free_bytes,
                    "stubs": len(hydration.table),
                    "handles": {n: tuple(h) for n, _, h in channel.open_nodes()},
                    "problems": registry.problems,
                }
            if what == "hydrated":
                return hydration.hydrated_bytes((registry.root / rel).lstat().st_ino)
            if what == "hydrate":
                return await hydration.hydrate((registry.root / rel).lstat().st_ino)
            if what == "commit":
                return await operations.commit(rel)
            record = operations.step_at(rel)
            if what == "persist":
                return persist(registry, objects, record)
            if what == "evict":
                return await operations.evict(rel, force=False)
            if what == "record":
                manifest = record.manifest
                return {"state": record.shown_state, "note": manifest.note, "populated": manifest.populated,
                        "checksums": {inner: entry.checksum for inner, entry in manifest.files.items()}}  # fmt: skip
            raise AssertionError(what)

    files = Files(tier, channel, steps, hydration=hydration)
    if mode == "takeover":
        steps.resume(nodeid for nodeid, _, handles in channel.open_nodes() if handles.writers)
        files.resume_open_files()

    async def serve() -> None:
        pyfuse3.init(files, channel.device(), set())
        async with trio.open_nursery() as nursery:
            await nursery.start(tier.run)
            await nursery.start(Upkeep(registry).run)
            await nursery.start(hydration.run)
            await pyfuse3.main(min_tasks=1, max_tasks=1000)
            nursery.cancel_scope.cancel()
        pyfuse3.close(unmount=False)

    trio.run(serve)


if __name__ == "__main__":
    main()
