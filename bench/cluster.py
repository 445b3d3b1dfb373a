"""From the marker of a step to `replicated`, by turns with the bare transfer of the same bytes between the same nodes.

Two nodes in network namespaces with a real etcd. One writes a step of 512 MiB through its mount, and the other pulls it
meanwhile. The clock runs from the moment before the marker gets its name until the node says that the step is
replicated. The bare loop sends a file with one `os.sendfile` after the other, and receives it with `recv_into` in a
mapping of the new one; it checks nothing. Memory for both is there before. Run by run.py, or alone:
`PYTHONPATH=tests python bench/cluster.py [--json] [--size-mib N] [--rounds N]`. Needs root, ip, nft and etcd.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Row, as_json, pair, table
from rig.cluster import Cluster, cluster
from rig.cluster_steps import level
from rig.instance import wait_until
from rig.plain_steps import MARKER, shard_names

MIB = 1 << 20
SHARDS = 4
PORT = 7200
RECEIVE_BYTES = 4 * MIB
WITHIN_S = 120


class Steps:
    """Each round writes the next step; the one before is removed first, so that there is always room."""

    def __init__(self, nodes: Cluster, size_bytes: int) -> None:
        self._nodes, self._number = nodes, 0
        self._data = os.urandom(size_bytes // SHARDS)
        self._root = nodes[0].mountpoint / "run"
        self._root.mkdir()

    def seconds_to_replicated(self) -> float:
        self._remove()
        self._number += 1
        step = self._root / f"step_{self._number}"
        step.mkdir()
        names = shard_names(SHARDS)
        for name in names:
            with (step / name).open("wb") as file:
                file.write(self._data)
                os.fsync(file.fileno())
        marker = json.dumps({"metadata": {}, "weight_map": {f"w{name}": name for name in names}})
        (step / "temporary").write_text(marker)
        begin = time.monotonic()
        (step / "temporary").rename(step / MARKER)
        wait_until(
            lambda: level(self._nodes[0], f"run/step_{self._number}") == "replica", "it is replicated", WITHIN_S, 0.005
        )
        return time.monotonic() - begin

    def _remove(self) -> None:
        old = self._root / f"step_{self._number}"
        if old.exists():
            shutil.rmtree(old)
            there = self._nodes[1].mountpoint / old.relative_to(self._nodes[0].mountpoint)
            wait_until(lambda: not there.exists(), "the other node has removed it", WITHIN_S)


class BareLoop:
    """A process on each node, started for each transfer; told are the seconds from connecting to the last byte."""

    def __init__(self, nodes: Cluster, directory: Path, size_bytes: int) -> None:
        self._nodes, self._directory = nodes, directory
        (directory / "source").write_bytes(os.urandom(size_bytes))

    def seconds(self) -> float:
        sender = self._start(0, "send", self._nodes[0].host.address)
        assert sender.stdout is not None
        sender.stdout.readline()  # it listens
        receiver = self._start(1, "receive", self._nodes[0].host.address)
        try:
            told, _ = receiver.communicate(timeout=WITHIN_S)
            sender.wait(WITHIN_S)
        finally:
            for process in (sender, receiver):
                process.kill()
                process.wait()
        return float(told)

    def _start(self, node: int, role: str, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--role", role, "--address", address, str(self._directory)]
        return subprocess.Popen(self._nodes[node].host.command(*command), stdout=subprocess.PIPE, text=True)


def send(directory: Path, address: str) -> None:
    with socket.create_server((address, PORT)) as listener, (directory / "source").open("rb") as file:
        print("listening", flush=True)
        connection, _ = listener.accept()
        size, offset = os.fstat(file.fileno()).st_size, 0
        with connection:
            while offset < size:
                offset += os.sendfile(connection.fileno(), file.fileno(), offset, size - offset)


def receive(directory: Path, address: str) -> None:
    size = (directory / "source").stat().st_size
    with (directory / "target").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        with mmap.mmap(file.fileno(), size) as mapping, memoryview(mapping) as view:
            begin = time.monotonic()
            with socket.create_connection((address, PORT)) as connection:
                offset = 0
                while offset < size:
                    with view[offset : offset + RECEIVE_BYTES] as piece:
                        offset += connection.recv_into(piece)
            print(time.monotonic() - begin, flush=True)
    (directory / "target").unlink()


def measure(size_mib: int, rounds: int) -> list[Row]:
    options = {"ram_ballast": "auto", "log_level": "info", "cluster_lease_s": "10", "peer_stall_s": "10"}
    size = f"{3 * size_mib}M"
    directory = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir="/dev/shm"))
    try:
        with cluster(nodes=2, size=size, **options) as nodes:
            steps, bare = Steps(nodes, size_mib * MIB), BareLoop(nodes, directory, size_mib * MIB)
            values: list[float] = []
            baselines: list[float] = []
            for turn in range(rounds + 1):
                order = [(values, steps.seconds_to_replicated), (baselines, bare.seconds)]
                for results, take in order if turn % 2 else reversed(order):
                    results.append(take())
            # The first round connects, and fills the ballast: it is not counted.
            what = f"marker to replicated, {size_mib} MiB pulled while written"
            return [pair(what, "s", values[1:], "bare transfer", baselines[1:], "<= 1.2")]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=("send", "receive"))
    parser.add_argument("--address")
    parser.add_argument("directory", nargs="?", type=Path)
    given = parser.parse_args()
    if given.role:
        {"send": send, "receive": receive}[given.role](given.directory, given.address)
        return 0
    rows: list[dict[str, Any]] = as_json(measure(given.size_mib, given.rounds))
    print(json.dumps(rows) if given.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
