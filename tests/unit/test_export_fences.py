"""What other nodes read as memory is given back by those who own the files: when a version leaves, and before the trash
is freed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import trio

from tests.unit.step_driver import Driver, until
from tests.unit.verbs_bench import Bench, mapped_inodes
from tierfs.cluster import transport
from tierfs.cluster.copies import Copies
from tierfs.cluster.own_copies import OwnFirst
from tierfs.cluster.versions import write_version
from tierfs.errors import PeerLacks
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import Source
from tierfs.ram.tier import RamTier
from tierfs.transport.verbs_exports import Exports
from tierfs.transport.verbs_messages import Exported, Proposal
from tierfs.transport.verbs_port import LinkAddress
from tierfs.transport.verbs_serving import VerbsSession

KEY = ("run", "step_1")
DATA = os.urandom(70_000)


@dataclass
class Node:
    """Its files, what it knows of them, and a connection that reads them."""

    files: Driver
    copies: Copies
    exports: Exports
    session: VerbsSession

    async def export(self, version: str) -> Exported:
        exported = await self.session.export(version, 0, len(DATA), growing=False)
        assert exported.length == len(DATA)
        return exported

    def in_tree(self) -> tuple[Path, str]:
        path = self.files.root / "run/step_1/shard"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(DATA)
        return path, self.copies.seal(path, path.lstat().st_ino)

    def on_shelf(self) -> tuple[Path, str]:
        place = self.copies.place(KEY, "b/01")
        place.write_bytes(DATA)
        write_version(place, "b/01")
        self.copies.shelved(KEY, "b/01", place)
        return place, "b/01"


@asynccontextmanager
async def running(top: Path) -> AsyncIterator[Node]:
    bench = Bench(1 << 30)
    files = Driver(top / "tier")
    copies = Copies(files.registry, "a")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(transport, "Devices", lambda peer: bench)
    wired = transport.Transport(copies, files.registry.settings, "a", lambda node: ())
    monkeypatch.undo()
    wired.follow(files.registry, copies, Hydration(files.registry, OwnFirst(cast("Source", None), copies)))
    serving = wired.serving
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(serving.run)
            session = serving.session()
            await session.link([Proposal("srd", LinkAddress("asker", 7))])
            yield Node(files, copies, serving.exports, session)
            nursery.cancel_scope.cancel()
    assert bench.fabric.registered == 0 and not +bench.kept
    bench.close()


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def withdraw(copies: Copies, path: Path, version: str) -> None:
    copies.withdraw(path.lstat().st_ino, path)


def damaged(copies: Copies, path: Path, version: str) -> None:
    copies.forget(KEY, version)


def drop(copies: Copies, path: Path, version: str) -> None:
    copies.drop(KEY, version)


def forget_step(copies: Copies, path: Path, version: str) -> None:
    copies.forget_step(KEY)


def seen_to_be_gone(copies: Copies, path: Path, version: str) -> None:
    path.rename(path.with_name("other"))
    path.write_bytes(b"")
    assert not copies.has(version)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (withdraw, "tree"),
        (damaged, "tree"),
        (seen_to_be_gone, "tree"),
        (damaged, "shelf"),
        (drop, "shelf"),
        (forget_step, "shelf"),
    ],
)
async def test_a_version_that_leaves_is_read_by_nobody_any_more(
    top: Path, how: Callable[[Copies, Path, str], None], where: str
) -> None:
    async with running(top) as node:
        path, version = node.in_tree() if where == "tree" else node.on_shelf()
        ino = path.lstat().st_ino
        await node.export(version)
        assert ino in mapped_inodes()
        how(node.copies, path, version)
        assert ino not in node.exports._files, "nobody can be given it from the moment on"
        with pytest.raises(PeerLacks):
            await node.export(version)
        await node.exports.fence(ino)
        assert ino not in mapped_inodes()


async def test_a_replica_that_got_a_name_in_the_tree_stays_registered(top: Path) -> None:
    async with running(top) as node:
        place, version = node.on_shelf()
        exported = await node.export(version)
        shown = node.files.root / "run/step_1/shard"
        shown.parent.mkdir(parents=True)
        os.link(place, shown)
        node.copies.unshelve(KEY, version, shown)
        assert not place.exists()
        assert (await node.export(version)).remotes == exported.remotes


async def test_room_of_a_removed_file_is_told_of_when_its_memory_came_back(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(RamTier, "released_room", lambda tier: told.append(ino in mapped_inodes()))
    async with running(top) as node:
        path, version = node.in_tree()
        ino = path.lstat().st_ino
        await node.export(version)
        told.clear()
        path.unlink()
        node.exports.look_soon()
        await until(lambda: told, "there is room")
        assert told == [False]


async def test_the_trash_is_freed_only_after_its_memory_was_given_back(top: Path) -> None:
    async with running(top) as node:
        path, version = node.in_tree()
        ino, freed = path.lstat().st_ino, []
        await node.export(version)

        async def before_freeing(trash: Path) -> None:
            await node.exports.free_tree(trash)
            freed.append((ino in mapped_inodes(), (trash / "shard").exists()))

        node.files.registry.before_freeing = before_freeing
        node.files.registry.discard(path.parent, size_bytes=len(DATA))
        assert ino in mapped_inodes()
        async with trio.open_nursery() as nursery:
            await nursery.start(node.files.upkeep.run)
            await until(lambda: not node.files.registry.is_freeing, "the trash is empty")
            nursery.cancel_scope.cancel()
        assert freed == [(False, True)]
        assert not list(node.files.tier.trash.iterdir())
