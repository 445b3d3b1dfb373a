"""Copies: versions are attributes of inodes; every answer is checked; what grows is offered, and sealed files once."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.unit.step_driver import Driver
from tierfs.checksum import checksum_fd
from tierfs.cluster import offering
from tierfs.cluster.copies import Copies
from tierfs.cluster.copy_index import PULLING
from tierfs.cluster.versions import attribute, read_version, write_version
from tierfs.errors import PeerLacks, PeerUnavailable
from tierfs.hydrate.stubs import StubMark, remove_mark, write_mark
from tierfs.transport.peers import Offer

KEY = ("run", "step_1")


@pytest.fixture
def node(tmp_path: Path) -> Driver:
    return Driver(tmp_path / "tier")


@pytest.fixture
def copies(node: Driver) -> Copies:
    return Copies(node.registry, "a")


def make(path: Path, data: bytes = b"bytes") -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path.lstat().st_ino


def read(fd: int) -> bytes:
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def test_a_seal_lasts_until_it_is_withdrawn_also_over_a_restart(node: Driver, copies: Copies) -> None:
    path = node.root / "run/step_1/shard"
    ino = make(path)
    version = copies.seal(path, ino)
    assert version.startswith("a/") and copies.seal(path, ino) == version
    assert copies.path(version) == path and copies.version_of(ino) == version

    again = Copies(node.registry, "a")
    again.scan()
    assert again.path(version) == path and read(again.open_version(version)) == b"bytes"

    assert again.withdraw(ino, path) == version
    assert not again.has(version) and again.version_of(ino) is None
    with pytest.raises(PeerLacks):
        again.open_version(version)
    assert again.seal(path, ino) != version


def test_an_answer_is_believed_only_where_the_inode_says_the_same(node: Driver, copies: Copies) -> None:
    path = node.root / "run/step_1/shard"
    version = copies.seal(path, make(path))
    old = node.root / "run/step_1/old"
    path.rename(old)
    make(path, b"others")
    assert copies.path(version) is None  # nobody said where it went
    copies.scan()
    assert copies.path(version) == old
    copies.moved(node.root / "run", node.root / "moved")
    (node.root / "run").rename(node.root / "moved")
    assert copies.path(version) == node.root / "moved/step_1/old"
    write_version(node.root / "moved/step_1/old", "a/0123")
    assert copies.path(version) is None


def test_a_stub_is_no_copy_until_its_mark_is_gone(node: Driver, copies: Copies) -> None:
    path = node.root / "run/step_1/shard"
    ino = make(path)
    fd = os.open(path, os.O_RDWR)
    write_mark(fd, StubMark("run", "step_1", "shard", 5, 0, 0))
    copies.adopt(path, ino, "b/01")
    assert not copies.has("b/01") and copies.version_of(ino) is None
    remove_mark(fd)
    os.close(fd)
    assert copies.path("b/01") == path and copies.seal(path, ino) == "b/01"


def test_the_shelf_is_found_again_and_what_was_being_pulled_goes(node: Driver, copies: Copies) -> None:
    place = copies.place(KEY, "b/01")
    assert place.parent == node.path / "shelf/run/step_1"
    make(place)
    write_version(place, "b/01")
    copies.shelved(KEY, "b/01", place)
    make(copies.place(KEY, "b/02").with_name("b.02" + PULLING))
    make(copies.place(KEY, "b/03"))  # without an attribute nobody knows what it is
    assert copies.bytes_of(KEY) > 0

    again = Copies(node.registry, "a")
    again.scan()
    assert os.listdir(place.parent) == ["b.01"]
    assert again.shelved_versions(KEY) == ["b/01"]
    shown = node.root / "run/step_1/shard"
    shown.parent.mkdir(parents=True)
    os.link(place, shown)
    assert again.bytes_of(KEY) == 0
    again.unshelve(KEY, "b/01", shown)
    assert again.path("b/01") == shown and not place.exists()
    again.forget_step(KEY)
    assert again.path("b/01") == shown and not (node.path / "shelf/run/step_1").exists()


def test_names_of_any_length_fit_the_shelf(copies: Copies) -> None:
    place = copies.place(("x" * 250 + "/" + "y" * 200, "step_1"), "ü" * 200 + "/" + "0" * 40)
    make(place.with_name(place.name + PULLING))


async def test_a_checksum_is_computed_once_and_given_to_the_manifest(node: Driver, copies: Copies) -> None:
    node.mkdirs("run/step_1")
    await node.write("run/step_1/shard", b"x" * 100)
    record = node.record("run/step_1")
    path = node.root / "run/step_1/shard"
    version = copies.seal(path, path.lstat().st_ino)
    found: list[object] = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(_sum, copies, version, found)
    with path.open("rb") as file:
        expected = checksum_fd(file.fileno())
    assert found == [expected] * 3
    assert record.manifest.files["shard"].checksum == expected.text
    with pytest.raises(PeerLacks):
        await copies.checksum("a/00")

    other = Copies(node.registry, "a")
    other.scan()
    path.write_bytes(b"y" * 100)  # behind everybody's back
    with pytest.raises(PeerLacks, match="other bytes than were sealed"):
        await other.checksum(version)


async def _sum(copies: Copies, version: str, found: list[object]) -> None:
    found.append(await copies.checksum(version))


async def _next(offers: AsyncIterator[Offer]) -> Offer:
    with trio.fail_after(5):
        return await offers.__anext__()


async def test_a_growing_file_is_offered_as_it_grows_and_once_when_sealed(node: Driver, copies: Copies) -> None:
    node.mkdirs("run/step_1")
    handle = await node.open("run/step_1/shard")
    name = copies.growing("run/step_1/shard", handle.ino)
    assert copies.growing("run/step_1/shard", handle.ino) == name
    async with copies.offers() as offers:
        os.write(handle.fd, b"x" * (2 << 20))
        first = await _next(offers)
        assert (first.version, first.inner, first.size_bytes, first.sealed) == (name, "shard", 2 << 20, False)
        assert len(read(copies.open_growing(name))) == 1 << 20
        os.write(handle.fd, b"x" * (2 << 20))
        assert (await _next(offers)).size_bytes == 4 << 20
        node.close(handle)
        version = copies.sealed("run/step_1/shard", handle.ino)
        last = await _next(offers)
        assert (last.version, last.growing, last.size_bytes, last.sealed) == (version, name, 4 << 20, True)
        os.close(copies.open_growing(name))  # a pull that began just then
    async with copies.offers() as offers:
        assert (await _next(offers)).version == version  # the step is still being written
    with pytest.raises(PeerLacks):
        copies.open_growing("a/00")


async def test_a_file_made_long_before_it_is_written_is_offered_when_sealed(node: Driver, copies: Copies) -> None:
    node.mkdirs("run/step_1")
    handle = await node.open("run/step_1/shard")
    os.ftruncate(handle.fd, 64 << 20)
    copies.growing("run/step_1/shard", handle.ino)
    async with copies.offers() as offers:
        with trio.move_on_after(0.1):
            raise AssertionError(await offers.__anext__())
    async with copies.offers() as offers:
        node.close(handle)
        copies.sealed("run/step_1/shard", handle.ino)
        assert (await _next(offers)).sealed


async def test_a_subscriber_that_is_too_slow_is_cut_off() -> None:
    feed = offering.Offering(list, most_waiting=3)
    async with feed.subscribe() as offers:
        for number in range(5):
            feed.end(number, Offer(f"a/{number}", *KEY, "shard", 1, 0, sealed=True))
        with pytest.raises(PeerUnavailable):
            await _next(offers)
    async with feed.subscribe() as offers:
        feed.end(9, Offer("a/9", *KEY, "shard", 1, 0, sealed=True))
        assert (await _next(offers)).version == "a/9"


def test_a_damaged_attribute_names_nothing(node: Driver, copies: Copies) -> None:
    path = node.root / "shard"
    ino = make(path)
    os.setxattr(path, attribute(), b"../../etc/passwd")
    assert read_version(path) is None
    assert copies.seal(path, ino).startswith("a/")
