"""Stubs whose bytes other nodes hold: whoever of them fails, lies or is gone, a read is right or an error."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from awscrt.checksums import crc64nvme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierfs.catalog.records import FileRecord, Holding, NodeRecord
from tierfs.checksum import FileChecksum, checksum_fd
from tierfs.cluster import sources
from tierfs.cluster.counting import Holders
from tierfs.cluster.sources import Sources
from tierfs.cluster.step_files import StepFiles, merge
from tierfs.errors import CatalogUnavailable, ChecksumMismatch, ObjectError, PeerError, PeerLacks, PeerUnavailable
from tierfs.hydrate import eviction
from tierfs.hydrate.hydration import Hydration
from tierfs.hydrate.source import ObjectSource
from tierfs.hydrate.stub_tier import StubTier
from tierfs.hydrate.stubs import StubMark, make_stub, read_mark
from tierfs.logs import NamespaceLog
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest
from tierfs.ram.tier import RamTier
from tierfs.settings import RamSettings, Settings
from tierfs.steps.cluster import Alone
from tierfs.steps.manifest import FileEntry, Manifest
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry
from tierfs.transport.peers import Pulled

KEY = ("run", "step_1")
MIB = 1 << 20
SIZE = 37 * MIB + 123
VERSION = "a/01"
DATA = random.Random(7).randbytes(SIZE)
NODES = ("a", "b", "c")


class View:
    """The catalogue's view of one complete step, whose files `a` wrote and others hold."""

    def __init__(self, file: FileRecord) -> None:
        self.nodes: dict[str, Any] = {}
        for node in ("me", *NODES):
            self.nodes[node] = SimpleNamespace(record=NodeRecord(node, (), "t", domain="far" if node == "c" else ""))
        self.states: Mapping[Key, Any] = {KEY: SimpleNamespace(record=SimpleNamespace(generation=3, level="complete"))}
        self.held = {node: Holding(3, parts=("a",)) for node in NODES}
        self.away = False
        self._files = merge(KEY, 3, 1, {"a": {"x.bin": file}}, {})

    async def files(self, key: Key, generation: int, *, fresh: bool = False) -> StepFiles:
        await trio.lowlevel.checkpoint()
        if self.away:
            raise CatalogUnavailable("the test says no")
        assert (key, generation) == (KEY, 3)
        return self._files

    def known_files(self, key: Key, generation: int) -> StepFiles | None:
        return None

    async def holdings(self, key: Key) -> dict[str, Holding]:
        await trio.lowlevel.checkpoint()
        return self.held

    def holders(self, files: StepFiles, holdings: Mapping[str, Holding], file: FileRecord) -> list[str]:
        return sorted(Holders(files, holdings, self.nodes).of(file))


@dataclass
class Others:
    """The other nodes, each with the same file. `faults`: what a node does instead of answering as it should."""

    summed: FileChecksum
    faults: dict[str, str] = field(default_factory=dict)
    pulls: list[tuple[str, int, int]] = field(default_factory=list)
    checksums: Counter[str] = field(default_factory=Counter)
    #: Each pull takes until all that can be asked for meanwhile was asked for.
    slowly: bool = False

    async def pull(
        self, node: str, version: str, offset: int, length: int, fd: int, *, growing: bool = False, urgent: bool = False
    ) -> Pulled:
        assert urgent and not growing and version == VERSION
        self.pulls.append((node, offset, length))
        if self.slowly:
            await trio.testing.wait_all_tasks_blocked()
        else:
            await trio.lowlevel.checkpoint()
        self._fail(node)
        data = bytearray(DATA[offset : offset + length])
        if self.faults.get(node) == "wrong":
            data[len(data) // 2] ^= 1
        os.pwrite(fd, data, offset)
        return Pulled(length, int(crc64nvme(data)))

    async def checksum(self, node: str, version: str) -> FileChecksum:
        self.checksums[node] += 1
        await trio.lowlevel.checkpoint()
        self._fail(node)
        if self.faults.get(node) == "wrong sums":
            return FileChecksum(SIZE, 1, tuple(range(len(self.summed.chunks))))
        return self.summed

    def _fail(self, node: str) -> None:
        if self.faults.get(node) == "lacks":
            raise PeerLacks(f"{node} has no {VERSION}")
        if self.faults.get(node) == "gone":
            raise PeerUnavailable("connection refused")


class Cluster(Alone):
    shares = True
    leaves = False

    def may_leave_ram(self, record: StepRecord) -> bool:
        return self.leaves


class Node:
    """This one: one complete step of the cluster, with one large file, a stub until it is hydrated."""

    def __init__(self, base: Path, *, checksum_known: bool = True) -> None:
        whole = base / "whole"
        whole.write_bytes(DATA)
        with whole.open("rb") as file:
            self.summed = checksum_fd(file.fileno())
        text = self.summed.text if checksum_known else None
        (base / "ram").mkdir()
        self.tier = RamTier(base / "ram", RamSettings(ballast="off"), 1 << 30, None)
        self.registry = StepRegistry(self.tier, Settings(), NamespaceLog(base / "log"))
        self.registry.settings.transfer.read_retry_for_s = 0.05
        self.registry.cluster = self.cluster = Cluster()
        self.view = View(FileRecord(SIZE, 5, 0o644, os.geteuid(), os.getegid(), VERSION, text))
        self.others = Others(self.summed)
        self.sources = Sources(self.view, self.others, node="me", retry_for_s=0.05)  # type: ignore[arg-type]
        self.versions: dict[int, str] = {}
        directory = self.tier.root / "run" / "step_1"
        directory.mkdir(parents=True)
        self.path = directory / "x.bin"
        self.mark = StubMark(*KEY, "x.bin", SIZE, self.summed.full if checksum_known else None, 5, VERSION)
        ino = make_stub(self.path, self.mark, mode=0o644, uid=os.geteuid(), gid=os.getegid())
        manifest = Manifest(*KEY, 1, state="complete", completed_at=1.0, generation=3, joined=9)
        manifest.files = {"x.bin": FileEntry(SIZE, 5, ino, self.mark.checksum_text, True)}
        self.record = StepRecord(manifest, directory)
        self.registry.records[KEY] = self.record
        self.restart()

    def restart(self) -> None:
        self.hydration = Hydration(self.registry, self.sources)
        self.hydration.on_whole_version = self._whole
        self.hydration.version_of = self.versions.get
        self.registry.object_tier = StubTier(self.hydration)
        self.hydration.scan()

    def _whole(self, ino: int, path: Path, version: str) -> None:
        assert read_mark(path) is not None, "until it has its version it is a stub"
        assert path.stat().st_ino == ino
        assert path.read_bytes() == DATA
        self.versions[ino] = version

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.hydration.run)
            with trio.fail_after(20):
                yield
            nursery.cancel_scope.cancel()

    @property
    def ino(self) -> int:
        return self.path.stat().st_ino

    async def read(self, offset: int, size: int) -> bytes:
        data = await self.hydration.read(self.ino, offset, size)
        assert data is not None
        return data


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PAUSE_S", 0.01)


async def test_bytes_come_from_all_holders_and_make_an_ordinary_file(tmp_path: Path) -> None:
    node = Node(tmp_path, checksum_known=False)
    node.others.slowly = True
    async with node.running():
        assert await node.read(20 * MIB, 1000) == DATA[20 * MIB :][:1000]
        first = [(offset, length) for _, offset, length in node.others.pulls[:4]]
        assert sorted(first) == [(at * MIB, 4 * MIB) for at in (16, 20, 24, 28)], "a program waits less for pieces"
        await node.hydration.hydrate(node.ino)
        assert not node.hydration.is_stub(node.ino) and read_mark(node.path) is None
        assert node.versions == {node.ino: VERSION}
        assert node.path.read_bytes() == DATA
        assert node.path.stat().st_mtime_ns == 5
    assert {each for each, _, _ in node.others.pulls} >= {"a", "b"}, "the far one only where the others are busy"
    assert sum(length for _, _, length in node.others.pulls) == SIZE, "each byte once"
    assert node.others.checksums.total() == 1
    assert node.record.manifest.files["x.bin"].checksum == node.summed.text, "nobody has to sum it up again"


@pytest.mark.parametrize(
    "faults",
    [{"a": "gone", "b": "lacks"}, {"a": "wrong"}, {"c": "wrong"}, {"a": "wrong sums", "b": "wrong sums"}],
    ids=lambda faults: ",".join(faults.values()),
)
async def test_one_good_holder_is_enough(node: Node, faults: dict[str, str]) -> None:
    node.others.faults = faults
    async with node.running():
        assert await node.read(0, 5000) == DATA[:5000]
        await node.hydration.hydrate(node.ino)
    assert node.path.read_bytes() == DATA
    failed = [each for each, _, _ in node.others.pulls if faults.get(each) in ("gone", "lacks")]
    assert len(failed) <= 8, "who fails is left alone: at most once for each of the reads that had begun"


async def test_what_nobody_gives_is_an_error_that_names_who_was_asked(node: Node) -> None:
    async with node.running():
        node.others.faults = dict.fromkeys(NODES, "wrong")
        with pytest.raises(ChecksumMismatch):
            await node.read(0, 5000)
        node.others.faults = {"a": "gone", "b": "gone", "c": "lacks"}
        with pytest.raises(PeerUnavailable) as refused:
            await node.read(0, 5000)
        assert refused.value.errno == 5
        assert all(f"{each}: connection refused" in refused.value.message for each in "ab")
        assert f"c: c has no {VERSION}" in refused.value.message
        del node.view.nodes["a"], node.view.nodes["b"], node.view.nodes["c"]
        with pytest.raises(PeerUnavailable, match="nobody holds"):
            await node.read(0, 5000)
        node.view.nodes["b"] = SimpleNamespace(record=NodeRecord("b", (), "t"))
        node.others.faults = {}
        assert await node.read(0, 5000) == DATA[:5000], "it is back"


async def test_with_the_catalogue_away_the_author_is_asked(node: Node) -> None:
    node.view.away = True
    async with node.running():
        assert await node.read(0, 5000) == DATA[:5000]
    assert {each for each, _, _ in node.others.pulls} == {"a"}


class Objects:
    """An object tier that holds the file."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.reads = 0
        self.file = ObjectFile(SIZE, node.summed.full, node.summed.chunks, 5, 0o644, 0, 0)

    async def manifest(self, namespace: str, step: str) -> ObjectManifest:
        await trio.lowlevel.checkpoint()
        return ObjectManifest(namespace, step, 1, 3, 1.0, None, {"x.bin": self.file})

    async def read_range(self, key: str, offset: int, length: int, fd: int, **how: Any) -> int:
        await trio.lowlevel.checkpoint()
        assert key == "run/step_1/x.bin"
        self.reads += 1
        found = DATA[offset : offset + length]
        os.pwrite(fd, found, offset)
        return int(crc64nvme(found))


async def test_the_object_tier_steps_in_where_it_holds_the_same_bytes(node: Node) -> None:
    objects = Objects(node)
    node.sources.objects = ObjectSource(objects, objects.manifest)  # type: ignore[arg-type]
    async with node.running():
        assert await node.read(0, 10) == DATA[:10]
        assert objects.reads == 0, "nodes are nearer"
        node.others.faults = {"a": "gone", "b": "lacks", "c": "wrong"}
        await node.hydration.hydrate(node.ino)
    assert objects.reads > 0
    assert node.path.read_bytes() == DATA


async def test_the_object_tier_with_another_save_is_not_read(node: Node) -> None:
    objects = Objects(node)
    objects.file = ObjectFile(SIZE, 1, node.summed.chunks, 6, 0o644, 0, 0)
    node.sources.objects = ObjectSource(objects, objects.manifest)  # type: ignore[arg-type]
    node.others.faults = dict.fromkeys(NODES, "gone")
    async with node.running():
        with pytest.raises((PeerError, ObjectError), match="another generation"):
            await node.read(0, 10)
    assert objects.reads == 0


async def test_a_file_that_the_cluster_holds_leaves_and_comes_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LEAST_BYTES", MIB)
    left: list[tuple[int, str]] = []
    async with node.running():
        await node.hydration.hydrate(node.ino)
        node.hydration.on_version_left = lambda ino, version: left.append((ino, version))
        whole = node.ino
        assert not node.hydration.evict(node.record) and not node.hydration.is_stub(node.ino)
        node.cluster.leaves = True
        assert node.hydration.ram_bytes(node.record) == SIZE
        assert node.hydration.evict(node.record)
        assert left == [(whole, VERSION)]
        assert node.hydration.is_stub(node.ino) and read_mark(node.path) == node.mark
        assert await node.read(SIZE - 100, 1000) == DATA[-100:]
    node.restart()
    assert node.hydration.is_stub(node.ino)


async def test_a_version_that_can_not_be_noted_leaves_a_stub_that_reads_right(node: Node) -> None:
    def refuse(ino: int, path: Path, version: str) -> None:
        raise OSError(28, "no room for an attribute")

    node.hydration.on_whole_version = refuse
    async with node.running():
        with pytest.raises(OSError, match="no room"):
            await node.hydration.hydrate(node.ino)
        assert node.hydration.is_stub(node.ino)
        assert await node.read(100, 100) == DATA[100:200]
        node.hydration.on_whole_version = node._whole
        await node.hydration.hydrate(node.ino)
    assert not node.hydration.is_stub(node.ino)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.fixed_dictionaries(dict.fromkeys(NODES, st.sampled_from(["", "", "gone", "lacks", "wrong"]))),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_whatever_holders_do_a_read_is_right_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, phases: list[dict[str, str]], checksum_known: bool
) -> None:
    async def main() -> None:
        node = Node(tmp_path_factory.mktemp("node"), checksum_known=checksum_known)
        async with node.running():
            for at, faults in enumerate(phases):
                node.others.faults = faults
                offset = at * 9 * MIB
                try:
                    assert await node.read(offset, 3000) == DATA[offset:][:3000]
                except (PeerError, ChecksumMismatch):
                    assert any(faults.values())

    trio.run(main)
