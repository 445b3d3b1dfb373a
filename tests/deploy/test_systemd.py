"""The units, by systemd's own check and by a systemd that runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import repository
from tests.deploy.booted import run_booted

pytestmark = pytest.mark.slow

UNITS = repository() / "deploy/systemd"

_BEGIN = """
set -eu
export PS4='+ ${LINENO} '
trap 'journalctl --no-pager -n 60 2>/dev/null; systemctl status --no-pager -n 0 "tierfs@*" || true' ERR
set -E
show() { systemctl show -p "$2" --value "tierfs@$1"; }
not() { if "$@"; then return 1; fi; }      # `! command` never ends a script
until_true() { for _ in $(seq 400); do if eval "$1"; then return; fi; sleep 0.05; done; echo "never: $1"; false; }
systemd-tmpfiles --create /etc/tmpfiles.d/tierfs.conf
printf 'size = "64MiB"\\n[ram]\\nballast = "off"\\n' >/etc/tierfs/tierfs.toml
set -x
"""

LIFE = """
systemctl start tierfs@ckpt
mountpoint -q /ckpt                       # it was ready when start returned
keeper=$(show ckpt MainPID)
daemon=$(cut -d' ' -f1 /run/tierfs/ckpt/daemon.pid)
[ "$(cut -d' ' -f1 /run/tierfs/ckpt/keeper.pid)" = "$keeper" ]
exec 9>/ckpt/file
printf a >&9

: reload brings new processes, and another main one
printf 'size = "96MiB"\\n[ram]\\nballast = "off"\\n' >/etc/tierfs/tierfs.toml
systemctl reload tierfs@ckpt
new=$(show ckpt MainPID)
[ "$new" != "$keeper" ]
[ "$(cut -d' ' -f1 /run/tierfs/ckpt/keeper.pid)" = "$new" ]
[ "$(cut -d' ' -f1 /run/tierfs/ckpt/daemon.pid)" != "$daemon" ]
until_true "[ ! -e /proc/$keeper ]"       # the old one has ended, and nobody minded
[ "$(show ckpt ActiveState)/$(show ckpt NRestarts)" = active/0 ]
grep -q tierfs@ckpt.service /proc/$new/cgroup
tierfs status ckpt --json | grep -q '"size_bytes": *100663296'
printf b >&9

: a killed keeper is started again, and adopts the daemon
daemon=$(cut -d' ' -f1 /run/tierfs/ckpt/daemon.pid)
kill -9 "$new"
until_true '[ "$(show ckpt NRestarts)/$(show ckpt ActiveState)" = 1/active ]'
[ "$(cut -d' ' -f1 /run/tierfs/ckpt/daemon.pid)" = "$daemon" ]
printf c >&9

: a killed daemon is the keepers business
kill -9 "$daemon"
until_true '[ "$(cut -d" " -f1 /run/tierfs/ckpt/daemon.pid)" != '"$daemon ]"
printf d >&9
[ "$(cat /ckpt/file)" = abcd ]
[ "$(show ckpt ActiveState)/$(show ckpt NRestarts)" = active/1 ]

: stop unmounts, and leaves nothing but what is in RAM
exec 9>&-
systemctl stop tierfs@ckpt
not mountpoint -q /ckpt
[ "$(show ckpt Result)" = success ]
[ ! -e /run/tierfs/ckpt/daemon.pid ]
not pgrep -f mount.daemon
systemctl start tierfs@ckpt
[ "$(cat /ckpt/file)" = abcd ]
systemctl stop tierfs@ckpt
"""

WATCHDOG = """
mkdir -p /etc/systemd/system/tierfs@dog.service.d /elsewhere
printf '[Service]\\nWatchdogSec=2\\n' >/etc/systemd/system/tierfs@dog.service.d/fast.conf
echo MOUNTPOINT=/elsewhere/dog >/etc/tierfs/dog.env
systemctl daemon-reload
systemctl start tierfs@dog
mountpoint -q /elsewhere/dog
echo text >/elsewhere/dog/file
daemon=$(cut -d' ' -f1 /run/tierfs/dog/daemon.pid)
kill -STOP "$daemon"
until_true "[ ! -e /proc/$daemon ]"
[ "$(cat /elsewhere/dog/file)" = text ]
[ "$(show dog ActiveState)/$(show dog NRestarts)" = active/0 ]
keeper=$(show dog MainPID)
kill -STOP "$keeper"                      # now it is systemd that misses the keeper
until_true '[ "$(show dog NRestarts)/$(show dog ActiveState)" = 1/active ]'
[ "$(cat /elsewhere/dog/file)" = text ]
systemctl stop tierfs@dog
"""

FSTAB = """
mkdir -p /mnt/job
echo 'job1 /mnt/job fuse.tierfs size=64MiB,ram.ballast=off,nofail,x-systemd.requires=-.mount 0 0' >/etc/fstab
systemctl daemon-reload
systemctl start mnt-job.mount
mountpoint -q /mnt/job
echo text >/mnt/job/file
pid=$(cut -d' ' -f1 /run/tierfs/job1/daemon.pid)
kill -9 "$pid"
[ "$(cat /mnt/job/file)" = text ]
systemctl is-active mnt-job.mount
systemctl stop mnt-job.mount
not mountpoint -q /mnt/job
until_true '! pgrep -f mount.daemon'
systemctl start mnt-job.mount
[ "$(cat /mnt/job/file)" = text ]
umount /mnt/job
"""


def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    unit = (UNITS / "tierfs@.service").read_text()
    assert unit.count("=tierfs mount") == 1
    program = tmp_path / "tierfs"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    # Where the command is installed is not the unit's business; that it is one, systemd checks.
    (tmp_path / "tierfs@ckpt.service").write_text(unit.replace("=tierfs mount", f"={program} mount"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tierfs@ckpt.service")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


def test_the_tmpfiles_make_what_they_name(tmp_path: Path) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("needs systemd-tmpfiles: apt-get install systemd")
    subprocess.run(
        ["systemd-tmpfiles", f"--root={tmp_path}", "--create", str(UNITS / "tierfs.tmpfiles.conf")],
        check=True,
        timeout=30,
    )
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"tierfs"}
    assert (tmp_path / "etc/tierfs").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("script", [LIFE, WATCHDOG, FSTAB], ids=["life", "watchdog", "fstab"])
def test_under_systemd(script: str) -> None:
    run_booted(_BEGIN + script)
