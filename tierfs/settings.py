"""Every setting of an instance, as plain data: names, defaults, units and what each is for.

This module only defines them. `tierfs.settings_values` parses and refuses values; `tierfs.settings_sources` reads
them from the file, the environment, `-o` options and flags. The reference in the docs is generated from here.
"""

# ruff: noqa: RUF009  (`setting` makes a dataclass field, which is what the rule asks for)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tierfs.settings_archive import ArchiveSettings
from tierfs.settings_cluster import ClusterSettings, EtcdSettings, PeerSettings, ReplicationSettings
from tierfs.settings_disk import DiskSettings
from tierfs.settings_fields import MIB, setting
from tierfs.settings_watch import EventsSettings, MetricsSettings

OFF = "off"  # as the value of a table's entry: takes the entry out
NAMESPACE_SECTIONS = ("steps", "retention", "durability", "persist", "archive", "replication", "disk")


@dataclass(frozen=True)
class SettingKey:
    """One setting's definition: `path` is its dotted name, `section` and `name` the two parts of it."""

    section: str
    name: str
    kind: str
    doc: str
    choices: tuple[str, ...]
    least: int
    default: Any

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "TIERFS_" + self.path.replace(".", "_").upper()


@dataclass
class RamSettings:
    """`[ram]`: the RAM tier."""

    huge_pages: str = setting(
        "auto",
        "Huge pages of the tier's tmpfs. auto: within_size where room given ahead gets huge pages by it, so that small "
        "files cost little, else always. Falls back, and says so, where the kernel refuses.",
        kind="choice",
        choices=("auto", "always", "within_size", "advise", "never"),
    )
    noswap: bool = setting(
        True, "Keep the tier out of swap (Linux 6.4 or later; ignored, and said, where unknown).", kind="bool"
    )
    ballast: str = setting(
        "auto",
        "Free room held ready as warm huge pages: auto (all the free room that memory allows), off, or a size.",
        kind="room",
    )
    runway_bytes: int = setting(256 * MIB, "How far ahead of its writer a growing shard is given room.", kind="size")
    first_extent_bytes: int = setting(
        64 * MIB, "Room given at once to a shard whose size nobody can guess yet.", kind="size"
    )


@dataclass
class StepSettings:
    """`[steps]`: which directories are steps, and when a step is complete."""

    patterns: list[str] = setting(
        [
            r"step[-_=]?(?P<step>\d+)",
            r"global_step(?P<step>\d+)",
            r"iter_(?P<step>\d+)",
            r"checkpoint[-_](?P<step>\d+)",
            r"epoch=\d+-step=(?P<step>\d+)(\.ckpt)?",
            r"(?P<step>\d+)",
        ],
        "Regular expressions a directory's whole name must match to be a step; the group `step` is its number.",
        kind="patterns",
    )
    markers: dict[str, str] = setting(
        {
            ".metadata": "dcp",
            "__(rank).metadata": "dcp-per-rank",
            "model.safetensors.index.json": "close",
            "trainer_state.json": "close",
            ".snapshot_metadata": "close",
            "commit_success.txt": "close",
        },
        "Files whose appearance completes a step, and how: dcp and dcp-per-rank are read and checked, "
        "close counts once every file of the step is sealed. Entries add to the default ones; off takes one out.",
        kind="table",
        choices=("dcp", "dcp-per-rank", "close"),
    )
    latest: str = setting(
        "shown",
        "The `latest` symlink in each namespace: shown, hidden from listings, or off.",
        kind="choice",
        choices=("shown", "hidden", "off"),
    )
    complete_when_idle_s: float = setting(
        0.0,
        "Complete a step without a marker once all its files are sealed and nothing changed for so long; 0 is never.",
        kind="duration",
    )
    overwrite_idle_s: float = setting(
        300.0,
        "An overwrite of a complete step is given up, and the old step put back, when nothing is open for writing and "
        "nothing changed for so long. It is put back at once when every process that took part is gone.",
        kind="duration",
    )
    sweep_after_s: float = setting(
        3600.0,
        "A step that never completed is removed this long after its last change, once a newer step of its "
        "namespace is complete. Steps of frameworks without a marker are never swept.",
        kind="duration",
    )
    checksums: bool = setting(True, "Compute the CRC64NVME of sealed files in the background.", kind="bool")


@dataclass
class RetentionSettings:
    """`[retention]`: what stays in the RAM tier, on the local disk, and in the object tier."""

    ram_steps: int = setting(
        2,
        "The newest complete steps of a namespace that are never evicted; older ones go when room is needed.",
        kind="int",
        least=1,
    )
    ram_max_steps: int = setting(
        0, "Never keep more complete steps of a namespace than this in RAM; 0 is no limit.", kind="int"
    )
    disk_steps: int = setting(
        0,
        "How many of a namespace's newest steps stay on the local disk; older ones go. 0 keeps as many as fit.",
        kind="int",
    )
    object_steps: int = setting(
        0,
        "How many of a namespace's newest steps the object tier keeps; older ones are deleted. 0 keeps all.",
        kind="int",
    )
    object_every: int = setting(
        0,
        "Steps whose number is a multiple of this stay in the object tier whatever `object_steps` says; 0 is none.",
        kind="int",
    )


@dataclass
class DurabilitySettings:
    """`[durability]`: what a program waits for."""

    fsync: str = setting(
        "ram",
        "What fsync of a file waits for: ram, or replica (until other nodes hold the file too).",
        kind="choice",
        choices=("ram", "replica"),
    )
    commit: str = setting(
        "auto",
        "What the completing rename waits for: ram, replica (until other nodes hold the step too), or object (until it "
        "is committed in the object tier). auto is replica where the node has peers, else ram.",
        kind="choice",
        choices=("auto", "ram", "replica", "object"),
    )
    timeout_s: float = setting(
        600.0, "How long the completing rename waits for the object tier at most.", kind="duration"
    )
    replica_timeout_s: float = setting(
        60.0,
        "How long the completing rename, or fsync, waits for copies on other nodes at most: a node without room should "
        "not hold up a training.",
        kind="duration",
    )
    strict: bool = setting(
        False,
        "What was not reached in time fails the rename with EIO. Otherwise the step goes on in the background, and "
        "`tierfs status` shows its level.",
        kind="bool",
    )


@dataclass
class PersistSettings:
    """`[persist]`: which complete steps go to the object tier."""

    policy: str = setting(
        "all",
        "Which complete steps are owed to the object tier: all, every (see every_steps and every_s), demand (those "
        "asked for with `tierfs flush`), or none (not even those).",
        kind="choice",
        choices=("all", "every", "demand", "none"),
    )
    every_steps: int = setting(
        0, "With policy every: each so many-th complete step of a namespace is owed; 0 is not by count.", kind="int"
    )
    every_s: float = setting(
        0.0,
        "With policy every: a step that completes this long after the last owed one did is owed; 0 is not by time.",
        kind="duration",
    )
    settle_s: float = setting(
        2.0,
        "A step is sent once nothing changed in it for so long: frameworks add files after the marker.",
        kind="duration",
    )
    protected: bool = setting(
        False,
        "Removing a step in the mount leaves its copy in the object tier; only retention deletes there.",
        kind="bool",
    )
    files: dict[str, str] = setting(
        {},
        "Files that go more often than whole steps: patterns of paths inside a step (`*` matches `/` too), and when "
        "they go: all (with every complete step), a number (with each so many-th), a duration (`30min` after they went "
        "last). They are sent alone where the step's turn has not come.",
        kind="table",
    )
    flush_on_umount: bool = setting(
        True,
        "The daemon sends what is owed, to the local disk too, before it leaves, when unmounted or asked to stop.",
        kind="bool",
    )
    flush_timeout_s: float = setting(600.0, "How long it takes for that at most.", kind="duration")


@dataclass
class TransferSettings:
    """`[transfer]`: how bytes go to the object tier and back."""

    workers: int = setting(
        1, "Processes that talk to the object store, beside the daemon. One fills about 8 Gbit/s.", kind="int", least=1
    )
    connections: int = setting(
        16, "Requests at a time, of all workers together; fewer while the store asks to slow down.", kind="int", least=1
    )
    upload_bytes_s: int = setting(0, "Bandwidth of uploads at most, bytes a second; 0 is no limit.", kind="size")
    download_bytes_s: int = setting(0, "Bandwidth of hydration at most, bytes a second; 0 is no limit.", kind="size")
    retry_for_s: float = setting(
        120.0,
        "How long one request is tried again, with growing pauses, after it failed first, before its work is put off.",
        kind="duration",
    )
    read_retry_for_s: float = setting(
        120.0,
        "The same for a program that waits for bytes: then its read(2) fails with EIO.",
        kind="duration",
    )
    index_every_s: float = setting(
        60.0, "How often the object tier is looked at for steps that others put there or removed.", kind="duration"
    )


@dataclass
class S3Settings:
    """`[s3]`: where an `s3://` object tier is and how to talk to it. Credentials come from the standard chain only:
    environment, profile, web identity (IRSA), container (Pod Identity), instance metadata."""

    endpoint_url: str = setting(
        "",
        "Endpoint of an S3-compatible server; empty is what AWS_ENDPOINT_URL or the profile says, else Amazon's.",
        kind="endpoint",
    )
    region: str = setting("", "Region; empty is what the environment or the profile says, else us-east-1.", kind="text")
    profile: str = setting("", "Profile of the shared AWS configuration files.", kind="text")
    addressing: str = setting(
        "auto",
        "Bucket in the host name (virtual) or in the path; auto is path but at Amazon's.",
        kind="choice",
        choices=("auto", "virtual", "path"),
    )
    ca_bundle: Path | None = setting(None, "Certificates to trust for TLS.", kind="path")
    read_timeout_s: float = setting(
        20.0, "A request that gets no byte for so long is broken off and tried again.", kind="duration"
    )


@dataclass
class GatewaySettings:
    """`[gateway]`: an HTTP service for scripts that save with Amazon's SageMaker checkpointing library."""

    listen: str = setting(
        "",
        "Where it listens: HOST:PORT, several with commas; empty is off. The library asks port 9200. There is no "
        "authentication in the protocol: name loopback, or an address that only the training's pods reach.",
        kind="addresses",
    )
    allow_reset: bool = setting(
        False, "Whether a client may reset the cluster, which removes every namespace with its steps.", kind="bool"
    )


@dataclass
class LogSettings:
    """`[log]`: the daemon's log, and one log a namespace."""

    format: str = setting("text", "Lines for people or for machines.", kind="choice", choices=("text", "json"))
    level: str = setting(
        "info", "The least level written.", kind="choice", choices=("debug", "info", "warning", "error")
    )
    directory: Path | None = setting(None, "Where logs go; by default the instance's runtime directory.", kind="path")


@dataclass
class Settings:
    """All settings of one instance."""

    name: str = setting("", "The instance's name; by default made from the mount point.", kind="name")
    node: str = setting(
        "",
        "This node's id among other nodes and in the object tier, one that no other node has; by default its host name "
        "and the instance's name.",
        kind="name",
    )
    size: int = setting(
        0, "The RAM tier's size: bytes, or a percentage of memory (default 50%).", kind="share", least=MIB
    )
    runtime_dir: Path | None = setting(
        None,
        "Parent of the instance's runtime directory (default /run/tierfs, or $XDG_RUNTIME_DIR/tierfs).",
        kind="path",
    )
    passthrough: str = setting(
        "auto", "Kernel passthrough of reads and writes.", kind="choice", choices=("auto", "off")
    )
    channel: str = setting(
        "auto",
        "How libfuse is joined to /dev/fuse: customio (libfuse 3.14 or later) or socketpair.",
        kind="choice",
        choices=("auto", "customio", "socketpair"),
    )
    resend: str = setting(
        "auto",
        "Ask the kernel to resend unanswered requests at a takeover (Linux 6.9).",
        kind="choice",
        choices=("auto", "off"),
    )
    allow_other: str = setting(
        "auto",
        "Let other users in, subject to permissions (default: yes for root).",
        kind="choice",
        choices=("auto", "on", "off"),
    )
    catalog: str = setting(
        "",
        "Which nodes and steps exist: empty is embedded (this node alone), or etcd://HOST:PORT[,HOST:PORT...].",
        kind="catalog",
    )
    object: str = setting("", "The object tier: file:///path or s3://bucket/prefix; empty is none.", kind="url")
    debug_crash_at: str = setting(
        "", "For tests: the daemon kills itself at this named point (name, or name:nth).", kind="text"
    )
    ram: RamSettings = field(default_factory=RamSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    durability: DurabilitySettings = field(default_factory=DurabilitySettings)
    disk: DiskSettings = field(default_factory=DiskSettings)
    persist: PersistSettings = field(default_factory=PersistSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    s3: S3Settings = field(default_factory=S3Settings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    peer: PeerSettings = field(default_factory=PeerSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    log: LogSettings = field(default_factory=LogSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    events: EventsSettings = field(default_factory=EventsSettings)
    namespaces: dict[str, dict[str, dict[str, Any]]] = field(
        default_factory=dict,
        metadata={
            "doc": '`[namespaces."GLOB"]`: steps, retention, durability, persist and replication settings of the '
            "namespaces that match.",
            "kind": "namespaces",
        },
    )
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False, metadata={"kind": "origin"})
    warnings: list[str] = field(default_factory=list, compare=False, repr=False, metadata={"kind": "origin"})

    def for_namespace(self, namespace: str) -> NamespaceSettings:
        """The settings of one namespace: every `[namespaces."GLOB"]` that matches it is laid over the general
        ones, in the order of the file, so that a later section wins. `*` matches `/` too.
        """
        sections: dict[str, Any] = {name: getattr(self, name) for name in NAMESPACE_SECTIONS}
        for glob, overrides in self.namespaces.items():
            if fnmatchcase(namespace, glob):
                for name, values in overrides.items():
                    sections[name] = _laid_over(sections[name], values)
        return NamespaceSettings(namespace=namespace, **sections)


@dataclass(frozen=True)
class NamespaceSettings:
    """What holds for one namespace. Not shared state: the general sections may be the same objects, so don't change
    them.
    """

    namespace: str
    steps: StepSettings
    retention: RetentionSettings
    durability: DurabilitySettings
    persist: PersistSettings
    archive: ArchiveSettings
    replication: ReplicationSettings
    disk: DiskSettings = field(default_factory=DiskSettings)


def setting_keys(section: str | None = None) -> tuple[SettingKey, ...]:
    """Every setting's definition, in the order of this file; of one section only when `section` is given."""
    return tuple(key for key in _walk(Settings, "") if section is None or key.section == section)


def merge_table(below: dict[str, str], above: dict[str, str]) -> dict[str, str]:
    """`above` laid over `below`; an entry whose value is `off` is taken out."""
    return {name: value for name, value in {**below, **above}.items() if value != OFF}


def _laid_over(section: Any, values: dict[str, Any]) -> Any:
    merged = {
        name: merge_table(getattr(section, name), value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return replace(section, **merged)


def _walk(cls: Any, section: str) -> Iterator[SettingKey]:
    for entry in fields(cls):
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if is_dataclass(default):
            yield from _walk(type(default), entry.name)
        elif entry.metadata["kind"] not in ("namespaces", "origin"):
            meta = entry.metadata
            yield SettingKey(section, entry.name, meta["kind"], meta["doc"], meta["choices"], meta["least"], default)
