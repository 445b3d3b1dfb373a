"""Parts of the disk tier by themselves: who leaves it, its manifest, its count, bytes past the page cache."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from tests.mount.stub_objects import object_file
from tierfs.disk.direct_io import PIECE_BYTES, DirectWriter, copy_range, sum_range
from tierfs.disk.disk_step import DiskStep, from_bytes, to_bytes
from tierfs.disk.policy import Count, counted
from tierfs.disk.retention import StoredFacts, choose_for_room, choose_surplus
from tierfs.errors import DiskError, SettingsError
from tierfs.persist.object_manifest import ObjectManifest
from tierfs.settings_sources import load_settings

facts = st.builds(
    StoredFacts,
    namespace=st.sampled_from(["a", "b"]),
    step=st.uuids().map(str),
    number=st.integers(0, 50),
    completed_at=st.integers(0, 1000).map(float),
    bytes=st.integers(1, 100),
    may_go=st.booleans(),
)


@given(
    st.lists(facts, max_size=12, unique_by=lambda each: each.completed_at), st.integers(1, 400), st.integers(0, 1000)
)
def test_the_newest_of_a_namespace_and_what_is_newer_than_the_one_that_needs_room_never_go(
    steps: list[StoredFacts], wanted: int, completed_at: int
) -> None:
    chosen = choose_for_room(steps, wanted, completed_at=completed_at)
    newest = {
        max((s for s in steps if s.namespace == ns), key=lambda s: s.completed_at)
        for ns in {s.namespace for s in steps}
    }
    could = [each for each in steps if each.may_go and each not in newest and each.completed_at < completed_at]
    if chosen is None:
        assert sum(each.bytes for each in could) < wanted
        return
    assert set(chosen) <= set(could)
    freed = [each.bytes for each in chosen]
    assert sum(freed) >= wanted > sum(freed[:-1]), "no more go than are needed"


@given(st.lists(facts, max_size=12, unique_by=lambda each: each.completed_at), st.integers(0, 4))
def test_only_those_beyond_the_newest_so_many_are_surplus(steps: list[StoredFacts], most: int) -> None:
    for each in choose_surplus(steps, lambda namespace: most):
        newer = [
            other for other in steps if other.namespace == each.namespace and other.completed_at > each.completed_at
        ]
        assert 0 < most <= len(newer)
        assert each.may_go


def stored(directory: Path) -> DiskStep:
    files = {
        "a.distcp": object_file("a", 20 << 20),
        "sub/b.bin": object_file("b", 100),
        ".metadata": object_file("m", 9),
    }
    step = ObjectManifest("run/x", "step_7", 7, 2, 1.5e9, ".metadata", files)
    return DiskStep(directory, step, "n1", 1.6e9, "policy", ".metadata", {"a.distcp": "n1/" + "0" * 32})


def test_a_manifest_is_read_as_it_was_written_and_no_flipped_byte_passes(tmp_path: Path) -> None:
    data = to_bytes(stored(tmp_path))
    assert from_bytes(data, tmp_path) == stored(tmp_path)
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 0x04
        try:
            found = from_bytes(bytes(flipped), tmp_path)
        except DiskError as error:
            assert "damaged" in error.message
        else:  # in the head, where it harms nothing: when it was stored, and by whom
            assert (
                replace(found, node="n1", stored_at=1.6e9, owed="policy", versions=found.versions).step
                == stored(tmp_path).step
            )
    for cut in (0, 10, len(data) - 1):
        with pytest.raises(DiskError):
            from_bytes(data[:cut], tmp_path)


def test_each_so_many_th_step_is_chosen_once() -> None:
    count, chosen = Count(), []
    for number in range(1, 8):
        for _ in range(2):  # after a crash a step is told of twice
            count = counted(count, 3, (f"step_{number}", 1))
        chosen += [f"step_{number}"] if (f"step_{number}", 1) in count.chosen else []
    assert chosen == ["step_3", "step_6"]


@pytest.mark.parametrize("size", [0, 1, 4096, PIECE_BYTES, 2 * PIECE_BYTES + 4097])
def test_bytes_go_to_the_disk_and_back_past_the_page_cache(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    writer = DirectWriter(tmp_path / "disk")
    try:
        assert writer.copy(source, 0, size) == crc64nvme(data)
        writer.finish(size)
        assert (tmp_path / "disk").read_bytes() == data
        start = min(size, 5000)
        os.ftruncate(target, size)
        assert copy_range(tmp_path / "disk", start, size - start, target) == crc64nvme(data[start:])
        assert os.pread(target, size, 0)[start:] == data[start:]
        assert sum_range(tmp_path / "disk", 0, size) == crc64nvme(data)
        with pytest.raises(EOFError):
            sum_range(tmp_path / "disk", 0, size + 1)
    finally:
        writer.close()
        os.close(source)
        os.close(target)


def test_where_the_disk_is_can_not_differ_by_namespace(tmp_path: Path) -> None:
    config = tmp_path / "tierfs.toml"
    config.write_text('[disk]\npath = "/nvme/tierfs"\n[namespaces."scratch/*".disk]\npolicy = "none"\n')
    settings = load_settings(config, {}, [], {}, memory_bytes=lambda: 1 << 34, config_directory=Path("/nonexistent"))
    assert settings.for_namespace("scratch/a").disk.policy == "none"
    assert settings.for_namespace("run").disk.policy == "all"
    config.write_text('[namespaces."scratch/*".disk]\npath = "/other"\n')
    with pytest.raises(SettingsError, match="of the whole instance"):
        load_settings(config, {}, [], {}, memory_bytes=lambda: 1 << 34, config_directory=Path("/nonexistent"))
