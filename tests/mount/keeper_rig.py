"""One instance for tests of keeper and mount commands: mounted by the command, watched by its runtime directory."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mount import kernel_mount
from mount.live_process import LiveProcess
from mount.processes import package_environment
from mount.runtime import Instance, keeper_is_alive, read_process
from tests.conftest import needs_fuse, repository, wait_until

STUB = "tests.mount.keeper_stub_daemon"


def tierfs(*arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mount.cli.main", *map(str, arguments)],
        env=package_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Rig:
    """`place` is the mount point, `instance` the runtime directory's paths."""

    def __init__(self, directory: Path, daemon_module: str) -> None:
        self.directory = directory
        self.place = directory / "ckpt"
        self.place.mkdir()
        self.parent = directory / "run"
        self.name = f"t{os.getpid()}-{directory.name}"[:60]
        self.instance = Instance(self.parent / self.name)
        self.daemon_module = daemon_module

    def mount_arguments(self, *options: str) -> list[str]:
        settings = [f"name={self.name}", f"runtime_dir={self.parent}", "size=64MiB", "ram.ballast=off", *options]
        return ["mount", str(self.place), "-o", ",".join(settings), "--daemon-module", self.daemon_module]

    def mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        done = tierfs(*self.mount_arguments(*options))
        assert done.returncode == 0, done.stderr + self.log()
        return done

    def wish(self, words: str) -> None:
        """How the stub shall misbehave from its next start on."""
        self.instance.directory.mkdir(parents=True, exist_ok=True)
        (self.instance.directory / "stub").write_text(words)

    @property
    def starts(self) -> list[str]:
        path = self.instance.directory / "starts"
        return path.read_text().split() if path.exists() else []

    @property
    def daemon(self) -> LiveProcess:
        process = read_process(self.instance.daemon_pid)
        assert process is not None, self.log()
        return process

    @property
    def keeper(self) -> LiveProcess:
        process = read_process(self.instance.keeper_pid)
        assert process is not None, self.log()
        return process

    def kill_daemon(self) -> LiveProcess:
        """SIGKILL, and returns the next daemon once it runs."""
        old = self.daemon
        old.send_signal(signal.SIGKILL)
        assert old.wait(10)
        wait_until(lambda: self.next_daemon(old), "another daemon runs")
        return self.daemon

    def next_daemon(self, old: LiveProcess) -> bool:
        new = read_process(self.instance.daemon_pid)
        return new is not None and new.pid != old.pid

    def is_mounted(self) -> bool:
        entry = kernel_mount.find_mount(str(self.place))
        return entry is not None and entry.is_tierfs

    def wait_for_end(self) -> None:
        wait_until(lambda: not keeper_is_alive(self.instance), "the keeper has ended", timeout_s=40)
        assert read_process(self.instance.daemon_pid) is None
        assert not self.is_mounted()

    def log(self) -> str:
        logs = sorted(self.instance.log_directory.rglob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')}" for path in logs)


@contextlib.contextmanager
def rig(daemon_module: str) -> Iterator[Rig]:
    """A rig in a temporary place of its own; nothing of it is left afterwards, whatever happened."""
    needs_fuse()
    directory = Path(tempfile.mkdtemp(prefix="tierfs-keeper-"))
    made = Rig(directory, daemon_module)
    try:
        yield made
    finally:
        for path in (made.instance.keeper_pid, made.instance.daemon_pid):
            if process := read_process(path):
                process.send_signal(signal.SIGKILL)
                process.wait(10)
        for mountpoint in (made.place, made.instance.ram):
            while kernel_mount.find_mount(str(mountpoint)) is not None:
                kernel_mount.unmount(str(mountpoint), lazy=True)
        tierfs("umount", "--discard", made.place)
        shutil.rmtree(directory)


AS_USER = textwrap.dedent(
    """\
    closed() {  # the outermost directory above $1 that other users can't enter
        local path=$1 found=
        while [ "$path" != / ]; do
            (( 0$(stat -c %a "$path") & 1 )) || found=$path
            path=$(dirname "$path")
        done
        echo "$found"
    }
    paths=() shut=()
    for path in "$HOME_OF_PYTHON" "$REPOSITORY"; do
        [ -n "$(closed "$path")" ] || continue
        paths+=("$path") shut+=("$(closed "$path")")
        mkdir $D/kept${#paths[@]} && mount --bind "$path" $D/kept${#paths[@]} || { echo SKIP; exit; }
    done
    for directory in $(printf '%s\n' "${shut[@]}" | sort -u); do
        mount -t tmpfs -o mode=755 open "$directory" || { echo SKIP; exit; }
    done
    for (( i = 0; i < ${#paths[@]}; i++ )); do
        mkdir -p "${paths[i]}" && mount --bind $D/kept$((i + 1)) "${paths[i]}" || { echo SKIP; exit; }
    done
    cd "$REPOSITORY"
    mknod -m 666 $D/fuse c 10 229 && mount --bind $D/fuse /dev/fuse || { echo SKIP; exit; }
    chmod 755 $D; mkdir $D/user; chown 65534:65534 $D/ckpt $D/user
    as_user() {
        setpriv --reuid 65534 --regid 65534 --clear-groups env -i PATH=$PATH HOME=/ XDG_RUNTIME_DIR=$D/user "$@"
    }
    command -v setpriv fusermount3 || { echo SKIP; exit; }
    """
)
"""Start of a script for `in_namespace`: `as_user COMMAND` runs it as a user without any capability, who can reach the
interpreter and /dev/fuse as usual machines allow."""


def in_namespace(script: str, directory: Path, **variables: str | Path) -> str:
    """Runs a bash script as root in a private mount namespace, so that nothing of the machine is changed.

    `$D` is `directory`, `$PY` the interpreter. Returns what it printed; skips the test when it printed SKIP.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    python = Path(sys.executable)
    values = {"D": directory, "PY": python, "HOME_OF_PYTHON": python.resolve().parents[1]}
    values |= {"REPOSITORY": repository(), **variables}
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    # The copies of other tests' mounts: their daemons would live for as long as they are held.
    lines.append("for each in $(awk '$3 ~ /^fuse/ {print $2}' /proc/self/mounts); do umount -l $each; done")
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "bash", "-c", "\n".join([*lines, script])],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "SKIP" in done.stdout:
        pytest.skip(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
