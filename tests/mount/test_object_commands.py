"""The commands of the object tier on a real mount with a `file://` store: from flush to a umount that sends first."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mount.runtime import read_process
from tests.conftest import repository, wait_until
from tests.mount.keeper_rig import Rig, rig, tierfs

MIB = 1 << 20


class ObjectRig:
    """A mount with an object tier in a directory. While `gate` is missing the store can't be reached."""

    def __init__(self, real: Rig) -> None:
        self.real = real
        self.gate = real.directory / "gate"
        self.store = self.gate / "store"
        self.gate.mkdir()

    def mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.real.mount(f"object=file://{self.store}", "persist.settle_s=0", *options)

    def write_step(self, name: str, size_bytes: int = 2 * MIB) -> Path:
        """A complete step, written through the mount."""
        step = self.real.place / "run1" / name
        step.mkdir(parents=True)
        (step / "model.safetensors").write_bytes(os.urandom(size_bytes))
        index = {"metadata": {}, "weight_map": {"w": "model.safetensors"}}
        (step / "model.safetensors.index.json").write_text(json.dumps(index))
        wait_until(lambda: self.step(name)["state"] == "complete", "the step is complete")
        return step

    def step(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = ask("stat", self.real.place / "run1" / name)["step"]
        return found

    def is_committed(self, name: str) -> bool:
        return (self.store / "run1" / name / ".tierfs" / "manifest.json").exists()

    def close_gate(self) -> None:
        """Nothing can be written to the store from now on."""
        self.gate.rename(self.gate.with_name("closed"))

    def open_gate(self) -> None:
        self.gate.with_name("closed").rename(self.gate)


@pytest.fixture
def tiered() -> Iterator[ObjectRig]:
    with rig("mount.daemon") as real:
        yield ObjectRig(real)


def ask(*arguments: str | Path, code: int = 0) -> Any:
    done = tierfs(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_step_is_flushed_verified_evicted_fetched_and_exported(tiered: ObjectRig) -> None:
    tiered.mount("persist.policy=demand")
    step = tiered.write_step("step_5")
    contents = (step / "model.safetensors").read_bytes()
    assert tiered.step("step_5")["object"]["state"] == "none"
    not_owed = tierfs("wait", step, "--timeout", "5")
    assert not_owed.returncode == 1 and "not owed" in not_owed.stderr
    assert "nothing to verify" in tierfs("verify", "--tier", "object", step).stderr

    answer = ask("flush", step, "--wait", "--timeout", "60")
    assert (answer["steps"], answer["failed"]) == (1, [])
    assert tiered.is_committed("step_5")
    assert ask("flush", "--all", tiered.real.place)["already"] == 1
    for level in ("ram", "object"):
        assert ask("wait", step, "--level", level) == {"path": "run1/step_5", "level": level, "reached": True}
    status = ask("status", tiered.real.place)
    assert status["steps"][0]["level"] == "object" and status["object"]["bytes_owed"] == 0
    assert status["namespaces"][0]["newest_persisted"] == "step_5"
    assert ask("verify", "--tier", "object", step)["files"] == 2

    assert tierfs("evict", step).returncode == 0
    listed = {each["name"]: each for each in ask("ls", step)["entries"]}
    assert listed["model.safetensors"]["level"] == "object"
    assert ask("stat", step)["tier"] in ("object", "ram+object")
    assert ask("verify", step, code=0)["stubs"] == 1
    out = tiered.real.directory / "out"
    fetched = ask("prefetch", tiered.real.place / "run1" / "latest")
    assert (fetched["files"], fetched["bytes"]) == (1, 2 * MIB)
    assert ask("prefetch", step)["already"] == 2
    assert tierfs("evict", step).returncode == 0
    assert ask("export", step, out)["bad"] == []
    assert (out / "model.safetensors").read_bytes() == contents

    assert tierfs("umount", "--discard", tiered.real.place).returncode == 0
    tiered.mount("persist.policy=demand")
    (listed_step,) = (each for each in ask("ls", tiered.real.place / "run1")["entries"] if each["step"])
    seen = ask("status", tiered.real.place)["steps"][0]
    assert (listed_step["size_bytes"], seen["bytes"], seen["ram_bytes"], seen["stubs"]) == (seen["bytes"],) * 2 + (0, 2)


def names_in(answer: Any) -> set[str]:
    """The keys of a JSON answer, at all depths."""
    if isinstance(answer, list):
        return {name for each in answer for name in names_in(each)}
    if isinstance(answer, dict):
        return set(answer) | {name for each in answer.values() for name in names_in(each)}
    return set()


@pytest.mark.parametrize("has_tier", [True, False])
def test_every_field_of_the_json_is_described(tiered: ObjectRig, has_tier: bool) -> None:
    page = (repository() / "docs" / "cli.md").read_text()
    bullets = re.findall(r"^- \*\*([a-z ]+)\*\*(.*?)(?=^- \*\*|\Z)", page, re.S | re.M)
    if has_tier:
        tiered.mount("persist.policy=demand")
    else:
        tiered.real.mount()
    step, out = tiered.write_step("step_5"), tiered.real.directory / "out"
    answers = {
        "status": ask("status", tiered.real.place),
        "ls": ask("ls", step),
        "stat": ask("stat", step / "model.safetensors"),
        "verify": ask("verify", step),
        "export": ask("export", step, out),
        "import": ask("import", out, step.with_name("step_6")),
        "config show": [dict.fromkeys(each) for each in ask("config", "show", tiered.real.place)],
        "doctor": ask("doctor", tiered.real.place),
    }
    if has_tier:
        answers["flush"] = ask("flush", step, "--wait")
        answers["wait"] = ask("wait", step)
        answers["prefetch"] = ask("prefetch", step)
        answers["repair"] = ask("repair", step)
    answers["status"]["requests"] = {}  # what the kernel asked for, by its names
    for command, answer in answers.items():
        text = "".join(found for name, found in bullets if name == command)
        if command in ("ls", "stat"):  # they describe steps as status does
            text += "".join(found for name, found in bullets if name == "status")
        assert names_in(answer) <= set(re.findall(r"`([a-z_0-9]+)`", text)), command
    steps = answers["status"]["steps"]
    assert steps and all({"ram_bytes", "stubs", "level", "object"} <= set(each) for each in steps)


def test_objects_put_there_by_others_are_imported_where_they_are(tiered: ObjectRig) -> None:
    place = tiered.store / "run1" / "step_9"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"w" * 2 * MIB)
    index = {"metadata": {}, "weight_map": {"w": "model.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    tiered.mount("persist.policy=demand")
    assert not (tiered.real.place / "run1" / "step_9").exists()
    answer = ask("import", tiered.real.place / "run1" / "step_9")
    assert (answer["path"], answer["files"]) == ("run1/step_9", 2)
    assert (tiered.real.place / "run1" / "step_9" / "model.safetensors").read_bytes() == b"w" * 2 * MIB
    assert os.readlink(tiered.real.place / "run1" / "latest") == "step_9"


def test_repair_mends_a_damaged_object_from_ram(tiered: ObjectRig) -> None:
    tiered.mount("persist.policy=demand")
    step = tiered.write_step("step_5")
    assert tierfs("flush", step, "--wait").returncode == 0
    thing = tiered.store / "run1" / "step_5" / "model.safetensors"
    damaged = bytearray(thing.read_bytes())
    damaged[MIB] ^= 1
    thing.write_bytes(damaged)
    bad = ask("verify", "--tier", "object", step, code=1)["bad"]
    assert [each["path"] for each in bad] == ["run1/step_5/model.safetensors"]
    assert [each["action"] for each in ask("repair", step, "--dry-run", code=1)["actions"]] == ["sent again"]
    assert ask("repair", step)["checked"] == 1
    assert ask("verify", "--tier", "all", step)["bad"] == []


def test_repair_mends_a_copy_in_ram_that_was_changed_past_the_mount(tiered: ObjectRig) -> None:
    """Also where its time or size tells of it: what verify calls bad must not be passed over as just being written."""
    tiered.mount("persist.policy=demand")
    step = tiered.write_step("step_5")
    assert tierfs("flush", step, "--wait").returncode == 0
    whole = (step / "model.safetensors").read_bytes()
    backing = tiered.real.instance.ram / "root" / "run1" / "step_5" / "model.safetensors"
    for damaged in (bytes([whole[0] ^ 1]) + whole[1:], whole[:MIB]):
        with open(backing, "r+b") as file:
            file.write(damaged)
            file.truncate(len(damaged))
        assert [each["tier"] for each in ask("verify", "--tier", "all", step, code=1)["bad"]] == ["ram"]
        assert [each["action"] for each in ask("repair", step)["actions"]] == ["fetched again"]
        assert ask("verify", "--tier", "all", step)["bad"] == []
        assert (step / "model.safetensors").read_bytes() == whole


def test_an_unreachable_store_mounts_and_status_says_why_it_waits(tiered: ObjectRig) -> None:
    tiered.close_gate()
    assert "warning: the object tier can't be used now" in tiered.mount().stderr
    step = tiered.write_step("step_5")

    def problems() -> list[str]:
        done = tierfs("status", tiered.real.place, "--json")
        answer = json.loads(done.stdout)
        errors = [each["message"] for each in answer["problems"] if each["severity"] == "error"]
        return errors if done.returncode == 3 and answer["object"]["bytes_owed"] >= 2 * MIB else []

    wait_until(problems, "status has an error of the object tier", timeout_s=30)
    assert str(tiered.store) in problems()[0]
    assert tierfs("wait", step, "--timeout", "0.5").returncode == 1
    tiered.open_gate()
    assert tierfs("wait", step, "--timeout", "60", timeout_s=90).returncode == 0


# --- umount


def test_a_read_that_failed_while_the_store_was_away_is_no_problem_once_it_answers(tiered: ObjectRig) -> None:
    tiered.mount("transfer.read_retry_for_s=0", "transfer.index_every_s=1")
    step = tiered.write_step("step_5")
    assert tierfs("wait", step, "--timeout", "60").returncode == 0
    assert tierfs("evict", step).returncode == 0
    tiered.close_gate()
    with pytest.raises(OSError) as failed:
        (step / "model.safetensors").read_bytes()
    assert failed.value.errno == errno.EIO
    problems = ask("status", tiered.real.place, code=3)["problems"]
    assert [each["path"] for each in problems if "can't be fetched" in each["message"]] == ["run1/step_5"]
    tiered.open_gate()
    assert len((step / "model.safetensors").read_bytes()) == 2 * MIB
    wait_until(lambda: tierfs("status", tiered.real.place).returncode == 0, "no problem is left")


def test_umount_sends_what_is_owed_first(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.write_step("step_5")
    tiered.write_step("step_6")
    done = tierfs("umount", tiered.real.place)
    assert done.returncode == 0, done.stderr
    assert tiered.is_committed("step_5") and tiered.is_committed("step_6")
    tiered.real.wait_for_end()


def test_umount_that_can_not_send_stays_mounted_and_no_flush_leaves_it_to_the_next_mount(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.close_gate()
    tiered.write_step("step_5")
    done = tierfs("umount", tiered.real.place, "--timeout", "0.5")
    assert done.returncode == 1 and "run1/step_5" in done.stderr and "still mounted" in done.stderr
    assert tiered.real.is_mounted()
    began = time.monotonic()
    done = tierfs("umount", tiered.real.place, "--no-flush")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 20
    tiered.real.wait_for_end()
    tiered.open_gate()
    assert not tiered.is_committed("step_5")
    tiered.mount()
    assert tierfs("wait", tiered.real.place / "run1" / "step_5", "--timeout", "60").returncode == 0
    assert tiered.is_committed("step_5")


def test_ctrl_c_while_it_sends_leaves_it_mounted(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.close_gate()
    tiered.write_step("step_5")
    command = subprocess.Popen(
        [*_command(), "umount", str(tiered.real.place)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(2)
    assert command.poll() is None
    command.send_signal(signal.SIGINT)
    assert command.wait(20) == 130
    assert tiered.real.is_mounted()


def test_after_a_plain_umount_the_daemon_stays_until_all_is_sent(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.close_gate()
    tiered.write_step("step_5")
    subprocess.run(["umount", tiered.real.place], check=True, timeout=20)
    assert not tiered.real.is_mounted()
    wait_until(lambda: not ask("status", tiered.real.name, code=3)["mounted"], "status says that it is unmounted")
    assert "still sending what is owed" in tierfs("status", tiered.real.name).stdout
    done = tierfs("umount", tiered.real.name, "--timeout", "0.5")
    assert done.returncode == 1 and "run1/step_5" in done.stderr and "mounted" not in done.stderr
    tiered.open_gate()
    done = tierfs("umount", tiered.real.name, "--timeout", "60", timeout_s=90)
    assert done.returncode == 0, done.stderr
    tiered.real.wait_for_end()
    assert tiered.is_committed("step_5")


def test_a_new_mount_takes_over_what_the_last_daemon_still_sends(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.close_gate()
    tiered.write_step("step_5")
    old = tiered.real.daemon
    subprocess.run(["umount", tiered.real.place], check=True, timeout=20)
    done = tiered.mount()
    assert "goes on with what is owed" in done.stderr
    assert read_process(tiered.real.instance.daemon_pid) != old
    tiered.open_gate()
    assert tierfs("wait", tiered.real.place / "run1" / "step_5", "--timeout", "60").returncode == 0


def test_sigterm_sends_first_and_a_second_one_ends_it(tiered: ObjectRig) -> None:
    tiered.mount()
    tiered.close_gate()
    tiered.write_step("step_5")
    keeper = tiered.real.keeper
    keeper.send_signal(signal.SIGTERM)
    wait_until(lambda: not tiered.real.is_mounted(), "the mount is gone")
    assert not keeper.wait(2), "it waits for what is owed"
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(20), tiered.real.log()
    tiered.real.wait_for_end()
    shutil.rmtree(tiered.gate.with_name("closed"))


def _command() -> list[str]:
    import sys

    return [sys.executable, "-m", "mount.cli.main"]


def test_setting_times_and_modes_of_a_persisted_step_changes_no_byte_of_it(tiered: ObjectRig) -> None:
    tiered.mount()
    step = tiered.write_step("step_5")
    shard, contents = step / "model.safetensors", (step / "model.safetensors").read_bytes()
    assert tierfs("wait", step, "--timeout", "20").returncode == 0
    os.utime(shard, (1e9, 1e9))
    shard.chmod(0o600)
    assert ask("evict", step)["bytes"] == len(contents)
    assert ask("stat", shard)["tier"] == "object"
    os.utime(shard, (1.1e9, 1.1e9))
    assert shard.read_bytes() == contents
    wait_until(lambda: ask("stat", shard)["tier"] == "ram", "it is whole")
    other = step.parent.parent / "other"  # another name of the file, which tells the step nothing
    other.hardlink_to(shard)
    os.utime(other, (1.2e9, 1.2e9))
    assert tiered.step("step_5")["object"]["state"] == "persisted"
    wait_until(lambda: ask("evict", step)["bytes"] == len(contents), "it is evicted once it is summed up again")
    other.unlink()
    with shard.open("rb") as reader:
        assert reader.read() == contents
        wait_until(lambda: ask("stat", shard)["tier"] == "ram", "it is whole")
        assert ask("evict", step)["bytes"] == 0, "a program has it open"
    assert (shard.stat().st_mtime, shard.stat().st_mode & 0o777) == (1.2e9, 0o600)


def test_stubs_are_no_data_for_a_mount_without_the_tier_that_has_their_bytes(tiered: ObjectRig) -> None:
    assert tiered.mount().returncode == 0
    step = tiered.write_step("step_1")
    content = (step / "model.safetensors").read_bytes()
    assert tierfs("flush", step, "--wait").returncode == 0
    assert tierfs("evict", step).returncode == 0
    assert tierfs("umount", tiered.real.place).returncode == 0

    assert tiered.real.mount().returncode == 0
    with pytest.raises(OSError) as refused:
        (step / "model.safetensors").read_bytes()
    assert refused.value.errno == errno.EIO and (step / "model.safetensors").stat().st_size == len(content)
    assert tierfs("umount", tiered.real.place).returncode == 0

    assert tiered.mount().returncode == 0
    assert (step / "model.safetensors").read_bytes() == content
