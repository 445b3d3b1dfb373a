"""What `tierfs doctor` finds out about a cluster, by trying it in this very process: etcd, addresses, other nodes."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mount.cluster_check import cannot_listen
from mount.doctor import FAIL, OK, WARN, Finding
from tierfs.catalog.keys import NODES
from tierfs.catalog.records import NodeRecord, from_bytes
from tierfs.errors import CatalogDenied, CatalogError, PeerError, RecordDamaged, SettingsError, TierfsError
from tierfs.settings import Settings
from tierfs.transport.addresses import join_address, split_setting
from tierfs.transport.credentials import Credentials
from tierfs.units import format_size

if TYPE_CHECKING:
    from tierfs.catalog.store import KeyStore

CATALOGUE = "catalogue"
#: Nobody waits longer for the catalogue, and then for all nodes together.
CATALOGUE_WITHIN_S = 15.0
NODES_WITHIN_S = 15.0
#: What is written for the test goes by itself, should this process die.
_LEASE_S = 30
#: etcd stops taking changes at 2 GiB, unless it was told another limit.
_LARGE_BYTES = 1 << 30
_WITHIN_ONE_S = 8.0
_SLOW_S = 0.1


@dataclass
class _Cluster:
    """What was found of the catalogue."""

    read_s: float = 0.0
    written: str = ""
    version: str = ""
    size_bytes: int = 0
    nodes: list[NodeRecord] = field(default_factory=list)


def examine_cluster(
    settings: Settings, *, whose: str = "", node: str = "", is_mounted: bool = False
) -> Iterator[Finding]:
    """Tries what a node with these settings needs. `whose` is put before what is found, where there are several.

    `node` is the id to ask by; `is_mounted`: this very node runs, so its addresses are taken. Never raises.
    """
    try:
        credentials = Credentials(settings.cluster)
    except SettingsError as error:
        yield Finding("cluster secret", FAIL, f"{whose}{error.message}", f"correct {error.key or 'it'}")
        return
    yield _trust(credentials, whose)
    yield from _listening(settings, whose, is_mounted=is_mounted)
    yield from _others(settings, credentials, whose, node)


def _trust(credentials: Credentials, whose: str) -> Finding:
    check = "cluster secret"
    if credentials.none:
        return Finding(
            check,
            WARN,
            f"{whose}there is neither a secret nor a certificate, so nodes of other machines are not let in",
            "set cluster.secret_file to a file of mode 600 that is the same on all nodes: `openssl rand -hex 32`",
        )
    if credentials.tls:
        how = "encrypted" if credentials.encrypt else "not encrypted"
        return Finding(check, OK, f"{whose}nodes prove themselves by certificates; what they send is {how}")
    return Finding(check, OK, f"{whose}nodes prove themselves by a secret; what they send is not encrypted")


def _listening(settings: Settings, whose: str, *, is_mounted: bool) -> Iterator[Finding]:
    check = "cluster listen"
    try:
        wanted = split_setting(settings.cluster.listen, "cluster.listen")
    except SettingsError as error:
        yield Finding(check, FAIL, f"{whose}{error.message}", "HOST:PORT, or :PORT for all addresses")
        return
    for host, port in wanted:
        at = f"{whose}{join_address(host, port)}"
        problem = cannot_listen(host, port)
        if problem == errno.EADDRINUSE:
            if is_mounted:
                yield Finding(check, OK, f"{at}: this node listens there")
            else:
                advice = "a node or another program has it: several nodes on one machine need different ports"
                yield Finding(check, WARN, f"{at} is in use", advice)
        elif problem and is_mounted:
            yield Finding(check, WARN, f"{at} is none of this machine's addresses, or of another network namespace's")
        elif problem:
            advice = "set cluster.listen to an address of this machine, or to :PORT for all of them"
            yield Finding(check, FAIL, f"{at} can't be listened at: {os.strerror(problem)}", advice)
        else:
            yield Finding(check, OK, f"{at} can be listened at")


# --- the catalogue and the other nodes


def _others(settings: Settings, credentials: Credentials, whose: str, node: str) -> Iterator[Finding]:
    import trio

    from tierfs.catalog.opening import open_store

    about = f"{whose}{settings.catalog}"
    found = _Cluster()
    try:
        store = open_store(settings)
    except SettingsError as error:
        yield Finding(CATALOGUE, FAIL, f"{whose}{error.message}", "pip install 'tierfs[etcd]'")
        return
    try:
        trio.run(_try_catalogue, store, found)
    except (TierfsError, OSError, trio.TooSlowError) as error:
        yield _catalogue_fails(about, error)
        return
    slow = found.read_s > _SLOW_S
    yield Finding(
        CATALOGUE,
        WARN if slow else OK,
        f"{about} answers within {found.read_s * 1000:.1f} ms, and is written to",
        "each look for a name of another node takes as long: bring etcd nearer" if slow else "",
    )
    yield from _etcd(found, whose)
    yield from _nodes(settings, found, whose, node)


async def _try_catalogue(store: KeyStore, found: _Cluster) -> None:
    """CatalogError, TooSlowError."""
    import trio

    from tierfs.catalog.etcd import EtcdStore

    try:
        with trio.fail_after(CATALOGUE_WITHIN_S):
            values, _ = await store.range(NODES)  # the first call connects
            began = trio.current_time()
            await store.newest([NODES], [], newer_than=0)
            found.read_s = trio.current_time() - began
            lease = await store.grant(_LEASE_S)
            key = f"x-doctor/{uuid.uuid4().hex}"
            await store.put(key, b"written by tierfs doctor", lease=lease)
            await store.revoke(lease)
            for value in values:
                with suppress(RecordDamaged):
                    found.nodes.append(from_bytes(NodeRecord, value.value))
            if isinstance(store, EtcdStore):
                found.version, found.size_bytes = await store.about()
    finally:
        await store.aclose()


def _catalogue_fails(about: str, error: Exception) -> Finding:
    text = error.message if isinstance(error, TierfsError) else f"no answer within {CATALOGUE_WITHIN_S:.0f} s"
    if isinstance(error, CatalogDenied):
        return Finding(
            CATALOGUE, FAIL, f"{about}: {text}", "set etcd.user and etcd.password_file, or etcd.ca, cert and key"
        )
    advice = "look whether etcd runs and listens on an address that this machine reaches (--listen-client-urls); "
    return Finding(CATALOGUE, WARN, f"{about}: {text}", f"{advice}a mount works meanwhile with what this node has")


def _etcd(found: _Cluster, whose: str) -> Iterator[Finding]:
    if not found.version:
        return
    text = f"{whose}etcd {found.version}, {format_size(found.size_bytes)}"
    if found.size_bytes >= _LARGE_BYTES:
        yield Finding(
            "etcd",
            WARN,
            f"{text}: at 2 GiB it takes no changes any more, unless --quota-backend-bytes says otherwise",
            "start etcd with --auto-compaction-retention 1h; `etcdctl compact` and `etcdctl defrag` help now",
        )
        return
    yield Finding("etcd", OK, text)


def _nodes(settings: Settings, found: _Cluster, whose: str, node: str) -> Iterator[Finding]:
    import trio

    check = "nodes"
    others = [record for record in found.nodes if record.node != node]
    if not others:
        yield Finding(check, OK, f"{whose}no other node is there (yet)")
        return
    told: dict[str, float | str] = {}
    trio.run(_ping_all, settings, node or f"doctor-{uuid.uuid4().hex[:8]}", others, told)
    silent = [record for record in others if not isinstance(told.get(record.node), float)]
    for record in silent:
        where = ", ".join(record.addresses) or "no address"
        yield Finding(
            check,
            WARN,
            f"{whose}{record.node} at {where}: {told.get(record.node, 'no answer in time')}",
            "let TCP through to it (firewalls, security groups), or set cluster.advertise on it",
        )
    times = [value for value in told.values() if isinstance(value, float)]
    if times:
        reached = f"{len(times)} of {len(others)} other nodes answer, within {max(times) * 1000:.1f} ms"
        yield Finding(check, OK if not silent else WARN, f"{whose}{reached}")


async def _ping_all(settings: Settings, node: str, others: list[NodeRecord], told: dict[str, float | str]) -> None:
    import trio

    from tierfs.transport.client import TcpPeers

    addresses = {record.node: record.addresses for record in others}
    peers = TcpPeers(settings, node, lambda other: addresses.get(other, ()))
    slots = trio.Semaphore(32)

    async def ping(other: str) -> None:
        async with slots:
            try:
                with trio.fail_after(_WITHIN_ONE_S):
                    told[other] = await peers.ping(other)
            except (PeerError, CatalogError) as error:
                told[other] = error.message
            except trio.TooSlowError:
                told[other] = f"no answer within {_WITHIN_ONE_S:.0f} s"

    with trio.move_on_after(NODES_WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peers.run)
            async with trio.open_nursery() as asking:
                for other in addresses:
                    asking.start_soon(ping, other)
            nursery.cancel_scope.cancel()
