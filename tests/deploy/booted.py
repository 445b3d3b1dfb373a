"""A machine with systemd as its first process: a container whose root is this machine's, in an overlay that is
forgotten. The units of deploy/systemd are installed in it. It has no network but its loopback, and starts no service of
this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import needs_fuse, repository

_CHECK = """\
[Unit]
DefaultDependencies=no
After=-.mount
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
StandardOutput=file:/check.log
StandardError=inherit
TimeoutStartSec={timeout_s:.0f}
ExecStart=bash /check
"""


def run_booted(script: str, *, timeout_s: float = 60) -> str:
    """Boots it, runs a bash script as root, and returns what it printed. Fails with that, if the script does.

    Skips the test, and says why, where no such container can be started.
    """
    needs_fuse()
    for tool in ("systemd-nspawn", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install systemd-container util-linux")
    with _overlay() as root:
        _furnish(root, script, timeout_s)
        command = ["systemd-nspawn", f"--directory={root}", "--quiet", "--register=no", "--keep-unit", "--boot"]
        command += ["--private-network", "--capability=all", "--bind=/dev/fuse", f"--machine=tierfs{os.getpid()}"]
        command += [f"--bind-ro={path}" for path in _elsewhere()]
        done = subprocess.run(
            [*command, "systemd.unit=check.service"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s + 30,
        )
        log = root / "check.log"
        if not log.exists():
            pytest.skip(f"systemd does not boot in a container here: {(done.stdout + done.stderr).strip()[-300:]}")
        said = log.read_text()
    assert said.endswith("\nall checked\n"), said + done.stdout[-2000:] + done.stderr[-2000:]
    return said


def _elsewhere() -> list[Path]:
    """What the command needs and the container's root doesn't show: it is on another file system than this machine's,
    or where the container has one of its own."""
    needed = {repository(), Path(sys.prefix), Path(sys.base_prefix)}
    hidden = (Path("/tmp"), Path("/run"))
    return sorted(
        path
        for path in needed
        if path.stat().st_dev != Path("/").stat().st_dev or any(path.is_relative_to(each) for each in hidden)
    )


@contextmanager
def _overlay() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tierfs-booted-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=256M", "booted", directory], check=True)
    root = directory / "root"
    try:
        for path in (root, directory / "upper", directory / "work"):
            path.mkdir()
        options = f"lowerdir=/,upperdir={directory}/upper,workdir={directory}/work"
        if subprocess.run(["mount", "-t", "overlay", "-o", options, "booted", root], capture_output=True).returncode:
            pytest.skip("no overlay of / can be mounted here")
        yield root
    finally:
        subprocess.run(["umount", "-l", root], capture_output=True)
        subprocess.run(["umount", "-l", directory], check=True)
        directory.rmdir()


def _furnish(root: Path, script: str, timeout_s: float) -> None:
    units = root / "etc/systemd/system"
    for wants in units.glob("*.wants"):
        shutil.rmtree(wants)
    deploy = repository() / "deploy/systemd"
    shutil.copy(deploy / "tierfs@.service", units)
    shutil.copy(deploy / "tierfs.tmpfiles.conf", root / "etc/tmpfiles.d/tierfs.conf")
    (units / "check.service").write_text(_CHECK.format(timeout_s=timeout_s))
    (root / "check").write_text(script + "\necho all checked\n")
    (root / "check.log").unlink(missing_ok=True)
    shutil.rmtree(root / "etc/tierfs", ignore_errors=True)
    (root / "etc/fstab").write_text("")
    programs = Path(sys.executable).parent
    (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    for name, place in (
        ("tierfs", "usr/local/bin/tierfs"),
        ("mount.tierfs", "usr/sbin/mount.tierfs"),
        ("mount.tierfs", "usr/sbin/mount.fuse.tierfs"),
    ):
        (root / place).unlink(missing_ok=True)
        (root / place).symlink_to(programs / name)
