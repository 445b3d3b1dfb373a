"""The command line: what it prints and how it ends, against a real control socket that gives canned answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mount import runtime
from mount.cli import completion, reference
from mount.cli.main import build_parser
from mount.cli.tables import Cell, Column, Screen, render_table
from tests.unit.canned_instance import CannedInstance, tierfs
from tierfs.settings import setting_keys

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
STEP = {
    "namespace": "run1",
    "step": "step_5",
    "number": 5,
    "state": "complete",
    "generation": 1,
    "overwriting": False,
    "files": 3,
    "bytes": 3 << 29,
    "pinned": True,
    "completed_at": 1767225600.0,
    "age_s": 125,
    "note": "",
}
STATUS: dict[str, Any] = {
    "name": "ckpt",
    "mountpoint": "/ckpt",
    "version": "0.1.0",
    "daemon_pid": 12,
    "keeper_pid": 11,
    "passthrough": False,
    "channel": {"kind": "customio", "resend": True, "reason": "Linux 5.10 has none", "proto": [7, 45]},
    "takeovers": 1,
    "uptime_s": 3780,
    "ram": {
        "path": "/run/tierfs/ckpt/ram",
        "size_bytes": 8 * GIB,
        "used_bytes": 2 * GIB,
        "free_bytes": 6 * GIB,
        "ballast_bytes": 5 * GIB,
        "ballast_target_bytes": 6 * GIB,
        "huge_pages": "always",
        "noswap": True,
    },
    "namespaces": [{"namespace": "run1", "latest": "step_5", "steps": [STEP]}],
    "steps": [STEP, {**STEP, "step": "step_10", "state": "writing", "pinned": False, "bytes": 10}],
    "growing": [{"path": "run1/step_10/a", "size_bytes": 1 << 20}],
    "problems": [],
}


@pytest.fixture
def canned(tmp_path: Path) -> Iterator[CannedInstance]:
    instance = CannedInstance(tmp_path)
    yield instance
    instance.close()


# --- without an instance ---------------------------------------------------------------------------------------


def test_help_lists_every_command_quickly_and_without_heavy_imports() -> None:
    probe = (
        "import sys, mount.cli.main as m; code = m.main(['--help']); "
        "heavy = {'pyfuse3', 'torch', 'trio', 'awscrt', 'numpy'} & set(sys.modules); "
        "print('HEAVY', sorted(heavy), code)"
    )
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "HEAVY [] 0" in out.stdout
    for command in build_parser().commands:
        assert re.search(rf"^    {command}\s", out.stdout, re.MULTILINE), command
    assert "debug_crash_at" not in out.stdout

    def cpu_seconds() -> float:
        before = os.times()
        tierfs("--help")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(cpu_seconds() for _ in range(5)) < 0.150


def test_every_command_has_a_description_and_a_help_that_works() -> None:
    for command in completion.walk(build_parser()):
        done = tierfs(*command.words, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("usage: tierfs")
        for option in command.options:
            assert option.help, f"{command.key} {option.names}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stauts"], "tierfs: no command 'stauts'; did you mean 'status'?; see `tierfs --help`\n"),
        (["status", "--jsn"], "tierfs: unrecognized arguments: --jsn; see `tierfs --help`\n"),
        (["pin"], "tierfs: the following arguments are required: PATH; see `tierfs pin --help`\n"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = tierfs(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_the_docs_name_every_command() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    for command in build_parser().commands:
        assert f"`tierfs {command}" in text, command


def test_version_and_no_command() -> None:
    assert tierfs("--version").stdout == "tierfs 0.1.0\n"
    assert tierfs().returncode == 2


def test_a_path_in_no_mount_is_not_mounted(tmp_path: Path) -> None:
    for command in ("status", "ls", "stat", "commit", "pin", "unpin", "evict", "rm", "verify"):
        done = tierfs(command, tmp_path / "nothing")
        assert done.returncode == 4, command
        assert done.stderr.startswith("tierfs: no tierfs instance")
        assert done.stderr.count("\n") == 1
    assert tierfs("config", "show", tmp_path / "nothing").returncode == 4


def test_a_traceback_is_shown_only_when_asked_for(tmp_path: Path) -> None:
    assert "Traceback" not in tierfs("ls", tmp_path).stderr
    assert "Traceback" in tierfs("ls", tmp_path, TIERFS_DEBUG="1").stderr


def test_config_show_and_check(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('size = "1G"\n[retention]\nram_steps = 5\n')
    rows = json.loads(tierfs("config", "show", "--config", path, "-o", "size=3G", "--json").stdout)
    by_key = {row["key"]: row for row in rows}
    assert by_key["size"] == {"key": "size", "value": 3 * GIB, "text": "3GiB", "source": "-o"}
    assert by_key["retention.ram_steps"]["source"] == str(path)
    table = tierfs("config", "show", "--config", path, TIERFS_LOG_LEVEL="debug").stdout
    assert "log.level" in table and "environment TIERFS_LOG_LEVEL" in table
    assert tierfs("config", "check", path).stdout == f"{path}: fine, 2 settings\n"
    path.write_text('sise = "1G"\n')
    done = tierfs("config", "check", path)
    assert done.returncode == 2
    assert done.stderr == f'tierfs: unknown setting "sise"; did you mean "size"? (from {path})\n'


def test_the_settings_reference_is_up_to_date() -> None:
    written = (ROOT / "docs/settings.md").read_text()
    assert written == reference.settings_reference(), "run `python -m mount.cli.reference > docs/settings.md`"
    missing = [key.path for key in setting_keys() if f"### `{key.path}`" not in written]
    assert not [path for path in missing if not path.startswith("debug_")], "give its section a title"
    assert "debug_crash_at" not in written


# --- with an instance ------------------------------------------------------------------------------------------


def test_status_shows_the_instance_and_its_steps(canned: CannedInstance) -> None:
    canned.answer("status", STATUS)
    done = tierfs("status", canned.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "instance     ckpt on /ckpt (tierfs 0.1.0)",
        "passthrough  off: Linux 5.10 has none",
        "processes    daemon 12, keeper 11, up 1 h 3 min, taken over 1 time",
        "ram          2 GiB of 8 GiB used, 6 GiB free, always huge pages",
        "ballast      5 GiB of 6 GiB ready",
    ]
    fields = [re.split(r"  +", line) for line in lines[6:9]]
    assert fields == [
        ["NAMESPACE", "STEP", "STATE", "GEN", "FILES", "SIZE", "AGE", "MARKS"],
        ["run1", "step_5", "complete", "1", "3", "1.5 GiB", "2 min 5 s", "latest, pinned"],
        ["run1", "step_10", "writing", "1", "3", "10 B", "2 min 5 s"],
    ]
    assert lines[7].index("GiB") + 3 == lines[8].index(" B ") + 2  # sizes end in the same column
    assert lines[10] == "being written: run1/step_10/a (1 MiB)"


def test_status_ends_with_3_for_errors_only(canned: CannedInstance) -> None:
    warning = {"severity": "warning", "message": "no huge pages", "path": ""}
    canned.answer("status", {**STATUS, "problems": [warning]})
    done = tierfs("status", canned.mountpoint)
    assert done.returncode == 0
    assert done.stdout.endswith("\nwarning: no huge pages\n")
    error = {"severity": "error", "message": "bad checksum", "path": "run1/step_5/a"}
    canned.answer("status", {**STATUS, "problems": [warning, error]})
    done = tierfs("status", canned.mountpoint)
    assert done.returncode == 3
    assert done.stdout.endswith("\nerror: run1/step_5/a: bad checksum\n")
    done = tierfs("status", canned.mountpoint, "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout) == {**STATUS, "problems": [warning, error]}


def test_a_fresh_instance_without_a_keeper_reads_well(canned: CannedInstance) -> None:
    canned.answer(
        "status", {**STATUS, "keeper_pid": None, "takeovers": 0, "steps": [], "growing": [], "namespaces": []}
    )
    text = tierfs("status", canned.mountpoint).stdout
    assert "daemon 12, no keeper, up 1 h 3 min\n" in text
    assert text.endswith("\nno steps yet\n")


def test_json_is_exactly_the_servers_answer(canned: CannedInstance) -> None:
    canned.answer("ls", {"path": "run1", "entries": [], "more": 1})
    canned.answer("stat", {"any": "thing"})
    canned.answer("pin", {"step": "step_5"})
    canned.answer("config", [{"key": "size", "value": 1, "text": "1", "source": "-o"}])
    step = canned.mountpoint / "run1/step_5"
    assert json.loads(tierfs("ls", "--json", canned.mountpoint / "run1").stdout)["more"] == 1
    assert json.loads(tierfs("stat", "--json", step).stdout) == {"any": "thing"}
    assert json.loads(tierfs("pin", "--json", step).stdout) == {"step": "step_5"}
    assert json.loads(tierfs("config", "show", "--json", canned.mountpoint).stdout)[0]["key"] == "size"
    assert [(each["op"], each.get("path")) for each in canned.asked] == [
        ("ls", "run1"),
        ("stat", "run1/step_5"),
        ("pin", "run1/step_5"),
        ("config", None),
    ]


def test_ls_and_stat_read_well(canned: CannedInstance) -> None:
    entry = {"name": "step_5", "type": "dir", "size_bytes": 3 << 29, "state": "complete", "step": True, "mtime": 0.0}
    latest = {"name": "latest", "type": "symlink", "size_bytes": 6, "state": "", "step": False, "mtime": 0.0}
    canned.answer("ls", {"path": "run1", "entries": [entry, latest]})
    lines = tierfs("ls", canned.mountpoint / "run1", TZ="UTC").stdout.splitlines()
    assert lines[0].split() == ["STATE", "SIZE", "CHANGED", "NAME"]
    assert lines[1].split() == ["complete", "1.5", "GiB", "1970-01-01", "00:00:00", "step_5/"]
    assert lines[2].split() == ["6", "B", "1970-01-01", "00:00:00", "latest"]
    found = {"path": "run1/step_5/a", "type": "file", "size_bytes": 1536, "mode": 0o100640, "uid": 1, "gid": 2}
    found |= {"mtime": 0.0, "state": "complete", "tier": "ram", "generation": 1, "checksum": "crc64nvme:ab"}
    canned.answer("stat", {**found, "sealed": True, "step": STEP})
    text = tierfs("stat", canned.mountpoint / "run1/step_5/a").stdout
    for part in (
        "1.5 KiB (1536 bytes)",
        "0640, uid 1, gid 2",
        "crc64nvme:ab",
        "step_5: complete, 3 files, 1.5 GiB, pinned",
    ):
        assert part in text


def test_step_commands_send_their_switches_and_go_on_after_a_failure(canned: CannedInstance) -> None:
    canned.answer("evict", {"files": 1, "bytes": 1024})
    canned.answer("rm", {})
    canned.refuse("commit", "StepBusy", "run1/step_5 has 2 open writers; close them first")
    done = tierfs("evict", "--force", canned.mountpoint / "run1/step_5")
    assert (done.returncode, done.stdout) == (0, "run1/step_5: evicted (1 file, 1 KiB)\n")
    tierfs("rm", "-r", canned.mountpoint / "run1")
    assert [(each["op"], each.get("force"), each.get("recursive")) for each in canned.asked] == [
        ("evict", True, None),
        ("rm", None, True),
    ]
    done = tierfs("commit", canned.mountpoint / "run1/step_5", canned.mountpoint / "run1/step_6")
    assert done.returncode == 1
    assert done.stderr == "tierfs: run1/step_5 has 2 open writers; close them first\n" * 2
    assert len(canned.asked) == 4


def test_a_step_command_refuses_the_mount_itself(canned: CannedInstance) -> None:
    for command in ("rm", "evict", "pin", "unpin", "commit"):
        done = tierfs(command, canned.mountpoint)
        assert done.returncode == 2
        assert "is the mount itself" in done.stderr
    assert canned.asked == []


def test_verify_ends_with_1_for_bad_files_and_for_nothing_verified(canned: CannedInstance) -> None:
    step = canned.mountpoint / "run1/step_5"
    canned.answer("verify", {"files": 3, "bytes": 3 * GIB, "bad": [], "unsealed": 1}, {"files": 1}, {"files": 2})
    done = tierfs("verify", step)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "✓ 3 files, 3 GiB: all as sealed; 1 without a checksum yet, not verified\n"
    canned.answer("verify", {"files": 3, "bytes": 1, "bad": [{"path": "a", "reason": "checksum"}], "unsealed": 0})
    done = tierfs("verify", step)
    assert done.returncode == 1
    assert done.stdout == "bad: a: checksum\n1 of 3 files, 1 B not as sealed\n"
    canned.answer("verify", {"files": 0, "bytes": 0, "bad": [], "unsealed": 2})
    done = tierfs("verify", step)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing was verified" in done.stderr
    assert "2 files have no checksum yet" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(canned: CannedInstance) -> None:
    canned.answer("status", {**STATUS, "steps": [STEP] * 5000})
    command = f"{sys.executable} -m mount.cli.main status {canned.mountpoint} | head -1; echo ${{PIPESTATUS[0]}}"
    # Python's unbuffered streams forget the rest of a write that was cut short, and so the error.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "141"


def test_a_dead_daemon_is_not_mounted(canned: CannedInstance) -> None:
    canned.close()
    runtime.register(canned.instance)
    canned.instance.daemon_pid.unlink()
    canned.instance.keeper_pid.unlink()
    done = tierfs("status", canned.mountpoint)
    runtime.unregister(canned.instance)
    assert done.returncode == 4
    assert done.stderr.startswith("tierfs: ")
    assert done.stderr.count("\n") == 1


# --- tables and completion -------------------------------------------------------------------------------------


def test_tables_keep_to_what_the_reader_can_show() -> None:
    columns = [Column("NAME"), Column("SIZE", right=True), Column("NEVER")]
    rows: list[list[str | Cell]] = [[Cell("é\x1b[31m\n", "red"), "10 B", ""], ["b", "1000 GiB", ""]]
    ascii_only = render_table(columns, rows, Screen(colour=False, unicode=False))
    assert ascii_only.isascii() and "\x1b" not in ascii_only and "NEVER" not in ascii_only
    assert ascii_only.splitlines()[1].endswith("    10 B")
    coloured = render_table(columns, rows, Screen(colour=True, unicode=True))
    assert "\x1b[31mé\\x1b[31m\\n\x1b[0m" in coloured


def test_colour_only_on_a_terminal_without_no_color() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, open(ours):
        assert Screen.of(terminal, {}).colour
        assert not Screen.of(terminal, {"NO_COLOR": "1"}).colour
        assert not Screen.of(terminal, {"TERM": "dumb"}).colour
    with open(os.devnull, "w", encoding="ascii") as pipe:
        assert Screen.of(pipe, {}) == Screen(colour=False, unicode=False)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["tierfs", "sta"], ["status", "stat"]),
        (["tierfs", "status", "--j"], ["--json"]),
        (["tierfs", "config", ""], ["show", "check"]),
        (["tierfs", "config", "show", "--con"], ["--config"]),
        (["tierfs", "completion", "z"], ["zsh"]),
        (["tierfs", "verify", "--tier", ""], ["ram", "object", "all"]),
        (["tierfs", "flush", "--"], ["--all", "--wait", "--timeout"]),
        (["tierfs", "rm", ""], []),
    ],
)
def test_bash_completes_commands_options_and_choices(typed: list[str], expected: list[str]) -> None:
    script = tierfs("completion", "bash").stdout
    words = " ".join(f"'{word}'" for word in typed)
    run = f'{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _tierfs; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert set(expected) <= set(done.stdout.split())
    if not expected:
        assert done.stdout.split() == []


@pytest.mark.parametrize(("shell", "check"), [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"])])
def test_other_shells_scripts_name_every_command(shell: str, check: list[str], tmp_path: Path) -> None:
    script = tierfs("completion", shell).stdout
    for command in completion.walk(build_parser()):
        assert all(word in script for word in command.words)
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([*check, tmp_path / "script"], check=True, timeout=60)
