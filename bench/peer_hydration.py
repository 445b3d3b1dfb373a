"""Hydrating a file from another node, by turns with a bare sendfile → recv_into loop, and when first bytes come.

Two network namespaces with a veth pair between them, a process in each, as in transport_tcp.py. The file is a stub in a
RAM tier, and all of it is brought, verified, and made an ordinary file, as when a program reads it on a node that was
replaced. The bare loop receives the file in a mapping and checks nothing. Both have their memory before the clock
starts, as the RAM tier has it from its ballast. The first bytes are those of a read of 128 KiB from a stub that nobody
touched, while the rest follows. Alone: `PYTHONPATH=tests python bench/peer_hydration.py [--json] [--size-mib N]
[--rounds N]`. Needs root and ip.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

import transport_tcp
from measure import Row, as_json, pair, table
from tierfs.catalog.records import FileRecord, Holding, NodeRecord
from tierfs.checksum import FileChecksum, checksum_fd, from_text
from tierfs.cluster.sources import Sources
from tierfs.cluster.step_files import StepFiles
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.stubs import StubMark, make_stub
from tierfs.logs import NamespaceLog
from tierfs.ram.tier import RamTier
from tierfs.settings import RamSettings, Settings
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import Offer
from tierfs.transport.tcp import TcpPeers, TcpServer
from transport_tcp import ASKER, BARE_PORT, HOLDER, MIB, VERSION, own_cpu_s, receive_bare
from two_nodes import HOLDER_ADDRESS, Side, tmpfs, two_namespaces

READ_BYTES = 128 << 10
WITHIN_S = 60


class Kept:
    """A shelf with one file that was summed up when it was sealed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.summed = checksum_fd(file.fileno())

    def open_version(self, version: str) -> int:
        return os.open(self._path, os.O_RDONLY)

    open_growing = open_version

    async def checksum(self, version: str) -> FileChecksum:
        await trio.lowlevel.checkpoint()
        return self.summed

    def offers(self) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        raise NotImplementedError


def settings_of(directory: Path) -> Settings:
    settings = Settings(ram=RamSettings(ballast="off"))
    settings.cluster.secret_file = directory / "secret"
    settings.cluster.listen = f"0.0.0.0:{transport_tcp.PORT}"
    return settings


def hold(directory: Path) -> None:
    """Serves the file and the bare loop until its standard input ends; answers each line with its CPU seconds."""
    shelf = Kept(directory / "source")
    listener = socket.create_server(("0.0.0.0", BARE_PORT))

    def serve_bare() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, (directory / "source").open("rb") as file:
                size, offset = os.fstat(file.fileno()).st_size, 0
                while offset < size:
                    offset += os.sendfile(connection.fileno(), file.fileno(), offset, size - offset)

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(TcpServer(shelf, settings_of(directory), HOLDER).run)
            print(shelf.summed.text, flush=True)
            async for _ in trio.wrap_file(sys.stdin):
                print(own_cpu_s(), flush=True)
            nursery.cancel_scope.cancel()

    threading.Thread(target=serve_bare, daemon=True).start()
    trio.run(serve)


class View:
    """A catalogue that knows nothing: the file's author is asked."""

    def __init__(self) -> None:
        self.nodes = {node: SimpleNamespace(record=NodeRecord(node, (), "t")) for node in (HOLDER, ASKER)}
        self.states: Mapping[Key, Any] = {}

    async def files(self, key: Key, generation: int, *, fresh: bool = False) -> StepFiles:
        raise NotImplementedError

    def known_files(self, key: Key, generation: int) -> StepFiles | None:
        return None

    async def holdings(self, key: Key) -> dict[str, Holding]:
        await trio.lowlevel.checkpoint()
        return {}

    def holders(self, files: StepFiles, holdings: Mapping[str, Holding], file: FileRecord) -> list[str]:
        return [HOLDER]


def ask(directory: Path) -> None:
    """For each line of standard input, what to do, a line: seconds, CPU seconds, seconds until the first bytes."""
    settings = settings_of(directory)
    (directory / "ram").mkdir()
    size = (directory / "source").stat().st_size
    tier = RamTier(directory / "ram", settings.ram, 2 * size + (256 << 20), None)
    registry = StepRegistry(tier, settings, NamespaceLog(directory / "log"))
    target = tier.root / "target"

    async def serve() -> None:
        peers = TcpPeers(settings, ASKER, lambda _: [f"{HOLDER_ADDRESS}:{transport_tcp.PORT}"])
        hydration = Hydration(registry, Sources(View(), peers, node=ASKER, retry_for_s=5.0))
        checksum = from_text(sys.stdin.readline().strip())
        async with trio.open_nursery() as nursery:
            await nursery.start(hydration.run)
            async for line in trio.wrap_file(sys.stdin):
                target.unlink(missing_ok=True)
                with trio.fail_after(WITHIN_S):
                    measured = bare() if line.strip() == "bare" else await hydrate(hydration, checksum)
                print(*measured, flush=True)
            nursery.cancel_scope.cancel()

    def bare() -> tuple[float, float, float]:
        fd = os.open(target, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, size)
        began, cpu = time.monotonic(), own_cpu_s()
        receive_bare(fd, size)
        os.close(fd)
        return time.monotonic() - began, own_cpu_s() - cpu, 0.0

    async def hydrate(hydration: Hydration, checksum: int) -> tuple[float, float, float]:
        mark = StubMark("run", "step_1", "target", size, checksum, 1, VERSION)
        ino = make_stub(target, mark, mode=0o644, uid=0, gid=0)
        hydration.table.add(ino, mark, target)
        began, cpu = time.monotonic(), own_cpu_s()
        hydration.opened(ino)
        data = await hydration.read(ino, random.randrange(size // MIB) * MIB, READ_BYTES)
        first = time.monotonic() - began
        assert data is not None and len(data) == READ_BYTES
        await hydration.hydrate(ino)
        measured = time.monotonic() - began, own_cpu_s() - cpu, first
        assert not hydration.is_stub(ino)
        return measured

    trio.run(serve)


def measure(size_mib: int, rounds: int) -> list[Row]:
    figures: dict[str, list[tuple[float, float, float]]] = {"hydrate": [], "bare": []}
    with contextlib.ExitStack() as stack:
        holding, asking = stack.enter_context(two_namespaces())
        directory = stack.enter_context(tmpfs((3 * size_mib + 256) * MIB))
        prepare(directory, size_mib)
        holder = Side(__file__, "hold", holding, directory)
        stack.callback(holder.end)
        summed = holder.line().strip()
        asker = Side(__file__, "ask", asking, directory)
        stack.callback(asker.end)
        asker.write(summed)
        for turn in range(rounds + 1):
            for way in list(figures)[:: 1 if turn % 2 else -1]:
                cpu = float(holder.tell("cpu"))
                seconds, own_s, first_s = map(float, asker.tell(way).split())
                cpu_s = own_s + float(holder.tell("cpu")) - cpu
                if turn:  # the first connects, and is not counted
                    figures[way].append((size_mib / 1024 / seconds, cpu_s / size_mib * 1024, first_s * 1000))
        with (directory / "ram" / "root" / "target").open("rb") as file:
            if checksum_fd(file.fileno()).text != summed:
                raise RuntimeError("what was hydrated is not what was there")
    gib_s, cpu_s_gib, first_ms = zip(*figures["hydrate"], strict=True)
    bare_gib_s, bare_cpu, _ = zip(*figures["bare"], strict=True)
    return [
        pair(f"hydrate {size_mib} MiB from a node", "GiB/s", list(gib_s), "bare loop", list(bare_gib_s), ">= 0.9"),
        pair("CPU of both nodes, hydrating", "s/GiB", list(cpu_s_gib), "bare loop", list(bare_cpu)),
        Row("first bytes of a stub, median", "ms", statistics.median(first_ms), goal="<= 50"),
        Row("first bytes of a stub, the slowest", "ms", max(first_ms)),
    ]


def prepare(directory: Path, size_mib: int) -> None:
    with (directory / "source").open("wb") as file:
        for _ in range(size_mib // 16):
            file.write(os.urandom(16 * MIB))
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=("hold", "ask"))
    parser.add_argument("directory", nargs="?", type=Path)
    given = parser.parse_args()
    if given.role:
        {"hold": hold, "ask": ask}[given.role](given.directory)
        return 0
    rows: list[dict[str, Any]] = as_json(measure(given.size_mib, given.rounds))
    print(json.dumps(rows) if given.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
