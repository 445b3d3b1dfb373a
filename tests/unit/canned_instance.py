"""An instance that answers what a test tells it to, for tests of the command line alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from mount import runtime
from tests.conftest import repository


class CannedInstance:
    """A registered instance whose daemon answers each operation from a table; `asked` records the requests."""

    def __init__(self, directory: Path) -> None:
        self.mountpoint = directory / "mnt"
        self.mountpoint.mkdir()
        self.instance = runtime.make_instance(directory / "runtime", f"canned-{os.getpid()}")  # tests run side by side
        runtime.write_record(self.instance, runtime.MountRecord(str(self.mountpoint), privileged=False))
        runtime.register(self.instance)
        runtime.write_process(self.instance.daemon_pid, os.getpid())
        runtime.write_process(self.instance.keeper_pid, os.getpid())
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.instance.control_socket))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def answer(self, op: str, result: Any, *progress: dict[str, Any]) -> None:
        self.answers[op] = [*({"progress": each} for each in progress), {"ok": True, "result": result}]

    def refuse(self, op: str, kind: str, message: str, exit_code: int = 1) -> None:
        self.answers[op] = [{"ok": False, "error": {"kind": kind, "message": message, "exit_code": exit_code}}]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                for line in stream:
                    request = json.loads(line)
                    self.asked.append(request)
                    for reply in self.answers[request["op"]]:
                        stream.write(json.dumps(reply).encode() + b"\n")
                    stream.flush()

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        runtime.unregister(self.instance)


def tierfs(*arguments: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIERFS_")}
    return subprocess.run(
        [sys.executable, "-m", "mount.cli.main", *map(str, arguments)],
        cwd=cwd or repository(),
        env={**clean, "PYTHONPATH": str(repository()), "PYTHONIOENCODING": "utf-8", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
