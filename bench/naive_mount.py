"""The file system one writes first: pyfuse3 that reads and writes a directory in Python. A baseline, no more.

Usage: naive_mount.py DIRECTORY MOUNTPOINT; prints "ready" once it is mounted and ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pyfuse3
import trio


class NaiveFs(pyfuse3.Operations):
    """One flat directory of files: what a sequential write and read of one file need."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._paths: dict[int, Path] = {pyfuse3.ROOT_INODE: directory}

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        info = self._paths[inode].stat()
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns", "st_atime_ns"):
            setattr(entry, name, getattr(info, name))
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        path = self._paths[parent] / os.fsdecode(name)
        if not path.exists():
            raise pyfuse3.FUSEError(errno.ENOENT)
        inode = path.stat().st_ino
        self._paths[inode] = path
        return await self.getattr(inode)

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext):  # type: ignore[no-untyped-def]
        path = self._paths[parent] / os.fsdecode(name)
        fd = os.open(path, flags | os.O_CREAT, mode)
        inode = os.fstat(fd).st_ino
        self._paths[inode] = path
        return pyfuse3.FileInfo(fh=fd), await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=os.open(self._paths[inode], flags & ~os.O_CREAT))

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return os.pwrite(fh, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        os.fsync(fh)

    async def release(self, fh: int) -> None:
        os.close(fh)

    async def unlink(self, parent: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        (self._paths[parent] / os.fsdecode(name)).unlink()


def main() -> None:
    directory, mountpoint = map(Path, sys.argv[1:3])
    options = set(pyfuse3.default_options) | {"fsname=naive"}
    pyfuse3.init(NaiveFs(directory), str(mountpoint), options)
    print("ready", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
