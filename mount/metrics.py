"""Reads the figures of a running daemon, for Prometheus; changes nothing and counts nothing but its own time.

Everything is read in the trio thread, where it belongs, with a checkpoint after each few files, so that no request of
the kernel waits for a scrape. What each figure means is in `mount.metrics_catalogue`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import trio

import tierfs
from mount.figures import Figures
from mount.log_counts import LogCounts
from mount.request_times import RequestTimes
from tierfs.steps.news import EVENT_KINDS, Event
from tierfs.steps.record import StepRecord
from tierfs.transport.verbs import Fallback
from tierfs.watch.histogram import Histogram

if TYPE_CHECKING:
    from mount.channel import Channel
    from tierfs.cluster.tier import ClusterTier
    from tierfs.disk.tier import DiskTier
    from tierfs.hydrate.hydration import Hydration
    from tierfs.objects.pool import WorkerPool
    from tierfs.persist.tier import ObjectSteps
    from tierfs.steps.registry import StepRegistry
    from tierfs.watch.telling import Telling

LEVEL_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
SCRAPE_BOUNDS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)
STATES = ("writing", "complete", "replicated", "persisted", "lost")
#: Files that are looked at before others have their turn: about 1 ms.
FILES_AT_ONCE = 2000
_SEVERITIES = ("warning", "error")


@dataclass
class Sources:
    """Where the figures are."""

    name: str
    mountpoint: str
    node: str
    registry: StepRegistry
    channel: Channel
    times: RequestTimes
    logged: LogCounts
    telling: Telling
    hydration: Hydration | None = None
    workers: WorkerPool | None = None
    objects: ObjectSteps | None = None
    cluster: ClusterTier | None = None
    disk: DiskTier | None = None


@dataclass
class _Namespace:
    """What was summed up of one namespace. Times are Unix; `newest` by the tier that the step is in."""

    states: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    newest: dict[str, float] = field(default_factory=dict)
    newest_step: tuple[int, float] | None = None
    begun_at: float = float("inf")
    owed_bytes: int = 0
    lacking: int = 0
    lacking_since: float | None = None


class Metrics:
    """Figures of one daemon. Events are to be given to `seen` as they happen."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._began_at = time.time()
        self._levels: dict[tuple[str, str], Histogram] = {}
        self._scrapes = Histogram(SCRAPE_BOUNDS_S)

    def seen(self, event: Event) -> None:
        seconds = event.facts.get("seconds")
        if event.kind == "level" and seconds is not None:
            key = event.namespace, str(event.facts["level"])
            self._levels.setdefault(key, Histogram(LEVEL_BOUNDS_S)).observe(seconds)

    async def figures(self, *, problems: Mapping[str, int], is_mounted: bool) -> Figures:
        """`problems` are those that `tierfs status` lists, by severity."""
        began = time.monotonic()
        found = Figures()
        await self._steps(found)
        self._ram(found)
        self._fuse(found)
        self._hydration(found)
        if self._from.workers is not None and self._from.objects is not None:
            self._objects(found, self._from.workers, self._from.objects)
        if self._from.disk is not None:
            self._disk(found, self._from.disk)
        if self._from.cluster is not None:
            self._nodes(found, self._from.cluster)
        self._daemon(found, problems, is_mounted=is_mounted)
        self._scrapes.observe(time.monotonic() - began)
        found.put_histogram("tierfs_scrape_seconds", self._scrapes)
        return found

    # --- steps

    async def _steps(self, found: Figures) -> None:
        registry = self._from.registry
        summed: dict[str, _Namespace] = {}
        looked_at = 0
        for record in list(registry.records.values()):
            self._add(summed.setdefault(record.manifest.namespace, _Namespace()), record)
            looked_at += 1 + len(record.manifest.files)
            if looked_at >= FILES_AT_ONCE:
                looked_at = 0
                await trio.lowlevel.checkpoint()
        now = time.time()
        for namespace, each in summed.items():
            for state in STATES:
                if state in ("replicated", "lost") and self._from.cluster is None:
                    continue
                if state == "persisted" and self._from.objects is None:
                    continue
                found.put("tierfs_steps", each.states[state], namespace=namespace, state=state)
            if each.newest_step is not None:
                found.put("tierfs_newest_step", each.newest_step[0], namespace=namespace)
            self._tiers(found, namespace, each, now)
        for (namespace, level), histogram in self._levels.items():
            found.put_histogram("tierfs_step_level_seconds", histogram, namespace=namespace, level=level)
        found.put("tierfs_checksum_queue_files", sum(len(names) for names in registry.to_checksum.values()))
        found.put("tierfs_judge_queue_steps", len(registry.to_judge))

    def _tiers(self, found: Figures, namespace: str, each: _Namespace, now: float) -> None:
        settings = self._from.registry.settings.for_namespace(namespace)
        tiers = {"ram"}
        if self._from.cluster is not None and settings.replication.replicas > 1:
            tiers.add("replica")
            found.put("tierfs_under_replicated_steps", each.lacking, namespace=namespace)
            lag = max(0.0, now - each.lacking_since) if each.lacking_since is not None else 0.0
            found.put("tierfs_replication_lag_seconds", lag, namespace=namespace)
        if self._from.objects is not None and (settings.persist.policy in ("all", "every") or "object" in each.newest):
            tiers.add("object")
        if self._from.disk is not None and (settings.disk.policy != "none" or "disk" in each.newest):
            tiers.add("disk")
            found.put("tierfs_step_bytes", each.bytes["disk"], namespace=namespace, tier="disk")
        for tier in sorted(tiers):
            age = now - each.newest.get(tier, each.begun_at)
            found.put("tierfs_recovery_point_age_seconds", max(0.0, age), namespace=namespace, tier=tier)
        found.put("tierfs_step_bytes", each.bytes["ram"], namespace=namespace, tier="ram")
        if self._from.objects is not None:
            found.put("tierfs_step_bytes", each.bytes["object"], namespace=namespace, tier="object")
            found.put("tierfs_object_owed_bytes", each.owed_bytes, namespace=namespace)

    def _add(self, each: _Namespace, record: StepRecord) -> None:
        manifest, registry = record.manifest, self._from.registry
        state = self._state_of(record)
        each.states[state] += 1
        each.begun_at = min(each.begun_at, manifest.created_at)
        each.bytes["ram"] += self._ram_bytes(record)
        if registry.object_tier.on_disk(record):
            each.bytes["disk"] += manifest.bytes
        if manifest.persisted is not None:
            each.bytes["object"] += manifest.persisted.bytes
        if not record.is_complete:
            return
        completed_at = manifest.completed_at or 0.0
        if manifest.owed:
            each.owed_bytes += manifest.bytes
        if not registry.is_readable(record):
            return
        of_step = manifest.number, completed_at
        each.newest_step = max(each.newest_step or of_step, of_step)
        tiers = ["ram"] if state != "lost" else []
        if self._is_replicated(record):
            tiers.append("replica")
        elif state == "complete" and self._from.cluster is not None:
            each.lacking += 1
            each.lacking_since = min(each.lacking_since or completed_at, completed_at)
        if record.is_persisted:
            tiers.append("object")
        if registry.object_tier.on_disk(record):
            tiers.append("disk")
        for tier in tiers:
            each.newest[tier] = max(each.newest.get(tier, 0.0), completed_at)

    def _state_of(self, record: StepRecord) -> str:
        if not record.is_complete:
            return "writing"
        if record.is_persisted:
            return "persisted"
        if not self._from.registry.cluster.is_readable(record):
            return "lost"
        return "replicated" if self._is_replicated(record) else "complete"

    def _is_replicated(self, record: StepRecord) -> bool:
        cluster = self._from.cluster
        seen = cluster.view.states.get(record.key) if cluster is not None else None
        return (
            cluster is not None
            and seen is not None
            and seen.record.generation == record.manifest.generation
            and seen.record.level == "replicated"
            and cluster.stewardship.is_believed(record.key)
        )

    def _ram_bytes(self, record: StepRecord) -> int:
        hydration, cluster = self._from.hydration, self._from.cluster
        here = 0
        if record.manifest.populated:
            for entry in list(record.manifest.files.values()):
                is_stub = hydration is not None and hydration.is_stub(entry.ino)
                here += hydration.hydrated_bytes(entry.ino) if hydration and is_stub else entry.size_bytes
        return here + (cluster.copies.bytes_of(record.key) if cluster is not None else 0)

    # --- this node

    def _ram(self, found: Figures) -> None:
        tier = self._from.registry.tier
        usage = tier.usage()
        found.put("tierfs_ram_size_bytes", usage.size_bytes)
        found.put("tierfs_ram_used_bytes", usage.used_bytes)
        found.put("tierfs_ram_free_bytes", usage.free_bytes)
        found.put("tierfs_ram_ballast_bytes", usage.ballast_bytes)
        found.put("tierfs_ram_freeing_bytes", self._from.registry.freeing_bytes)
        found.put("tierfs_ram_growing_files", len(tier.growing))

    def _fuse(self, found: Figures) -> None:
        counted = self._from.channel.counters()
        found.put("tierfs_takeovers_total", counted.pop("takeovers"))
        found.put("tierfs_fuse_resent_total", counted.pop("resent"))
        found.put("tierfs_channel_read_bytes_total", counted.pop("bytes_read"))
        found.put("tierfs_channel_written_bytes_total", counted.pop("bytes_written"))
        found.put_all("tierfs_fuse_requests_total", "operation", counted.items())
        times = self._from.times
        for operation, histogram in times.by_operation.items():
            found.put_histogram("tierfs_fuse_request_seconds", histogram, operation=operation)
        for (operation, name), count in times.failures().items():
            found.put("tierfs_fuse_errors_total", count, operation=operation, errno=name)
        found.put("tierfs_fuse_requests_in_hand", times.in_hand)

    def _hydration(self, found: Figures) -> None:
        hydration = self._from.hydration
        if hydration is None:
            return
        counts = hydration.counts
        found.put("tierfs_stub_files", len(hydration.table))
        found.put("tierfs_hydrated_files_total", counts.files)
        found.put_all("tierfs_hydrated_bytes_total", "tier", counts.bytes.items())
        for (tier, kind), count in counts.failures.items():
            found.put("tierfs_hydration_failures_total", count, tier=tier, kind=kind)
        found.put("tierfs_hydration_chunks_in_flight", hydration.in_flight)

    def _disk(self, found: Figures, disk: DiskTier) -> None:
        status = disk.status()
        found.put("tierfs_disk_used_bytes", status["used_bytes"])
        found.put("tierfs_disk_steps", status["steps"])
        found.put("tierfs_disk_owed_steps", status["steps_owed"])
        found.put("tierfs_disk_owed_bytes", status["bytes_owed"])
        found.put("tierfs_disk_usable", status["state"] == "ok" and not status["problem"])
        found.put("tierfs_disk_damaged_steps", len(disk.index.damaged))
        found.put("tierfs_disk_written_bytes_total", status["bytes_written"])
        found.put("tierfs_disk_read_bytes_total", status["bytes_read"])

    def _daemon(self, found: Figures, problems: Mapping[str, int], *, is_mounted: bool) -> None:
        source = self._from
        found.put(
            "tierfs_instance_info", 1,
            name=source.name, mountpoint=source.mountpoint, node=source.node, version=tierfs.__version__,
        )  # fmt: skip
        found.put("tierfs_start_time_seconds", self._began_at)
        found.put("tierfs_mounted", is_mounted)
        found.put_all("tierfs_problems", "severity", ((each, problems.get(each, 0)) for each in _SEVERITIES))
        for (level, part), count in source.logged.counts.items():
            found.put("tierfs_logged_total", count, level=level, part=part)
        found.put_all("tierfs_events_total", "event", ((kind, source.telling.counts[kind]) for kind in EVENT_KINDS))
        for hook, counted in source.telling.hooks().items():
            found.put("tierfs_event_hooks_waiting", counted.pop("waiting"), hook=hook)
            for outcome, count in counted.items():
                found.put("tierfs_event_hooks_total", count, hook=hook, outcome=outcome)

    # --- elsewhere

    def _objects(self, found: Figures, workers: WorkerPool, objects: ObjectSteps) -> None:
        stats = workers.stats
        found.put("tierfs_object_reachable", not (objects.index.problem or stats.last_error))
        found.put("tierfs_object_requests_total", stats.requests)
        found.put("tierfs_object_retries_total", stats.retries)
        found.put("tierfs_object_throttled_total", stats.throttled)
        found.put_all("tierfs_object_errors_total", "kind", stats.errors_by_kind.items())
        found.put("tierfs_object_sent_bytes_total", stats.bytes_sent)
        found.put("tierfs_object_received_bytes_total", stats.bytes_received)
        found.put("tierfs_object_concurrency", stats.concurrency)
        progress = [objects.persister.progress(record) for record in objects.persister.owed_records()]
        states = Counter(each.state for each in progress if each is not None)
        found.put_all(
            "tierfs_object_steps_owed", "state", ((each, states[each]) for each in ("owed", "sending", "waiting"))
        )
        found.put("tierfs_object_deletions_owed", len(objects.deletions.owed()))
        found.put("tierfs_object_parts_owed", len(objects.persister.parts.owed()))
        found.put("tierfs_archive_steps_owed", len(objects.archiver.owed()) if objects.archiver is not None else 0)

    def _nodes(self, found: Figures, cluster: ClusterTier) -> None:
        states = Counter(seen.record.state for seen in cluster.view.nodes.values())
        states["lost"] += len(cluster.membership.lost)
        found.put_all(
            "tierfs_cluster_nodes", "state", ((each, states[each]) for each in ("serving", "draining", "lost"))
        )
        found.put("tierfs_cluster_connected", cluster.view.connected)
        found.put("tierfs_cluster_member", cluster.membership.member)
        found.put("tierfs_cluster_draining", cluster.drain.is_draining)
        found.put("tierfs_cluster_pending_changes", cluster.publisher.pending)
        state = cluster.replicator.state()
        found.put("tierfs_replication_files_pulling", state.pulling)
        found.put("tierfs_replication_missing_bytes", state.missing_bytes)
        found.put("tierfs_replication_files_without_room", state.without_room)
        self._transport(found, cluster)

    def _transport(self, found: Figures, cluster: ClusterTier) -> None:
        peers, server = cluster.peers, cluster.server
        found.put("tierfs_peer_received_bytes_total", peers.tcp.bytes_received, transport="tcp")
        found.put("tierfs_peer_received_bytes_total", peers.bytes_read, transport="rdma")
        found.put("tierfs_peer_sent_bytes_total", server.bytes_sent)
        found.put("tierfs_peer_resumed_total", peers.tcp.resumed)
        found.put("tierfs_peer_refused_total", server.refused)
        fallbacks = Counter(dict.fromkeys(get_args(Fallback), 0))
        for peer in peers.describe().values():
            fallbacks.update(peer["fallbacks"])
        found.put_all("tierfs_peer_fallbacks_total", "kind", fallbacks.items())
        found.put("tierfs_peer_registered_bytes", sum(cluster.transport.exports.registered.values()))
