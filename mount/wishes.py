"""The attributes `user.tierfs.*`: what programs read of a step, and the few by which they ask for something.

Programs that see nothing but the mount, in a container say, have no other way to the daemon.

user.tierfs.size         of a file that is open for writing: how many bytes it will have, so that room is made now
user.tierfs.tiers        of a step: `tierfs.steps.wishes`
user.tierfs.durability   of a step: the same
user.tierfs.ram_max_steps   of a namespace: the same
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pyfuse3

from tierfs.steps import wishes

if TYPE_CHECKING:
    from mount.nodes import NodeTable
    from mount.open_files import OpenFiles
    from mount.stub_files import StubFiles
    from tierfs.ram.tier import RamTier
    from tierfs.steps.events import StepTracker

_PREFIX = "user.tierfs."
_SIZE = "size"
_MOST_BYTES = 1 << 62


class Wishes:
    """Answers getxattr and setxattr for these names."""

    def __init__(
        self, nodes: NodeTable, files: OpenFiles, stubs: StubFiles, tier: RamTier, tracker: StepTracker
    ) -> None:
        self._nodes = nodes
        self._files = files
        self._stubs = stubs
        self._tier = tier
        self._tracker = tracker

    def get(self, nodeid: int, name: str) -> bytes:
        """ENODATA for what this file or directory does not have."""
        rel = self._nodes.path(nodeid)
        if rel is None:
            self._stubs.refuse_replaced(nodeid)
        value = None if rel is None else self._tracker.xattrs(rel, self._nodes.stat(nodeid)).get(name)
        if value is None:
            raise pyfuse3.FUSEError(errno.ENODATA)
        return value

    async def put(self, nodeid: int, name: str, value: bytes) -> None:
        """EPERM for a name that only tells; EINVAL for a value that is none; EOPNOTSUPP where the wish can't be met."""
        wish, rel = name.removeprefix(_PREFIX), self._nodes.path(nodeid)
        text = value.decode("utf-8", "replace")
        if wish == _SIZE:
            await self._make_room(nodeid, text)
        elif wish in (*wishes.NAMES, wishes.MAX_STEPS) and rel is not None:
            self._tracker.wished(rel, wish, text)
        else:
            raise pyfuse3.FUSEError(errno.EPERM)

    async def _make_room(self, nodeid: int, text: str) -> None:
        if not (text.isascii() and text.isdigit()) or int(text) > _MOST_BYTES:
            raise pyfuse3.FUSEError(errno.EINVAL)
        if nodeid not in self._files.growing:
            raise pyfuse3.FUSEError(errno.EBADF)  # nobody writes it
        with self._files.backing(nodeid) as fd:
            await self._tier.reserve(fd, int(text))
            if nodeid in self._files.growing:
                self._tier.begin_shard(nodeid, fd, int(text))
