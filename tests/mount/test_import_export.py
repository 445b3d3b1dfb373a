"""`tierfs import` and `tierfs export` through a real mount: a step made of plain files, and plain files of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import checkpoints
from tests.conftest import wait_until
from tests.mount.keeper_rig import Rig, rig, tierfs


@pytest.fixture
def real() -> Iterator[Rig]:
    with rig("mount.daemon") as made:
        made.mount()
        yield made


def write_plain(directory: Path, names: list[str], size_bytes: int = 3 << 20) -> dict[str, bytes]:
    """A checkpoint in the form of Hugging Face: shards and an index that names them."""
    directory.mkdir(parents=True)
    contents = {name: os.urandom(size_bytes) for name in names}
    index = {"metadata": {}, "weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    contents["model.safetensors.index.json"] = json.dumps(index).encode()
    for name, data in contents.items():
        (directory / name).write_bytes(data)
        os.utime(directory / name, (1_700_000_000, 1_700_000_000))
    return contents


def test_a_plain_checkpoint_becomes_a_step_and_a_plain_directory_again(real: Rig) -> None:
    plain, step, out = real.directory / "plain", real.place / "run1" / "step_7", real.directory / "out"
    contents = write_plain(plain, ["a.safetensors", "b.safetensors"])
    done = tierfs("import", plain, step, "--json")
    assert done.returncode == 0, done.stderr
    size = sum(map(len, contents.values()))
    assert json.loads(done.stdout) == {"path": "run1/step_7", "files": 3, "bytes": size, "state": "complete"}
    assert os.readlink(real.place / "run1" / "latest") == "step_7"
    assert {path.name: path.read_bytes() for path in step.iterdir()} == contents
    assert (step / "a.safetensors").stat().st_mtime == 1_700_000_000

    assert tierfs("verify", step).returncode in (0, 1)  # checksums are made in the background
    done = tierfs("export", real.place / "run1" / "latest", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["files"] == 3 and json.loads(done.stdout)["bad"] == []
    assert {path.name: path.read_bytes() for path in out.iterdir()} == contents
    assert (out / "b.safetensors").stat().st_mtime == 1_700_000_000
    again = tierfs("export", step, out)
    assert again.returncode == 2 and "is not empty" in again.stderr
    assert tierfs("export", step, out, "--force").returncode == 0


def test_an_existing_step_is_replaced_only_by_force_and_only_by_a_whole_one(real: Rig) -> None:
    first, second, broken = (real.directory / name for name in ("first", "second", "broken"))
    step = real.place / "run1" / "step_7"
    old = write_plain(first, ["a.safetensors", "b.safetensors"])
    new = write_plain(second, ["a.safetensors", "c.safetensors"])
    write_plain(broken, ["a.safetensors", "d.safetensors"])
    (broken / "d.safetensors").unlink()
    assert tierfs("import", first, step).returncode == 0
    done = tierfs("import", second, step)
    assert done.returncode == 1 and "is a complete step already (3 files)" in done.stderr
    assert {path.name: path.read_bytes() for path in step.iterdir()} == old
    done = tierfs("import", second, step, "--force")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_bytes() for path in step.iterdir()} == new
    stat = json.loads(tierfs("stat", step, "--json").stdout)
    assert (stat["state"], stat["generation"]) == ("complete", 2)


def test_a_source_that_is_not_whole_is_never_complete(real: Rig) -> None:
    plain, step = real.directory / "plain", real.place / "run1" / "step_7"
    checkpoints.save(plain, 7, 1 << 20)
    assert tierfs("import", plain, step).returncode == 0
    checkpoints.check(step, 7, 1 << 20)
    shard = next(plain.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    done = tierfs("import", plain, real.place / "run1" / "step_8")
    assert done.returncode == 1 and "the source is not whole: its .metadata names files" in done.stderr, done.stderr
    shard.unlink()
    assert tierfs("import", plain, step, "--force").returncode == 1
    assert json.loads(tierfs("stat", real.place / "run1" / "step_8", "--json").stdout)["state"] == "writing"
    assert not (real.place / "run1" / "step_8" / ".metadata").exists()
    (plain / ".metadata").write_bytes(b"not a pickle")
    done = tierfs("import", plain, real.place / "run1" / "step_9")
    assert done.returncode == 1 and "can't be read" in done.stderr, done.stderr


def test_a_source_without_a_marker_is_committed(real: Rig) -> None:
    plain, step = real.directory / "plain", real.place / "run1" / "step_8"
    (plain / "sub").mkdir(parents=True)
    (plain / "sub" / "weights.bin").write_bytes(b"w" * 100)
    done = tierfs("import", plain, step)
    assert done.stdout == "run1/step_8: imported (1 file, 100 B)\n", done.stderr
    assert (step / "sub" / "weights.bin").read_bytes() == b"w" * 100
    assert "is no step's place" in tierfs("import", plain, real.place / "run1" / "models").stderr
    assert "is not a directory" in tierfs("import", plain / "none", real.place / "run1" / "step_9").stderr
    (plain / "sub" / "weights.bin").unlink()
    assert "nothing to import" in tierfs("import", plain, real.place / "run1" / "step_9").stderr


def test_export_names_a_file_that_is_not_what_was_sealed(real: Rig) -> None:
    plain, step, out = real.directory / "plain", real.place / "run1" / "step_7", real.directory / "out"
    write_plain(plain, ["a.safetensors", "b.safetensors"])
    assert tierfs("import", plain, step).returncode == 0
    assert tierfs("export", step, real.directory / "good").returncode == 0

    def sealed() -> bool:
        return bool(json.loads(tierfs("stat", step / "a.safetensors", "--json").stdout)["checksum"])

    wait_until(sealed, "the checksum is there")
    with open(real.instance.ram / "root" / "run1" / "step_7" / "a.safetensors", "r+b") as file:
        file.write(b"\0damage\0")
    done = tierfs("export", step, out)
    assert done.returncode == 1
    assert "a.safetensors: the copy has the checksum" in done.stderr and "don't use this copy" in done.stderr
    assert not (out / "model.safetensors.index.json").exists(), "a copy with a bad file has no marker"
