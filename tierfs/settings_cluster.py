"""The settings of a node among others: the cluster, its catalogue, and the way between nodes."""

# ruff: noqa: RUF009  (`setting` makes a dataclass field, which is what the rule asks for)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierfs.settings_fields import MIB, setting


@dataclass
class ClusterSettings:
    """`[cluster]`: the nodes that share one namespace, and how they talk to each other."""

    name: str = setting("default", "Name of the cluster: several may share one etcd.", kind="name")
    listen: str = setting(
        ":7117",
        "Where other nodes reach this one: HOST:PORT, several with commas (one each network card); :PORT is all "
        "addresses of this machine.",
        kind="addresses",
    )
    advertise: str = setting(
        "",
        "What other nodes are told to connect to, as for listen; empty is the address by which this node reaches the "
        "catalogue, with the port of listen.",
        kind="addresses",
    )
    domain: str = setting(
        "", "What fails together with this node (a rack, a capacity block): copies go to other domains.", kind="text"
    )
    secret_file: Path | None = setting(
        None,
        "File with the secret that all nodes share, 16 to 4096 bytes, which nobody but its owner may read; this or "
        "tls_cert is needed to let other nodes in.",
        kind="path",
    )
    tls_cert: Path | None = setting(
        None,
        "This node's certificate (PEM), for mutual TLS; its names must be the node's id, a wildcard or none.",
        kind="path",
    )
    tls_key: Path | None = setting(None, "Its private key (PEM).", kind="path")
    tls_ca: Path | None = setting(
        None, "Certificates (PEM) that other nodes' certificates must be signed by.", kind="path"
    )
    encryption: str = setting(
        "auto",
        "Encrypt what goes between nodes: auto (with TLS certificates, yes), on, or off: only authenticated, for a "
        "network that is trusted, where sendfile is faster.",
        kind="choice",
        choices=("auto", "on", "off"),
    )
    lease_s: float = setting(
        10.0, "A node that gave no sign of life for so long is taken for lost.", kind="duration", least=1
    )
    wait_s: float = setting(
        10.0,
        "How long a completing rename waits for files that other nodes are still sealing, or for the catalogue.",
        kind="duration",
    )
    drain_on_stop: bool = setting(
        False,
        "SIGTERM hands what only this node holds to other nodes before it goes, as `tierfs drain` does.",
        kind="bool",
    )
    notice_file: Path | None = setting(
        None,
        "When this file appears (a spot interruption's notice) the node drains as with `tierfs drain`.",
        kind="path",
    )
    notice_command: str = setting(
        "", "A command run every notice_every_s; when it exits with 0 the node drains.", kind="text"
    )
    notice_every_s: float = setting(5.0, "How often notice_file and notice_command are looked at.", kind="duration")


@dataclass
class EtcdSettings:
    """`[etcd]`: how to talk to etcd, where `catalog` is etcd://…"""

    user: str = setting("", "User name, where etcd asks for one.", kind="text")
    password_file: Path | None = setting(None, "File with its password.", kind="path")
    ca: Path | None = setting(None, "Certificates (PEM) to trust; with it etcd is spoken to by TLS.", kind="path")
    cert: Path | None = setting(None, "This node's client certificate (PEM), where etcd asks for one.", kind="path")
    key: Path | None = setting(None, "Its private key (PEM).", kind="path")
    timeout_s: float = setting(5.0, "A request without an answer for so long has failed.", kind="duration", least=1)


@dataclass
class ReplicationSettings:
    """`[replication]`: copies of steps in other nodes' RAM."""

    replicas: int = setting(
        2, "How many nodes hold each file of a step, this one included; 1 is no copies.", kind="int", least=1
    )
    after_s: float = setting(
        15.0, "What a lost node held is copied again after so long: it may only be restarting.", kind="duration"
    )


@dataclass
class PeerSettings:
    """`[peer]`: how bytes go from node to node."""

    streams: int = setting(4, "Connections to one node that carry bytes at the same time.", kind="int", least=1)
    serve_streams: int = setting(
        64, "Connections of other nodes that are served at the same time; more wait.", kind="int", least=1
    )
    replicate_bytes_s: int = setting(
        0,
        "Bandwidth of replication at most, bytes a second, as received; 0 is no limit. Hydration is not limited.",
        kind="size",
    )
    stall_s: float = setting(
        10.0, "A peer that sends no byte for so long is given up, and another asked.", kind="duration", least=1
    )
    transport: str = setting(
        "auto",
        "How files' bytes come from other nodes: auto (by RDMA where this node and the other have devices for it, else "
        "by TCP; by TCP alone where that is encrypted, as RDMA is not), tcp, or verbs: RDMA also where TCP is "
        "encrypted, and it is a problem of the node's status when it has no device.",
        kind="choice",
        choices=("auto", "tcp", "verbs"),
    )
    verbs_devices: str = setting(
        "",
        "RDMA devices to use, by their names in /sys/class/infiniband, several with commas; empty is all that can be "
        "used, at most 8, those near this process' processors first.",
        kind="text",
    )
    # EFA's table has about 22 million entries, one for each 4 KiB (as Mooncake found on p5en).
    verbs_registered_bytes: int = setting(
        80 * 1024 * MIB,
        "Memory of the RAM tier that is registered with each RDMA device at most, for others to read.",
        kind="size",
        least=64 * MIB,
    )
