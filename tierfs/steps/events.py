"""What the file system tells whoever keeps track of steps, and a listener that does nothing.

`StepTracker` is the boundary between the mount, which knows requests, and the steps, which know what a marker or an
overwrite means. Paths are relative to the root of the mount (the root is ""), names that are not valid UTF-8 carry
surrogate escapes.

After a crash of the daemon a request that was already done may be made again, so `created` and the `after_...` calls
come at least once, not exactly once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from tierfs.errors import NotAStep


class StepTracker(Protocol):
    """Each call may raise TierfsError or OSError; its errno is what the program gets."""

    invalidate: Callable[[str, str], None]
    """Set by the file system: call it with (directory, name) when that entry was changed behind the kernel's back."""

    def before_lookup(self, rel: str, pid: int) -> bool:
        """True: the entry is in a step whose files have to be made first, by `populate`."""
        ...

    def before_listing(self, rel: str) -> bool:
        """The same for the entries of the directory `rel`."""
        ...

    async def populate(self, rel: str, *, listing: bool) -> None:
        """Make what has the name `rel`, or (`listing`) all that is in that directory; returns once it is there."""
        ...

    async def before_mkdir(self, rel: str, mode: int, uid: int, gid: int) -> None:
        """FileExistsError where another node has something of that name, which is there by then."""
        ...

    async def before_create(self, rel: str, pid: int, *, exclusive: bool) -> None:
        """The same for a file."""
        ...

    async def before_link(self, old: str | None, new: str | None, nodeid: int) -> None: ...

    async def before_write_open(self, rel: str, pid: int, *, truncate: bool) -> bool:
        """True: the name now has a new inode, so the open is answered with ESTALE and the kernel looks it up again."""
        ...

    async def before_truncate(self, rel: str, pid: int) -> bool:
        """The same for truncate(2) by path."""
        ...

    def created(self, rel: str, pid: int) -> None: ...

    def opened_for_write(self, rel: str, nodeid: int, pid: int) -> None: ...

    def writer_closed(self, rel: str | None, nodeid: int) -> None:
        """The last write handle of the inode is gone; `rel` is None when it has no name any more."""
        ...

    def times_set(self, rel: str | None, before: os.stat_result, after: os.stat_result) -> None:
        """A program set the modification time of what is there, and nothing else of it."""
        ...

    async def before_unlink(self, rel: str, pid: int) -> None: ...

    def after_unlink(self, rel: str) -> None: ...

    def is_out_of_sight(self, rel: str) -> bool:
        """A program may still have seen the name, whose file was taken away by tierfs just now."""

    async def before_rename(self, old: str, new: str, flags: int, pid: int) -> None: ...

    def after_rename(self, old: str, new: str, flags: int, pid: int) -> None: ...

    async def wait_for_level(self, rel: str) -> None:
        """After a rename to `rel`: until the step that it completed is as durable as the settings ask."""
        ...

    async def flushed(self, rel: str, nodeid: int) -> None:
        """A program closed what may be the last handle for writing: other nodes should have the file by the time that
        close(2) returns."""
        ...

    def attributes_set(self, rel: str | None) -> None:
        """A program set the mode or owner of what is there."""
        ...

    async def synced(self, rel: str, nodeid: int) -> None:
        """fsync: until the file is as durable as the settings ask."""
        ...

    def before_rmdir(self, rel: str) -> bool:
        """True as for `before_listing`."""
        ...

    def after_rmdir(self, rel: str) -> None: ...

    def expected_size(self, rel: str) -> int | None:
        """How large the file will probably be, where that can be told."""
        ...

    def is_likely_large(self, rel: str) -> bool:
        """True for a file that by its name is a shard, so that room is worth having before its size is known."""
        ...

    def xattrs(self, rel: str, st: os.stat_result) -> dict[str, bytes]: ...

    def wished(self, rel: str, name: str, value: str) -> None:
        """A program asks for something for a step or a namespace: `name` and `value` are of `tierfs.steps.wishes`."""
        ...

    def hidden(self, dir_rel: str, name: str) -> bool: ...


class NoSteps:
    """A tracker for a mount without steps: plain files only."""

    def __init__(self) -> None:
        self.invalidate: Callable[[str, str], None] = lambda _directory, _name: None

    def before_lookup(self, rel: str, pid: int) -> bool:
        return False

    def before_listing(self, rel: str) -> bool:
        return False

    async def populate(self, rel: str, *, listing: bool) -> None:
        pass

    async def before_mkdir(self, rel: str, mode: int, uid: int, gid: int) -> None:
        pass

    async def before_create(self, rel: str, pid: int, *, exclusive: bool) -> None:
        pass

    async def before_link(self, old: str | None, new: str | None, nodeid: int) -> None:
        pass

    async def before_write_open(self, rel: str, pid: int, *, truncate: bool) -> bool:
        return False

    async def before_truncate(self, rel: str, pid: int) -> bool:
        return False

    def created(self, rel: str, pid: int) -> None:
        pass

    def opened_for_write(self, rel: str, nodeid: int, pid: int) -> None:
        pass

    def writer_closed(self, rel: str | None, nodeid: int) -> None:
        pass

    def times_set(self, rel: str | None, before: os.stat_result, after: os.stat_result) -> None:
        pass

    async def before_unlink(self, rel: str, pid: int) -> None:
        pass

    def after_unlink(self, rel: str) -> None:
        pass

    def is_out_of_sight(self, rel: str) -> bool:
        return False

    async def before_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        pass

    def after_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        pass

    async def wait_for_level(self, rel: str) -> None:
        pass

    async def flushed(self, rel: str, nodeid: int) -> None:
        pass

    def attributes_set(self, rel: str | None) -> None:
        pass

    async def synced(self, rel: str, nodeid: int) -> None:
        pass

    def before_rmdir(self, rel: str) -> bool:
        return False

    def after_rmdir(self, rel: str) -> None:
        pass

    def expected_size(self, rel: str) -> int | None:
        return None

    def is_likely_large(self, rel: str) -> bool:
        return False

    def xattrs(self, rel: str, st: os.stat_result) -> dict[str, bytes]:
        return {}

    def wished(self, rel: str, name: str, value: str) -> None:
        raise NotAStep(f"{rel} is no step")

    def hidden(self, dir_rel: str, name: str) -> bool:
        return False
