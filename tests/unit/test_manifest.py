"""Manifests come back as they were saved, and a damaged one is told, never believed."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierfs.checksum import to_text
from tierfs.errors import ManifestDamaged
from tierfs.steps.manifest import (
    FileEntry,
    Manifest,
    Overwrite,
    delete_manifest,
    load_all,
    load_manifest,
    manifest_path,
    remove_unfinished,
    save_manifest,
)


def full_manifest(namespace: str = "team/run", number: int = 5) -> Manifest:
    return Manifest(
        namespace=namespace,
        step=f"step_{number}",
        number=number,
        state="complete",
        generation=2,
        created_at=1.5,
        changed_at=2.0,
        completed_at=3.25,
        pinned=True,
        bytes=12,
        files={
            "__0_0.distcp": FileEntry(12, -1, 77, to_text(5), True),
            # A name that is no UTF-8, as os.listdir gives it.
            "deep/er/\udcff": FileEntry(0, 1 << 62, (1 << 64) - 1),
        },
        marker=".metadata",
        overwrite=Overwrite(
            3, 4.0, {"123": 456}, "generations/team%2Frun/step_5.2", {"__0_0.distcp": FileEntry(1, 2, 3)}, True
        ),
        note='a "quoted" note – with a dash',
    )


def test_comes_back_equal(tmp_path: Path) -> None:
    saved = [
        Manifest("a", "step_1", 1),
        full_manifest(),
        full_manifest(number=10),
        full_manifest("team%2Frun", 6),
    ]
    for manifest in reversed(saved):
        save_manifest(tmp_path, manifest)
        assert load_manifest(manifest_path(tmp_path, manifest.namespace, manifest.step)) == manifest
    assert load_all(tmp_path) == (sorted(saved, key=lambda each: (each.namespace, each.number)), [])


def test_a_save_replaces_and_a_delete_removes(tmp_path: Path) -> None:
    manifest = full_manifest()
    save_manifest(tmp_path, manifest)
    manifest.note = "changed"
    manifest.overwrite = None
    save_manifest(tmp_path, manifest)
    assert load_all(tmp_path) == ([manifest], [])
    delete_manifest(tmp_path, manifest.namespace, manifest.step)
    delete_manifest(tmp_path, manifest.namespace, manifest.step)
    assert load_all(tmp_path) == ([], [])
    assert os.listdir(tmp_path) == []
    assert load_all(tmp_path / "missing") == ([], [])


def test_a_save_that_was_killed_leaves_the_old_manifest(tmp_path: Path) -> None:
    manifest = full_manifest()
    save_manifest(tmp_path, manifest)
    directory = manifest_path(tmp_path, manifest.namespace, manifest.step).parent
    (directory / ".step_5.99.tmp").write_bytes(b'{"version":1,"name')
    assert load_all(tmp_path) == ([manifest], [])
    assert remove_unfinished(tmp_path) == 1
    assert os.listdir(directory) == ["step_5.json"]


def test_a_save_that_fails_half_way_leaves_the_old_manifest(tmp_path: Path) -> None:
    manifest = full_manifest()
    save_manifest(tmp_path, manifest)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ: the write beyond the limit is cut short, the next one fails, as on a full tier.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as caught:
            save_manifest(tmp_path, replace(manifest, note="changed"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert load_all(tmp_path) == ([manifest], [])
    assert os.listdir(tmp_path / "team%2Frun") == ["step_5.json"]


def change(path: tuple[str, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for key in path[:-1]:
            target = target[key]
        if value is KeyError:
            del target[path[-1]]
        else:
            target[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 4, "version 4 is unknown"),
        (("version",), KeyError, "lacks 'version'"),
        (("version",), True, "'version' must be"),
        (("state",), "done", "state 'done' is unknown"),
        (("namespace",), "../etc", r"'\.\.' component"),
        (("step",), "a/b", "'/'"),
        (("number",), -1, "'number' must be"),
        (("bytes",), 1.5, "'bytes' must be"),
        (("bytes",), 1 << 70, "'bytes' must be"),
        (("pinned",), 1, "'pinned' must be true or false"),
        (("completed_at",), "yesterday", "'completed_at' must be seconds"),
        (("files",), [], "'files' must be an object"),
        (("files", "/abs"), {}, "lacks"),
        (("files", "__0_0.distcp", "checksum"), "crc64nvme:zz", "not"),
        (("files", "__0_0.distcp", "size_bytes"), None, "'size_bytes' must be"),
        (("files", "__0_0.distcp", "extra"), 1, "unknown members: extra"),
        (("marker",), "../.metadata", "component"),
        (("marker",), KeyError, "lacks 'marker'"),
        (("surprise",), 1, "unknown members: surprise"),
        (("overwrite",), 5, "overwrite is not an object"),
        (("overwrite", "participants"), {"x": 1}, "participant 'x'"),
        (("overwrite", "old_directory"), "/", "absolute"),
        (("overwrite", "old_files", "x"), 1, "not an object"),
    ],
)
def test_each_wrong_member_is_named(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    manifest = full_manifest()
    save_manifest(tmp_path, manifest)
    file = manifest_path(tmp_path, manifest.namespace, manifest.step)
    content = json.loads(file.read_bytes())
    change(path, value)(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ManifestDamaged, match=message) as caught:
        load_manifest(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version": NaN}', b'{"version": 1' + b"0" * 9999],
)
def test_what_is_no_manifest_is_told_and_the_others_still_load(tmp_path: Path, content: bytes) -> None:
    save_manifest(tmp_path, full_manifest())
    bad = tmp_path / "team%2Frun" / "step_9.json"
    bad.write_bytes(content)
    manifests, problems = load_all(tmp_path)
    assert manifests == [full_manifest()]
    assert [problem.path for problem in problems] == [bad]
    assert str(bad) in problems[0].message


def test_a_manifest_in_the_place_of_another_is_told(tmp_path: Path) -> None:
    save_manifest(tmp_path, full_manifest())
    path = manifest_path(tmp_path, "team/run", "step_5")
    path.rename(path.with_name("step_6.json"))
    manifests, problems = load_all(tmp_path)
    assert manifests == []
    assert "wrong place" in problems[0].message


def test_a_thousand_files_are_saved_in_milliseconds(tmp_path: Path) -> None:
    entry = FileEntry(1 << 30, time.time_ns(), 12345, to_text(5), True)
    manifest = Manifest("run", "step_1", 1, files={f"__{rank}_0.distcp": entry for rank in range(1000)})
    took = []
    for _ in range(10):
        began = time.perf_counter()
        save_manifest(tmp_path, manifest)
        took.append(time.perf_counter() - began)
    # 1.2 ms measured on an idle machine.
    assert min(took) < 0.005
