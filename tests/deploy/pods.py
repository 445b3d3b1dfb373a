"""Pods as the kubelet makes them, as far as a mount is concerned: processes in mount namespaces of their own.

The host shares its tree (as systemd leaves it). A daemon's pod sees the host's directories with mountPropagation
Bidirectional, a trainer's with HostToContainer; both see the host's processes or their own, as asked.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mount import kernel_mount
from mount.live_process import LiveProcess
from mount.processes import package_environment
from mount.runtime import Instance, read_process
from tests.conftest import needs_fuse, wait_until

DAEMON = "mount.daemon"
POD_FLAGS = ("--foreground", "--replace", "--ready-file")
"""What a daemon's pod runs `tierfs mount` with, as in the chart."""


class Pod:
    """The main process of a daemon's pod."""

    def __init__(self, node: Node, name: str, *, daemon_module: str = DAEMON, size: str = "128MiB") -> None:
        self.ready_file = node.directory / f"{name}.ready"
        self.log_file = node.directory / f"{name}.log"
        options = f"name={node.name},runtime_dir={node.run},size={size},ram.ballast=off"
        command = [sys.executable, "-m", "mount.cli.main", "mount", str(node.mountpoint), "-o", options]
        command += [*POD_FLAGS, str(self.ready_file), "--daemon-module", daemon_module]
        with open(self.log_file, "ab") as log:
            # Bidirectional: the pod's copies of the host's mounts stay in one peer group with them.
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "unchanged", *command],
                env=package_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_ready(self) -> bool:
        return self.ready_file.exists()

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            return self.is_ready

        wait_until(ready, f"the pod is ready\n{self.log()}", timeout_s=30)

    def delete(self) -> int:
        """As the kubelet ends a pod: SIGTERM; the exit code of its main process."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


class Node:
    """A host: `run` and `mountpoint` are the directories that pods get from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = f"pod{os.getpid()}"
        self.host = directory / "host"
        self.run = self.host / "run"
        self.mounts = self.host / "mnt"
        self.mountpoint = self.mounts / "ckpt"
        self.instance = Instance(self.run / self.name)
        self.pods: list[Pod] = []

    def pod(self, name: str, **how: str) -> Pod:
        self.pods.append(Pod(self, name, **how))
        return self.pods[-1]

    @property
    def daemon(self) -> LiveProcess:
        process = read_process(self.instance.daemon_pid)
        assert process is not None, self.logs()
        return process

    def is_mounted(self) -> bool:
        entry = kernel_mount.find_mount(str(self.mountpoint))
        return entry is not None and entry.is_tierfs

    def trainer(self, script: str, *, volume: Path, at: Path) -> subprocess.Popen[str]:
        """A trainer's pod: `volume` of the host at `at`, HostToContainer. `script` is Python, and speaks by lines."""
        at.mkdir(exist_ok=True)
        setup = f"mount --rbind {shlex.quote(str(volume))} {shlex.quote(str(at))} && "
        setup += f'mount --make-rslave {shlex.quote(str(at))} && exec {shlex.quote(sys.executable)} -c "$SCRIPT"'
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "unchanged", "bash", "-c", setup],
            env={**os.environ, "SCRIPT": script},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def logs(self) -> str:
        files = [pod.log_file for pod in self.pods] + sorted(self.instance.log_directory.rglob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')}" for path in files)


@contextmanager
def node() -> Iterator[Node]:
    """A node in a temporary place; nothing of it is left afterwards, whatever happened."""
    needs_fuse()
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    directory = Path(tempfile.mkdtemp(prefix="tierfs-pods-"))
    made = Node(directory)
    made.host.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=16M", "host", made.host], check=True)
    subprocess.run(["mount", "--make-rshared", made.host], check=True)
    try:
        made.run.mkdir()
        made.mounts.mkdir()
        yield made
    finally:
        for pod in made.pods:
            pod.process.kill()
            pod.process.wait()
        for path in (made.instance.keeper_pid, made.instance.daemon_pid, made.instance.spare_pid):
            if process := read_process(path):
                process.send_signal(signal.SIGKILL)
                process.wait(10)
        for mountpoint in (made.mountpoint, made.instance.ram, made.host):
            while kernel_mount.find_mount(str(mountpoint)) is not None:
                kernel_mount.unmount(str(mountpoint), lazy=True)
        shutil.rmtree(directory)
