"""Metadata requests a second through the kernel channel, against the same pyfuse3 file system without it.

    python bench/metadata_rates.py [--files 100] [--rounds 40] [--kind customio] [--json]

Both serve a tmpfs directory each, with the same handlers; only `Channel.attach` is called in one of them. Needs root.
The goal is a ratio of at least 0.8 for each kind of request. The daemon's CPU time for each is the quieter measure on
a machine that does other things as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import Row, as_json, pair, table

GOAL = ">= 0.8"
CPU_GOAL = "<= 1.25"
_libc = ctypes.CDLL(None, use_errno=True)
_OPTIONS = "rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"


def serve(fuse_fd: int, directory: str, kind: str) -> None:
    """The file system; `kind` is the channel's, or "none" for pyfuse3 alone."""
    from mount.channel import Channel
    from mount.syscalls import name_to_handle

    channel = None
    if kind != "none":
        state = Path(directory).with_suffix(".state")
        channel = Channel(fuse_fd, state, kind=kind, passthrough=True, resend=True, takeover=False)
    import pyfuse3
    import trio

    class Files(pyfuse3.Operations):  # type: ignore[misc]
        paths = {pyfuse3.ROOT_INODE: os.fsencode(directory)}  # noqa: RUF012

        def attributes(self, path: bytes) -> Any:
            st = os.lstat(path)
            entry = pyfuse3.EntryAttributes()
            entry.st_ino = pyfuse3.ROOT_INODE if path == self.paths[pyfuse3.ROOT_INODE] else st.st_ino
            entry.entry_timeout = entry.attr_timeout = 60
            for name in ("mode", "nlink", "uid", "gid", "size", "blksize", "blocks"):
                setattr(entry, f"st_{name}", getattr(st, f"st_{name}"))
            for name in ("atime", "mtime", "ctime"):
                setattr(entry, f"st_{name}_ns", getattr(st, f"st_{name}_ns"))
            return entry

        def grant(self, inode: int, fd: int) -> Any:
            handle = name_to_handle(fd)
            if channel is not None:
                channel.attach(inode, fd, handle)
                os.close(fd)
                return pyfuse3.FileInfo(fh=inode)
            return pyfuse3.FileInfo(fh=fd)

        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            return self.attributes(self.paths[inode])

        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            path = self.paths[parent] + b"/" + name
            try:
                entry = self.attributes(path)
            except FileNotFoundError:
                raise pyfuse3.FUSEError(errno.ENOENT) from None
            self.paths[entry.st_ino] = path
            return entry

        async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
            fd = os.open(self.paths[parent] + b"/" + name, os.O_CREAT | os.O_RDWR, mode)
            entry = await self.lookup(parent, name)
            return self.grant(entry.st_ino, fd), entry

        async def open(self, inode: int, flags: int, ctx: Any) -> Any:
            return self.grant(inode, os.open(self.paths[inode], os.O_RDWR))

        async def read(self, fh: int, off: int, size: int) -> bytes:
            return os.pread(fh, size, off)

        async def write(self, fh: int, off: int, buf: bytes) -> int:
            return os.pwrite(fh, buf, off)

        async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
            os.unlink(self.paths[parent] + b"/" + name)  # noqa: PTH108

        async def access(self, inode: int, mode: int, ctx: Any) -> bool:
            return True

        async def flush(self, fh: int) -> None:
            pass

        async def release(self, fh: int) -> None:
            if channel is None:
                os.close(fh)

    os.set_blocking(fuse_fd, False)
    pyfuse3.init(Files(), channel.device() if channel else f"/dev/fd/{fuse_fd}", set())
    trio.run(pyfuse3.main)


@contextlib.contextmanager
def mounted(base: Path, kind: str) -> Iterator[tuple[Path, int]]:
    """The mount, and the pid of its daemon."""
    directory, path = base / f"{kind}-files", base / f"{kind}-mount"
    directory.mkdir()
    path.mkdir()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},{_OPTIONS}".encode()
    if _libc.mount(b"metadata-rates", os.fsencode(path), b"fuse.metadatarates", 6, options) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    command = [sys.executable, __file__, "--serve", str(fd), str(directory), kind]
    with subprocess.Popen(command, pass_fds=[fd]) as process:
        os.close(fd)
        try:
            path.stat()
            yield path, process.pid
        finally:
            _libc.umount2(os.fsencode(path), 2)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def steps(path: Path, files: int) -> dict[str, Callable[[], None]]:
    """In the order in which they must run."""
    names = [str(path / f"f{k}") for k in range(files)]

    def create() -> None:
        for name in names:
            fd = os.open(name, os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"content")
            os.close(fd)

    def stat() -> None:
        for name in names:
            os.stat(name)

    def read() -> None:
        for name in names:
            fd = os.open(name, os.O_RDONLY)
            os.read(fd, 100)
            os.close(fd)

    def unlink() -> None:
        for name in names:
            os.unlink(name)  # noqa: PTH108

    return {"create+write+close": create, "stat after write": stat, "open+read+close": read, "unlink": unlink}


def daemon_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process: its clock, as clock_getcpuclockid(3) makes the number."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(kind: str, files: int, rounds: int) -> list[Row]:
    """Each kind of request is measured on one mount and at once on the other, so both see the same machine."""
    rates: dict[str, dict[str, list[float]]] = {"none": {}, kind: {}}
    costs: dict[str, dict[str, list[float]]] = {"none": {}, kind: {}}
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        mounts = {name: stack.enter_context(mounted(base, name)) for name in rates}
        todo = {name: steps(path, files) for name, (path, _) in mounts.items()}
        for turn in range(rounds + 1):
            for what in todo[kind]:
                for name in list(rates) if turn % 2 else list(rates)[::-1]:
                    cpu, start = daemon_cpu_s(mounts[name][1]), time.perf_counter()
                    todo[name][what]()
                    wall_s, cpu_s = time.perf_counter() - start, daemon_cpu_s(mounts[name][1]) - cpu
                    if turn:  # the first warms up
                        rates[name].setdefault(what, []).append(files / wall_s)
                        costs[name].setdefault(what, []).append(cpu_s / files * 1e6)
    return [
        pair(what + more, unit, values[kind][what], "pyfuse3 alone", values["none"][what], goal)
        for more, unit, values, goal in (("", "1/s", rates, GOAL), (", CPU time", "us", costs, CPU_GOAL))
        for what in rates["none"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=100, help="files a round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--kind", default="customio", choices=("customio", "socketpair"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), *arguments.serve[1:])
        return 0
    rows = measure(arguments.kind, arguments.files, arguments.rounds)
    print(json.dumps(as_json(rows), indent=2) if arguments.json else table(as_json(rows)))
    return 0 if all(row.is_met for row in rows) else 3


if __name__ == "__main__":
    sys.exit(main())
