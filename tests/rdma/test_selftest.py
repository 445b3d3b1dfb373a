"""`tierfs verbs-selftest` with a real device: against itself, and two processes that know each other by a secret."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import repository
from tierfs.transport.verbs_port import Capabilities

#: An emulated processor on a busy machine takes its time.
_WITHIN_S = 90
_CHECKS = [
    "link", "READ of 4 KiB", "READ of 1 MiB", "wrong key", "link after an error", "beyond the memory",
    "deregistered memory", "after errors", "READ of 8 MiB",
]  # fmt: skip


def selftest(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mount.cli.main", "verbs-selftest", *map(str, arguments)],
        cwd=repository(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = process.communicate(timeout=_WITHIN_S)
    assert process.returncode == 0, said
    answer: dict[str, Any] = json.loads(said)
    return answer


def check_answer(answer: dict[str, Any], device: Capabilities) -> None:
    assert answer["passed"] and answer["reason"] == ""
    of_device = [each for each in answer["checks"] if each["device"] == device.device]
    assert [each["check"] for each in of_device] == _CHECKS
    assert {each["verdict"] for each in of_device} == {"ok"}, of_device
    assert of_device[-1]["bytes_s"] > 0
    described = next(each for each in answer["devices"] if each["device"] == device.device)
    assert described["usable"] and described["max_qp_rd_atom"] > 0 and described["port_state"] == 4, described
    machine = answer["machine"]
    assert machine["rdma_core"] and "libibverbs.so" in machine["libraries"], machine


def test_a_device_reads_from_itself(device: Capabilities) -> None:
    answer = answer_of(selftest("--json", "--size", "8MiB"))
    print(json.dumps(answer, indent=1))
    check_answer(answer, device)
    assert answer["peer"] == "" and answer["peer_machine"] == {}


def test_two_processes_with_a_secret(device: Capabilities, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the cluster's nodes")
    secret.chmod(0o600)
    options = ("-o", f"cluster.secret_file={secret}", "--size", "8MiB")
    holder = selftest("--serve", "127.0.0.1:0", "--once", *options)
    assert holder.stdout is not None
    try:
        assert select.select([holder.stdout], [], [], _WITHIN_S)[0], "it does not listen in time"
        where = holder.stdout.readline().split()[-1]
        answer = answer_of(selftest(where, "--json", *options))
        check_answer(answer, device)
        assert answer["peer"] == where
        assert answer["peer_machine"]["machine"]["kernel"] == answer["machine"]["kernel"]
        assert answer["peer_machine"]["devices"][0]["usable"]
        said, _ = holder.communicate(timeout=_WITHIN_S)
        assert holder.returncode == 0 and "verbs-selftest-asker at 127.0.0.1" in said
    finally:
        holder.kill()
        holder.wait()


def test_serving_ends_by_ctrl_c_and_needs_its_address(device: Capabilities) -> None:
    holder = selftest("--serve", "127.0.0.1:0")
    assert holder.stdout is not None
    try:
        assert select.select([holder.stdout], [], [], _WITHIN_S)[0], "it does not listen in time"
        address = holder.stdout.readline().split("@")[-1].strip()
        second = selftest("--serve", address)
        said, _ = second.communicate(timeout=_WITHIN_S)
        assert second.returncode == 2 and "can't listen there" in said and said.count("\n") == 1
        holder.send_signal(signal.SIGINT)
        said, _ = holder.communicate(timeout=_WITHIN_S)
        assert (holder.returncode, said) == (130, "")
    finally:
        holder.kill()
        holder.wait()


def test_people_see_what_was_tried(device: Capabilities) -> None:
    process = selftest("--size", "2MiB")
    said, _ = process.communicate(timeout=_WITHIN_S)
    assert process.returncode == 0, said
    assert "all checks passed" in said and "deregistered memory" in said
    assert ("please send this" in said) is (device.kind == "srd")


@pytest.mark.parametrize("transport", ["auto", "verbs"])
def test_doctor_names_the_devices(device: Capabilities, transport: str) -> None:
    from mount.rdma_doctor import examine_rdma
    from tierfs.settings import Settings

    settings = Settings()
    settings.peer.transport = transport
    findings = list(examine_rdma([("", settings)]))
    assert (findings[0].check, findings[0].verdict) == ("RDMA", "ok")
    assert f"{device.device} ({device.kind})" in findings[0].found
