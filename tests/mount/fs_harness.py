"""Run the file system alone in a process of its own: no keeper, no steps, plain pyfuse3 as the channel.

    python tests/mount/fs_harness.py TIER_DIRECTORY MOUNTPOINT DESCRIPTORS

At most DESCRIPTORS files are open at a time. It prints "ready" when the mount answers. It isolates `TierFs` from the
channel and the RAM tier, so a fault found here is the file system's own.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import trio

from mount.filesystem import TierFs
from tierfs.errors import NoRoom
from tierfs.steps.events import NoSteps


class PlainChannel:
    """What `mount.channel.Channel` promises, for plain pyfuse3: counts are kept by `CountingFs` below."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}
        self.opens: Counter[int] = Counter()
        self.writers: Counter[int] = Counter()

    def attach(self, nodeid: int, fd: int, handle: bytes) -> None:
        if nodeid not in self.fds:
            self.fds[nodeid] = os.dup(fd)

    def fd(self, nodeid: int) -> int | None:
        return self.fds.get(nodeid)

    def handles(self, nodeid: int) -> Any:
        return SimpleNamespace(opens=self.opens[nodeid], writers=self.writers[nodeid])

    def open_nodes(self) -> list[Any]:
        return []

    def info(self) -> Any:
        return SimpleNamespace(passthrough=False)

    def resent(self, operation: str, nodeid: int) -> bool:
        return False

    def opened(self, nodeid: int, flags: int) -> None:
        self.opens[nodeid] += 1
        self.writers[nodeid] += flags & os.O_ACCMODE != os.O_RDONLY

    def released(self, nodeid: int) -> None:
        self.opens[nodeid] -= 1
        if self.opens[nodeid] == 0:
            self.writers[nodeid] = 0
            os.close(self.fds.pop(nodeid))


class PlainTier:
    """The RAM tier's directories without a ballast."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, path / "root"
        self.root.mkdir(exist_ok=True)

    def usage(self) -> Any:
        st = os.statvfs(self.path)
        return SimpleNamespace(
            size_bytes=st.f_blocks * st.f_frsize,
            free_bytes=st.f_bavail * st.f_frsize,
            files=st.f_files - st.f_ffree,
            files_free=st.f_ffree,
        )

    async def reserve(self, fd: int, expected_bytes: int | None, *, likely_large: bool = False) -> None:
        pass

    def begin_shard(self, nodeid: int, fd: int, expected_bytes: int | None, *, likely_large: bool = False) -> None:
        pass

    def end_shard(self, nodeid: int) -> None:
        pass

    def released_room(self) -> None:
        pass


class CountingFs(TierFs):
    """Counts open handles, as the real channel does."""

    async def open(self, inode: int, flags: int, ctx: Any) -> Any:
        answer = await super().open(inode, flags, ctx)
        self.channel.opened(inode, flags)  # type: ignore[attr-defined]
        return answer

    async def create(self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
        answer = await super().create(parent_inode, name, mode, flags, ctx)
        self.channel.opened(answer[0].fh, flags)  # type: ignore[attr-defined]
        return answer

    async def release(self, fh: int) -> None:
        self.channel.released(fh)  # type: ignore[attr-defined]
        await super().release(fh)


class FaultySteps(NoSteps):
    """Fails on names that ask for it, in ways no handler expects."""

    def before_lookup(self, rel: str, pid: int) -> None:
        if rel.endswith("raise-ZeroDivisionError"):
            raise ZeroDivisionError("asked for by the test")
        if rel.endswith("raise-NoRoom"):
            raise NoRoom("the tier is full, said the test")


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    descriptors = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    tier, mountpoint = PlainTier(Path(sys.argv[1])), sys.argv[2]
    operations = CountingFs(tier, PlainChannel(), FaultySteps())  # type: ignore[arg-type]
    pyfuse3.init(operations, mountpoint, {"default_permissions", "allow_other", "fsname=tierfs-harness"})
    print("ready", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)
        operations.close()


if __name__ == "__main__":
    main()
