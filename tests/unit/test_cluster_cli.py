"""The commands about other nodes: what they ask, print and end with, against an instance of canned answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.canned_instance import CannedInstance, tierfs
from tests.unit.test_cli import STATUS, STEP

GIB = 1 << 30
ALONE = "this node is alone: mount with -o catalog=etcd://HOST:PORT to share steps with other nodes"


def node(name: str, **more: Any) -> dict[str, Any]:
    usual = {"this": False, "state": "serving", "addresses": [f"{name}:7117"], "domain": "", "size_bytes": 8 * GIB}
    rest = {"free_bytes": 6 * GIB, "partners": ["n1"], "version": "0.1.0", "mountpoint": "/ckpt", "lost_s": None}
    return {"node": name, **usual, **rest, **more}


NODES = {
    "catalog": "etcd://etcd:2379",
    "cluster": "default",
    "connected": True,
    "nodes": [node("n1", this=True, partners=["n2"]), node("n2", domain="rack-2")],
}


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[CannedInstance]:
    instance = CannedInstance(tmp_path)
    yield instance
    instance.close()


def test_nodes_are_a_table_and_one_that_is_lost_or_a_catalogue_that_is_away_ends_with_3(canned: CannedInstance) -> None:
    canned.answer("nodes", NODES)
    done = tierfs("nodes", canned.mountpoint)
    rows = done.stdout.splitlines()
    assert done.returncode == 0 and rows[0].split()[:4] == ["NODE", "STATE", "ADDRESS", "DOMAIN"]
    assert "n1 (this)" in rows[1] and "rack-2" in rows[2] and "6 GiB" in rows[2]
    lost = node("n3", state="lost", addresses=[], partners=[], lost_s=125.0)
    canned.answer("nodes", {**NODES, "nodes": [*NODES["nodes"], lost]})
    done = tierfs("nodes", canned.mountpoint)
    assert done.returncode == 3 and "lost 2 min 5 s ago" in done.stdout
    canned.answer("nodes", {**NODES, "connected": False})
    done = tierfs("nodes", canned.mountpoint)
    assert done.returncode == 3
    assert done.stdout.startswith("the catalogue etcd://etcd:2379 can't be reached: as it was last seen\n")
    assert tierfs("nodes", canned.mountpoint, "--json").returncode == 3


def test_drain_names_what_is_left_and_can_be_taken_back(canned: CannedInstance) -> None:
    canned.answer("drain-node", {"steps": 2, "bytes": GIB, "left": [], "bytes_left": 0}, {"bytes": 1, "bytes_total": 2})
    done = tierfs("drain", canned.mountpoint, "--timeout", "2min")
    assert done.stdout == "drained: 2 steps held by others too; this node may be stopped\n"
    assert canned.asked[-1] == {"op": "drain-node", "seconds": 120}
    canned.answer("drain-node", {"steps": 1, "bytes": 0, "left": ["run1/step_5"], "bytes_left": GIB})
    done = tierfs("drain", canned.mountpoint)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tierfs: only this node still holds 1 step or file, 1 GiB:\n  run1/step_5\n"
    canned.answer("drain-node", {"stopped": True})
    done = tierfs("drain", canned.mountpoint, "--stop")
    assert (done.returncode, done.stdout) == (0, "the node stays, and takes copies again\n")
    assert canned.asked[-1] == {"op": "drain-node", "stop": True}


def test_prefetch_passes_globs_on_and_wait_the_level(canned: CannedInstance) -> None:
    step = canned.mountpoint / "run1/step_5"
    canned.answer("prefetch", {"files": 1, "bytes": GIB, "already": 0})
    done = tierfs("prefetch", step, "--files", "__[0-7]_*", "--files", ".metadata")
    assert done.stdout == "fetched 1 file, 1 GiB\n"
    assert canned.asked[-1] == {"op": "prefetch", "paths": ["run1/step_5"], "files": ["__[0-7]_*", ".metadata"]}
    canned.answer("wait", {"path": "run1/step_5", "level": "replica", "reached": True})
    assert tierfs("wait", step, "--level", "replica").stdout == "run1/step_5: reached the level replica\n"


def test_repair_ends_with_1_for_what_it_had_to_leave(canned: CannedInstance) -> None:
    action = {"path": "run1/step_5/a", "action": "fetched again", "reason": "the copy here has another checksum"}
    canned.answer("repair", {"checked": 1, "actions": [action]})
    assert tierfs("repair", canned.mountpoint).returncode == 0
    canned.answer("repair", {"checked": 1, "actions": [{**action, "action": "left"}]})
    done = tierfs("repair", canned.mountpoint)
    assert done.returncode == 1 and done.stdout.startswith("run1/step_5/a: left: the copy here")


def test_status_tells_of_the_cluster_and_of_copies_on_the_way(canned: CannedInstance) -> None:
    cluster = {"cluster": "default", "node": "n1", "catalog": "etcd://etcd:2379", "connected": True, "nodes": 3,
               "lost": ["n4"], "pending": 0, "under_replicated": 1, "draining": True}  # fmt: skip
    replica = {"state": "copying", "wanted": 2, "copies": 1}
    step = {**STEP, "level": "ram", "object": None, "replica": replica, "stubs": 2, "ram_bytes": GIB}
    canned.answer("status", {**STATUS, "cluster": cluster, "steps": [step]})
    done = tierfs("status", canned.mountpoint)
    assert "cluster      3 nodes of default, this is n1, lost: n4, this one is draining" in done.stdout
    assert "catalogue    etcd://etcd:2379" in done.stdout and "ram, 1 of 2 copies" in done.stdout
    cluster.update(connected=False, pending=3, lost=[], draining=False)
    canned.answer("status", {**STATUS, "cluster": cluster, "steps": [step]})
    assert "etcd://etcd:2379 can't be reached; 3 changes wait for it" in tierfs("status", canned.mountpoint).stdout
    assert json.loads(tierfs("status", canned.mountpoint, "--json").stdout)["cluster"]["pending"] == 3


def test_status_and_nodes_tell_how_files_come(canned: CannedInstance) -> None:
    cluster = {"cluster": "default", "node": "n1", "catalog": "etcd://etcd:2379", "connected": True, "nodes": 3,
               "lost": [], "pending": 0, "under_replicated": 0, "draining": False}  # fmt: skip
    peers = {"n2": {"reason": ""}, "n3": {"reason": "it has no RDMA device"}}
    for transport, told in (
        ({"transport": "auto", "devices": [], "reason": "no driver", "peers": {}}, ""),
        ({"transport": "verbs", "devices": [], "reason": "no driver", "peers": {}}, "none: no driver"),
        (
            {"transport": "auto", "devices": [{"name": "efa0"}, {"name": "efa1"}], "reason": "", "peers": peers},
            "efa0, efa1; n3 by TCP (it has no RDMA device)",
        ),
    ):
        canned.answer("status", {**STATUS, "cluster": {**cluster, "transport": transport}})
        shown = [line for line in tierfs("status", canned.mountpoint).stdout.splitlines() if line.startswith("RDMA")]
        assert [line.removeprefix("RDMA").strip() for line in shown] == ([told] if told else [])
    node = {"node": "n1", "this": True, "state": "serving", "addresses": [], "domain": "", "size_bytes": GIB,
            "free_bytes": GIB, "partners": [], "version": "1", "mountpoint": "", "lost_s": None,
            "transport": ""}  # fmt: skip
    answer = {"catalog": "etcd://etcd:2379", "connected": True, "cluster": "default"}
    canned.answer("nodes", {**answer, "nodes": [node, {**node, "node": "n2", "transport": "tcp"}]})
    assert "BY" not in tierfs("nodes", canned.mountpoint).stdout
    canned.answer("nodes", {**answer, "nodes": [node, {**node, "node": "n2", "transport": "verbs"}]})
    lines = tierfs("nodes", canned.mountpoint).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["BY", "-", "RDMA"]


def test_a_node_that_is_alone_refuses_with_2(canned: CannedInstance) -> None:
    step = canned.mountpoint / "run1/step_5"
    for op, command in (
        ("drain-node", ["drain", canned.mountpoint]),
        ("wait", ["wait", step, "--level", "replica"]),
        ("verify", ["verify", step, "--tier", "replica"]),
    ):
        canned.refuse(op, "SettingsError", ALONE, 2)
        done = tierfs(*command)
        assert (done.returncode, done.stderr) == (2, f"tierfs: {ALONE}\n"), command
