"""What the ballast is worth: create + write + fsync + close of one file, on /dev/shm and on the RAM tier.

Every figure is a median over rounds in which all cases take turns, each after some idle seconds (a virtual machine's
host takes memory that idles away, and that is how memory is between two checkpoints). Ratios are against /dev/shm
in the same run. Needs root and some 4 GiB of memory; takes under two minutes.

    python bench/ballast.py [--json] [--size 512M] [--rounds 5] [--idle 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tierfs.ram import tmpfs
from tierfs.ram.tier import RamTier
from tierfs.settings import RamSettings
from tierfs.units import format_size, parse_size

BLOCK = 16 << 20
FIRST_FILL_LIMIT_S = 60.0


def write_file(fd: int, source: memoryview, size_bytes: int) -> None:
    left = size_bytes
    while left:
        left -= os.write(fd, source[: min(left, len(source))])
    os.fsync(fd)


async def plain_save(path: Path, source: memoryview, size_bytes: int) -> float:
    began = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    await trio.to_thread.run_sync(write_file, fd, source, size_bytes)
    os.close(fd)
    return time.perf_counter() - began


async def tier_save(
    tier: RamTier, source: memoryview, size_bytes: int, expected: int | None, likely_large: bool
) -> tuple[float, float]:
    """Seconds of the whole save, and of begin_shard alone."""
    began = time.perf_counter()
    fd = os.open(tier.root / "shard", os.O_CREAT | os.O_RDWR)
    node = os.fstat(fd).st_ino
    before = time.perf_counter()
    tier.begin_shard(node, fd, expected, likely_large=likely_large)
    begin_s = time.perf_counter() - before
    await trio.to_thread.run_sync(write_file, fd, source, size_bytes)
    tier.end_shard(node)
    os.close(fd)
    return time.perf_counter() - began, begin_s


async def ballast_is_full(tier: RamTier) -> None:
    with trio.fail_after(FIRST_FILL_LIMIT_S):
        while True:
            usage = tier.usage()
            if usage.ballast_target_bytes and usage.ballast_bytes >= usage.ballast_target_bytes:
                return
            await trio.sleep(0.02)


async def measure(size_bytes: int, rounds: int, idle_s: float, huge_pages: str) -> dict[str, Any]:
    source = memoryview(os.urandom(BLOCK))
    seconds: dict[str, list[float]] = {}
    begins: list[float] = []
    cpu: dict[str, list[float]] = {}
    settings = {"ballast known": "auto", "ballast likely": "auto", "ballast unknown": "auto", "no ballast": "off"}
    with tempfile.TemporaryDirectory() as directory:
        tiers: dict[str, RamTier] = {}
        try:
            async with trio.open_nursery() as nursery:
                for ballast in ("auto", "off"):
                    place = Path(directory) / ballast
                    place.mkdir()
                    room = size_bytes + (256 << 20)
                    grant = tmpfs.mount_tmpfs(place, room, huge_pages=huge_pages, noswap=True)
                    tiers[ballast] = RamTier(place, RamSettings(huge_pages=huge_pages, ballast=ballast), room, grant)
                    await nursery.start(tiers[ballast].run)
                began, cpu_began = time.perf_counter(), time.process_time()
                await ballast_is_full(tiers["auto"])
                fill_s, fill_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
                filled = tiers["auto"].usage().ballast_bytes
                for _ in range(rounds):
                    await trio.sleep(idle_s)
                    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
                        seconds.setdefault("/dev/shm", []).append(
                            await plain_save(Path(shm) / "shard", source, size_bytes)
                        )
                    for case, ballast in settings.items():
                        await trio.sleep(idle_s)
                        tier = tiers[ballast]
                        if ballast == "auto":
                            await ballast_is_full(tier)
                        expected = size_bytes if case == "ballast known" else None
                        loop_before = time.thread_time()
                        took, begin_s = await tier_save(
                            tier, source, size_bytes, expected, likely_large=case == "ballast likely"
                        )
                        cpu.setdefault(case, []).append((time.thread_time() - loop_before) / size_bytes * (1 << 30))
                        seconds.setdefault(case, []).append(took)
                        if expected:
                            begins.append(begin_s)
                        (tier.root / "shard").unlink()
                        tier.released_room()
                nursery.cancel_scope.cancel()
        finally:
            for ballast in ("auto", "off"):
                place = Path(directory) / ballast
                if tmpfs.is_tmpfs_mount(place):
                    tmpfs.unmount_tmpfs(place)
    median: Callable[[list[float]], float] = statistics.median
    base = median(seconds["/dev/shm"])
    return {
        "size_bytes": size_bytes,
        "rounds": rounds,
        "idle_s": idle_s,
        "huge_pages": grant.huge_pages,
        "cases": {
            case: {
                "gb_per_s": size_bytes / median(values) / 1e9,
                "ratio": base / median(values),
                "loop_cpu_s_per_gib": median(cpu[case]) if case in cpu else None,
            }
            for case, values in seconds.items()
        },
        "first_over_second_save": median(seconds["ballast likely"]) / median(seconds["ballast known"]),
        "begin_shard_ms": median(begins) * 1e3,
        "fill_gb_per_s": filled / fill_s / 1e9,
        "fill_cpu_s_per_gib": fill_cpu_s / filled * (1 << 30),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--size", type=parse_size, default=512 << 20)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--idle", type=float, default=2.0, help="seconds of idleness before each save")
    arguments.add_argument("--huge-pages", default="auto")
    given = arguments.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/ballast.py mounts a tmpfs, which needs root")
    result = trio.run(measure, given.size, given.rounds, given.idle, given.huge_pages)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    print(f"create + write {format_size(given.size)} + fsync + close, medians of {given.rounds} rounds:")
    for case, figures in result["cases"].items():
        loop = figures["loop_cpu_s_per_gib"]
        extra = "" if loop is None else f"   loop CPU {loop:.4f} s/GiB"
        print(f"  {case:16} {figures['gb_per_s']:6.2f} GB/s   {figures['ratio']:5.2f} x /dev/shm{extra}")
    first = result["first_over_second_save"]
    print(f"first save (likely to be large, size unknown) takes {first:.2f} of the time of the second (size known)")
    print(f"begin_shard of a known size {result['begin_shard_ms']:.2f} ms")
    print(
        f"filling {result['fill_gb_per_s']:.2f} GB/s, {result['fill_cpu_s_per_gib']:.2f} CPU s/GiB; huge pages:"
        f" {result['huge_pages']}"
    )


if __name__ == "__main__":
    main()
