"""What a running instance answers over its control socket: the operations behind the command line.

Answers are the `--json` contract of the command line (docs/cli.md).
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tierfs
from mount.cluster_operations import ClusterControl, ClusterWork
from mount.disk_operations import DiskControl, DiskWork
from mount.leaving import Leaving
from mount.object_operations import ObjectControl, ObjectWork, Tell, path_of, seconds_of, telling
from mount.runtime import Instance, MountRecord, read_process
from tierfs.errors import NotFound, PathRefused
from tierfs.persist.selection import select
from tierfs.settings_sources import describe_settings
from tierfs.steps.names import safe_relative
from tierfs.steps.operations import StepOperations
from tierfs.steps.report import describe_namespaces, describe_step, describe_tiers, step_bytes, step_tier

if TYPE_CHECKING:
    from mount.channel import Channel
    from mount.control import Operation, Progress
    from mount.gateway_status import GatewayStatus
    from tierfs.steps.record import StepRecord
    from tierfs.steps.registry import StepRegistry

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class ShownPages(Protocol):
    """What is shown by HTTP: where, and what is wrong with it (as `status` lists problems)."""

    def urls(self) -> list[str]: ...

    def problems(self) -> list[dict[str, str]]: ...


class Operations:
    """The operations of one instance, by name in `table()`."""

    def __init__(
        self,
        instance: Instance,
        record: MountRecord,
        registry: StepRegistry,
        channel: Channel,
        *,
        path_of: Callable[[int], str | None],
        objects: ObjectWork | None = None,
        cluster: ClusterWork | None = None,
        disk: DiskWork | None = None,
        leaving: Leaving | None = None,
        pages: ShownPages | None = None,
        gateway: GatewayStatus | None = None,
    ) -> None:
        """`path_of` turns a node id into a path below the mount's root, where it has one; `objects` is there when
        there is an object tier, `cluster` when there may be other nodes, `disk` when there is a local-disk tier.
        `pages` are what it shows by HTTP."""
        self._instance = instance
        self._record = record
        self._registry = registry
        self._channel = channel
        self._path_of = path_of
        self._steps = StepOperations(registry)
        self._leaving = leaving or Leaving()
        self._pages = pages
        self._gateway = gateway
        self._objects = ObjectControl(objects, self._leaving)
        self._cluster = ClusterControl(cluster, self._as_node)
        self._disk = DiskControl(disk)
        self._started = time.monotonic()

    def table(self) -> dict[str, Operation]:
        """Name → operation, as `ControlServer` takes them."""
        return {
            "status": self.status,
            "ls": self.ls,
            "stat": self.stat,
            "config": self.config,
            "commit": self.commit,
            "pin": self.pin,
            "unpin": self.unpin,
            "evict": self.evict,
            "rm": self.rm,
            "verify": self.verify,
            **self._objects.table(),
            **self._cluster.table(),
            "wait": self.wait,
            "prefetch": self.prefetch,
            "repair": self.repair,
        }

    async def status(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        usage = self._registry.tier.usage()
        info = self._channel.info()
        keeper = read_process(self._instance.keeper_pid)
        grant = self._registry.tier.grant
        namespaces = await describe_namespaces(self._registry)
        objects = await self._objects.status()
        problems = self._problems(objects)
        return {
            "name": self._instance.name,
            "mountpoint": self._record.mountpoint,
            "mounted": self.is_mounted,
            "version": tierfs.__version__,
            "daemon_pid": os.getpid(),
            "keeper_pid": keeper.pid if keeper is not None else None,
            "passthrough": info.passthrough,
            "channel": {
                "kind": info.kind,
                "resend": info.resend,
                "reason": info.reason,
                "proto": f"{info.proto[0]}.{info.proto[1]}",
            },
            "takeovers": self._channel.takeovers(),
            "requests": self._channel.counters(),
            "uptime_s": time.monotonic() - self._started,
            "ram": {
                "path": str(self._registry.tier.path),
                "size_bytes": usage.size_bytes,
                "used_bytes": usage.used_bytes,
                "free_bytes": usage.free_bytes,
                "ballast_bytes": usage.ballast_bytes,
                "ballast_target_bytes": usage.ballast_target_bytes,
                "huge_pages": grant.huge_pages if grant is not None else "never",
                "noswap": grant.noswap if grant is not None else False,
            },
            "object": objects,
            "disk": self._disk.status(),
            "cluster": self._cluster.status(),
            "pages": self._pages.urls() if self._pages is not None else [],
            "gateway": self._gateway.describe() if self._gateway is not None else None,
            "namespaces": _with_durability(namespaces, objects),
            "steps": [step for namespace in namespaces for step in namespace["steps"]],
            "growing": self._growing(),
            "problems": problems,
        }

    @property
    def is_mounted(self) -> bool:
        """False while an unmounted daemon still sends what is owed."""
        return not self._leaving.is_sending

    async def problems(self) -> list[dict[str, str]]:
        """Those of `status`, without what else that takes."""
        return self._problems(await self._objects.status())

    def _problems(self, objects: dict[str, Any] | None) -> list[dict[str, str]]:
        found = [
            {"severity": each.severity, "message": each.message, "path": each.path}
            for each in self._registry.tier.problems()
        ]
        found += _object_problems(objects) + self._cluster.problems() + self._disk.problems()
        found += self._pages.problems() if self._pages is not None else []
        if read_process(self._instance.keeper_pid) is None:
            found.append(
                {
                    "severity": "warning",
                    "message": "no keeper watches this mount: it works, but would not outlive its daemon; "
                    f"`tierfs mount {self._record.mountpoint}` starts one without disturbing anybody",
                    "path": "",
                }
            )
        return found + self._registry.problems

    def _growing(self) -> list[dict[str, Any]]:
        return [
            {"path": self._name_of(nodeid), "size_bytes": shard.size_bytes, "since": shard.since}
            for nodeid, shard in self._registry.tier.growing.items()
        ]

    def _name_of(self, nodeid: int) -> str:
        with suppress(OSError):
            path = self._path_of(nodeid)
            if path is not None:
                return path
        return f"inode {nodeid} (removed)"

    async def ls(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        rel, path = self._place(arguments)
        await self._populate(rel)
        if not stat.S_ISDIR(self._lstat(rel, path).st_mode):
            raise PathRefused(f"{rel} is not a directory; `tierfs stat` describes a file")
        entries = []
        for name in sorted(os.listdir(path)):
            try:
                entries.append(self._entry(f"{rel}/{name}" if rel else name, path / name))
            except NotFound:
                continue
        return {"path": rel, "entries": entries}

    def _entry(self, rel: str, path: Path) -> dict[str, Any]:
        info = self._lstat(rel, path)
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None else None
        is_step = record is not None and where is not None and where.inner == ""
        size = info.st_size
        level, in_object, on_disk = "", None, None
        if is_step and record is not None:
            size = step_bytes(record)
            described = describe_tiers(self._registry, record)
            level, in_object, on_disk = described["level"], described["object"], described["disk"]
        elif stat.S_ISDIR(info.st_mode):
            size = 0
        elif stat.S_ISREG(info.st_mode):
            level = "ram"
            if self._registry.object_tier.is_stub(info.st_ino):
                on_nodes = self._registry.cluster.shares and not (record is not None and record.is_persisted)
                level = "replica" if on_nodes else "object"
                if record is not None and self._registry.object_tier.on_disk(record):
                    level = "disk"
        return {
            "name": path.name,
            "type": _KINDS.get(stat.S_IFMT(info.st_mode), "other"),
            "size_bytes": size,
            "state": record.shown_state if record is not None else "",
            "step": is_step,
            **_part_and_archive(self._registry, record if is_step else None),
            "level": level,
            "object": in_object,
            "disk": on_disk,
            "mtime": info.st_mtime,
        }

    async def stat(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        rel, path = self._place(arguments)
        await self._populate(rel)
        info = self._lstat(rel, path)
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None else None
        entry = record.manifest.files.get(where.inner) if record is not None and where is not None else None
        answer = self._entry(rel, path) if rel else {"type": "directory", "size_bytes": 0, "state": "", "level": ""}
        described = describe_step(self._registry, record) if record is not None else None
        return {
            "path": rel,
            "type": answer["type"],
            "size_bytes": answer["size_bytes"],
            "mode": stat.S_IMODE(info.st_mode),
            "uid": info.st_uid,
            "gid": info.st_gid,
            "mtime": info.st_mtime,
            "state": answer["state"],
            "tier": _tier_of(answer, described),
            "level": answer["level"],
            "generation": record.generation_of(where.inner) if record is not None and where is not None else None,
            "checksum": entry.checksum if entry is not None else None,
            "sealed": entry.sealed if entry is not None else False,
            "step": described,
        }

    async def config(self, arguments: Mapping[str, Any], progress: Progress) -> list[dict[str, Any]]:
        return describe_settings(self._registry.settings)

    async def commit(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        return await self._steps.commit(_text(arguments, "path"))

    async def pin(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        return await self._steps.pin(_text(arguments, "path"), pinned=True)

    async def unpin(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        return await self._steps.pin(_text(arguments, "path"), pinned=False)

    async def evict(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        return await self._steps.evict(_text(arguments, "path"), force=arguments.get("force") is True)

    async def rm(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        return await self._steps.remove(_text(arguments, "path"), recursive=arguments.get("recursive") is True)

    async def verify(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """What the tiers asked for hold of the path. `all` adds them up, and says of each bad file where it is bad."""
        path, tier = _text(arguments, "path"), arguments.get("tier", "ram")
        if tier not in ("ram", "disk", "replica", "object", "all"):
            raise PathRefused(f"{tier!r} is no tier; there are ram, disk, replica, object and all")
        # Refuses now rather than after the RAM tier was read.
        if tier == "replica":
            _ = self._cluster.work
        elif tier == "disk":
            _ = self._disk.work
        elif tier == "object" or (tier == "all" and self._cluster.is_alone and not self._disk.is_there):
            _ = self._objects.work

        async def verified(tell: Tell) -> dict[str, Any]:
            sums: dict[str, Any] = {"files": 0, "bytes": 0, "bad": [], "unsealed": 0, "stubs": 0, "not_persisted": 0}
            if tier in ("ram", "all"):
                _add_up(sums, "ram", await self._steps.verify(path, tell))
            if tier == "disk" or (tier == "all" and self._disk.is_there):
                _add_up(sums, "disk", await self._disk.verify(path, tell))
            if tier == "replica" or (tier == "all" and not self._cluster.is_alone):
                _add_up(sums, "replica", await self._cluster.verify(path, tell))
            if tier == "object" or (tier == "all" and self._objects.is_there):
                try:
                    found = await self._objects.verify(path, tell)
                except NotFound:
                    if tier == "object":
                        raise
                    found = {"bad": [], "unsealed": len(select(self._registry, path))}
                _add_up(sums, "object", {**found, "unsealed": 0, "not_persisted": found["unsealed"]})
            return sums

        return await telling(progress, verified)

    async def wait(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """For the level `replica` other nodes are needed, for `disk` a disk tier, for `object` an object tier."""
        level = arguments.get("level")
        if level == "replica":
            return await self._cluster.wait(arguments, progress)
        if level == "disk":
            return await self._disk.wait(arguments, progress)
        if level == "ram" and not self._objects.is_there:
            path, timeout_s = path_of(arguments), seconds_of(arguments)
            return await telling(progress, lambda tell: self._steps.wait(path, tell, timeout_s=timeout_s))
        return await self._objects.wait(arguments, progress)

    async def prefetch(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """From the disk, the object tier or other nodes: one of them has to be there."""
        if self._disk.is_there and not self._objects.is_there and self._cluster.is_alone:
            return await self._disk.prefetch(arguments, progress)
        if self._objects.is_there or self._cluster.is_alone:
            return await self._objects.prefetch(arguments, progress)
        return await self._cluster.prefetch(arguments, progress)

    async def repair(self, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        """This node's copies by those of others, then what is in the object tier: one answer for both."""
        if self._cluster.is_alone:
            return await self._objects.repair(arguments, progress)
        path, dry_run = path_of(arguments), arguments.get("dry_run") is True

        async def repaired(tell: Tell) -> dict[str, Any]:
            found = await self._cluster.repair(path, tell, dry_run=dry_run)
            if not self._objects.is_there:
                return found
            of_objects = await self._objects.work.repair(path, dry_run=dry_run, progress=tell)
            checked = found["checked"] + of_objects["checked"] - of_objects.get("shared", 0)
            return {"checked": checked, "actions": found["actions"] + of_objects["actions"]}

        return await telling(progress, repaired)

    def _as_node(self) -> dict[str, Any]:
        """This node, where it is alone, as `tierfs nodes` lists it."""
        usage = self._registry.tier.usage()
        return {
            "node": self._registry.settings.node or self._instance.name,
            "this": True,
            "state": "serving",
            "addresses": [],
            "domain": self._registry.settings.cluster.domain,
            "size_bytes": usage.size_bytes,
            "free_bytes": usage.free_bytes,
            "partners": [],
            "version": tierfs.__version__,
            "mountpoint": self._record.mountpoint,
            "lost_s": None,
        }

    async def _populate(self, rel: str) -> None:
        """Makes the stubs of what is looked into, of the object tier and of other nodes, as the file system does."""
        if self._registry.cluster.shares:
            if rel:  # the mount's root is always there
                await self._registry.cluster.show(rel)
            if (self._registry.root / rel).is_dir():
                await self._registry.cluster.show_listing(rel)
        where = self._registry.names.locate(rel)
        record = self._registry.at(where) if where is not None else None
        if record is not None and not record.manifest.populated and not self._registry.is_shared(record):
            await self._registry.object_tier.populate(record)

    def _place(self, arguments: Mapping[str, Any]) -> tuple[str, Path]:
        rel = _text(arguments, "path")
        if rel:
            safe_relative(rel)
        return rel, self._registry.root / rel

    def _lstat(self, rel: str, path: Path) -> os.stat_result:
        try:
            return path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no {rel or 'root'} in {self._record.mountpoint}") from None


def _part_and_archive(registry: StepRegistry, record: StepRecord | None) -> dict[str, Any]:
    """What else `ls` tells of a step in the object tier; both null for what is none."""
    described = registry.object_tier.describe(record) if record is not None else {}
    return {name: described.get(name) for name in ("part", "archive")}


def _text(arguments: Mapping[str, Any], key: str) -> str:
    value = arguments.get(key)
    if not isinstance(value, str):
        raise PathRefused(f"the request lacks {key!r}")
    return value


def _add_up(sums: dict[str, Any], tier: str, found: Mapping[str, Any]) -> None:
    sums["bad"] += [{**bad, "tier": tier} for bad in found["bad"]]
    for key in sums:
        if key != "bad":
            sums[key] += found.get(key, 0)


def _tier_of(entry: Mapping[str, Any], step: Mapping[str, Any] | None) -> str:
    """Where the bytes of a file are, or of the step that a directory is, or is in."""
    if entry["type"] == "file":
        return str(entry["level"])
    return "ram" if step is None else step_tier(step)


def _object_problems(objects: dict[str, Any] | None) -> list[dict[str, str]]:
    """Those of the object tier, which go to the others; `objects` keeps none of the list it may have brought."""
    if objects is None:
        return []
    found: list[dict[str, str]] = list(objects.pop("problems", []))
    problem = objects.get("problem") or ""
    if problem:
        stuck = not objects.get("reachable", True) or any(each["state"] == "waiting" for each in objects["sending"])
        told = [each for each in found if problem in each["message"]]
        if not told:
            told = [{"severity": "", "message": f"the object tier {objects['url']}: {problem}", "path": ""}]
            found = told + found
        for each in told:
            each["severity"] = "error" if stuck else "warning"
    return found


def _with_durability(namespaces: list[dict[str, Any]], objects: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Each namespace with its newest persisted step, its age and the bytes that are owed; null without a tier."""
    known = objects.pop("namespaces", {}) if objects is not None else {}
    missing = {"newest_persisted": None, "newest_persisted_age_s": None, "bytes_owed": None if objects is None else 0}
    return [{**namespace, **missing, **known.get(namespace["namespace"], {})} for namespace in namespaces]
