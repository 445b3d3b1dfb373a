"""What a person asks of the cluster: nodes, status, wait, drain, prefetch, verify, repair.

Answers are the `--json` contract of the command line (docs/cli.md). Paths are relative to the mount's root.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from tierfs.catalog.records import FileRecord, NodeRecord
from tierfs.cluster.comparing import Comparing
from tierfs.cluster.counting import Holders
from tierfs.cluster.draining import Left
from tierfs.cluster.repairing import ClusterRepair
from tierfs.errors import CatalogError, NotFound, TierfsError
from tierfs.hydrate.prefetching import Prefetching
from tierfs.persist.reporting import all_of, reporting
from tierfs.persist.selection import Selected, select
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key

if TYPE_CHECKING:
    from tierfs.cluster.tier import ClusterTier

Progress = Callable[[dict[str, Any]], Awaitable[None]]

#: How often something is looked at that tells nobody when it changes.
LOOK_S = 0.2
#: A drain without a time-out of its own ends after so long.
DRAIN_WITHIN_S = 24 * 3600.0
#: Files whose copies are compared side by side.
VERIFIED_AT_ONCE = 4


class ClusterOperations:
    """`mount.cluster_operations.ClusterWork`."""

    def __init__(self, tier: ClusterTier) -> None:
        self._tier = tier
        self._registry = tier.registry

    # --- telling

    def nodes(self) -> dict[str, Any]:
        tier, now = self._tier, time.time()
        found = [self._node(seen.record) for seen in tier.view.nodes.values()]
        known = {node["node"] for node in found}
        if tier.node not in known:
            found.append({**self._node(tier.describe_node()), "state": "joining"})
        found += [
            {
                "node": node,
                "this": False,
                "state": "lost",
                "addresses": [],
                "domain": "",
                "size_bytes": 0,
                "free_bytes": 0,
                "partners": [],
                "version": "",
                "mountpoint": "",
                "transport": "",
                "lost_s": max(0.0, now - since),
            }
            for node, since in tier.membership.lost.items()
            if node not in known
        ]
        return {
            "catalog": tier.settings.catalog,
            "cluster": tier.settings.cluster.name,
            "connected": tier.view.connected,
            "nodes": sorted(found, key=lambda node: str(node["node"])),
        }

    def _node(self, record: NodeRecord) -> dict[str, Any]:
        tier = self._tier
        return {
            "node": record.node,
            "this": record.node == tier.node,
            "state": record.state,
            "addresses": list(record.addresses),
            "domain": record.domain,
            "size_bytes": record.size_bytes,
            "free_bytes": record.free_bytes,
            "partners": list(tier.replicator.groups.partners(record.node, tier.settings.replication.replicas)),
            "version": record.version,
            "mountpoint": record.mountpoint,
            "transport": tier.transport.by(record.node),
            "lost_s": None,
        }

    def status(self) -> dict[str, Any]:
        tier = self._tier
        states = tier.view.states.values()
        return {
            "cluster": tier.settings.cluster.name,
            "node": tier.node,
            "catalog": tier.settings.catalog,
            "connected": tier.view.connected,
            "member": tier.membership.member,
            "nodes": len(tier.view.nodes),
            "lost": sorted(tier.membership.lost),
            "pending": tier.publisher.pending,
            "under_replicated": sum(seen.record.level == "complete" for seen in states),
            "draining": tier.drain.is_draining,
            "pulling": tier.replicator.state().pulling,
            "transport": tier.transport.describe(),
            "bytes_sent": tier.server.bytes_sent,
            "bytes_received": tier.peers.bytes_received,
        }

    def problems(self) -> list[dict[str, str]]:
        tier = self._tier
        found: list[dict[str, str]] = []
        if not tier.view.connected and tier.publisher.pending:
            message = f"the catalogue can't be reached; {tier.publisher.pending} changes are published once it can"
            found.append({"severity": "warning", "message": message, "path": ""})
        if not tier.view.connected and not found:
            message = f"the catalogue {tier.settings.catalog} can't be reached; what is on this node goes on working"
            found.append({"severity": "warning", "message": message, "path": ""})
        found += [{"severity": "error", "message": message, "path": ""} for message in tier.following.problems()]
        found += [
            {
                "severity": "error",
                "message": "it is lost: a file of it has no copy left; `latest` passes it over",
                "path": "/".join(key),
            }
            for key, seen in tier.view.states.items()
            if seen.record.level == "lost" and not tier.is_persisted(key)
        ]
        found += [
            {"severity": "warning", "message": f"no bytes come from the node {node}: {why}", "path": ""}
            for node in sorted(tier.view.nodes)
            if node != tier.node and (why := tier.peers.trouble(node))
        ]
        if message := tier.transport.problem():
            found.append({"severity": "warning", "message": message, "path": ""})
        if without := tier.replicator.state().without_room:
            message = (
                f"{without} files of other nodes have no room here, so their steps stay under-replicated; mount with a "
                f"larger size, or keep fewer steps"
            )
            found.append({"severity": "warning", "message": message, "path": ""})
        return found

    # --- waiting and leaving

    async def wait_replica(self, rel: str, *, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
        """Until the step is replicated. `reached` is False when time ran out. NotFound."""
        if rel:
            await self._registry.cluster.show(rel)
        found = select(self._registry, rel)
        if len(found) != 1 or not found[0].is_named:
            raise NotFound(f"{rel or 'the mount'} is no step; wait for one, such as run1/step_100")
        record = found[0].record
        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")) as scope:
            await reporting(lambda: self._replicated(record), lambda: self._copies_of(record), progress)
        return {"path": record.rel, "level": "replica", "reached": not scope.cancelled_caught}

    async def _replicated(self, record: StepRecord) -> None:
        while True:
            if self._registry.records.get(record.key) is not record:
                raise NotFound(f"{record.rel} was removed")
            described = self._tier.describe(record)["replica"]
            if described["state"] == "replicated":
                return
            if record.is_complete and (described["wanted"] < 2 or not self._tier.has_peers()):
                raise TierfsError(
                    f"{record.rel} gets no copies: there is no other node, or replication.replicas is 1 for it"
                )
            await trio.sleep(LOOK_S)

    def _copies_of(self, record: StepRecord) -> dict[str, Any]:
        described = self._tier.describe(record)["replica"]
        return {"steps_done": int(described["state"] == "replicated"), "steps_total": 1, "path": record.rel}

    async def drain(self, progress: Progress, *, timeout_s: float | None) -> dict[str, Any]:
        """Hand what only this node holds to others; `left` names what is still here alone."""
        most = Left()

        def told(left: Left) -> None:
            nonlocal most
            if left.bytes > most.bytes or left.steps > most.steps:
                most = left

        async def work() -> Left:
            within_s = DRAIN_WITHIN_S if timeout_s is None else timeout_s
            return await self._tier.drain.drain(within_s=within_s, told=told)

        def report() -> dict[str, Any]:
            left = self._tier.drain.left or most
            return {
                "steps_done": max(0, most.steps - left.steps),
                "steps_total": most.steps,
                "bytes": max(0, most.bytes - left.bytes),
                "bytes_total": most.bytes,
                "path": left.paths[0] if left.paths else "",
            }

        left = await reporting(work, report, progress)
        paths = list(left.paths)
        if left.note and not paths and not left.is_nothing:
            paths = [left.note]
        return {
            "steps": max(0, most.steps - left.steps),
            "bytes": max(0, most.bytes - left.bytes),
            "left": paths,
            "bytes_left": left.bytes,
        }

    def stop_draining(self) -> bool:
        """The node stays after all; False where it was not draining."""
        drain = self._tier.drain
        was_draining = drain.is_draining
        drain.stop()
        return was_draining

    # --- bytes

    async def prefetch(self, paths: Sequence[str], *, globs: Sequence[str], progress: Progress) -> dict[str, Any]:
        """See `tierfs.hydrate.prefetching`."""
        return await Prefetching(self._registry, self._tier.hydration).run(paths, globs=globs, progress=progress)

    async def repair(self, rel: str, progress: Progress, *, dry_run: bool) -> dict[str, Any]:
        """Make damaged copies here good from others. See `tierfs.cluster.repairing`."""
        return await ClusterRepair(self._tier).run(rel, progress, dry_run=dry_run)

    async def verify(self, rel: str, progress: Progress) -> dict[str, Any]:
        """Have every holder of each file of the complete steps below the path read it, and compare what it has with
        what was sealed. `files` and `bytes` count copies."""
        chosen: dict[Key, list[Selected]] = {}
        for found in select(self._registry, rel):
            if found.record.is_complete and found.record.manifest.joined:
                chosen.setdefault(found.record.key, []).append(found)
        sums: dict[str, Any] = {"files": 0, "bytes": 0, "bad": [], "unsealed": 0}
        at = [""]

        async def work() -> None:
            for selected in chosen.values():
                record = selected[0].record
                at[0] = record.rel
                try:
                    files = await self._tier.view.files(record.key, record.manifest.generation, fresh=True)
                    holders = Holders(files, await self._tier.view.holdings(record.key), self._tier.view.nodes)
                except CatalogError as error:
                    raise TierfsError(f"{record.rel} can't be verified on other nodes: {error.message}") from None
                jobs = [
                    partial(self._verify_file, record, inner, file, sorted(holders.of(file)), sums)
                    for inner, file in files.files.items()
                    if any(each.holds(inner) for each in selected)
                ]
                await all_of(jobs, at_once=VERIFIED_AT_ONCE)

        await reporting(work, lambda: {"files": sums["files"], "bytes": sums["bytes"], "path": at[0]}, progress)
        sums["bad"].sort(key=lambda bad: (bad["path"], bad["reason"]))
        return sums

    async def _verify_file(
        self, record: StepRecord, inner: str, file: FileRecord, holders: list[str], sums: dict[str, Any]
    ) -> None:
        def bad(reason: str) -> None:
            sums["bad"].append({"path": f"{record.rel}/{inner}", "reason": reason})

        comparing = Comparing(self._tier.copies, self._tier.peers)
        seen = await comparing.now(file, holders)
        expected = await comparing.sealed(record, inner, file, holders, seen)
        if not holders and not record.is_persisted:
            bad("no node holds it any more")
        for node, reason in sorted(seen.failed.items()):
            bad(f"{node} {reason}")
        for node, found in sorted(seen.found.items()):
            sums["files"] += 1
            sums["bytes"] += file.size_bytes
            if expected is None and len(set(seen.found.values())) > 1:
                bad(f"the copy on {node} has the checksum {found}, others differ, and nobody knows which is right")
            elif expected not in (None, found):
                bad(f"the copy on {node} has the checksum {found}, {expected} was sealed; `tierfs repair` it there")
