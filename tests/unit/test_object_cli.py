"""The commands of the object tier: what they ask, print and end with, against an instance of canned answers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mount import runtime
from mount.cli.progress import progress_text
from tests.conftest import repository
from tests.unit.canned_instance import CannedInstance, tierfs
from tests.unit.test_cli import STATUS, STEP
from tierfs.settings import Settings
from tierfs.settings_sources import settings_to_json

MIB = 1 << 20
NONE = "no object tier: mount with -o object=file:///... or s3://..."


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[CannedInstance]:
    instance = CannedInstance(tmp_path)
    runtime.write_atomically(instance.instance.settings, settings_to_json(Settings(object="file:///store")))
    yield instance
    instance.close()


def of_object(state: str, **more: Any) -> dict[str, Any]:
    return {"state": state, "bytes_sent": 0, "bytes": 3 << 29, "at": None, "error": "", **more}


SENDING = {**STEP, "level": "ram", "ram_bytes": 3 << 29, "stubs": 0, "object": of_object("sending", bytes_sent=3 << 28)}
STUBS = {**STEP, "step": "step_4", "level": "object", "ram_bytes": MIB, "stubs": 2, "object": of_object("persisted")}
OBJECT = {
    "url": "s3://bucket/ckpt",
    "reachable": True,
    "problem": "",
    "conditional_put": True,
    "concurrency": 16,
    "requests": 9,
    "retries": 2,
    "throttled": 0,
    "bytes_sent": 3 * MIB,
    "bytes_received": 0,
    "last_error": "",
    "steps_owed": 2,
    "bytes_owed": 3 << 29,
    "deletions_owed": 1,
    "sending": [
        {"path": "run1/step_5", "bytes": 3 << 28, "bytes_total": 3 << 29, "state": "sending", "error": "",
         "next_try_in_s": None},
        {"path": "run1/step_6", "bytes": 0, "bytes_total": MIB, "state": "waiting", "error": "access denied",
         "next_try_in_s": 12.0},
    ],
}  # fmt: skip
DURABLE = {"newest_persisted": "step_4", "newest_persisted_age_s": 300.0, "bytes_owed": 3 << 29}
WITH_OBJECT = {
    **STATUS,
    "mounted": True,
    "object": OBJECT,
    "namespaces": [{"namespace": "run1", "latest": "step_5", "steps": [], **DURABLE}],
    "steps": [STUBS, SENDING],
}


def test_status_shows_levels_what_is_not_durable_and_why_it_waits(canned: CannedInstance) -> None:
    canned.answer("status", WITH_OBJECT)
    done = tierfs("status", canned.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "object tier  s3://bucket/ckpt, 3 MiB sent, 0 B received, 2 retries",
        "not durable  2 steps, 1.5 GiB; 1 deletion to do",
        "run1       step_4          5 min      1.5 GiB",
        "sending: run1/step_5, 50% of 1.5 GiB",
        "waiting: run1/step_6, 0% of 1 MiB sent: access denied; next try in 12 s",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    rows = {
        line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("run1  ") and "pinned" in line
    }
    assert "ram, 50% sent" in rows["step_5"]
    assert "  object  " in rows["step_4"] and "  1 MiB  " in rows["step_4"]


def test_status_tells_of_a_daemon_that_still_sends_after_an_unmount(canned: CannedInstance) -> None:
    canned.answer("status", {**WITH_OBJECT, "mounted": False})
    assert "unmounted    still sending what is owed" in tierfs("status", canned.instance.name).stdout


def test_ls_and_stat_show_the_level_only_where_there_is_more_than_one(canned: CannedInstance) -> None:
    entry = {"name": "step_5", "type": "directory", "size_bytes": 5, "state": "complete", "step": True, "mtime": 0.0}
    canned.answer("ls", {"path": "run1", "entries": [{**entry, "level": "ram", "object": None}]})
    assert tierfs("ls", canned.mountpoint / "run1").stdout.split()[:4] == ["STATE", "SIZE", "CHANGED", "NAME"]
    canned.answer("ls", {"path": "run1", "entries": [{**entry, "level": "ram", "object": of_object("owed")}]})
    assert tierfs("ls", canned.mountpoint / "run1").stdout.splitlines()[1].split()[:3] == ["complete", "ram,", "owed"]
    found = {"path": "run1/step_4", "type": "directory", "size_bytes": 5, "mode": 0o40755, "uid": 0, "gid": 0}
    canned.answer("stat", {**found, "mtime": 0.0, "state": "complete", "tier": "ram+object", "step": STUBS})
    text = tierfs("stat", canned.mountpoint / "run1/step_4").stdout
    assert "ram+object" in text and "level      object\n" in text and "in RAM     1 MiB\n" in text


def test_flush_sends_paths_or_all_and_fails_for_steps_that_can_not_be_sent(canned: CannedInstance) -> None:
    step = canned.mountpoint / "run1/step_5"
    canned.answer("flush", {"steps": 1, "bytes": MIB, "already": 2, "failed": []}, {"bytes": 1, "bytes_total": MIB})
    assert tierfs("flush", step).stdout == "1 step, 1 MiB on the way to the object tier; 2 steps there before\n"
    done = tierfs("flush", "--all", "--wait", cwd=canned.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 step, 1 MiB in the object tier; 2 steps there before\n"
    assert [(each["paths"], each["wait"]) for each in canned.asked] == [(["run1/step_5"], False), ([], True)]
    failed = [{"path": "run1/step_6", "reason": "not complete"}]
    canned.answer("flush", {"steps": 0, "bytes": 0, "already": 0, "failed": failed})
    done = tierfs("flush", step)
    assert (done.returncode, done.stderr) == (1, "tierfs: run1/step_6: not complete\n")
    assert done.stdout == ""
    assert tierfs("flush").returncode == 2
    assert "say --wait, too" in tierfs("flush", step, "--timeout", "5").stderr


def test_wait_ends_with_1_when_the_time_is_up(canned: CannedInstance) -> None:
    step = canned.mountpoint / "run1/step_5"
    canned.answer("wait", {"path": "run1/step_5", "level": "object", "reached": True})
    assert tierfs("wait", step, "--level", "object").returncode == 0
    assert canned.asked[-1] == {"op": "wait", "path": "run1/step_5", "level": "object", "seconds": None}
    canned.answer("wait", {"path": "run1/step_5", "level": "object", "reached": False})
    done = tierfs("wait", step, "--timeout", "2min")
    assert canned.asked[-1]["seconds"] == 120
    assert done.returncode == 1 and "did not reach the level object within 120 s" in done.stderr
    assert json.loads(tierfs("wait", step, "--timeout", "1", "--json").stdout)["reached"] is False
    assert tierfs("wait", step, "--timeout", "soon").returncode == 2


def test_prefetch_follows_latest_and_repair_says_what_it_did(canned: CannedInstance) -> None:
    (canned.mountpoint / "run1/step_5").mkdir(parents=True)
    (canned.mountpoint / "run1/latest").symlink_to("step_5")
    canned.answer("prefetch", {"files": 3, "bytes": 2 * MIB, "already": 1})
    done = tierfs("prefetch", canned.mountpoint / "run1/latest")
    assert done.stdout == "fetched 3 files, 2 MiB; 1 file there before\n"
    assert canned.asked[-1]["paths"] == ["run1/step_5"]
    action = {"path": "run1/step_5/a", "action": "sent again", "reason": "is missing in the object tier"}
    canned.answer("repair", {"checked": 2, "actions": [action]})
    done = tierfs("repair", canned.mountpoint)
    assert done.stdout.splitlines() == [
        "run1/step_5/a: sent again: is missing in the object tier",
        "2 steps checked, 1 repair done",
    ]
    assert (done.returncode, canned.asked[-1]["path"]) == (0, "")
    assert tierfs("repair", "--dry-run", canned.mountpoint).returncode == 1
    canned.answer("repair", {"checked": 1, "actions": [{**action, "action": "lost"}]})
    assert tierfs("repair", canned.mountpoint).returncode == 1


def test_verify_says_what_was_not_read(canned: CannedInstance) -> None:
    answer = {"files": 3, "bytes": MIB, "bad": [], "unsealed": 0, "stubs": 2, "not_persisted": 1}
    canned.answer("verify", answer)
    done = tierfs("verify", "--tier", "all", canned.mountpoint)
    assert "all as sealed; 2 not in RAM here, not read; 1 step not in the object tier" in done.stdout
    assert canned.asked[-1]["tier"] == "all"
    canned.answer("verify", {**answer, "files": 0})
    assert "--tier object reads it there" in tierfs("verify", canned.mountpoint).stderr
    bad = [{"path": "a", "reason": "checksum", "tier": "object"}]
    canned.answer("verify", {**answer, "bad": bad})
    assert tierfs("verify", "--tier", "all", canned.mountpoint).stdout.startswith("bad: a: checksum (object)\n")


def test_without_an_object_tier_each_command_says_so_and_ends_with_2(canned: CannedInstance, tmp_path: Path) -> None:
    step = canned.mountpoint / "run1/step_5"
    for command, *rest in (["flush"], ["wait"], ["prefetch"], ["repair"], ["import"], ["verify", "--tier", "object"]):
        canned.refuse(command, "SettingsError", NONE, 2)
        done = tierfs(command, *rest, step)
        assert (done.returncode, done.stderr) == (2, f"tierfs: {NONE}\n"), command


def test_export_refuses_what_would_mislead(canned: CannedInstance, tmp_path: Path) -> None:
    step = canned.mountpoint / "run1/step_5"
    canned.answer("stat", {"type": "directory", "step": {**STEP, "state": "writing"}, "checksum": None})
    assert "is not complete" in tierfs("export", step, tmp_path / "out").stderr
    canned.answer("stat", {"type": "directory", "step": STEP, "checksum": None})
    done = tierfs("export", step, tmp_path)
    assert done.returncode == 2 and "is not empty" in done.stderr
    canned.answer("stat", {"type": "directory", "step": None, "checksum": None})
    assert tierfs("export", canned.mountpoint / "run1", tmp_path / "out").returncode == 2


# --- umount


def test_umount_that_can_not_send_all_in_time_fails_and_says_what_is_left(canned: CannedInstance) -> None:
    left = {"steps": 1, "bytes": MIB, "left": ["run1/step_6"], "bytes_left": 2 * MIB, "problem": "access denied"}
    canned.answer("drain", left)
    done = tierfs("umount", canned.mountpoint, "--timeout", "3")
    assert done.returncode == 1
    assert done.stdout == "sent 1 step, 1 MiB, to the object tier\n"
    for part in ("3 s", "access denied", "run1/step_6", "2 MiB", "--no-flush"):
        assert part in done.stderr
    assert canned.asked == [{"op": "drain", "seconds": 3.0}]


# --- progress


def test_progress_lines_say_how_far_how_fast_and_what_is_waited_for() -> None:
    half = {"bytes": 2 << 29, "bytes_total": 2 << 30, "steps_done": 0, "steps_total": 2, "path": "run1/step_5"}
    text = progress_text("sending", half, 512 << 20, unicode=False)
    assert text == "sending [##########..........]  50% of 2 GiB, 512 MiB/s, 2 s left, 0 of 2 steps: run1/step_5"
    waiting = progress_text("sending", {**half, "waiting_for": "access denied"}, 0, unicode=True)
    assert waiting == "sending [██████████░░░░░░░░░░]  50% of 2 GiB, 0 of 2 steps; waiting: access denied"
    hardly = {"bytes": 1 << 10, "bytes_total": 2 << 30, "steps_total": 1}
    assert progress_text("sending", hardly, 100, unicode=False, width=4) == "sending [....]   0% of 2 GiB, 0 of 1 step"


def test_progress_is_shown_on_a_terminal_and_taken_away_again(canned: CannedInstance) -> None:
    canned.answer("prefetch", {"files": 3, "bytes": 2 * MIB, "already": 0}, {"bytes": MIB, "bytes_total": 2 * MIB})
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mount.cli.main", "prefetch", str(canned.mountpoint / "run1/step_5")]
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=repository(), env=environ, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.stdout == b"fetched 3 files, 2 MiB\n"
    assert "50% of 2 MiB" in shown
    assert shown.endswith("\r" + " " * len(shown.split("\r")[1]) + "\r")
