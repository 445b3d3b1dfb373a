"""The directory on the disk, with what somebody else, or half a write, left in it: other steps are there as before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from awscrt.checksums import crc64nvme

from tierfs.disk.disk_step import DiskStep, to_bytes
from tierfs.disk.store import IDENTITY, DiskStore
from tierfs.errors import DiskError
from tierfs.persist.layout import MANIFEST
from tierfs.persist.object_manifest import ObjectFile, ObjectManifest

DATA = b"some bytes"


def put(top: Path, step: str, *, name: str = "", namespace: str = "run", inner: str = "sub/a") -> Path:
    """A step on the disk, whose manifest says that it is another one where it is told to."""
    directory = top / "steps" / "run" / step
    (directory / ".tierfs").mkdir(parents=True)
    (directory / "sub").mkdir()
    (directory / "sub" / "a").write_bytes(DATA)
    checksum = int(crc64nvme(DATA))
    file = ObjectFile(len(DATA), checksum, (checksum,), 1, 0o644, 0, 0)
    manifest = ObjectManifest(namespace, name or step, 1, 1, 1.0, None, {inner: file})
    (directory / MANIFEST).write_bytes(to_bytes(DiskStep(directory, manifest, "n1", 1.0)))
    return directory


def _symlink(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.symlink_to(target)

    return make


def _pipe_as_manifest(step: Path) -> None:
    (step / ".tierfs").mkdir(parents=True)
    os.mkfifo(step / MANIFEST)


@pytest.mark.parametrize(
    ("where", "make"),
    [
        ("steps/stray", Path.touch),
        ("steps/elsewhere", _symlink("/etc")),
        ("steps/nowhere", _symlink("/nonexistent")),
        ("steps/run/stray", Path.touch),
        ("steps/run/step_2", _symlink("/etc")),
        ("steps/run/step_2", _symlink("step_1")),
        ("steps/run/step_2", _pipe_as_manifest),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", name="..")),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", name="a/b")),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", name="x" * 300)),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", namespace="..")),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", inner="../step_1/sub/a")),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", inner="\ud800")),
        ("steps/run/step_2", lambda path: put(path.parents[2], "step_2", inner="a\0b")),
    ],
)
def test_what_is_planted_beside_a_step_is_named_and_hides_nothing(
    tmp_path: Path, where: str, make: Callable[[Path], object]
) -> None:
    put(tmp_path, "step_1")
    make(tmp_path / where)
    found = DiskStore(tmp_path).open()
    assert [stored.key for stored in found.steps] == [("run", "step_1")]
    assert set(found.damaged) == {tmp_path / where}


def test_a_step_with_a_link_in_the_way_to_a_file_is_none(tmp_path: Path) -> None:
    step = put(tmp_path / "tier", "step_1")
    shutil.move(step / "sub", tmp_path / "sub")
    (step / "sub").symlink_to(tmp_path / "sub")
    assert not DiskStore(tmp_path / "tier").open().steps


@pytest.mark.parametrize("name", ["incoming", "trash", "steps"])
def test_nothing_is_removed_through_a_link_in_the_place_of_a_directory_of_the_tier(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(DiskError, match="no directory"):
        DiskStore(tmp_path / "tier").open()
    assert (tmp_path / "precious" / "file").exists()


def test_an_id_that_power_failure_cut_off_is_made_anew_and_the_steps_are_there(tmp_path: Path) -> None:
    put(tmp_path, "step_1")
    (tmp_path / IDENTITY).write_bytes(b"")
    store = DiskStore(tmp_path)
    found = store.open()
    assert [stored.key for stored in found.steps] == [("run", "step_1")]
    store.check(found.disk_id)


def test_a_stray_file_with_the_name_of_a_namespace_stops_no_step_of_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.open()
    (tmp_path / "steps" / "run").touch()
    incoming = store.begin()
    file = ObjectFile(0, 0, (), 1, 0o644, 0, 0)
    (incoming / "a").touch()
    store.commit(DiskStep(incoming, ObjectManifest("run", "step_1", 1, 1, 1.0, None, {"a": file}), "n1", 1.0))
    store.close()
    assert [stored.key for stored in DiskStore(tmp_path).open().steps] == [("run", "step_1")]


def test_one_thing_that_can_not_be_removed_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    store.open()
    for name in ("a", "stuck", "z"):
        (tmp_path / "trash" / name).mkdir()
    rmdir = os.rmdir

    def refuse(path: str | Path, **how: int) -> None:
        if Path(path).name == "stuck":
            raise PermissionError
        rmdir(path, **how)

    monkeypatch.setattr(os, "rmdir", refuse)
    with pytest.raises(PermissionError):
        store.empty_trash()
    assert os.listdir(tmp_path / "trash") == ["stuck"]
