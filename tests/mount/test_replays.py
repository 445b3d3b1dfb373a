"""A request that was done by a daemon that died before it said so succeeds when the kernel sends it again.

The handlers are called twice here, as the kernel would over a takeover, with a channel that says so; that the real
kernel and channel do so is tested where they are.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest

from mount import syscalls
from mount.filesystem import TierFs
from tests.conftest import needs_root
from tests.mount.fs_harness import PlainChannel, PlainTier
from tierfs.steps.events import NoSteps

CALLER: Any = SimpleNamespace(uid=0, gid=0, pid=1, umask=0)


class ReplayingChannel(PlainChannel):
    """Says of what it is told to that it was sent again."""

    def __init__(self) -> None:
        super().__init__()
        self.again: str = ""

    def resent(self, operation: str, nodeid: int) -> bool:
        return operation == self.again


class Told(NoSteps):
    """Remembers what the tracker is told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, ...]] = []
        self.out_of_sight = ""

    def is_out_of_sight(self, rel: str) -> bool:
        return rel == self.out_of_sight

    def created(self, rel: str, pid: int) -> None:
        self.calls.append(("created", rel))

    def after_unlink(self, rel: str) -> None:
        self.calls.append(("unlinked", rel))

    def after_rename(self, old: str, new: str, flags: int, pid: int) -> None:
        self.calls.append(("renamed", old, new))


class Rig:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.channel = ReplayingChannel()
        self.told = Told()
        self.tier = PlainTier(base)
        self.fs = self.daemon()

    def daemon(self) -> TierFs:
        """A daemon on the same tier that knows nothing yet."""
        return TierFs(self.tier, self.channel, self.told, log=logging.getLogger("test"))  # type: ignore[arg-type]

    async def twice(self, operation: str, request: Callable[[TierFs], Awaitable[Any]]) -> None:
        """Once by a daemon that dies, once by the next."""
        await request(self.fs)
        told = self.told.calls[-1:]
        self.fs.close()
        self.fs = self.daemon()
        self.channel.again = operation
        await request(self.fs)
        self.channel.again = ""
        assert self.told.calls[-1:] == told

    @property
    def root(self) -> Path:
        return self.tier.root


@pytest.fixture
def rig() -> Iterator[Rig]:
    needs_root()
    umask = os.umask(0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        made = Rig(Path(base))
        yield made
        made.fs.close()
    os.umask(umask)


@pytest.mark.parametrize(
    ("operation", "request_again"),
    [
        ("mkdir", lambda fs: fs.mkdir(1, b"new", 0o755, CALLER)),
        ("symlink", lambda fs: fs.symlink(1, b"new", b"to", CALLER)),
        ("mknod", lambda fs: fs.mknod(1, b"new", 0o100644, 0, CALLER)),
        ("create", lambda fs: fs.create(1, b"new", 0o644, os.O_RDWR | os.O_EXCL, CALLER)),
        ("unlink", lambda fs: fs.unlink(1, b"file", CALLER)),
        ("rmdir", lambda fs: fs.rmdir(1, b"dir", CALLER)),
        ("rename", lambda fs: fs.rename(1, b"file", 1, b"moved", 0, CALLER)),
        ("rename2", lambda fs: fs.rename(1, b"file", 1, b"moved", syscalls.RENAME_NOREPLACE, CALLER)),
    ],
)
async def test_a_request_sent_again_finds_its_own_work(rig: Rig, operation: str, request_again: Any) -> None:
    (rig.root / "file").write_text("x")
    (rig.root / "dir").mkdir()
    await rig.twice(operation, request_again)
    with pytest.raises(pyfuse3.FUSEError) as failed:  # a new one gets the truth
        await request_again(rig.fs)
    assert failed.value.errno in (errno.EEXIST, errno.ENOENT)


async def test_what_was_taken_out_of_sight_can_be_removed_by_who_still_saw_it(rig: Rig) -> None:
    rig.told.out_of_sight = "marker"
    await rig.fs.unlink(1, b"marker", CALLER)
    assert rig.told.calls == [], "the name is nobody's business any more"
    with pytest.raises(pyfuse3.FUSEError) as failed:
        await rig.fs.unlink(1, b"other", CALLER)
    assert failed.value.errno == errno.ENOENT


async def test_a_link_sent_again_finds_its_own_work(rig: Rig) -> None:
    (rig.root / "file").write_text("x")
    nodeid = (rig.root / "file").stat().st_ino
    await rig.twice("link", lambda fs: fs.link(nodeid, 1, b"new", CALLER))
    assert (rig.root / "new").stat().st_ino == nodeid


async def test_an_exchange_sent_again_is_not_undone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (rig.root / "one").write_text("one")
    (rig.root / "two").write_text("two")
    # The daemon dies between the exchange and what follows it.
    monkeypatch.setattr(rig.fs._replays, "forget_exchange", lambda *_: None)
    await rig.twice("rename2", lambda fs: fs.rename(1, b"one", 1, b"two", syscalls.RENAME_EXCHANGE, CALLER))
    assert ((rig.root / "one").read_text(), (rig.root / "two").read_text()) == ("two", "one")
    assert os.listxattr(rig.root / "two") == []
    rig.channel.again = "rename2"  # sent again, but not done before: done now
    await rig.fs.rename(1, b"one", 1, b"two", syscalls.RENAME_EXCHANGE, CALLER)
    assert ((rig.root / "one").read_text(), (rig.root / "two").read_text()) == ("one", "two")


async def test_a_resent_request_does_not_take_what_is_of_another_kind(rig: Rig) -> None:
    (rig.root / "taken").write_text("a file")
    rig.channel.again = "mkdir"
    with pytest.raises(pyfuse3.FUSEError) as failed:
        await rig.fs.mkdir(1, b"taken", 0o755, CALLER)
    assert failed.value.errno == errno.EEXIST
