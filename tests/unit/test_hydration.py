"""Hydration on a plain directory: whatever is read, evicted, killed, corrupted and short of room, bytes are right."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.mount import stub_objects
from tests.mount.stub_objects import LocalClient, content, load_manifest, put_step
from tierfs.errors import ChecksumMismatch, NoRoom, ObjectError, TierfsError
from tierfs.hydrate import aside, eviction, fetching, hydration, partial, room, source
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.stubs import ATTRIBUTES, MarkDamaged, StubMark, make_stub, mark_from_bytes, read_mark, write_mark
from tierfs.logs import NamespaceLog
from tierfs.persist.object_manifest import ObjectManifest
from tierfs.ram.tier import RamTier, RamUsage
from tierfs.settings import RamSettings, Settings
from tierfs.steps.manifest import Manifest, Persisted
from tierfs.steps.record import StepRecord
from tierfs.steps.recovery import recover
from tierfs.steps.registry import StepRegistry

#: Small chunks, so that a test has many of them.
CHUNK = 1 << 20
FILES = {"a.distcp": 5 * CHUNK + 1000, "sub/b.bin": 3 * CHUNK, "small.json": 500}
STEP = ("run", "step_1")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aside, fetching, hydration, partial, room, source, stub_objects):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK, raising=False)
    monkeypatch.setattr(stub_objects, "object_file", _object_file(stub_objects.object_file))
    monkeypatch.setattr(eviction, "LEAST_BYTES", CHUNK)


def _object_file(real: Any) -> Any:
    return lambda key, size, mode=0o644: replace(real(key, size, mode=mode), uid=os.geteuid(), gid=os.getegid())


class SmallTier(RamTier):
    """A limit that holds to the byte, as that of a tmpfs."""

    def usage(self) -> RamUsage:
        used = sum(
            os.lstat(os.path.join(directory, name)).st_blocks * 512
            for top in (self.root, self.trash)
            for directory, _, names in os.walk(top)
            for name in names
        )
        return RamUsage(self.size_bytes, used, max(0, self.size_bytes - used), 0, 0, 0, 0)

    async def give_room(self, fd: int, start: int, end: int) -> None:
        before = os.fstat(fd).st_blocks
        await super().give_room(fd, start, end)
        if self.usage().used_bytes > self.size_bytes:
            size = os.fstat(fd).st_size
            if os.fstat(fd).st_blocks > before:
                with suppress(OSError):
                    room.syscalls.fallocate(fd, 3, start, end - start)
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Node:
    """A node whose daemon can be started anew."""

    base: Path
    size: int = 1 << 30

    def __post_init__(self) -> None:
        (self.base / "ram").mkdir()
        self.objects = self.base / "objects"
        self.objects.mkdir()
        put_step(self.objects, *STEP, FILES)
        self.handles: dict[int, int] = {}
        self.restart()

    def manifest(self) -> ObjectManifest:
        return load_manifest(self.objects, *STEP)

    def restart(self) -> None:
        self.tier = SmallTier(self.base / "ram", RamSettings(), self.size, None)
        self.registry = StepRegistry(self.tier, Settings(), NamespaceLog(self.base / "log"))
        self.registry.open_handles = lambda ino: self.handles.get(ino, 0)
        recover(self.registry)
        self.client = LocalClient(self.objects)
        self.hydration = Hydration(self.registry, source.ObjectSource(self.client, self._manifest))  # type: ignore[arg-type]
        self.hydration.serve_objects(self._manifest)
        self.hydration.scan()
        if STEP not in self.registry.records:
            directory = self.tier.root / "run" / "step_1"
            directory.mkdir(parents=True, exist_ok=True)
            made = Manifest(
                *STEP, 1, state="complete", completed_at=1.0, persisted=Persisted(1, "e", 1.0, 1, 3), populated=False
            )
            record = StepRecord(made, directory)
            self.registry.records[STEP] = record
            self.registry.save(record)
        self.record = self.registry.records[STEP]

    async def _manifest(self, namespace: str, step: str) -> ObjectManifest:
        await trio.lowlevel.checkpoint()
        return load_manifest(self.objects, namespace, step)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.hydration.run)
            yield
            nursery.cancel_scope.cancel()

    def path(self, inner: str) -> Path:
        return self.record.directory / inner

    async def read(self, inner: str, offset: int, size: int) -> bytes:
        """As the file system reads."""
        data = await self.hydration.read(self.path(inner).lstat().st_ino, offset, size)
        if data is not None:
            return data
        with self.path(inner).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def order(self, **orders: Any) -> None:
        import json

        (self.objects / "orders.json").write_text(json.dumps(orders))

    def expected(self, inner: str, offset: int, size: int) -> bytes:
        return content(f"run/step_1/{inner}", offset, max(0, min(size, FILES[inner] - offset)))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_populating_shows_every_file_and_brings_the_small_ones(node: Node) -> None:
    async with node.running():
        await node.hydration.populate(node.record)
        assert {inner: node.path(inner).stat().st_size for inner in FILES} == FILES
        assert all(entry.sealed and entry.checksum for entry in node.record.manifest.files.values())
        with trio.fail_after(5):
            while node.hydration.is_stub(node.path("small.json").stat().st_ino):  # noqa: ASYNC110 - a file changes
                await trio.sleep(0.005)
        assert node.path("small.json").read_bytes() == node.expected("small.json", 0, 500)
        assert node.path("small.json").stat().st_mtime_ns == stub_objects.MTIME_NS
        assert node.hydration.is_stub(node.path("a.distcp").stat().st_ino)
        assert node.hydration.ram_bytes(node.record) == 0
    node.restart()
    assert node.record.manifest.populated
    assert node.record.is_persisted
    assert node.hydration.is_stub(node.path("a.distcp").stat().st_ino)


async def test_an_interrupted_population_goes_on(node: Node) -> None:
    node.path("a.distcp").symlink_to("/etc/passwd")  # whatever else lies there gives way
    (node.record.directory / "sub").mkdir()
    mark = StubMark(*STEP, "sub/b.bin", FILES["sub/b.bin"], node.manifest().files["sub/b.bin"].checksum, 1)
    ino = make_stub(node.path("sub/b.bin"), mark, mode=0o600, uid=os.geteuid(), gid=os.getegid())
    async with node.running():
        await node.hydration.populate(node.record)
        assert node.path("sub/b.bin").lstat().st_ino != ino, "of another time"
        again = {inner: node.path(inner).lstat().st_ino for inner in FILES}
        node.record.manifest.populated = False
        await node.hydration.populate(node.record)
        assert {inner: node.path(inner).lstat().st_ino for inner in FILES} == again
        assert await node.read("a.distcp", 0, 100) == node.expected("a.distcp", 0, 100)


async def test_hydrating_whole_tells_how_far_it_is_and_makes_an_ordinary_file(node: Node) -> None:
    told: list[int] = []
    async with node.running():
        await node.hydration.populate(node.record)
        ino = node.path("a.distcp").stat().st_ino
        await node.hydration.hydrate(ino, on_progress=told.append)
        assert not node.hydration.is_stub(ino)
        assert told == sorted(told)
        assert told[-1] == FILES["a.distcp"]
        assert node.path("a.distcp").read_bytes() == node.expected("a.distcp", 0, 1 << 30)
        assert not any(name in ATTRIBUTES for name in os.listxattr(node.path("a.distcp")))
        await node.hydration.hydrate(ino)  # again: at once
        assert node.hydration.ram_bytes(node.record) == FILES["a.distcp"]
        assert node.hydration.evict(node.record)
        assert node.hydration.ram_bytes(node.record) == 0
        assert node.path("a.distcp").stat().st_ino != ino
        assert await node.read("a.distcp", 3, CHUNK) == node.expected("a.distcp", 3, CHUNK)


async def test_a_cancelled_reader_takes_the_chunk_from_nobody(node: Node) -> None:
    async with node.running():
        await node.hydration.populate(node.record)
        node.order(hold=True)
        found = []

        async def read() -> None:
            found.append(await node.read("a.distcp", 0, 100))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            with trio.move_on_after(0.05):
                await node.read("a.distcp", 0, 100)
            node.order()
        assert found == [node.expected("a.distcp", 0, 100)]


async def test_a_read_that_comes_before_anything_can_be_fetched_waits(node: Node) -> None:
    """A new daemon answers what the kernel sends again a moment before it talks to the object tier."""
    async with node.running():
        await node.hydration.populate(node.record)
    found = []

    async def read() -> None:
        found.append(await node.read("a.distcp", 0, 100))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert found == []
        async with node.running():
            with trio.fail_after(10):
                while not found:  # noqa: ASYNC110 - it may run in any of the tasks
                    await trio.sleep(0.005)
    assert found == [node.expected("a.distcp", 0, 100)]
    node.registry.settings.transfer.read_retry_for_s = 0.05
    with pytest.raises(ObjectError, match="not served"):
        await node.read("a.distcp", 2 * CHUNK, 100)


async def test_an_object_of_another_generation_is_not_read(node: Node) -> None:
    async with node.running():
        await node.hydration.populate(node.record)
        manifest = node.manifest()
        other = replace(manifest.files["a.distcp"], checksum=1)
        object.__setattr__(manifest, "files", {**manifest.files, "a.distcp": other})

        async def newer(namespace: str, step: str) -> ObjectManifest:
            await trio.lowlevel.checkpoint()
            return manifest

        node.hydration._source = source.ObjectSource(node.client, newer)  # type: ignore[arg-type]
        with pytest.raises(ObjectError, match="another generation"):
            await node.read("a.distcp", 0, 100)


async def test_a_file_that_is_not_its_object_is_not_evicted(node: Node) -> None:
    async with node.running():
        await node.hydration.populate(node.record)
        for inner in FILES:
            await node.hydration.hydrate(node.path(inner).stat().st_ino)
        manifest = node.manifest()
        other = replace(manifest.files["a.distcp"], checksum=1)
        object.__setattr__(manifest, "files", {**manifest.files, "a.distcp": other})
        node.hydration.kept_manifest = lambda namespace, step: manifest
        assert node.hydration.evict(node.record)
        assert not node.hydration.is_stub(node.path("a.distcp").stat().st_ino)
        assert node.hydration.is_stub(node.path("sub/b.bin").stat().st_ino)
        assert node.hydration.ram_bytes(node.record) == 0, "nothing more can be had of it"


def test_a_mark_is_read_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    mark = StubMark("run/a", "step_1", "x/y", 10, 1 << 63, -5)
    assert mark_from_bytes(mark.to_bytes()) == mark
    assert mark.key == "run/a/step_1/x/y"
    assert b'"v": 1' in mark.to_bytes(), "an earlier program reads it too"
    held = StubMark("run/a", "step_1", "x/y", 10, None, -5, "n1/0a1b")
    for of_cluster in (held, replace(held, checksum=7), replace(held, version="")):
        assert mark_from_bytes(of_cluster.to_bytes()) == of_cluster
    unnamed = held.to_bytes().replace(b"n1/0a1b", b"../0a1b/..")
    for bad in (
        *(b"", b"{}", b"\xff", mark.to_bytes().replace(b"x/y", b"../y"), mark.to_bytes()[:-1], b"[" * 100_000),
        *(unnamed, held.to_bytes()[:-1], held.to_bytes().replace(b'"v": 2', b'"v": 3')),
    ):
        with pytest.raises(MarkDamaged):
            mark_from_bytes(bad)
    path = tmp_path / "file"
    path.write_bytes(b"")
    assert read_mark(path) is None
    fd = os.open(path, os.O_RDWR)
    write_mark(fd, mark)
    assert read_mark(fd) == read_mark(path) == mark
    os.close(fd)


async def test_a_stub_whose_mark_is_damaged_gives_an_error_and_no_zeros(node: Node) -> None:
    async with node.running():
        await node.hydration.populate(node.record)
    path = node.path("a.distcp")
    name = next(name for name in os.listxattr(path) if name in ATTRIBUTES)
    os.setxattr(path, name, b"rubbish")
    node.restart()
    async with node.running():
        with pytest.raises(ObjectError, match="damaged"):
            await node.read("a.distcp", 0, 100)


NAMES = st.sampled_from(sorted(FILES))
#: What the object tier does meanwhile: of each chunk so many answers are wrong, or it answers nothing.
FAULTS = st.sampled_from([{}, {}, {"wrong": 1}, {"wrong": 2}, {"wrong": 10**6}, {"fails": True}])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), FAULTS, NAMES, st.integers(0, 6 * CHUNK), st.integers(1, 2 * CHUNK)),
        st.tuples(st.just("readers"), FAULTS, NAMES, st.integers(0, 5), st.integers(1, 4)),
        st.tuples(st.just("hydrate"), FAULTS, NAMES),
        st.tuples(st.just("evict"), FAULTS),
        st.tuples(st.just("restart"), FAULTS),
        st.tuples(st.just("scribble"), FAULTS, st.sampled_from(["a.distcp", "sub/b.bin"]), st.integers(0, 2)),
        st.tuples(st.just("open"), FAULTS, NAMES, st.booleans()),
    ),
    min_size=4,
    max_size=25,
)


# What is found is not made smaller: that takes minutes, and lists are short.
@settings(
    deadline=None,
    max_examples=50,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations=OPERATIONS, chunks=st.sampled_from([2, 5, 1000]))
def test_whatever_happens_a_read_gives_the_objects_bytes_or_an_error(operations: Any, chunks: int) -> None:
    base = Path(tempfile.mkdtemp(prefix="tierfs-test-"))
    try:
        trio.run(_bounded, Node(base, size=chunks * CHUNK), operations)
    finally:
        shutil.rmtree(base)


async def _bounded(node: Node, operations: list[tuple[Any, ...]]) -> None:
    with trio.fail_after(60):
        await _model(node, operations)


async def _model(node: Node, operations: list[tuple[Any, ...]]) -> None:
    pending: Iterator[tuple[Any, ...]] = iter([*operations, ("last", {})])
    restarting = True
    #: What began while the object tier failed may still fail, and with it whoever waits for the same.
    lingering = False
    while restarting:
        restarting = False
        node.order()
        async with node.running():
            await node.hydration.populate(node.record)
            for operation, faults, *given_ in pending:
                wrong = {f"run/step_1/{inner} {at}": faults.get("wrong", 0) for inner in FILES for at in range(6)}
                if operation == "last":
                    await _settled(node)
                lingering = lingering and _is_busy(node)
                node.client.forget_faults()
                node.order(corrupt=wrong, fail=[f"run/step_1/{inner}" for inner in FILES if "fails" in faults])
                may_fail = lingering = bool(faults) or lingering
                if operation == "restart":
                    restarting = True
                    break
                if operation == "evict":
                    assert node.hydration.evict(node.record)
                    for thrown in list(node.tier.trash.iterdir()):
                        shutil.rmtree(thrown)
                        node.registry.freed(thrown.name)
                elif operation == "hydrate":
                    with suppress(NoRoom, *((ObjectError, ChecksumMismatch) if may_fail else ())):
                        await node.hydration.hydrate(node.path(given_[0]).stat().st_ino)
                elif operation == "open":
                    ino = node.path(given_[0]).stat().st_ino
                    node.handles[ino] = int(given_[1])
                    (node.hydration.opened if given_[1] else node.hydration.closed)(ino)
                elif operation == "scribble":
                    _scribble(node, *given_)
                elif operation == "read":
                    await _checked(node, *given_, may_fail=may_fail)
                elif operation == "readers":
                    inner, chunk, readers = given_
                    async with trio.open_nursery() as nursery:
                        for reader in range(readers):
                            nursery.start_soon(_read_one, node, inner, chunk * CHUNK + reader * 1000, may_fail)
                else:
                    for inner, size in FILES.items():
                        for at in range(0, size, CHUNK):
                            await _checked(node, inner, at, CHUNK, may_fail=False)
        if restarting:
            lingering = False
            node.handles.clear()
            node.restart()
            assert node.record.is_persisted
    for inner, entry in node.record.manifest.files.items():
        assert entry.checksum is not None, inner
        assert (entry.size_bytes, entry.ino) == (FILES[inner], node.path(inner).stat().st_ino)


def _is_busy(node: Node) -> bool:
    parts = (node.hydration.table.get(node.path(inner).stat().st_ino) for inner in FILES)
    return any(part.fetches or part.filling or part.wants for part in parts if part is not None)


async def _settled(node: Node) -> None:
    while _is_busy(node):  # noqa: ASYNC110 - bounded by the caller
        await trio.sleep(0.001)


async def _read_one(node: Node, inner: str, offset: int, may_fail: bool) -> None:
    await _checked(node, inner, offset, 3000, may_fail=may_fail)


async def _checked(node: Node, inner: str, offset: int, size: int, *, may_fail: bool) -> None:
    try:
        found = await node.read(inner, offset, size)
    except TierfsError:
        if not may_fail:
            raise
    else:
        assert found == node.expected(inner, offset, size), f"{inner} at {offset}"


def _scribble(node: Node, inner: str, chunk: int) -> None:
    """What a dead daemon's worker may leave: wrong bytes in a chunk that nobody has verified."""
    part = node.hydration.table.get(node.path(inner).stat().st_ino)
    if part is not None and part.is_missing(chunk) and not part.users:
        part.set(chunk, partial.UNCHECKED)
        with node.path(inner).open("r+b") as file:
            file.seek(chunk * CHUNK)
            file.write(b"wrong bytes")
