"""CPU time of taking a GiB into a file of the RAM tier: through a buffer, by turns with a device that writes into it.

Through a buffer: bytes that came elsewhere are summed up and written. Into the file: its pages are made ready for a
device (MADV_POPULATE_WRITE, which is what registering does to them, without the locking), and what the device would
have put there is read back and summed up. The device's own writing costs no CPU and is left out on both sides. The
file's room was given before (fallocate), as hydration and replication do. Run by run.py, or alone, as root:
`python bench/receiving.py [--json] [--size-mib N] [--rounds N]`
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
from pathlib import Path

from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

from measure import ROUNDS, Row, as_json, compare, table
from two_nodes import tmpfs

MIB = 1 << 20
BUFFER_BYTES = 4 * MIB
#: include/uapi/asm-generic/mman-common.h; Python's mmap does not name it.
MADV_POPULATE_WRITE = 23


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Target:
    """A file of zeroes to come, with its room."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._path = directory / "target"
        self.size_bytes = size_bytes

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.posix_fallocate(self._fd, 0, self.size_bytes)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._path.unlink()


def through_buffer(target: Target, source: mmap.mmap) -> float:
    with target as fd, memoryview(source) as view:
        began, checksum = cpu_s(), 0
        for at in range(0, target.size_bytes, BUFFER_BYTES):
            piece = view[at : at + BUFFER_BYTES]
            checksum = crc64nvme(piece, checksum)
            os.pwrite(fd, piece, at)
            piece.release()
        return cpu_s() - began


def into_file(target: Target) -> float:
    buffer = memoryview(bytearray(MIB))
    with target as fd:
        began, checksum = cpu_s(), 0
        with mmap.mmap(fd, target.size_bytes) as mapping:
            mapping.madvise(MADV_POPULATE_WRITE)
            for at in range(0, target.size_bytes, MIB):
                os.preadv(fd, [buffer], at)
                checksum = crc64nvme(buffer, checksum)
        return cpu_s() - began


def rows(size_bytes: int, rounds: int) -> list[Row]:
    gib = size_bytes / (1 << 30)
    found = []
    with mmap.mmap(-1, size_bytes) as source:
        source.write(os.urandom(MIB) * (size_bytes // MIB))
        for pages, huge in (("huge pages", "always"), ("pages of 4 KiB", "never")):
            with tmpfs(size_bytes + 64 * MIB, huge=huge) as directory:
                target = Target(directory, size_bytes)
                found += compare(
                    f"CPU of receiving into a file of {pages}, through a buffer",
                    "s/GiB",
                    lambda target=target: through_buffer(target, source) / gib,  # type: ignore[misc]
                    {"into its mapping": lambda target=target: into_file(target) / gib},  # type: ignore[misc]
                    rounds=rounds,
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    found = as_json(rows(options.size_mib * MIB, options.rounds))
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()
