"""Repair: each file of a persisted step has two copies at most, in RAM and in the object tier, and one that is good
makes the other good again.

Everything is read first, then mended. What is decided is said even where nothing is done (`dry_run`).

Of a step that other nodes share, RAM was looked at before (`tierfs.cluster.repairing`), and each node sends again what
it owns.
"""

from __future__ import annotations

import logging
import os
import stat
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trio

from tierfs.checksum import FileChecksum, checksum_fd, to_text
from tierfs.errors import NoRoom, ObjectCorrupt, StepBusy, TierfsError
from tierfs.objects.client import ObjectClient
from tierfs.persist.layout import file_key, manifest_key
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest
from tierfs.persist.reading_back import ReadBack
from tierfs.persist.reporting import Progress, reporting
from tierfs.persist.selection import select
from tierfs.persist.verifying import Examined, examine, examine_files
from tierfs.steps.manifest import FileEntry
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

if TYPE_CHECKING:
    from tierfs.hydrate.hydration import Hydration
    from tierfs.persist.index import ObjectIndex
    from tierfs.persist.persister import Persister

log = logging.getLogger("tierfs.persist")

#: What is added to a marker's name so that a step that lost a file is not taken for whole again.
LOST_SUFFIX = ".lost"

Action = Literal["sent again", "fetched again", "lost", "left"]


def decide(*, ram: str | None, object_reason: str, in_ram: bool) -> tuple[Action, str] | None:
    """What is to be done about one file, and why. `ram` says what is wrong with the copy in RAM ("" nothing, None: it
    is a stub or not there), `object_reason` with the one in the object tier. Pure."""
    if not object_reason:
        return ("fetched again", f"the copy in RAM {ram}") if ram else None
    if in_ram and not ram:
        return "sent again", object_reason
    here = f"; the copy in RAM {ram}" if ram else "; RAM has no copy"
    return "lost", object_reason + here


@dataclass
class Plan:
    """What is to be done about one step. `by_file` is by the path inside it."""

    record: StepRecord
    examined: Examined
    manifest: ObjectManifest | None
    by_file: dict[str, tuple[Action, str]] = field(default_factory=dict)
    #: The commit is damaged, and this node has a good copy of it.
    commit_again: str = ""

    def of(self, action: Action) -> list[str]:
        return sorted(inner for inner, (wanted, _) in self.by_file.items() if wanted == action)


class Repair:
    """One run of the command. `actions` are for its answer."""

    def __init__(
        self,
        registry: StepRegistry,
        client: ObjectClient,
        index: ObjectIndex,
        persister: Persister,
        hydration: Hydration,
    ) -> None:
        self._registry = registry
        self._client = client
        self._index = index
        self._persister = persister
        self._hydration = hydration
        self._reader = ReadBack(client)
        self._at = ""
        self.checked = 0
        self.shared = 0  # of those checked, which other nodes share
        self.actions: list[dict[str, str]] = []

    async def run(self, rel: str, *, dry_run: bool, progress: Progress) -> dict[str, Any]:
        """Every persisted step below the path. Raises NotFound, NoRoom, ObjectError where the store can't be asked."""
        records = [found.record for found in select(self._registry, rel)]
        persisted = [record for record in records if record.manifest.persisted is not None and record.is_complete]
        total = sum(record.manifest.bytes for record in persisted)

        async def work() -> None:
            with self._registry.using(persisted):
                for record in persisted:
                    self._at = record.rel
                    await self._repair(record, dry_run=dry_run)
                    self.checked += 1
                    self.shared += self._registry.is_shared(record)

        await reporting(
            work,
            lambda: {
                "steps": self.checked,
                "steps_total": len(persisted),
                "bytes": self._reader.passed_bytes,
                "bytes_total": total,
                "path": self._at,
            },
            progress,
        )
        shared = {"shared": self.shared} if self.shared else {}
        return {"checked": self.checked, **shared, "actions": self.actions}

    async def _repair(self, record: StepRecord, *, dry_run: bool) -> None:
        plan = await self._plan(record, dry_run=dry_run)
        if plan is None:
            return
        for inner, (action, reason) in sorted(plan.by_file.items()):
            self._tell(f"{record.rel}/{inner}", action, reason)
        if plan.commit_again:
            self._tell(record.rel, "sent again", plan.commit_again)
        lost = plan.of("lost")
        if lost:
            self._tell(
                record.rel,
                "withdrawn",
                f"it lacks {', '.join(lost[:4])}, so it is no longer complete, nor committed in the object tier; load "
                f"an older step, and remove this one once nothing of it is wanted",
            )
        if dry_run:
            return
        if lost:
            await self._withdraw(plan, lost)
            return
        for inner in plan.of("fetched again"):
            await self._fetch_again(plan, inner)
        if plan.of("sent again"):
            await self._send_again(plan)
        elif plan.commit_again and plan.manifest is not None:
            await self._commit_again(record, plan.manifest)
        if plan.by_file or plan.commit_again:
            self._registry.clear_problems(record.rel)

    def _tell(self, path: str, action: str, reason: str) -> None:
        self.actions.append({"path": path, "action": action, "reason": reason})
        log.warning("repair: %s: %s, since it %s", path, action, reason, extra={"tier": "object"})

    # --- looking

    async def _plan(self, record: StepRecord, *, dry_run: bool) -> Plan | None:
        """None where the step is in order, or changed while it was looked at."""
        before = record.manifest.persisted
        examined = await examine(self._client, *record.key, self._reader)
        plan = Plan(record, examined, examined.manifest)
        if examined.manifest is None:
            kept = self._index.cache.load(record.key)
            if kept is not None:
                plan.manifest = kept[1]
                plan.examined = await examine_files(self._client, kept[1], self._reader)
                plan.commit_again = examined.manifest_reason
        manifest = plan.manifest
        # A file that is not in the manifest was not to be persisted.
        names = manifest.files.keys() if manifest is not None else record.manifest.files.keys()
        for inner in sorted(names):
            entry = record.manifest.files.get(inner)
            in_ram = entry is not None and not self._hydration.is_stub(entry.ino)
            of_object = manifest.files[inner] if manifest is not None else None
            ram = await self._why_ram_bad(record, inner, entry, of_object) if entry is not None and in_ram else None
            object_reason = plan.examined.bad.get(inner, "") if manifest is not None else examined.manifest_reason
            if self._registry.is_shared(record):
                is_known = examined.manifest is not None or manifest is not None
                decided = await self._decide_shared(record, inner, ram, object_reason if is_known else "", dry_run)
            else:
                decided = decide(ram=ram, object_reason=object_reason, in_ram=in_ram)
            if decided is not None:
                plan.by_file[inner] = decided
        if record.manifest.persisted != before or not record.is_persisted:
            return None
        return plan

    async def _decide_shared(
        self, record: StepRecord, inner: str, ram: str | None, object_reason: str, dry_run: bool
    ) -> tuple[Action, str] | None:
        """What is to be done about what the object tier has. Other nodes may have the bytes that RAM lacks here."""
        if not object_reason:
            return None
        if not self._registry.cluster.owns(record, inner):
            return "left", f"{object_reason}; another node sent it: repair there"
        if ram:
            return "left", f"{object_reason}; the copy in RAM {ram}"
        entry = record.manifest.files.get(inner)
        if ram is None and entry is not None and not dry_run:
            try:
                await self._hydration.hydrate(entry.ino)
            except (TierfsError, OSError) as error:
                return "lost", f"{object_reason}; RAM has no copy, and nobody gives it: {error}"
        return "sent again", object_reason

    async def _why_ram_bad(self, record: StepRecord, inner: str, entry: FileEntry, of_object: ObjectFile | None) -> str:
        """What is wrong with the copy in RAM; "" where nothing is, or nobody can tell."""
        try:
            read = await trio.to_thread.run_sync(_checksum_of, record.directory / inner, entry)
        except OSError as error:
            return f"can't be read: {error.strerror}"
        if read is None or record.manifest.files.get(inner) is not entry or inner in record.open_names():
            return ""  # written again meanwhile
        wanted = entry.checksum or (to_text(of_object.checksum) if of_object is not None else read.text)
        return "" if read.text == wanted else f"has the checksum {read.text}, {wanted} was sealed"

    # --- mending

    async def _commit_again(self, record: StepRecord, manifest: ObjectManifest) -> None:
        """Put this node's copy of the commit over the damaged one."""
        etag = await self._client.put(manifest_key(*record.key), manifest.to_bytes())
        self._index.committed(manifest, etag)
        if record.manifest.persisted is not None:
            record.manifest.persisted = replace(record.manifest.persisted, etag=etag)
            self._registry.save_or_later(record)

    async def _send_again(self, plan: Plan) -> None:
        """The step is withdrawn, and committed again once what is damaged was sent again.

        The damaged objects go first: in its size and with its ETag, such a one looks as if it were sent already.
        """
        record = plan.record
        async with record.lock:  # nothing is sent of it meanwhile
            record.manifest.persisted = None
            record.manifest.owed = "demand"
            self._registry.save_or_later(record)
            await self._client.delete([manifest_key(*record.key)])
            await self._client.delete([file_key(*record.key, inner) for inner in plan.of("sent again")])
        self._persister.owe(record, "demand")
        await self._persister.wait_persisted(record)

    async def _fetch_again(self, plan: Plan, inner: str) -> None:
        """The damaged file in RAM is replaced by what the object tier has. Who has it open keeps what it has."""
        record, manifest = plan.record, plan.manifest
        entry = record.manifest.files.get(inner)
        if manifest is None or entry is None:
            return
        if inner in record.open_names():
            raise StepBusy(f"{record.rel}/{inner} is open for writing; close it, and repair again")
        of_object = manifest.files[inner]
        lacking = of_object.size_bytes - self._registry.tier.usage().free_bytes
        if lacking > 0 and not self._registry.make_room(lacking):
            raise NoRoom(
                f"there is no room in the RAM tier to fetch {record.rel}/{inner} again beside its damaged copy; evict "
                f"steps, and repair again",
                needed_bytes=of_object.size_bytes,
                free_bytes=self._registry.tier.usage().free_bytes,
            )
        path = record.directory / inner
        # What lies here and no manifest names is removed by the next daemon, if this one dies.
        scratch = self._registry.tier.generations / f"repair.{uuid.uuid4().hex}"
        fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            await self._read_whole(file_key(*record.key, inner), of_object, manifest.chunk_bytes, fd)
            before = os.lstat(path)
            os.fchown(fd, before.st_uid, before.st_gid)
            os.fchmod(fd, stat.S_IMODE(before.st_mode))
            os.utime(fd, ns=(before.st_atime_ns, entry.mtime_ns))
            if record.manifest.files.get(inner) is not entry or inner in record.open_names():
                raise StepBusy(f"{record.rel}/{inner} was written meanwhile; repair again")
            scratch.rename(path)
            ino = os.fstat(fd).st_ino
        finally:
            os.close(fd)
            scratch.unlink(missing_ok=True)
        text = to_text(of_object.checksum)
        record.manifest.files[inner] = FileEntry(of_object.size_bytes, entry.mtime_ns, ino, text, True)
        self._registry.save_or_later(record)
        self._registry.invalidate_inside(record, inner)

    async def _read_whole(self, key: str, file: ObjectFile, chunk_bytes: int, fd: int) -> None:
        os.ftruncate(fd, file.size_bytes)
        for at, wanted in enumerate(file.chunks):
            offset = at * chunk_bytes
            found = await self._client.read_range(key, offset, min(chunk_bytes, file.size_bytes - offset), fd)
            if found != wanted:
                raise ObjectCorrupt(f"{key} came with other bytes than were committed, at {offset}; repair again")

    async def _withdraw(self, plan: Plan, lost: list[str]) -> None:
        """The step is whole nowhere: it is no longer committed, nor complete here. What is good of it stays."""
        record = plan.record
        await self._client.delete([manifest_key(*record.key)])
        manifest = record.manifest
        manifest.persisted = None
        manifest.owed = ""
        if self._registry.is_shared(
            record
        ):  # all nodes see what of it is left; the catalogue says when a file has no holder
            self._registry.save_or_later(record)
            return
        if not manifest.populated:
            self._registry.remove(record)  # only a name here
            return
        manifest.state = "writing"
        manifest.completed_at = None
        manifest.note = f"no longer complete: {', '.join(lost[:4])} lost, in RAM and in the object tier"
        for inner in list(manifest.files):
            marker = self._registry.rules.match(inner)
            if marker is not None and marker.directory == "":
                # Whoever loads must not find it, and it must not be judged whole again by it.
                path = record.directory / inner
                path.rename(path.with_name(path.name + LOST_SUFFIX))
                self._registry.invalidate_inside(record, inner)
                self._registry.invalidate_inside(record, inner + LOST_SUFFIX)
        manifest.files = record.scan()
        manifest.added.clear()
        manifest.marker = None
        record.touch()
        self._registry.save_or_later(record)
        self._registry.problem("error", f"{record.rel} is {manifest.note}", record.rel)
        self._registry.lines.write(manifest.namespace, manifest.note, level="ERROR", step=manifest.number)
        self._registry.update_latest(manifest.namespace)


def _checksum_of(path: Path, entry: FileEntry) -> FileChecksum | None:
    """Of the inode that was sealed, whatever its size and times are now: what is damaged may have others.

    None where the name has another inode."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return checksum_fd(fd) if os.fstat(fd).st_ino == entry.ino else None
    finally:
        os.close(fd)
