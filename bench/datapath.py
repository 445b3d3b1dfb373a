"""Bytes through the mount: against the tmpfs behind it, /dev/shm, the mount without passthrough, and a naive mount.

Run by run.py, or alone: `PYTHONPATH=tests python bench/datapath.py [--json]`. Needs root for what it compares.
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
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ballast_wait import wait_for_ballast
from measure import ROUNDS, Row, as_json, compare, pair, single, table
from rig.instance import Instance, mounted, tierfs, wait_until

MIB, GIB = 1 << 20, 1 << 30
BLOCK = memoryview(os.urandom(16 * MIB))
IDLE_S = 5.0  # a machine that trains does not write to its page cache between two saves
SHM = Path("/dev/shm")
DCP_MIB = 480


def write_file(path: Path, size: int, flags: int = os.O_CREAT | os.O_TRUNC) -> float:
    """Creates (or rewrites), writes, fsyncs and closes; GiB/s."""
    bytes(BLOCK)  # warm: what a training saves was in use a moment ago, and a host takes idle memory away
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    left = size
    while left:
        left -= os.write(fd, BLOCK[: min(left, len(BLOCK))])
    os.fsync(fd)
    os.close(fd)
    return size / GIB / (time.perf_counter() - begin)


def read_file(path: Path) -> float:
    """Reads once from begin to end; GiB/s."""
    buffer = bytearray(BLOCK)  # its pages are there
    size = path.stat().st_size
    begin = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    while os.readv(fd, [buffer]):
        pass
    os.close(fd)
    return size / GIB / (time.perf_counter() - begin)


def fresh(path: Path, size: int, idle_s: float = 0.0) -> Callable[[], float]:
    """A measurement that writes a new file, after removing the last one and some idleness."""

    def measure() -> float:
        path.unlink(missing_ok=True)
        time.sleep(idle_s)
        return write_file(path, size)

    return measure


def against_the_tmpfs_behind(instance: Instance) -> list[Row]:
    """(a) The same inode, written over and read, by the mount and by the path of its backing file."""
    through, behind = instance.mountpoint / "scratch", instance.ram_path / "root" / "scratch"
    through.mkdir()
    write_file(through / "file", GIB)
    rows = compare(
        "write 1 GiB over a file",
        "GiB/s",
        lambda: write_file(through / "file", GIB, 0),
        {"tmpfs behind": lambda: write_file(behind / "file", GIB, 0)},
        goals={"tmpfs behind": ">= 0.95"},
    )
    rows += compare(
        "read 1 GiB",
        "GiB/s",
        lambda: read_file(through / "file"),
        {"tmpfs behind": lambda: read_file(behind / "file")},
        goals={"tmpfs behind": ">= 0.95"},
    )
    (through / "file").unlink()
    rows += compare(
        "write 1 GiB to a new file",
        "GiB/s",
        fresh(through / "new", GIB, 1),
        {"tmpfs behind": fresh(behind / "direct", GIB, 1)},
        goals={"tmpfs behind": ">= 0.95"},
        rounds=3,
    )
    shutil.rmtree(through)
    return rows


class Saves:
    """A job's saves of one shard: step after step in a namespace, of which the newest two are kept."""

    def __init__(self, namespace: Path, size: int) -> None:
        self._namespace = namespace
        self._size = size
        self._step = 0
        namespace.mkdir()

    def save(self, idle_s: float = IDLE_S) -> float:
        self._step += 1
        shutil.rmtree(self._namespace / f"step_{self._step - 2}", ignore_errors=True)
        time.sleep(idle_s)
        step = self._namespace / f"step_{self._step}"
        step.mkdir()
        return write_file(step / "__0_0.distcp", self._size)


def after_idleness(instance: Instance) -> list[Row]:
    """(b) What a save costs after seconds without one, against /dev/shm."""
    saves = Saves(instance.mountpoint / "idle", 512 * MIB)
    shm = SHM / f"tierfs-bench-{os.getpid()}"
    saves.save(0)
    try:
        return compare(
            "create+write+fsync+close 512 MiB, idle before",
            "GiB/s",
            saves.save,
            {"/dev/shm": fresh(shm, 512 * MIB, IDLE_S)},
            goals={"/dev/shm": ">= 3"},
        )
    finally:
        shm.unlink(missing_ok=True)
        shutil.rmtree(instance.mountpoint / "idle")


def first_save_and_second(instance: Instance) -> list[Row]:
    """(e) The first save of a job, whose sizes nobody knows, against its second."""
    firsts, seconds = [], []
    for job in range(ROUNDS):
        saves = Saves(instance.mountpoint / f"job{job}", 512 * MIB)
        firsts.append(saves.save(2))
        seconds.append(saves.save(2))
        shutil.rmtree(instance.mountpoint / f"job{job}")
    return [pair("first save of a job, 512 MiB", "GiB/s", firsts, "second save", seconds)]


def with_and_without_passthrough(instance: Instance, other: Instance, naive: Path) -> list[Row]:
    """(c) The same write and read by passthrough, by the channel's own copies, and in Python."""
    folders = {"passthrough=off": other.mountpoint / "scratch", "naive pyfuse3": naive}
    ours = instance.mountpoint / "scratch"
    ours.mkdir()
    (other.mountpoint / "scratch").mkdir()
    names = {name: folder / "file" for name, folder in folders.items()}
    rows = compare(
        "write 512 MiB, passthrough",
        "GiB/s",
        fresh(ours / "file", 512 * MIB, 0.5),
        {name: fresh(path, 512 * MIB, 0.5) for name, path in names.items()},
    )
    rows += compare(
        "read 512 MiB, passthrough",
        "GiB/s",
        lambda: read_file(ours / "file"),
        {name: (lambda path=path: read_file(path)) for name, path in names.items()},
    )
    rows += compare(
        "write 512 MiB, passthrough=off",
        "GiB/s",
        fresh(names["passthrough=off"], 512 * MIB, 0.5),
        {"naive pyfuse3": fresh(names["naive pyfuse3"], 512 * MIB, 0.5)},
    )
    rows += compare(
        "read 512 MiB, passthrough=off",
        "GiB/s",
        lambda: read_file(names["passthrough=off"]),
        {"naive pyfuse3": lambda: read_file(names["naive pyfuse3"])},
    )
    shutil.rmtree(ours)
    shutil.rmtree(other.mountpoint / "scratch")
    names["naive pyfuse3"].unlink()
    return rows


def dcp_save_and_load(instance: Instance) -> list[Row]:
    """(d) Stock `dcp.save` and `dcp.load` of one rank, against /dev/shm; seconds, so that less is better."""
    import torch
    import torch.distributed.checkpoint as dcp

    layers = 16
    shape = (DCP_MIB * MIB // layers // 4096, 1024)
    state = {f"layer{i}": torch.rand(shape) for i in range(layers)}
    target = {f"layer{i}": torch.zeros(shape) for i in range(layers)}
    roots = {"mount": instance.mountpoint / "dcp", "shm": SHM / f"tierfs-bench-{os.getpid()}"}
    times: dict[tuple[str, str], list[float]] = {(kind, to): [] for kind in ("save", "load") for to in roots}
    try:
        for root in roots.values():
            root.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for turn in range(ROUNDS + 1):
                for to, root in roots.items():
                    shutil.rmtree(root / f"step_{turn - 1}", ignore_errors=True)
                    time.sleep(IDLE_S)
                    for tensor in (*state.values(), *target.values()):
                        tensor.sum()  # in use a moment ago, as in a training
                    begin = time.perf_counter()
                    dcp.save(state, checkpoint_id=str(root / f"step_{turn}"), no_dist=True)
                    saved = time.perf_counter()
                    dcp.load(target, checkpoint_id=str(root / f"step_{turn}"), no_dist=True)
                    loaded = time.perf_counter()
                    if turn > 0:  # the first round warms torch up, and tierfs knows no sizes yet
                        times["save", to].append(saved - begin)
                        times["load", to].append(loaded - saved)
                    assert all(torch.equal(state[name], target[name]) for name in state)
    finally:
        for root in roots.values():
            shutil.rmtree(root, ignore_errors=True)
    goals = {"save": "<= 0.65", "load": "<= 0.95"}
    return [
        pair(f"DCP {kind} of {DCP_MIB} MiB", "s", times[kind, "mount"], "/dev/shm", times[kind, "shm"], goals[kind])
        for kind in goals
    ]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process (fields 14 and 15 of proc(5)'s stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """What a piece of work costs a process: its CPU time until it rests again, less what it uses at rest."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._wait_for_rest()
        begin = cpu_seconds(pid)
        time.sleep(3)
        self.at_rest = (cpu_seconds(pid) - begin) / 3
        """CPU seconds a second, without any work."""

    def cost(self, work: Callable[[], Any]) -> float:
        begin, clock = cpu_seconds(self._pid), time.monotonic()
        work()
        self._wait_for_rest()
        return max(0.0, cpu_seconds(self._pid) - begin - self.at_rest * (time.monotonic() - clock))

    def _wait_for_rest(self) -> None:
        last = -1.0

        def is_quiet() -> bool:
            nonlocal last
            before, last = last, cpu_seconds(self._pid)
            return last - before < 0.03

        wait_until(is_quiet, f"process {self._pid} comes to rest", timeout_s=60, every_s=0.5)


def daemon_cpu(instance: Instance, label: str) -> list[Row]:
    """(f) CPU seconds of the daemon a GiB written, and a GiB removed (the room goes back to the ballast)."""
    first = instance.mountpoint / "cpu" / "step_0"  # the sizes are known, as in a job after its first save
    first.mkdir(parents=True)
    write_file(first / "model.pt", GIB)
    tierfs("commit", first)
    meter = CpuMeter(instance.daemon_pid())
    writing, removing = [], []
    for turn in range(3):
        step = instance.mountpoint / "cpu" / f"step_{turn + 1}"
        step.mkdir(parents=True)
        writing.append(meter.cost(lambda file=step / "model.pt": write_file(file, GIB)))
        removing.append(meter.cost(lambda step=step: shutil.rmtree(step)))
    shutil.rmtree(first.parent)
    goal = "<= 0.02" if label == "checksums off" else ""
    return [
        single(f"daemon CPU a GiB written, {label}", "s", writing, goal),
        single(f"daemon CPU a GiB removed, {label}", "s", removing),
        single(f"daemon CPU a second at rest, {label}", "s", [meter.at_rest]),
    ]


@contextlib.contextmanager
def naive_mount(scratch: Path) -> Iterator[Path]:
    """naive_mount.py over a tmpfs with huge pages like tierfs's own."""
    behind, mountpoint = scratch / "naive-tmpfs", scratch / "naive"
    behind.mkdir()
    mountpoint.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1G,huge=always", "naive", behind], check=True)
    script = Path(__file__).with_name("naive_mount.py")
    server = subprocess.Popen([sys.executable, script, behind, mountpoint], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", "the naive mount did not start"
        yield mountpoint
    finally:
        subprocess.run(["fusermount3", "-u", "-q", mountpoint], check=False)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
        subprocess.run(["umount", behind], check=False)


def measure_all() -> list[Row]:
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierfs-bench-")))
        names = f"bench-{os.getpid()}"
        with mounted(scratch / "on", names, size="2560M", options={"steps.checksums": "off"}) as instance:
            wait_for_ballast(instance)
            rows += against_the_tmpfs_behind(instance)
            rows += after_idleness(instance)
            rows += first_save_and_second(instance)
            rows += dcp_save_and_load(instance)
            rows += daemon_cpu(instance, "checksums off")
            with (
                mounted(scratch / "off", f"{names}-off", size="1G", options={"passthrough": "off"}) as other,
                naive_mount(scratch) as naive,
            ):
                wait_for_ballast(other)
                rows += with_and_without_passthrough(instance, other, naive)
        with mounted(scratch / "sums", f"{names}-sums", size="3G") as instance:
            wait_for_ballast(instance)
            rows += daemon_cpu(instance, "checksums on")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = as_json(measure_all())
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
