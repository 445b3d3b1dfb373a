"""Registered memory as the RAM tier has it: a file's, mapped for reading and writing."""

from __future__ import annotations

import ctypes
import mmap
import os
import random

from tierfs.transport.verbs_device import DevicePort


class Memory:
    def __init__(self, port: DevicePort, size_bytes: int, *, remote: bool) -> None:
        fd = os.memfd_create("rdma-test")
        os.ftruncate(fd, size_bytes)
        self.bytes = mmap.mmap(fd, size_bytes)
        os.close(fd)
        self._pinned = ctypes.c_char.from_buffer(self.bytes)
        self.region = port.register(ctypes.addressof(self._pinned), size_bytes, remote=remote)

    def fill(self) -> None:
        block = random.Random(7).randbytes(1 << 20)
        for at in range(0, len(self.bytes), len(block)):
            self.bytes[at : at + len(block)] = (at.to_bytes(8, "big") + block)[: len(block)]

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.region.close()
        del self._pinned
        self.bytes.close()
