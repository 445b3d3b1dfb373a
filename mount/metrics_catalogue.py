"""Every figure that the daemon has for Prometheus: name, kind, labels and what it says; docs/metrics.md says the same.

Names and units are as https://prometheus.io/docs/practices/naming/ asks: seconds, bytes, `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """`name` is as it is exposed; a histogram has `_bucket`, `_sum` and `_count` behind it. `needs` is what it needs to
    be there: "", `object` (an object tier), `disk` (a disk tier), `cluster` (a catalogue)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    needs: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    metrics: tuple[Metric, ...]


def _gauge(name: str, said: str, *labels: str, needs: str = "") -> Metric:
    return Metric(f"tierfs_{name}", "gauge", said, labels, needs)


def _counter(name: str, said: str, *labels: str, needs: str = "") -> Metric:
    return Metric(f"tierfs_{name}_total", "counter", said, labels, needs)


def _histogram(name: str, said: str, *labels: str, needs: str = "") -> Metric:
    return Metric(f"tierfs_{name}", "histogram", said, labels, needs)


SECTIONS = (
    Section(
        "Steps",
        (
            _gauge(
                "steps",
                "Steps by how far they are: writing, complete (in RAM only), replicated, persisted (in the object "
                "tier), lost.",
                "namespace", "state",
            ),
            _gauge(
                "newest_step", "Number of the newest complete step of which all files can be read.", "namespace"
            ),
            _gauge(
                "step_bytes",
                "Bytes of the namespace's steps by tier: ram (in this node's RAM, copies for others included), disk "
                "(on this node's disk), object.",
                "namespace", "tier",
            ),
            _gauge(
                "recovery_point_age_seconds",
                "Seconds of training that would be lost now if only this tier were left (ram, disk, replica, object): "
                "since the newest step there was complete, or since the namespace's first step was begun where none "
                "is.",
                "namespace", "tier",
            ),
            _histogram(
                "step_level_seconds",
                "Seconds until a step reached a level: ram since its first write on this node, disk, replica and "
                "object since it was complete. Each step is counted by one node.",
                "namespace", "level",
            ),
            _gauge("checksum_queue_files", "Sealed files whose checksum is still to be computed."),
            _gauge("judge_queue_steps", "Steps that are still to be looked at, whether they are complete."),
        ),
    ),
    Section(
        "The RAM tier",
        (
            _gauge("ram_size_bytes", "Size of the RAM tier."),
            _gauge("ram_used_bytes", "Bytes of it that data holds."),
            _gauge("ram_free_bytes", "Free room in it."),
            _gauge("ram_ballast_bytes", "Free room of it that is held ready as warm memory."),
            _gauge("ram_freeing_bytes", "Bytes that were let go of and come back in a moment."),
            _gauge("ram_growing_files", "Files that are open for writing."),
        ),
    ),
    Section(
        "Requests of the kernel",
        (
            _counter(
                "fuse_requests",
                "Requests of the kernel by operation, since the mount was made; also those that the channel answers "
                "without Python.",
                "operation",
            ),
            _histogram(
                "fuse_request_seconds",
                "Seconds that requests took which Python answered, by operation as pyfuse3 names it (rename is the "
                "kernel's rename2). Reads and writes of data are among them only where bytes have to be fetched first.",
                "operation",
            ),
            _counter(
                "fuse_errors",
                "Requests that were answered with an error, by operation and errno. ENOENT of a lookup is everyday.",
                "operation", "errno",
            ),
            _gauge("fuse_requests_in_hand", "Requests that Python is answering now."),
            _counter("fuse_resent", "Requests that the kernel sent again after a takeover."),
            _counter(
                "channel_read_bytes", "Bytes that programs read through the channel; none with kernel passthrough."
            ),
            _counter("channel_written_bytes", "The same for writing."),
            _counter("takeovers", "How often another daemon took this mount over."),
        ),
    ),
    Section(
        "The local disk",
        (
            _gauge("disk_used_bytes", "Bytes of steps on this node's disk.", needs="disk"),
            _gauge("disk_steps", "Whole steps there.", needs="disk"),
            _gauge("disk_owed_steps", "Complete steps that are still to be copied there.", needs="disk"),
            _gauge("disk_owed_bytes", "The bytes of these.", needs="disk"),
            _gauge("disk_usable", "1 while the disk can be used, 0 while it is away or fails.", needs="disk"),
            _gauge("disk_damaged_steps", "Steps there that were found to be damaged, and are not shown.", needs="disk"),
            _counter("disk_written_bytes", "Bytes of files written there.", needs="disk"),
            _counter("disk_read_bytes", "Bytes brought back from there.", needs="disk"),
        ),
    ),
    Section(
        "Bytes brought back",
        (
            _gauge("stub_files", "Files whose bytes are, or partly are, not in this node's RAM."),
            _counter("hydrated_files", "Files whose bytes were all brought."),
            _counter("hydrated_bytes", "Bytes brought and verified, by the tier they came from.", "tier"),
            _counter(
                "hydration_failures", "Chunks that could not be had, by tier and the error's kind.", "tier", "kind"
            ),
            _gauge("hydration_chunks_in_flight", "Chunks of 16 MiB that are being fetched now."),
        ),
    ),
    Section(
        "The object tier",
        (
            _gauge("object_reachable", "1 where the last request to the store went well, else 0.", needs="object"),
            _counter("object_requests", "Requests to the store, each attempt counted.", needs="object"),
            _counter("object_retries", "Requests that were made again after they had failed.", needs="object"),
            _counter("object_throttled", "Requests that the store refused with SlowDown.", needs="object"),
            _counter("object_errors", "Requests that failed, by the error's kind.", "kind", needs="object"),
            _counter("object_sent_bytes", "Bytes sent to the store.", needs="object"),
            _counter("object_received_bytes", "Bytes received from it.", needs="object"),
            _gauge("object_concurrency", "Requests at a time that the store allows now.", needs="object"),
            _gauge(
                "object_steps_owed",
                "Steps that are to be sent: owed (not begun), sending, waiting (for another try).",
                "state", needs="object",
            ),
            _gauge("object_owed_bytes", "Bytes of them.", "namespace", needs="object"),
            _gauge("object_deletions_owed", "Steps that are to be deleted from the store.", needs="object"),
            _gauge("object_parts_owed", "Steps of which some files, and not all, are to go there.", needs="object"),
            _gauge("archive_steps_owed", "Steps that are to be copied to the archive.", needs="object"),
        ),
    ),
    Section(
        "Other nodes",
        (
            _gauge("cluster_nodes", "Nodes by state as seen here: serving, draining, lost.", "state", needs="cluster"),
            _gauge("cluster_connected", "1 where this node follows the catalogue, else 0.", needs="cluster"),
            _gauge("cluster_member", "1 where others take this node for alive, else 0.", needs="cluster"),
            _gauge("cluster_draining", "1 where this node hands over what it holds, to go, else 0.", needs="cluster"),
            _gauge("cluster_pending_changes", "Changes that the catalogue does not have yet.", needs="cluster"),
            _gauge(
                "under_replicated_steps", "Complete steps with fewer copies than wanted.", "namespace", needs="cluster"
            ),
            _gauge(
                "replication_lag_seconds",
                "Age of the oldest complete step that is not replicated yet; 0 where all are. What the object tier has "
                "is not waited for.",
                "namespace", needs="cluster",
            ),
            _gauge("replication_files_pulling", "Files of other nodes that are being copied here.", needs="cluster"),
            _gauge("replication_missing_bytes", "Bytes of them that are not here yet.", needs="cluster"),
            _gauge("replication_files_without_room", "Files of other nodes that have no room here.", needs="cluster"),
            _counter(
                "peer_received_bytes", "Bytes from other nodes by transport: tcp, rdma.", "transport", needs="cluster"
            ),
            _counter(
                "peer_sent_bytes", "Bytes sent to other nodes by TCP; of what they READ by RDMA nobody here knows.",
                needs="cluster",
            ),
            _counter(
                "peer_fallbacks",
                "Transfers that went on by TCP though this node has RDMA: no_rdma (the other node has none), failed, "
                "connection (it was lost), not_given (the holder gives this range by TCP only), no_memory (none can "
                "be registered here).",
                "kind", needs="cluster",
            ),
            _gauge("peer_registered_bytes", "Memory that is registered with RDMA devices, of all.", needs="cluster"),
            _counter("peer_resumed", "Transfers that broke and went on.", needs="cluster"),
            _counter("peer_refused", "Connections of others that were refused.", needs="cluster"),
        ),
    ),
    Section(
        "The daemon",
        (
            _gauge("instance_info", "1; the labels say who this is.", "name", "mountpoint", "node", "version"),
            _gauge("start_time_seconds", "When this daemon began, Unix time."),
            _gauge("mounted", "1 while it is mounted; 0 while an unmounted daemon still sends what is owed."),
            _gauge("problems", "What `tierfs status` lists as problems, by severity.", "severity"),
            _counter("logged", "Lines of the log by level (warning, error, critical) and part.", "level", "part"),
            _counter("events", "Events by kind, see docs/events.md. Each is counted by one node.", "event"),
            _counter(
                "event_hooks", "What became of events for a hook: delivered, failed, dropped.", "hook", "outcome"
            ),
            _gauge("event_hooks_waiting", "Events that wait for a hook.", "hook"),
            _histogram("scrape_seconds", "Seconds that it took to put together an answer like this one."),
        ),
    ),
)  # fmt: skip


def all_metrics() -> Iterable[Metric]:
    for section in SECTIONS:
        yield from section.metrics
