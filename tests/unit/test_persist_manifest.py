"""What the object tier says of a step, read as strictly as if a stranger had written it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.checksum import CHUNK_BYTES, combine
from tierfs.errors import ObjectCorrupt, PathRefused
from tierfs.persist import layout
from tierfs.persist.object_manifest import (
    NodeFile,
    ObjectDirectory,
    ObjectFile,
    ObjectManifest,
    SentObject,
    merge,
    read_manifest,
    read_node_file,
)
from tierfs.settings import StepSettings
from tierfs.steps.names import StepNames

NAMES = StepNames(StepSettings().patterns)


def a_file(size: int = 5, seed: int = 7) -> ObjectFile:
    chunks = tuple((seed * 1000003 + at) % (1 << 64) for at in range(-(-size // CHUNK_BYTES)))
    whole = done = 0
    for chunk in chunks:
        length = min(CHUNK_BYTES, size - done)
        whole, done = combine(whole, chunk, length), done + length
    return ObjectFile(size, whole, chunks, 1_700_000_000_000_000_001, 0o644, 1000, 100)


def a_node_file(node: str = "n1", *, generation: int = 1, completed_at: float = 5.5, **files: ObjectFile) -> NodeFile:
    objects = {name: SentObject(file, f"etag of {name}") for name, file in files.items()}
    marker = "meta" if "meta" in files else None
    return NodeFile(
        node, "run", "step_7", 7, generation, completed_at, marker, ObjectDirectory(1, 0o750, 1, 2), objects
    )


@given(st.dictionaries(st.sampled_from(["a", "b", "c/d", "ü"]), st.integers(0, 3 * CHUNK_BYTES + 1)))
def test_what_is_written_is_read_again(sizes: dict[str, int]) -> None:
    node_file = a_node_file(**{name: a_file(size, len(name)) for name, size in sizes.items()})
    assert read_node_file(node_file.to_bytes(), "run", "step_7") == node_file
    manifest = merge([node_file])
    assert read_manifest(manifest.to_bytes(), "run", "step_7") == manifest


def test_two_nodes_with_the_same_files_make_the_same_bytes() -> None:
    one, other = a_node_file("n1", meta=a_file(), x=a_file(9)), a_node_file("n2", x=a_file(9), meta=a_file())
    assert merge([one]).to_bytes() == merge([other]).to_bytes() == merge([other, one]).to_bytes()


def test_of_a_name_that_two_nodes_sent_the_newer_one_counts() -> None:
    old = a_node_file("a", generation=1, x=a_file(1), only_old=a_file(3))
    new = a_node_file("b", generation=2, meta=a_file(), x=a_file(2))
    manifest = merge([old, new])
    assert {name: file.size_bytes for name, file in manifest.files.items()} == {"meta": 5, "x": 2, "only_old": 3}
    assert (manifest.generation, manifest.marker) == (2, "meta")


def _file_is(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["files"]["x"].update(members)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda value: value.update(version=2), "version 2"),
        (lambda value: value.update(step="step_8"), "another step"),
        (lambda value: value.update(more=1), "unknown members"),
        (lambda value: value.update(marker="gone"), "none of its files"),
        (lambda value: value["files"].update({"../x": value["files"]["x"]}), "'..'"),
        (lambda value: value["files"].update({".tierfs/x": value["files"]["x"]}), "'.tierfs/x'"),
        (lambda value: value["files"].update({"x/y": value["files"]["x"]}), "a file and a directory"),
        (lambda value: value.update(chunk_bytes=1), "chunk_bytes"),
        (_file_is(size_bytes=-1), "size_bytes"),
        (_file_is(size_bytes=CHUNK_BYTES + 1), "chunks"),
        (_file_is(checksum="crc64nvme:AAAAAAAAAAA="), "not that of the whole"),
        (_file_is(chunks=["AAAAAAAAAAA=", "AAAAAAAAAAA="]), "2 chunks"),
        (_file_is(mode=0o4755), "out of range"),
        (_file_is(uid=1 << 32), "out of range"),
        (_file_is(etag="x"), "unknown members"),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Callable[[dict[str, Any]], None], words: str) -> None:
    value = json.loads(merge([a_node_file(x=a_file(), meta=a_file())]).to_bytes())
    damage(value)
    with pytest.raises(ObjectCorrupt, match="run/step_7") as refused:
        read_manifest(json.dumps(value).encode(), "run", "step_7")
    assert words in refused.value.message


@given(st.binary(max_size=64))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ObjectCorrupt):
        read_manifest(data, "run", "step_7")


def test_a_file_has_the_name_that_the_mount_shows() -> None:
    assert layout.file_key("team/run", "step_7", "sub/__0_0.distcp") == "team/run/step_7/sub/__0_0.distcp"
    assert layout.manifest_key("run", "step_7") == "run/step_7/.tierfs/manifest.json"
    node = layout.inner_of(NAMES, "run", "step_7", layout.node_key("run", "step_7", "host-a"))
    assert node is not None and layout.node_of(node) == "host-a"


@pytest.mark.parametrize(
    "inner", ["../x", "/x", "a//b", ".tierfs/manifest.json", "a\0b", "x" * 300, "\udcff", "d/" * 480]
)
def test_names_that_no_object_can_have_are_refused(inner: str) -> None:
    with pytest.raises(PathRefused):
        layout.file_key("run", "step_7", inner.rstrip("/"))


def test_the_objects_of_a_step_inside_another_ones_prefix_are_not_its_own() -> None:
    assert layout.inner_of(NAMES, "run", "5", "run/5/x") == "x"
    assert layout.inner_of(NAMES, "run", "5", "run/5/step_3/x") is None
    assert layout.inner_of(NAMES, "run/5", "step_3", "run/5/step_3/x") == "x"


def test_manifests_of_different_bytes_differ() -> None:
    one = merge([a_node_file(x=a_file(5, 1))])
    assert one.has_same_bytes(merge([a_node_file(generation=2, x=a_file(5, 1))]))
    for other in (a_node_file(x=a_file(5, 2)), a_node_file(x=a_file(5, 1), y=a_file()), a_node_file()):
        assert not one.has_same_bytes(merge([other]))
    assert isinstance(one, ObjectManifest)
