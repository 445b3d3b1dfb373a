"""Stubs on a real mount: reads bring their bytes and nothing else, wrong bytes are never shown, and nothing is lost."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs_fuse
from tests.mount.channel_rig import wait_until
from tests.mount.stub_objects import MIB, MTIME_NS, content
from tests.mount.stub_rig import StubRig, stub_rig
from tierfs.checksum import CHUNK_BYTES

STEP = "run/step_1"
GIB = 1 << 30


@contextmanager
def serving(base: Path, files: dict[str, int] | None = None, **config: Any) -> Iterator[StubRig]:
    needs_fuse()
    with stub_rig(base, {STEP: files or {"shard.distcp": 40 * MIB}}, **config) as rig:
        yield rig


def expected(inner: str, offset: int, length: int) -> bytes:
    return content(f"{STEP}/{inner}", offset, length)


def read_at(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), length, offset)


def chunks_of(rig: StubRig, inner: str) -> dict[int, int]:
    prefix = f"{STEP}/{inner} "
    return {int(key.removeprefix(prefix)): n for key, n in rig.fetched().items() if key.startswith(prefix)}


def test_a_step_that_nobody_looked_into_is_a_name_and_a_look_shows_its_files(tmp_path: Path) -> None:
    sizes = {"shard.distcp": 40 * MIB, "deep/er/weights.bin": 3 * MIB, "empty": 0, "config.json": 300}
    with serving(tmp_path, sizes) as rig:
        step = rig.path / STEP
        assert os.listdir(rig.path / "run") == ["step_1"]
        assert step.stat().st_size >= 0
        assert not rig.ask(f"record:{STEP}")["populated"]
        found = {str(path.relative_to(step)): path.stat() for path in step.rglob("*") if path.is_file()}
        assert {inner: info.st_size for inner, info in found.items()} == sizes
        assert {info.st_mtime_ns for info in found.values()} == {MTIME_NS}
        assert {info.st_mode & 0o777 for info in found.values()} == {0o644}
        assert step.stat().st_mtime_ns == MTIME_NS
        assert found["shard.distcp"].st_blocks == 0, "du shows what is in RAM"
        assert not (step / "no such file").exists()
        wait_until(lambda: rig.whole(f"{STEP}/config.json"))
        assert (step / "config.json").read_bytes() == expected("config.json", 0, 300)
        assert chunks_of(rig, "shard.distcp") == {}, "looking brings no large file"


def test_a_lookup_alone_finds_a_file_of_a_step_that_nobody_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        assert (rig.path / STEP / "shard.distcp").stat().st_size == 40 * MIB


@pytest.mark.parametrize("passthrough", ["on", "off"])
def test_a_read_brings_its_chunks_and_a_whole_file_is_read_by_the_kernel(tmp_path: Path, passthrough: str) -> None:
    with serving(tmp_path, passthrough=passthrough) as rig:
        path = rig.path / STEP / "shard.distcp"
        assert path.read_bytes() == expected("shard.distcp", 0, 40 * MIB)
        wait_until(lambda: rig.whole(f"{STEP}/shard.distcp"))
        assert chunks_of(rig, "shard.distcp") == {0: 1, 1: 1, 2: 1}
        assert path.stat().st_mtime_ns == MTIME_NS
        assert (rig.root / STEP / "shard.distcp").stat().st_mtime_ns == MTIME_NS
        assert os.listxattr(rig.root / STEP / "shard.distcp") == []
        wait_until(lambda: rig.handles(path.stat().st_ino) is None)
        before = rig.reads()
        if passthrough == "on":
            assert path.read_bytes() == expected("shard.distcp", 0, 40 * MIB)
            assert rig.reads() == before, "passthrough"


def test_a_part_of_a_huge_file_in_a_small_tier_costs_its_chunks_only(tmp_path: Path) -> None:
    with serving(tmp_path, {"shard.distcp": 2 * GIB}, size=64 * MIB) as rig:
        path = rig.path / STEP / "shard.distcp"
        at = GIB - MIB // 2
        assert read_at(path, at, MIB) == expected("shard.distcp", at, MIB)
        assert chunks_of(rig, "shard.distcp") == {63: 1, 64: 1}
        assert path.stat().st_size == 2 * GIB
        with path.open("rb", buffering=0) as file:
            for chunk in (0, 5, 127, 9, 64, 5, 30, 0, 1, 2, 3):
                offset = chunk * CHUNK_BYTES + 12345
                assert os.pread(file.fileno(), 4096, offset) == expected("shard.distcp", offset, 4096)
        assert (rig.root / STEP / "shard.distcp").stat().st_blocks * 512 <= 64 * MIB


def test_readers_of_the_same_file_share_what_is_fetched(tmp_path: Path) -> None:
    with serving(tmp_path, {"shard.distcp": 100 * MIB}) as rig:
        path = rig.path / STEP / "shard.distcp"
        rig.order(delay_s=0.05)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: hash(path.read_bytes()), range(8)))
        assert set(found) == {hash(expected("shard.distcp", 0, 100 * MIB))}
        assert chunks_of(rig, "shard.distcp") == dict.fromkeys(range(7), 1)


def test_a_read_that_waits_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    with serving(tmp_path, {"shard.distcp": 100 * MIB, "other.bin": 17 * MIB}) as rig:
        assert (rig.path / STEP / "other.bin").read_bytes() == expected("other.bin", 0, 17 * MIB)
        rig.order(hold=True)
        path = rig.path / STEP / "shard.distcp"
        waiting = [threading.Thread(target=read_at, args=(path, n % 7 * CHUNK_BYTES, 4096)) for n in range(150)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: len(chunks_of(rig, "shard.distcp")) == 7)
        (rig.path / "fresh").write_bytes(b"x" * MIB)
        assert (rig.path / "fresh").read_bytes() == b"x" * MIB
        assert (rig.path / STEP / "other.bin").read_bytes() == expected("other.bin", 0, 17 * MIB)
        wait_until(lambda: len(rig.ask("status")["handles"]) == 1)
        rig.order()
        for thread in waiting:
            thread.join(20)
            assert not thread.is_alive()


def test_a_chunk_that_comes_wrong_is_fetched_again_and_never_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        path = rig.path / STEP / "shard.distcp"
        name = f"{STEP}/shard.distcp"
        rig.order(corrupt={f"{name} 0": 2, f"{name} 1": 1000})
        assert read_at(path, 0, 4096) == expected("shard.distcp", 0, 4096)
        assert chunks_of(rig, "shard.distcp")[0] == 3
        with pytest.raises(OSError) as failed:
            read_at(path, CHUNK_BYTES, 4096)
        assert failed.value.errno == errno.EIO
        assert read_at(path, 2 * CHUNK_BYTES, 4096) == expected("shard.distcp", 2 * CHUNK_BYTES, 4096)
        problems = rig.ask("status")["problems"]
        assert any("chunk 1 of run/step_1/shard.distcp" in problem["message"] for problem in problems)
        rig.order()
        assert path.read_bytes() == expected("shard.distcp", 0, 40 * MIB)


def test_an_object_tier_that_fails_is_eio_and_works_again_later(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        path = rig.path / STEP / "shard.distcp"
        rig.order(fail=[f"{STEP}/shard.distcp"])
        with pytest.raises(OSError) as failed:
            read_at(path, 0, 4096)
        assert failed.value.errno == errno.EIO
        rig.order()
        assert read_at(path, 0, 4096) == expected("shard.distcp", 0, 4096)


@pytest.mark.parametrize("passthrough", ["on", "off"])
def test_a_reader_survives_the_daemons_death_in_the_middle(tmp_path: Path, passthrough: str) -> None:
    with serving(tmp_path, {"shard.distcp": 200 * MIB}, passthrough=passthrough) as rig:
        path = rig.path / STEP / "shard.distcp"
        rig.order(delay_s=0.1)
        with path.open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), MIB, 0) == expected("shard.distcp", 0, MIB)
            pid = rig.ask("status")["pid"]
            rig.kill()
            for offset in range(0, 200 * MIB, 7 * MIB):
                assert os.pread(file.fileno(), MIB, offset) == expected("shard.distcp", offset, MIB)
            assert rig.ask("status")["pid"] != pid
            os.unlink(path)
            rig.kill()
            for offset in range(0, 199 * MIB, 50 * MIB):
                assert os.pread(file.fileno(), MIB, offset) == expected("shard.distcp", offset, MIB)
        assert os.listdir(rig.path / STEP) == []


def test_half_a_chunk_that_a_killed_daemon_left_is_not_taken_for_data(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        path, behind = rig.path / STEP / "shard.distcp", rig.root / STEP / "shard.distcp"
        assert path.stat().st_size == 40 * MIB
        rig.kill()
        with behind.open("r+b") as file:  # as the dead one's worker would have
            file.write(expected("shard.distcp", 0, 3 * MIB))
            file.seek(CHUNK_BYTES)
            file.write(expected("shard.distcp", CHUNK_BYTES, CHUNK_BYTES))
        rig.kill()
        assert path.stat().st_mtime_ns == MTIME_NS
        assert path.read_bytes() == expected("shard.distcp", 0, 40 * MIB)
        wait_until(lambda: rig.whole(f"{STEP}/shard.distcp"))


def save(rig: StubRig, step: str, data: dict[str, bytes]) -> None:
    for inner, content_ in data.items():
        path = rig.path / step / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_)
    wait_until(lambda: not rig.ask("status")["handles"])
    rig.ask(f"commit:{step}")
    rig.ask(f"persist:{step}")


def test_evicting_frees_the_room_and_changes_nothing_that_a_program_sees(tmp_path: Path) -> None:
    data = {"a.bin": os.urandom(33 * MIB), "sub/b.bin": os.urandom(2 * MIB), "small.json": b"{}"}
    with serving(tmp_path) as rig:
        free = rig.ask("status")["free"]
        save(rig, "run/step_2", data)
        step = rig.path / "run/step_2"
        before = {inner: (step / inner).stat() for inner in data}
        directory = step.stat()
        freed = rig.ask("evict:run/step_2")
        assert freed["bytes"] == 35 * MIB
        wait_until(lambda: rig.ask("status")["free"] > free - MIB)
        for inner, info in before.items():
            after = (step / inner).stat()
            assert (after.st_size, after.st_mtime_ns, after.st_mode, after.st_uid) == (
                info.st_size, info.st_mtime_ns, info.st_mode, info.st_uid,
            )  # fmt: skip
        assert (step.stat().st_mtime_ns, step.stat().st_ino) == (directory.st_mtime_ns, directory.st_ino)
        assert rig.ask("record:run/step_2")["state"] == "complete"
        assert os.getxattr(step / "a.bin", "user.tierfs.tier") == b"object"
        assert os.getxattr(step / "small.json", "user.tierfs.tier") == b"ram"
        rig.kill()
        for inner, expected_bytes in data.items():
            assert (step / inner).read_bytes() == expected_bytes
        assert rig.ask("record:run/step_2")["state"] == "complete"
        rig.ask("evict:run/step_2")
        wait_until(lambda: rig.ask("status")["free"] > free - MIB)


def evict_all_but_open(rig: StubRig, step: str, *, gone: str) -> None:
    """What the daemon does after a file's last close may come a moment later, and a file that changed since stays."""

    def evicted() -> bool:
        rig.ask(f"persist:{step}")
        rig.ask(f"evict:{step}")
        return not rig.whole(f"{step}/{gone}")

    wait_until(evicted)


def test_a_file_that_is_open_or_mapped_stays_when_its_step_is_evicted(tmp_path: Path) -> None:
    data = {"a.bin": os.urandom(5 * MIB), "b.bin": os.urandom(5 * MIB)}
    with serving(tmp_path) as rig:
        save(rig, "run/step_2", data)
        path = rig.path / "run/step_2/a.bin"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            evict_all_but_open(rig, "run/step_2", gone="b.bin")
            assert mapped[:] == data["a.bin"]
            assert file.read() == data["a.bin"]
            assert rig.whole("run/step_2/a.bin")
        assert path.read_bytes() == data["a.bin"]


def test_a_save_that_needs_room_evicts_persisted_steps_and_they_can_still_be_read(tmp_path: Path) -> None:
    with serving(tmp_path, size=128 * MIB, ram_steps=0) as rig:
        old = os.urandom(80 * MIB)
        save(rig, "run/step_2", {"a.bin": old})
        new = os.urandom(90 * MIB)
        (rig.path / "run/step_3").mkdir()
        wait_until(lambda: not rig.whole("run/step_2/a.bin"))
        with (rig.path / "run/step_3/a.bin").open("wb", buffering=0) as file:
            for at in range(0, len(new), MIB):
                file.write(new[at : at + MIB])
        assert (rig.path / "run/step_3/a.bin").read_bytes() == new
        assert (rig.path / "run/step_2/a.bin").read_bytes() == old, "on demand, beside the new one"


def test_who_writes_to_a_stub_gets_a_whole_file(tmp_path: Path) -> None:
    sizes = {"a.bin": 20 * MIB, "b.bin": 20 * MIB, "c.bin": 20 * MIB, "d.bin": 20 * MIB, "note": 2000}
    with serving(tmp_path, sizes) as rig:
        step = rig.path / STEP
        with (step / "a.bin").open("r+b") as file:
            file.write(b"changed")
        assert (step / "a.bin").read_bytes() == b"changed" + expected("a.bin", 7, 20 * MIB - 7)
        os.truncate(step / "b.bin", 17 * MIB)
        assert (step / "b.bin").read_bytes() == expected("b.bin", 0, 17 * MIB)
        before = chunks_of(rig, "c.bin")
        (step / "c.bin").write_bytes(b"new")
        assert (step / "c.bin").read_bytes() == b"new"
        os.truncate(step / "d.bin", 0)
        assert (step / "d.bin").read_bytes() == b""
        assert chunks_of(rig, "c.bin") == before == chunks_of(rig, "d.bin") == {}, "what is truncated is not fetched"
        with (step / "note").open("ab") as file:
            file.write(b"more")
        assert (step / "note").read_bytes() == expected("note", 0, 2000) + b"more"


def test_an_overwrite_that_is_given_up_puts_the_stubs_back(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 20 * MIB, "b.bin": 20 * MIB}) as rig:
        step = rig.path / STEP
        assert len(list(step.iterdir())) == 2
        writer = subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={step / 'a.bin'}", "bs=1M", "count=2000", "oflag=append", "conv=notrunc"],
            stderr=subprocess.DEVNULL,
        )
        writer.terminate()
        writer.wait()
        script = "import sys, time; f = open(sys.argv[1], 'wb', 0); f.write(b'x'); print(1, flush=True); time.sleep(99)"
        writer = subprocess.Popen([sys.executable, "-c", script, step / "b.bin"], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"1\n"
        assert rig.ask(f"record:{STEP}")["state"] == "writing"
        writer.kill()
        writer.wait()
        wait_until(lambda: rig.ask(f"record:{STEP}")["state"] == "complete", 20)
        assert (step / "b.bin").read_bytes() == expected("b.bin", 0, 20 * MIB)
        assert (step / "a.bin").stat().st_size == 20 * MIB


def test_stubs_do_not_leave_their_step_by_a_rename_but_mv_copies_them(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 3 * MIB, "sub/b.bin": 3 * MIB}) as rig:
        step = rig.path / STEP
        for old, new in [(step, rig.path / "run/step_9"), (rig.path / "run", rig.path / "away")]:
            with pytest.raises(OSError) as refused:
                old.rename(new)
            assert refused.value.errno == errno.EXDEV
        for inner in ("a.bin", "sub"):
            with pytest.raises(OSError) as refused:
                (step / inner).rename(rig.path / inner)
            assert refused.value.errno == errno.EXDEV
        (step / "a.bin").rename(step / "c.bin")
        assert read_at(step / "c.bin", 0, 4096) == expected("a.bin", 0, 4096)
        (rig.path / "empty").mkdir()
        with pytest.raises(OSError) as refused:
            (rig.path / "empty").rename(step)
        assert refused.value.errno == errno.ENOTEMPTY
        shutil.move(step / "sub/b.bin", rig.path / "b.bin")
        assert (rig.path / "b.bin").read_bytes() == expected("sub/b.bin", 0, 3 * MIB)


def test_a_hard_link_from_another_step_gets_the_bytes(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 3 * MIB, "b.bin": 3 * MIB}) as rig:
        step = rig.path / STEP
        os.link(step / "a.bin", step / "same.bin")
        assert not rig.whole(f"{STEP}/same.bin")
        os.link(step / "b.bin", rig.path / "kept.bin")
        assert rig.whole(f"{STEP}/b.bin")
        shutil.rmtree(step)
        assert (rig.path / "kept.bin").read_bytes() == expected("b.bin", 0, 3 * MIB)


def test_removing_a_step_of_stubs_fetches_nothing_large(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 3 * MIB, "sub/b.bin": 3 * MIB}) as rig:
        with pytest.raises(OSError) as refused:
            (rig.path / STEP).rmdir()
        assert refused.value.errno == errno.ENOTEMPTY
        shutil.rmtree(rig.path / STEP)
        assert os.listdir(rig.path / "run") == []
        assert rig.fetched() == {}


def test_times_that_a_program_sets_on_a_stub_stay(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        path = rig.path / STEP / "shard.distcp"
        os.utime(path, ns=(1, 1_600_000_000_000_000_001))
        rig.kill()
        assert path.read_bytes() == expected("shard.distcp", 0, 40 * MIB)
        wait_until(lambda: rig.whole(f"{STEP}/shard.distcp"))
        assert path.stat().st_mtime_ns == 1_600_000_000_000_000_001


@pytest.mark.parametrize("passthrough", ["on", "off"])
def test_a_stub_can_be_mapped_shared_and_opened_beside_the_mapping(tmp_path: Path, passthrough: str) -> None:
    with serving(tmp_path, {"a.bin": 40 * MIB}, passthrough=passthrough) as rig:
        path = rig.path / STEP / "a.bin"
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[20 * MIB : 21 * MIB] == expected("a.bin", 20 * MIB, MIB)
            wait_until(lambda: rig.whole(f"{STEP}/a.bin"))
            assert path.read_bytes() == expected("a.bin", 0, 40 * MIB), "opened while the old handle is mapped"
            rig.kill()
            assert path.read_bytes() == expected("a.bin", 0, 40 * MIB)
            assert mapped[:] == expected("a.bin", 0, 40 * MIB)
        wait_until(lambda: rig.handles(path.stat().st_ino) is None)
        assert path.read_bytes() == expected("a.bin", 0, 40 * MIB)


LIBRARIES = """
import sys, numpy
safetensors, plain, pickled, other = sys.argv[1:5]
from safetensors import safe_open
import torch
with safe_open(safetensors, "pt") as file:
    assert file.get_tensor("a").sum().item() == 4 << 20, "safetensors"
assert int(numpy.load(plain, mmap_mode="r").sum()) == 4 << 20, "numpy"
assert int(numpy.memmap(other, dtype="uint8", mode="r").astype("int64").sum()) == 5 << 20, "memmap"
assert torch.load(pickled, mmap=True, weights_only=True)["a"].sum().item() == 4 << 20, "torch"
"""


def test_libraries_that_map_checkpoints_load_stubs(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    with serving(tmp_path) as rig:
        step = rig.path / "run/step_2"
        step.mkdir()
        tensor = torch.ones(4 << 20)
        save_file({"a": tensor}, step / "model.safetensors")
        numpy.save(step / "a.npy", numpy.ones(4 << 20, dtype="int64"))
        torch.save({"a": tensor}, step / "a.pt")
        (step / "raw.bin").write_bytes(b"\x01" * (5 << 20))
        wait_until(lambda: not rig.ask("status")["handles"])
        rig.ask("commit:run/step_2")
        rig.ask("persist:run/step_2")
        rig.ask("evict:run/step_2")
        names = ("model.safetensors", "a.npy", "a.pt", "raw.bin")
        assert not any(rig.whole(f"run/step_2/{name}") for name in names)
        subprocess.run([sys.executable, "-c", LIBRARIES, *(step / name for name in names)], check=True, timeout=100)


def test_a_hydration_that_can_not_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 300 * MIB}, size=64 * MIB) as rig:
        assert (rig.path / STEP / "a.bin").stat().st_size == 300 * MIB
        with pytest.raises(OSError) as refused:
            rig.ask(f"hydrate:{STEP}/a.bin")
        assert refused.value.errno == errno.ENOSPC
        assert chunks_of(rig, "a.bin") == {}
        with pytest.raises(OSError) as refused:
            (rig.path / STEP / "a.bin").open("r+b")
        assert refused.value.errno == errno.ENOSPC


def test_closing_a_file_ends_its_filling_but_not_a_prefetch(tmp_path: Path) -> None:
    with serving(tmp_path, {"a.bin": 400 * MIB}, size=GIB) as rig:
        rig.order(delay_s=0.2)
        done = threading.Thread(target=rig.ask, args=(f"hydrate:{STEP}/a.bin",))
        assert (rig.path / STEP / "a.bin").stat().st_size == 400 * MIB
        done.start()
        assert read_at(rig.path / STEP / "a.bin", 0, 4096) == expected("a.bin", 0, 4096)
        done.join(30)
        assert not done.is_alive()
        assert rig.whole(f"{STEP}/a.bin")


@pytest.mark.parametrize("point", ["evict:made", "evict:replaced", "populate:saved"])
def test_a_daemon_that_dies_between_two_steps_of_it_leaves_every_file_whole(tmp_path: Path, point: str) -> None:
    data = {"a.bin": os.urandom(5 * MIB), "b.bin": os.urandom(5 * MIB)}
    with serving(tmp_path, {"a.bin": 3 * MIB}, crash_at=point) as rig:
        if point.startswith("evict"):
            save(rig, "run/step_2", data)
            rig.ask("evict:run/step_2")
        else:
            assert os.listdir(rig.path / STEP) == ["a.bin"]
        assert rig.exits()[:1] == [-signal.SIGKILL]
        assert (rig.path / STEP / "a.bin").read_bytes() == expected("a.bin", 0, 3 * MIB)
        if point.startswith("evict"):
            assert rig.ask("record:run/step_2")["state"] == "complete"
            assert None not in rig.ask("record:run/step_2")["checksums"].values()
            for inner, expected_bytes in data.items():
                assert (rig.path / "run/step_2" / inner).read_bytes() == expected_bytes
