"""Devices for exports, by the double: slow in their threads, bounded, and counted by whoever keeps them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
import threading
import time
from collections import Counter
from pathlib import Path

import trio

from tests.unit.verbs_double import DoublePort, DoubleRegion, Fabric
from tierfs.transport.verbs_fabric import OpenPort
from tierfs.transport.verbs_port import Capabilities
from tierfs.transport.verbs_reading import Reader


class SlowRegion(DoubleRegion):
    def close(self) -> None:
        port = self.port
        assert isinstance(port, SlowPort)
        port.bench.be_slow()
        super().close()


class SlowPort(DoublePort):
    """Its calls take time in their threads, and it takes `device_bytes` at most."""

    def __init__(self, bench: Bench, name: str, device_bytes: int) -> None:
        super().__init__(bench.fabric, Capabilities(name, "srd", True, 1 << 30, 16), name)
        self.bench = bench
        self.device_bytes = device_bytes

    def register(self, address: int, length: int, *, remote: bool) -> DoubleRegion:
        self.bench.be_slow()
        if self.bench.locks_pages:
            for page in range(address, address + length, mmap.PAGESIZE):
                ctypes.memmove(page, ctypes.string_at(page, 1), 1)
        with self.bench.registering:
            with self.fabric.lock:
                used = sum(each.length for each in self.fabric.regions.values() if each.port is self and each.is_open)
            if used + length > self.bench.limit_bytes:
                self.bench.wrong.append(f"{used} + {length} bytes are registered with {self.gid}")
            if used + length > self.device_bytes:
                raise OSError(errno.ENOMEM, f"{self.gid} is full")
            return SlowRegion(self, address, length, remote)


class Bench:
    """The `tierfs.transport.verbs_fabric.Fabric` that exports need."""

    def __init__(self, limit_bytes: int, *, seed: int = 1, device_bytes: int = 1 << 62, slowest_s: float = 0.0) -> None:
        """`limit_bytes` is what nobody may register more than with a device."""
        self.limit_bytes = limit_bytes
        self.fabric = Fabric(seed)
        #: Nobody else registers between looking for room and taking it.
        self.registering = threading.Lock()
        self.threads = trio.CapacityLimiter(3)
        self.reason = ""
        self.kept: Counter[OpenPort] = Counter()
        self.wrong: list[str] = []
        self.all: list[SlowPort] = []
        self.ports: tuple[OpenPort, ...] = ()
        #: Registering writes to each page, as locking it does.
        self.locks_pages = False
        #: Where it is not None, threads wait until it is set.
        self.held_up: threading.Event | None = None
        self._dice = random.Random(seed)
        self._slowest_s = slowest_s
        for _ in range(2):
            self.add(device_bytes)

    def add(self, device_bytes: int = 1 << 62) -> None:
        port = SlowPort(self, f"efa{len(self.all)}", device_bytes)
        self.all.append(port)
        self.ports += (OpenPort(port, Reader(port)),)

    def lose(self, index: int) -> None:
        lost = self.ports[index]
        lost.reader.gone = "it was pulled out"
        self.ports = tuple(each for each in self.ports if each is not lost)
        self.add()

    def keep(self, port: OpenPort) -> None:
        assert not port.gone, "a device that is gone was taken into use"
        self.kept[port] += 1

    def release(self, port: OpenPort) -> None:
        self.kept[port] -= 1
        assert self.kept[port] >= 0

    def be_slow(self) -> None:
        if self.held_up is not None:
            assert self.held_up.wait(10)
        if self._slowest_s:
            time.sleep(self._dice.random() * self._slowest_s)

    def close(self) -> None:
        for port in self.all:
            port.close()


def mapped_inodes() -> list[int]:
    """Of each mapping of this process (proc_pid_maps(5))."""
    return [int(line.split()[4]) for line in Path("/proc/self/maps").read_text().splitlines()]
