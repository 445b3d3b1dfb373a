"""What only a directory as an object store has to get right."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from objects.targets import Target
from objects.transfers import Freely, get, keys_of, noise, put, put_part
from tests.conftest import needs_root
from tierfs.errors import (
    ObjectDenied,
    ObjectError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreFull,
    ObjectStoreMissing,
    PathRefused,
    UploadMissing,
)
from tierfs.objects.opening import StoreSettings, open_store
from tierfs.objects.store import MIB

SCRATCH = ".tierfs/scratch"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    needs_root()
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def test_objects_are_plain_files_under_their_names(on_files: Target) -> None:
    assert on_files.root
    put(on_files.store, "ns/step_1/model.pt", b"weights")
    assert (on_files.root / "ns/step_1/model.pt").read_bytes() == b"weights"
    (on_files.root / "ns/step_1/other.pt").write_bytes(b"copied there by hand")
    assert get(on_files.store, "ns/step_1/other.pt") == b"copied there by hand"
    (on_files.root / "ns/step_1/empty directory").mkdir()
    assert keys_of(on_files.store) == ["ns/step_1/model.pt", "ns/step_1/other.pt"]
    assert on_files.store.list_page("ns/step_1/", delimiter="/").prefixes == ()


def test_the_order_of_a_listing_is_that_of_the_keys_and_unfinished_objects_are_hidden(on_files: Target) -> None:
    keys = ["a-b", "a.b", "a/1", "a/é", "a0", "b/c/d", "é"]
    for key in reversed(keys):
        put(on_files.store, key, b"x")
    put(on_files.store, ".tierfs/kept", b"x")
    on_files.store.start_upload("unfinished")
    assert keys_of(on_files.store) == [".tierfs/kept", *keys]
    assert keys_of(on_files.store, ".tierfs/") == [".tierfs/kept"]
    assert keys_of(on_files.store, f"{SCRATCH}/") == []
    with pytest.raises(ObjectError, match="unfinished objects"):
        put(on_files.store, f"{SCRATCH}/mine", b"x")


def test_nothing_outside_the_directory_is_reached(on_files: Target, tmp_path: Path) -> None:
    assert on_files.root
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    put(on_files.store, "ns/k", b"x")
    (on_files.root / "link").symlink_to(outside)
    (on_files.root / "ns/link").symlink_to(outside / "secret")
    os.mkfifo(on_files.root / "ns/pipe")
    assert keys_of(on_files.store) == ["ns/k"]
    for key in ("link/secret", "ns/link", "ns/pipe"):
        with pytest.raises(ObjectError, match=key):
            get(on_files.store, key)
    with pytest.raises(ObjectError, match="link"):
        put(on_files.store, "link/new", b"x")
    on_files.store.delete(["link/secret"])
    for key in ("../outside/secret", "/etc/passwd", "ns/../../outside/secret", "ns//k", "", "ns/\0"):
        with pytest.raises(PathRefused):
            get(on_files.store, key)
        with pytest.raises(PathRefused):
            put(on_files.store, key, b"x")
    assert sorted(each.name for each in outside.iterdir()) == ["secret"]


def test_a_name_is_an_object_or_a_prefix_but_not_both(on_files: Target) -> None:
    put(on_files.store, "a/b", b"x")
    with pytest.raises(ObjectError, match="an object and the beginning of other keys"):
        put(on_files.store, "a/b/c", b"x")
    for only_if_absent in (False, True):
        with pytest.raises(ObjectError, match="an object and the beginning of other keys") as caught:
            put(on_files.store, "a", b"x", only_if_absent=only_if_absent)
        assert not isinstance(caught.value, ObjectExists)
    with pytest.raises(ObjectMissing):
        get(on_files.store, "a")
    assert keys_of(on_files.store) == ["a/b"]


def test_a_full_disk_is_said_and_leaves_no_object(small_tmpfs: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{small_tmpfs}/objects"))
    put(store, "kept", noise(2 * MIB))
    with pytest.raises(ObjectStoreFull, match="No space left"):
        put(store, "large", noise(8 * MIB))
    upload_id = store.start_upload("parts")
    with pytest.raises(ObjectStoreFull, match="No space left"):
        put_part(store, "parts", upload_id, 1, noise(8 * MIB))
    assert store.list_parts("parts", upload_id) == []
    store.abort_upload("parts", upload_id)
    assert keys_of(store) == ["kept"]
    put(store, "large", noise(3 * MIB))


def test_a_share_that_went_away_is_missing_rather_than_empty(on_files: Target) -> None:
    assert on_files.root
    put(on_files.store, "k", b"x")
    on_files.root.rename(on_files.root.with_name("away"))
    with pytest.raises(ObjectStoreMissing, match="mount what"):
        on_files.store.list_page("")
    with pytest.raises(ObjectStoreMissing):
        put(on_files.store, "k", b"x")
    on_files.root.with_name("away").rename(on_files.root)
    assert keys_of(on_files.store) == ["k"]


def test_who_may_not_write_is_told_so(on_files: Target) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    assert on_files.root
    put(on_files.store, "k", b"x")
    on_files.root.chmod(0o500)
    try:
        with pytest.raises(ObjectDenied, match="must be able to write"):
            put(on_files.store, "ns/k", b"x")
        assert get(on_files.store, "k") == b"x"
    finally:
        on_files.root.chmod(0o700)


def test_half_a_line_of_the_journal_costs_only_its_part(on_files: Target) -> None:
    assert on_files.root
    upload_id = on_files.store.start_upload("k")
    data = noise(2 * MIB + 5)
    sent = [put_part(on_files.store, "k", upload_id, 1, data[:MIB])]
    with (on_files.root / SCRATCH / upload_id / "parts.jsonl").open("ab") as journal:
        journal.write(b'{"number": 2, "size": 10485')
    successor = open_store(on_files.settings)
    assert [part.number for part in successor.list_parts("k", upload_id)] == [1]
    sent += [put_part(successor, "k", upload_id, n, data[(n - 1) * MIB : n * MIB]) for n in (2, 3)]
    successor.finish_upload("k", upload_id, sent)
    assert get(successor, "k") == data


def test_an_upload_killed_while_it_finished_is_finished(on_files: Target) -> None:
    assert on_files.root
    upload = on_files.store.start_upload("ns/k")
    data = noise(MIB + 5)
    sent = [put_part(on_files.store, "ns/k", upload, n, data[(n - 1) * MIB : n * MIB]) for n in (1, 2)]
    # As it is between the file's getting its name and the upload's being forgotten.
    before = on_files.root / SCRATCH / upload
    shutil.copytree(before, on_files.root.with_name("copy"), ignore=shutil.ignore_patterns("data"))
    etag = on_files.store.finish_upload("ns/k", upload, sent)
    on_files.root.with_name("copy").rename(before)
    assert open_store(on_files.settings).finish_upload("ns/k", upload, sent) == etag
    assert get(on_files.store, "ns/k") == data
    assert list((on_files.root / SCRATCH).iterdir()) == []


def test_parts_of_different_sizes_are_refused_rather_than_mixed_up(on_files: Target) -> None:
    upload = on_files.store.start_upload("k")
    sent = [put_part(on_files.store, "k", upload, n, noise(size)) for n, size in ((1, 900), (2, 800), (3, 900))]
    with pytest.raises(ObjectError, match="of one size"):
        on_files.store.finish_upload("k", upload, sent)
    assert keys_of(on_files.store) == []


def test_an_upload_id_leads_nowhere_else(on_files: Target) -> None:
    upload = on_files.store.start_upload("k")
    put(on_files.store, "victim/upload.json", b"x")
    for wrong in ("", ".", "..", f"../../{SCRATCH}/{upload}", "../../victim", "upload-" + "0" * 32):
        with pytest.raises(UploadMissing):
            on_files.store.put_part("k", wrong, 1, memoryview(b""), 0, Freely())
        on_files.store.abort_upload("k", wrong)
    with pytest.raises(UploadMissing):
        on_files.store.list_parts("another key", upload)
    assert keys_of(on_files.store) == ["victim/upload.json"]


def test_what_a_killed_writer_left_goes_after_a_day(on_files: Target) -> None:
    assert on_files.root
    on_files.store.probe()
    scratch = on_files.root / SCRATCH
    for name in ("put-old", "put-new"):
        (scratch / name).write_bytes(b"half an object")
    os.utime(scratch / "put-old", (0, 0))
    on_files.store.probe()
    assert [each.name for each in scratch.iterdir()] == ["put-new"]
