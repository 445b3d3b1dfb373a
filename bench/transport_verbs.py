"""Pulling a file from another node by RDMA, by turns with `ib_read_bw` (perftest) on the same device: bytes a second,
and the CPU time of both sides beside the same pull by TCP.

Two processes on one machine with an RDMA device; a tmpfs for both files. `ib_read_bw` READs the same memory again and
again and looks at nothing; a pull asks for a version, READs it, sums it up and writes it to a file. Its processes'
CPU time is counted from a connection that is there already. Not run by run.py, as it takes a device: as root, with
perftest and pyverbs installed, `PYTHONPATH=tests python bench/transport_verbs.py [--json] [--rounds N] [--mib N...]`;
without a device `make bench-verbs`, in the virtual machine with soft-RoCE, whose figures are ratios at best.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import trio

from measure import Row, as_json, pair, table
from tierfs.settings import Settings
from tierfs.transport.client import TcpPeers
from tierfs.transport.server import TcpServer
from tierfs.transport.verbs import VerbsPeers
from tierfs.transport.verbs_devices import find_devices
from tierfs.transport.verbs_fabric import Devices
from tierfs.transport.verbs_serving import VerbsServing
from transport.nodes import until
from transport_tcp import ASKER, HOLDER, MIB, VERSION, OneFile
from two_nodes import tmpfs

PORT = 7117
PERFTEST_PORT = 18517
PULL_BYTES = 8 * MIB
#: Of one READ; the transport's own are as large.
READ_BYTES = MIB
WITHIN_S = 120


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def settings_of(transport: str) -> Settings:
    settings = Settings()
    settings.cluster.listen = f"127.0.0.1:{PORT}"
    settings.peer.transport = transport
    settings.peer.stall_s = 30.0
    return settings


def hold(directory: Path) -> None:
    """Serves the file until its standard input ends; for each line of that the CPU time it took until then."""

    async def serve() -> None:
        settings, shelf = settings_of("verbs"), OneFile(directory / "source")
        async with trio.open_nursery() as nursery:
            devices = Devices(settings)
            await nursery.start(devices.run)
            await until(lambda: devices.ports, "the device is open", within_s=WITHIN_S)
            serving = VerbsServing(shelf, devices, most_registered_bytes=settings.peer.verbs_registered_bytes)
            await nursery.start(serving.run)
            await nursery.start(TcpServer(shelf, settings, HOLDER, serving).run)
            print("ready", flush=True)
            async for _ in trio.wrap_file(sys.stdin):
                print(own_cpu_s(), flush=True)
            nursery.cancel_scope.cancel()

    trio.run(serve)


class Holder:
    def __init__(self, directory: Path) -> None:
        command = [sys.executable, __file__, "--hold", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._line().strip() != "ready":
            raise RuntimeError("the holder did not start; see above")

    def cpu_s(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


async def pull(peers: VerbsPeers | TcpPeers, directory: Path, size: int) -> float:
    """Seconds."""
    target = directory / "target"
    target.unlink(missing_ok=True)
    fd = os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, size)
        began = time.monotonic()
        with trio.fail_after(WITHIN_S):
            async with trio.open_nursery() as nursery:
                for offset in range(0, size, PULL_BYTES):
                    nursery.start_soon(peers.pull, HOLDER, VERSION, offset, min(PULL_BYTES, size - offset), fd)
        took_s = time.monotonic() - began
    finally:
        os.close(fd)
    if target.read_bytes() != (directory / "source").read_bytes():
        raise RuntimeError("what was pulled is not what was there")
    return took_s


def read_bw(device: str, size: int) -> float:
    """MiB/s that perftest reads, of the same size in READs of the same size."""
    rounds = max(5, size // READ_BYTES)  # perftest takes no less than 5
    options = ["-d", device, "-s", str(READ_BYTES), "-n", str(rounds), "-F", "-p", str(PERFTEST_PORT)]
    server = subprocess.Popen(["ib_read_bw", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + WITHIN_S
        while True:
            client = subprocess.run(
                ["ib_read_bw", *options, "127.0.0.1"], capture_output=True, text=True, timeout=WITHIN_S
            )
            if client.returncode == 0:
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ib_read_bw: {client.stdout}{client.stderr}")
        server.wait(WITHIN_S)
    finally:
        server.kill()
        server.wait()
    found = re.search(rf"^\s*{READ_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)", client.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"ib_read_bw says no figure:\n{client.stdout}")
    return float(found.group(1))


async def measure(directory: Path, sizes_mib: list[int], rounds: int) -> list[Row]:
    device = find_devices().devices[0].device
    rows = []
    async with trio.open_nursery() as nursery:
        settings = settings_of("verbs")
        devices = Devices(settings)
        await nursery.start(devices.run)
        await until(lambda: devices.ports, "the device is open", within_s=WITHIN_S)

        def addresses(node: str) -> list[str]:
            return [f"127.0.0.1:{PORT}"]

        rdma = VerbsPeers(settings, TcpPeers(settings, ASKER, addresses), devices)
        tcp = TcpPeers(settings, ASKER, addresses)
        await nursery.start(rdma.run)
        for mib in sizes_mib:
            (directory / "source").write_bytes(os.urandom(mib * MIB))
            holder = Holder(directory)
            try:
                speeds: dict[str, list[float]] = {"rdma": [], "tcp": [], "perftest": []}
                cpus: dict[str, list[float]] = {"rdma": [], "tcp": [], "rdma holder": [], "tcp holder": []}
                for turn in range(rounds + 1):
                    figures = {"perftest": await trio.to_thread.run_sync(read_bw, device, mib * MIB)}
                    for name, peers in (("rdma", rdma), ("tcp", tcp))[:: 1 if turn % 2 else -1]:
                        read_before, holders, own = rdma.bytes_read, holder.cpu_s(), own_cpu_s()
                        took_s = await pull(peers, directory, mib * MIB)
                        own, holders = own_cpu_s() - own, holder.cpu_s() - holders
                        if name == "rdma" and rdma.bytes_read - read_before != mib * MIB:
                            raise RuntimeError(f"not all came by RDMA: {rdma.describe()}")
                        figures[name] = mib / took_s
                        if turn:  # the first connects and registers, and is not counted
                            cpus[name].append(own / mib * 1024)
                            cpus[f"{name} holder"].append(holders / mib * 1024)
                    for name, value in figures.items() if turn else ():
                        speeds[name].append(value)
            finally:
                holder.end()
            rows.append(pair(f"pull {mib} MiB by RDMA", "MiB/s", speeds["rdma"], "ib_read_bw", speeds["perftest"]))
            rows.append(pair(f"pull {mib} MiB by RDMA", "MiB/s", speeds["rdma"], "by TCP", speeds["tcp"]))
            rows.append(pair(f"asker's CPU, {mib} MiB", "s/GiB", cpus["rdma"], "by TCP", cpus["tcp"]))
            rows.append(pair(f"holder's CPU, {mib} MiB", "s/GiB", cpus["rdma holder"], "by TCP", cpus["tcp holder"]))
        nursery.cancel_scope.cancel()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold is not None:
        hold(options.hold)
        return
    found = find_devices()
    if not found.devices:
        sys.exit(f"nothing to measure: {found.reason}")
    with tmpfs((3 * max(options.mib) + 64) * MIB) as directory:
        rows = as_json(trio.run(measure, directory, options.mib, options.rounds))
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
