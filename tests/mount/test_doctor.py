"""`tierfs doctor` says what is, by trying, and a machine that can mount is never called broken."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mount import kernel_mount, rdma_doctor
from tests.mount.keeper_rig import AS_USER, STUB, Rig, in_namespace, rig, tierfs
from tierfs.settings import Settings
from tierfs.transport.verbs_devices import Found
from tierfs.transport.verbs_port import Capabilities


@pytest.fixture
def stub() -> Iterator[Rig]:
    with rig(STUB) as made:
        yield made


def findings(done: subprocess.CompletedProcess[str] | str) -> dict[str, list[dict[str, Any]]]:
    answer = json.loads(done if isinstance(done, str) else done.stdout)
    named: dict[str, list[dict[str, Any]]] = {}
    for finding in answer["findings"]:
        named.setdefault(finding["check"], []).append(finding)
    return named


def test_a_machine_that_can_mount_passes_and_nothing_stays_mounted(stub: Rig) -> None:
    before = len(kernel_mount.mount_table())
    done = tierfs("doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = findings(done)
    for check in ("FUSE device", "privileges", "libfuse", "kernel", "memory", "RDMA"):
        assert check in found
    assert found["FUSE device"][0]["verdict"] == "ok"
    assert not [entry for entry in kernel_mount.mount_table() if "tierfs-doctor" in entry.mountpoint]
    assert before >= 1
    people = tierfs("doctor")
    assert people.returncode == 0 and "FUSE device" in people.stdout


def test_what_it_says_of_passthrough_and_resend_is_what_a_mount_gets() -> None:
    with rig("mount.daemon") as real:
        real.mount()
        told = json.loads(real.instance.daemon_ready.read_text())
        found = findings(tierfs("doctor", "--json"))
    assert (found["passthrough"][0]["verdict"] == "ok") is told["passthrough"]
    assert (found["resend"][0]["verdict"] == "ok") is told["resend"]


def test_a_killed_keeper_a_dead_mount_and_memory_left_over_are_named(stub: Rig) -> None:
    stub.mount()
    (stub.instance.ram / "root" / "shard").write_bytes(b"kept")
    keeper, daemon = stub.keeper, stub.daemon
    keeper.send_signal(signal.SIGKILL)
    assert keeper.wait(10)
    assert any(str(daemon.pid) in each["found"] for each in findings(tierfs("doctor", "--json"))["instances"])
    daemon.send_signal(signal.SIGKILL)
    assert daemon.wait(10)
    found = findings(tierfs("doctor", "--json"))
    assert any(f"{stub.place} does not answer" in each["found"] for each in found["mounts"])
    assert tierfs("umount", stub.place).returncode == 0
    left = [each for each in findings(tierfs("doctor", "--json"))["instances"] if stub.name in each["found"]]
    assert (len(left) == 1 and "keeps 4 KiB in memory" in left[0]["found"]) or "2 MiB" in left[0]["found"]
    assert f"tierfs umount --discard {stub.name}" in left[0]["advice"]


def test_without_root_it_says_what_is_missing(stub: Rig) -> None:
    said = in_namespace(AS_USER + "as_user $PY -m mount.cli.main doctor --json > $D/doctor.json", stub.directory)
    found = findings((stub.directory / "doctor.json").read_text())
    assert found["privileges"][0]["verdict"] == "warn" and "mount as root" in found["privileges"][0]["advice"], said
    assert "user_allow_other" in found["other users"][0]["advice"]
    assert found["fusermount3"][0]["verdict"] == "ok"


def test_rdma_is_looked_for_as_the_settings_say() -> None:
    """By the name of a device that no machine has, so that there is none to use."""
    none = "peer.verbs_devices=none0"
    (auto,) = findings(tierfs("doctor", "--json", "-o", none))["RDMA"]
    assert (auto["verdict"], auto["advice"]) == ("ok", "")
    assert auto["found"].startswith("files go from node to node by TCP: ")
    reason = auto["found"].partition(": ")[2]
    assert reason
    (tcp,) = findings(tierfs("doctor", "--json", "-o", f"{none},peer.transport=tcp"))["RDMA"]
    assert (tcp["verdict"], tcp["found"]) == ("ok", "not looked at: peer.transport is tcp")
    done = tierfs("doctor", "--json", "-o", f"{none},peer.transport=verbs")
    (verbs,) = findings(done)["RDMA"]
    assert done.returncode == 1 and verbs["verdict"] == "fail" and "peer.transport = auto" in verbs["advice"]
    assert verbs["found"] == f"peer.transport is verbs, and there is no device to use: {reason}"


def test_rdma_devices_are_named_once_for_all_that_ask_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(
        (Capabilities("mlx5_0", "rc", True, 1 << 30, 256), Capabilities("efa0", "srd", True, 1 << 30, 256)), ""
    )
    monkeypatch.setattr(
        rdma_doctor, "find_devices", lambda wanted: found if not wanted else Found((), "no such device")
    )
    monkeypatch.setattr(rdma_doctor, "is_capable", lambda _: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 << 30, 2 << 30))
    usual, named, encrypted, all_the_same = Settings(), Settings(), Settings(), Settings()
    named.peer.verbs_devices, named.peer.transport = "mlx5_7", "verbs"
    encrypted.cluster.tls_cert = Path("/etc/tierfs/node.crt")
    all_the_same.cluster.tls_cert = encrypted.cluster.tls_cert
    all_the_same.peer.transport = "verbs"
    asked = [("a: ", usual), ("b: ", usual), ("c: ", named), ("d: ", encrypted), ("e: ", all_the_same)]
    told = [(each.check, each.verdict, each.found) for each in rdma_doctor.examine_rdma(asked)]
    assert told == [
        ("RDMA", "ok", "a: mlx5_0 (rc), efa0 (srd)"),
        ("locked memory", "warn", "a: at most 2 GiB: files beyond that go by TCP"),
        ("RDMA", "fail", "c: peer.transport is verbs, and there is no device to use: no such device"),
        (
            "RDMA",
            "ok",
            "d: not looked at: what goes by TCP is encrypted (cluster.tls_cert, cluster.encryption), and RDMA is not; "
            "peer.transport = verbs uses it all the same",
        ),
        ("RDMA", "ok", "e: mlx5_0 (rc), efa0 (srd)"),
        ("locked memory", "warn", "e: at most 2 GiB: files beyond that go by TCP"),
    ]


def test_an_object_tier_is_tried_and_left_as_it_was(stub: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stub.directory / "store"
    found = findings(tierfs("doctor", "--json", "-o", f"object=file://{store}"))
    assert found["object tier"][0]["verdict"] == "ok" and "read back" in found["object tier"][0]["found"]
    assert found["conditional PUT"][0]["verdict"] == "ok"
    assert "free in" in found["object tier space"][0]["found"]
    assert [path for path in store.rglob("*") if path.is_file()] == []
    stub.mount(f"object=file://{store}")
    assert f"{stub.name}: file://{store}" in findings(tierfs("doctor", "--json", stub.place))["object tier"][0]["found"]
    monkeypatch.setenv("TIERFS_OBJECT", f"file://{stub.directory}/other")
    found = findings(tierfs("doctor", "--json"))
    assert any(f"file://{stub.directory}/other" in each["found"] for each in found["object tier"]), found


def test_an_object_tier_that_can_not_be_used_is_a_warning_that_says_why(stub: Rig) -> None:
    (stub.directory / "file").touch()
    done = tierfs("doctor", "--json", "-o", f"object=file://{stub.directory}/file/store")
    assert done.returncode == 0
    found = findings(done)["object tier"][0]
    assert found["verdict"] == "warn" and str(stub.directory) in found["found"] and found["advice"], found
    assert tierfs("doctor", "-o", "object=s3://").returncode == 2


def test_a_profile_and_certificates_that_are_missing_are_said(stub: Rig) -> None:
    where = "object=s3://bucket/ckpt,s3.endpoint_url=http://127.0.0.1:9"
    found = findings(tierfs("doctor", "--json", "-o", f"{where},s3.profile=not-there"))
    assert found["credentials"][0]["verdict"] == "warn"
    assert "not-there" in found["credentials"][0]["found"] and found["credentials"][0]["advice"]
    done = tierfs("doctor", "--json", "-o", f"{where},s3.ca_bundle={stub.directory}/none.pem")
    assert done.returncode == 1
    (missing,) = findings(done)["object tier"]
    assert (missing["verdict"], missing["advice"]) == ("fail", "correct s3.ca_bundle")
    assert f"{stub.directory}/none.pem is not a file" in missing["found"]
