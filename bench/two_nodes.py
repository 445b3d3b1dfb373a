"""Two nodes on one machine, for benchmarks: network namespaces, a tmpfs for their files, a process in each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOLDER_ADDRESS, ASKER_ADDRESS = "10.237.11.1", "10.237.11.2"


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Joined by a veth pair; both are gone afterwards."""
    names = tuple(f"tierfs-bench-{os.getpid()}-{which}" for which in "ab")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, address in zip(names, (HOLDER_ADDRESS, ASKER_ADDRESS), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def tmpfs(size_bytes: int, *, huge: str = "always") -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="tierfs-bench-"))
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"huge={huge},size={size_bytes},mode=700", "bench", directory], check=True
        )
        try:
            yield directory
        finally:
            subprocess.run(["umount", "-l", directory], check=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Side:
    """One of the two processes, in its namespace."""

    def __init__(self, program: str, role: str, namespace: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, program, "--role", role, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended early; see above")
        return line

    def write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def tell(self, text: str) -> str:
        self.write(text)
        return self.line()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
