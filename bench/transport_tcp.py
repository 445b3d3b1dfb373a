"""Pulling a file from another node, by turns with a bare sendfile → recv_into loop: bytes a second and CPU time.

Two network namespaces with a veth pair between them, a process in each, and a tmpfs with huge pages for both files. The
bare loop sends the file with one `os.sendfile` after the other and receives it with `recv_into` in a mapping of the new
one; it checks nothing. The transport asks for pieces of 64 MiB, sums up what it writes, and is measured with a
secret (plain), and with certificates (TLS 1.3). Memory for the new file is there before the clock starts. Run by
run.py, or alone, as root, with ip and openssl:
`PYTHONPATH=tests python bench/transport_tcp.py [--json] [--size-mib N] [--rounds N] [--only secret]`
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trio

from measure import Row, as_json, pair, table
from tierfs.checksum import FileChecksum, checksum_fd
from tierfs.settings import Settings
from tierfs.transport.peers import MOST_PULL_BYTES, Offer
from tierfs.transport.tcp import TcpPeers, TcpServer
from transport.certificates import Authority
from two_nodes import HOLDER_ADDRESS, Side, tmpfs, two_namespaces

MIB = 1 << 20
HOLDER, ASKER = "holder", "asker"
BARE_PORT, PORT, TLS_PORT = 7200, 7117, 7118
VERSION = f"{HOLDER}/ab"
RECEIVE_BYTES = 4 * MIB
WITHIN_S = 60
STREAMS = 2


# --- the holder's process


class OneFile:
    """A shelf with one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open_version(self, version: str) -> int:
        return os.open(self._path, os.O_RDONLY)

    open_growing = open_version

    async def checksum(self, version: str) -> FileChecksum:
        fd = self.open_version(version)
        try:
            return await trio.to_thread.run_sync(checksum_fd, fd)
        finally:
            os.close(fd)

    verify = checksum

    def offers(self) -> AbstractAsyncContextManager[AsyncIterator[Offer]]:
        raise NotImplementedError


def hold(directory: Path) -> None:
    """Serves the transport twice and the bare loop, until its standard input ends."""

    def serve_bare(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, (directory / "source").open("rb") as file:
                size, offset = os.fstat(file.fileno()).st_size, 0
                while offset < size:
                    offset += os.sendfile(connection.fileno(), file.fileno(), offset, size - offset)

    async def serve() -> None:
        shelf = OneFile(directory / "source")
        async with trio.open_nursery() as nursery:
            for settings in all_settings(directory, HOLDER).values():
                await nursery.start(TcpServer(shelf, settings, HOLDER).run)
            listener = socket.create_server(("0.0.0.0", BARE_PORT))
            nursery.start_soon(lambda: trio.to_thread.run_sync(serve_bare, listener, abandon_on_cancel=True))
            print("ready", flush=True)
            async for _ in trio.wrap_file(sys.stdin):
                print(own_cpu_s(), flush=True)
            nursery.cancel_scope.cancel()

    trio.run(serve)
    os._exit(0)


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def all_settings(directory: Path, node: str) -> dict[str, Settings]:
    plain, encrypted = Settings(), Settings()
    plain.cluster.secret_file = directory / "secret"
    plain.cluster.listen = f"0.0.0.0:{PORT}"
    encrypted.cluster.tls_cert = directory / "ca" / f"{node}.pem"
    encrypted.cluster.tls_key = directory / "ca" / f"{node}.key"
    encrypted.cluster.tls_ca = directory / "ca" / "ca.pem"
    encrypted.cluster.listen = f"0.0.0.0:{TLS_PORT}"
    return {"secret": plain, "TLS": encrypted}


# --- the asker's process


def ask(directory: Path) -> None:
    """For each line of standard input, what to do, one line with the seconds and the CPU seconds that it took."""

    async def serve() -> None:
        ports = {"secret": PORT, "TLS": TLS_PORT}
        peers = {
            name: TcpPeers(settings, ASKER, lambda _, port=ports[name]: [f"{HOLDER_ADDRESS}:{port}"])  # type: ignore[misc]
            for name, settings in all_settings(directory, ASKER).items()
        }
        size = (directory / "source").stat().st_size
        async for line in trio.wrap_file(sys.stdin):
            what, *given = line.split()
            target = directory / "target"
            target.unlink(missing_ok=True)
            fd = os.open(target, os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, size)  # as the RAM tier does from its ballast, before the bytes come
            began, cpu = time.monotonic(), own_cpu_s()
            if what == "bare":
                receive_bare(fd, size)
            else:
                await pull(peers[what], fd, size, int(given[0]))
            print(time.monotonic() - began, own_cpu_s() - cpu, flush=True)
            os.close(fd)

    trio.run(serve)


def receive_bare(fd: int, size: int) -> None:
    with (
        socket.create_connection((HOLDER_ADDRESS, BARE_PORT)) as connection,
        mmap.mmap(fd, size) as mapping,
        memoryview(mapping) as view,
    ):
        offset = 0
        while offset < size:
            with view[offset : offset + RECEIVE_BYTES] as piece:
                offset += connection.recv_into(piece)


async def pull(peers: TcpPeers, fd: int, size: int, streams: int) -> None:
    limit = trio.CapacityLimiter(streams)

    async def one(offset: int) -> None:
        async with limit:
            await peers.pull(HOLDER, VERSION, offset, min(MOST_PULL_BYTES, size - offset), fd)

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            for offset in range(0, size, MOST_PULL_BYTES):
                nursery.start_soon(one, offset)


# --- around them


def measure(size_mib: int, rounds: int, only: str) -> list[Row]:
    ways = {
        "secret, 1 stream": "secret 1",
        f"secret, {STREAMS} streams": f"secret {STREAMS}",
        "TLS, 1 stream": "TLS 1",
        f"TLS, {STREAMS} streams": f"TLS {STREAMS}",
    }
    ways = {way: order for way, order in ways.items() if way.startswith(only)} | {"bare": "bare"}
    with two_namespaces() as (holding, asking), tmpfs((2 * size_mib + 64) * MIB) as directory:
        prepare(directory, size_mib)
        sides = [Side(__file__, "hold", holding, directory)]
        try:
            assert sides[0].line() == "ready\n"
            sides.append(Side(__file__, "ask", asking, directory))
            figures: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for turn in range(rounds + 1):
                for way, order in list(ways.items())[:: 1 if turn % 2 else -1]:
                    cpu = float(sides[0].tell("cpu"))
                    seconds, own_s = map(float, sides[1].tell(order).split())
                    cpu_s = own_s + float(sides[0].tell("cpu")) - cpu
                    if turn:  # the first connects, and is not counted
                        figures[way].append((size_mib / 1024 / seconds, cpu_s / size_mib * 1024))
            check_target(directory)
        finally:
            for side in sides:
                side.end()
    bare = figures.pop("bare")
    rows = []
    for way, measured in figures.items():
        goal = ">= 0.9" if way.startswith("secret") else ""
        gib_s, cpu = zip(*measured, strict=True)
        bare_gib_s, bare_cpu = zip(*bare, strict=True)
        rows.append(pair(f"pull {size_mib} MiB ({way})", "GiB/s", list(gib_s), "bare loop", list(bare_gib_s), goal))
        rows.append(pair(f"CPU of both nodes ({way})", "s/GiB", list(cpu), "bare loop", list(bare_cpu)))
    return rows


def prepare(directory: Path, size_mib: int) -> None:
    with (directory / "source").open("wb") as file:
        for _ in range(size_mib // 16):
            file.write(os.urandom(16 * MIB))
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_text(os.urandom(32).hex())
    authority = Authority(directory / "ca", "bench")
    for node in (HOLDER, ASKER):
        authority.certify(Settings(), node)


def check_target(directory: Path) -> None:
    sums = []
    for name in ("source", "target"):
        with (directory / name).open("rb") as file:
            sums.append(checksum_fd(file.fileno()).full)
    if sums[0] != sums[1]:
        raise RuntimeError("what was pulled is not what was there")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="ways that begin so: secret, TLS")
    parser.add_argument("--role", choices=("hold", "ask"))
    parser.add_argument("directory", nargs="?", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is taken away again
    if given.role:
        {"hold": hold, "ask": ask}[given.role](given.directory)
        return 0
    rows: list[dict[str, Any]] = as_json(measure(given.size_mib, given.rounds, given.only))
    print(json.dumps(rows) if given.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
