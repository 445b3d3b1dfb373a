"""The one etcd of a cluster under test, on a host of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from base64 import b64decode
from pathlib import Path

from rig.instance import wait_until
from rig.network import Host

PORT = 2379


class ClusterEtcd:
    """Its data lie in shared memory: what is tested is not its disk."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host = host
        self.directory = directory
        self.url = f"http://{host.address}:{PORT}"
        self._log = directory / "log"

    def start(self) -> None:
        """Returns when it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        peer = "http://127.0.0.1:2380"
        flags = {
            "name": "etcd",
            "data-dir": str(self.directory / "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"etcd={peer}",
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "logger": "zap",
            "log-level": "warn",
        }
        with self._log.open("ab") as log:
            subprocess.Popen(
                self.host.command("etcd", *(f"--{name}={value}" for name, value in flags.items())),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).returncode = 0  # it is ended with the host's processes
        try:
            wait_until(self.answers, "etcd answers", 20, every_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def answers(self) -> bool:
        return self._etcdctl("endpoint", "health", "--command-timeout=1s").returncode == 0

    def kill(self) -> None:
        """SIGKILL; what it answered for is on its disk."""
        self.host.kill()

    def restart(self, *, lose_data: bool = False) -> None:
        self.kill()
        if lose_data:
            shutil.rmtree(self.directory / "data")
        self.start()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self.host.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.host.signal(signal.SIGCONT)

    def keys(self, prefix: str = "") -> list[str]:
        """Every key of the catalogue that has `prefix` in it."""
        done = self._etcdctl("get", "", "--from-key", "--keys-only", "--write-out=json")
        assert done.returncode == 0, done.stderr
        found = [b64decode(entry["key"]).decode() for entry in json.loads(done.stdout).get("kvs", ())]
        return [key for key in found if prefix in key]

    def log(self, lines: int = 40) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _etcdctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.host.command("etcdctl", f"--endpoints={self.url}", "--dial-timeout=1s", *arguments)
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
