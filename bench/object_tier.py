"""Steps to the object tier and back, by turns with other clients of the same server: speed, CPU time, memory.

Two servers: a sink that costs next to nothing, so that the client is what is measured (4 x 512 MiB), and SeaweedFS, a
real one, which is the limit itself on a small machine (4 x 64 MiB). Run by run.py, or alone:
`PYTHONPATH=tests python bench/object_tier.py [--json] [--server sink|seaweedfs]`. Needs root, a C compiler, and what
bench/requirements.txt names.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Row, as_json, pair, single, table
from mount.cli.client import request
from process_trees import PeakMemory, cpu_s
from rig.instance import Instance, mounted, tierfs, wait_until
from rig.s3_servers import seaweedfs

MIB, GIB = 1 << 20, 1 << 30
FILES = 4
PATIENCE_S = 300
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Server:
    """Where the clients send to, how much, how often, and which clients make sense there."""

    name: str
    endpoint: str
    bucket: str
    environment: dict[str, str]
    size_bytes: int
    rounds: int
    clients: tuple[str, ...]
    #: These cost many times more: once is enough to see it.
    slow_clients: tuple[str, ...] = ()


@dataclass
class Figures:
    """One figure for each round."""

    gib_s: list[float] = field(default_factory=list)
    cpu_s_gib: list[float] = field(default_factory=list)
    peak_bytes: list[float] = field(default_factory=list)

    def add(self, size_bytes: int, seconds: float, cpu: float, peak: int) -> None:
        gib = size_bytes / GIB
        self.gib_s.append(gib / seconds)
        self.cpu_s_gib.append(cpu / gib)
        self.peak_bytes.append(peak)


@contextlib.contextmanager
def sink(directory: Path) -> Iterator[Server]:
    program = directory / "sink"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-pthread", HERE / "sink.c", "-o", program], check=True)
    process = subprocess.Popen([program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        clients, slow = ("boto3", "s5cmd", "s3torchconnector"), ("s3transfer",)
        yield Server("sink", f"http://127.0.0.1:{port}", "bench", keys, 512 * MIB, 5, clients, slow)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def real_server(_directory: Path) -> Iterator[Server]:
    with seaweedfs() as server:
        server.make_bucket("bench")
        clients, slow = ("boto3", "s5cmd", "dcp"), ("s3transfer",)
        yield Server("SeaweedFS", server.endpoint_url, "bench", server.environment(), 64 * MIB, 3, clients, slow)


def environment(server: Server) -> dict[str, str]:
    return {
        **os.environ,
        **server.environment,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYTHONWARNINGS": "ignore",
    }


# ---------------------------------------------------------------- tierfs


class TierfsSide:
    """A step of FILES shards on a mount: flushed to the server, dropped from RAM, prefetched."""

    def __init__(self, server: Server, instance: Instance) -> None:
        self._server = server
        self._instance = instance
        self._number = 0
        self._pid = instance.daemon_pid()
        self.send, self.fetch = Figures(), Figures()
        for _ in range(2):  # the workers run, and have imported what they need
            self._save(4 * MIB)
            self._ask("flush", wait=True)
            self._drop()
            self._ask("prefetch")

    @property
    def step(self) -> Path:
        return self._instance.mountpoint / "bench" / f"step_{self._number}"

    @property
    def files(self) -> list[Path]:
        """As they lie in the RAM tier: what the others send."""
        directory = self._instance.ram_path / "root" / "bench" / f"step_{self._number}"
        return [directory / f"shard{index}.distcp" for index in range(FILES)]

    def _save(self, size_bytes: int) -> None:
        """Zeros: the sink gives back nothing else. The checksums are made before the clock runs."""
        if self.step.exists():
            shutil.rmtree(self.step)
        self._number += 1
        self.step.mkdir(parents=True)
        block = bytes(4 * MIB)
        for path in self.files:
            with (self.step / path.name).open("wb") as file:
                for _ in range(size_bytes // len(block)):
                    file.write(block)
        tierfs("commit", self.step)
        wait_until(self._is_quiet, "the daemon has done its checksums", timeout_s=60)

    def _is_quiet(self) -> bool:
        before = cpu_s(self._pid)
        time.sleep(0.3)
        return cpu_s(self._pid) - before <= 0.02

    def _drop(self) -> None:
        tierfs("evict", self.step)

    def _ask(self, op: str, **arguments: Any) -> None:
        path = str(self.step.relative_to(self._instance.mountpoint))
        request(str(self._instance.mountpoint), op, paths=[path], within_s=PATIENCE_S, **arguments)

    def _measure(self, figures: Figures, op: str, **arguments: Any) -> None:
        before = cpu_s(self._pid)
        with PeakMemory(self._pid) as memory:
            begin = time.perf_counter()
            self._ask(op, **arguments)
            seconds = time.perf_counter() - begin
        cpu = cpu_s(self._pid) - before
        figures.add(FILES * self._server.size_bytes, seconds, cpu, memory.over_idle_bytes)

    def round(self, *, others_first: bool, others: list[ClientSide], scratch: Path) -> None:
        """Both directions; the other clients right before or after, with the same files."""
        self._save(self._server.size_bytes)
        for direction in ("send", "fetch"):
            if others_first:
                for other in others:
                    other.round(direction, self.files, scratch)
            if direction == "send":
                self._measure(self.send, "flush", wait=True)
            if not others_first:
                for other in others:
                    other.round(direction, self.files, scratch)
            if direction == "fetch":
                self._drop()
                self._measure(self.fetch, "prefetch")


# ---------------------------------------------------------------- the other clients


class ClientSide:
    """One client of object_peers.py, each time in a process of its own that has imported all before the clock runs."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._server = server
        self.send, self.fetch = Figures(), Figures()

    def round(self, direction: str, sources: list[Path], scratch: Path) -> None:
        targets = scratch / self.name
        targets.mkdir(exist_ok=True)
        files = sources if direction == "send" else [targets / path.name for path in sources]
        facts = {
            "endpoint": self._server.endpoint,
            "bucket": self._server.bucket,
            "prefix": f"peers/{self.name}",
            "files": [str(path) for path in files],
            "size_bytes": self._server.size_bytes,
        }
        process = subprocess.Popen(
            [sys.executable, HERE / "object_peers.py", self.name, direction, json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(self._server),
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            self._expect(process, "ready")
            before = cpu_s(process.pid)
            with PeakMemory(process.pid) as memory:
                begin = time.perf_counter()
                self._tell(process)
                self._expect(process, "done")
                seconds = time.perf_counter() - begin
            cpu = cpu_s(process.pid) - before
            self._tell(process)
            process.wait(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(targets)
        figures = self.send if direction == "send" else self.fetch
        figures.add(FILES * self._server.size_bytes, seconds, cpu, memory.over_idle_bytes)

    def _tell(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def _expect(self, process: subprocess.Popen[str], word: str) -> None:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"{self.name} said {said!r} instead of {word!r}")


# ---------------------------------------------------------------- the report


def rows(server: Server, ours: TierfsSide, clients: list[ClientSide]) -> list[Row]:
    result = []
    size = f"{FILES} x {server.size_bytes // MIB} MiB"
    for title, direction in (("object tier: send", "send"), ("object tier: fetch", "fetch")):
        mine: Figures = getattr(ours, direction)
        theirs: dict[str, Figures] = {client.name: getattr(client, direction) for client in clients}
        label = f"{title} {size}, {server.name}"
        fastest = max(theirs, key=lambda name: sorted(theirs[name].gib_s)[len(theirs[name].gib_s) // 2])
        for name, figures in theirs.items():
            count = len(figures.gib_s)
            goal = ">= 0.9" if name == fastest else ""
            result.append(pair(label, "GiB/s", mine.gib_s[:count], name, figures.gib_s, goal))
        for name, figures in theirs.items():
            count = len(figures.gib_s)
            result.append(pair(f"{label}: CPU a GiB", "s", mine.cpu_s_gib[:count], name, figures.cpu_s_gib))
        for name, figures in {"tierfs": mine, **theirs}.items():
            peaks = [peak / MIB for peak in figures.peak_bytes]
            goal = "<= 256" if name == "tierfs" else ""
            result.append(single(f"{label}: memory over idle, {name}", "MiB", peaks, goal))
    return result


def measure(server: Server, directory: Path) -> list[Row]:
    total = FILES * server.size_bytes
    options = {
        "object": f"s3://{server.bucket}/ours",
        "s3.endpoint_url": server.endpoint,
        "s3.addressing": "path",
        "s3.region": "us-east-1",
        "persist.policy": "demand",
        "persist.settle_s": "0",  # what others wait for is not measured either
    }
    fast, slow = ([ClientSide(server, name) for name in names] for names in (server.clients, server.slow_clients))
    scratch = Path(tempfile.mkdtemp(prefix="tierfs-bench-", dir="/dev/shm"))
    before = dict(os.environ)
    os.environ.update(environment(server))
    try:
        size = f"{max(GIB, 2 * total) // MIB}M"
        place = directory / f"mount-{server.name}"
        with mounted(place, f"bench-{os.getpid()}", size=size, options=options) as instance:
            ours = TierfsSide(server, instance)
            for turn in range(server.rounds):
                others = fast + slow if turn == 0 else fast
                ours.round(others_first=turn % 2 == 1, others=others, scratch=scratch)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(scratch, ignore_errors=True)
    return rows(server, ours, fast + slow)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--server", choices=("sink", "seaweedfs"), action="append", help="only with this one")
    arguments = parser.parse_args()
    servers = {"sink": sink, "seaweedfs": real_server}
    result: list[Row] = []
    directory = Path(tempfile.mkdtemp(prefix="tierfs-bench-"))
    try:
        for name in arguments.server or servers:
            with servers[name](directory) as server:
                result += measure(server, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(as_json(result)) if arguments.json else table([vars(row) for row in result]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
