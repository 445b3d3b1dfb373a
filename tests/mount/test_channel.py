"""The kernel channel on a real mount, with each driver, with and without passthrough."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from channel_rig import Rig, rig, wait_until

if os.geteuid() != 0:
    pytest.skip("mounting needs root", allow_module_level=True)
if not os.path.exists("/dev/fuse"):
    pytest.skip("there is no /dev/fuse", allow_module_level=True)

MODES = [(kind, passthrough) for kind in ("customio", "socketpair") for passthrough in ("on", "off")]
MIB = 1 << 20
#: How many random moments to kill the daemon at. `make soak-kills` asks for 100.
KILLS = int(os.environ.get("TIERFS_KILLS", "15"))


@pytest.fixture(params=MODES, ids="-".join)
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    kind, passthrough = request.param
    with rig(tmp_path, kind, passthrough) as made:
        status = made.status()
        assert status["kind"] == kind
        if passthrough == "on" and not status["passthrough"]:
            pytest.skip(status["reason"])
        if not status["resend"]:
            pytest.skip(status["reason"])
        yield made


def number_of(path: Path) -> int:
    return path.stat().st_ino


def program(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Another process on the mount: one that waits for a dead daemon must not be the test itself."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE)


def test_all_ways_of_reading_and_writing_agree(mounted: Rig) -> None:
    path = mounted.path / "file"
    content = bytearray(os.urandom(3 * MIB + 123))
    path.write_bytes(content)
    assert path.read_bytes() == content
    assert (mounted.root / "file").read_bytes() == content

    reader = os.open(path, os.O_RDONLY)
    assert os.pread(reader, 4096, 0) == content[:4096]  # now in the reader's page cache, if it has one
    with path.open("r+b", buffering=0) as f:
        f.write(b"head")
        content[:4] = b"head"
        assert os.pread(reader, 4096, 0) == content[:4096]
        with mmap.mmap(f.fileno(), 0) as mapped:
            assert mapped[:] == content
            mapped[100:104] = b"mmap"
            mapped.flush()
        content[100:104] = b"mmap"
        assert os.pread(reader, 4096, 0) == content[:4096]
        f.truncate(MIB)
        del content[MIB:]
        assert os.fstat(reader).st_size == MIB
    with mmap.mmap(reader, 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == content
    os.close(reader)

    first = os.open(path, os.O_WRONLY | os.O_APPEND)
    second = os.open(path, os.O_WRONLY | os.O_APPEND)
    for fd in (first, second, first):
        os.write(fd, b"added")
        content += b"added"
    os.close(first)
    os.close(second)
    assert path.read_bytes() == content

    page = mmap.mmap(-1, 4096)
    page.write(b"d" * 4096)
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    assert os.pwrite(direct, page, 8192) == 4096
    content[8192:12288] = b"d" * 4096
    assert os.preadv(direct, [page], 0) == 4096
    assert page[:] == content[:4096]
    os.close(direct)
    assert path.read_bytes() == content

    path.write_bytes(b"short")  # O_TRUNC inside OPEN
    assert path.read_bytes() == b"short"
    wait_until(lambda: mounted.handles(number_of(path)) is None)
    moved = mounted.status()["counters"]
    assert moved["bytes_written"] == 0 if mounted.passthrough == "on" else moved["bytes_written"] > 3 * MIB
    assert mounted.unmount() == 0


def test_files_that_are_not_passed_through_are_read_far_ahead(mounted: Rig) -> None:
    device = mounted.path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    if not os.access(setting, os.W_OK):
        pytest.skip("the read-ahead of a mount can't be set here")
    assert setting.read_text() == "2048\n"
    content = os.urandom(4 * MIB + 5)
    (mounted.path / "file").write_bytes(content)
    before = mounted.status()["counters"].get("read", 0)
    with (mounted.path / "file").open("rb", buffering=0) as f:
        assert b"".join(iter(lambda: f.read(4096), b"")) == content
    assert mounted.status()["counters"].get("read", 0) - before < 15


def test_counts_follow_opens_and_releases(mounted: Rig) -> None:
    path = mounted.path / "file"
    path.write_bytes(b"x")
    number = number_of(path)
    writer, both, reader = (os.open(path, flags) for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY))
    assert mounted.handles(number) == (3, 2)
    os.close(both)
    wait_until(lambda: mounted.handles(number) == (2, 1))
    mounted.kill()
    assert mounted.handles(number) == (2, 1)
    os.close(writer)
    wait_until(lambda: mounted.handles(number) == (1, 0))
    os.close(reader)
    wait_until(lambda: mounted.handles(number) is None)


def test_a_daemon_killed_inside_a_request_costs_nothing(mounted: Rig) -> None:
    code = """
import os, sys
path = sys.argv[1]
os.mkdir(path + ".d")
fd = os.open(path, os.O_CREAT | os.O_RDWR)
os.write(fd, b"content")
other = os.open(path, os.O_RDONLY)
os.fsync(fd)
os.close(fd)
assert os.read(other, 100) == b"content"
os.unlink(path)
assert os.pread(other, 100, 0) == b"content" and os.fstat(other).st_size == 7
os.close(other)
"""
    cases = [(name, "before") for name in ("create", "open", "fsync", "flush", "release")]
    cases += [(name, "after") for name in ("create", "open", "unlink", "mkdir")]
    for number, (operation, when) in enumerate(cases, 1):
        mounted.crash_in(operation, when)
        ended = program(code, mounted.path / f"{operation}-{when}")
        assert ended.wait(20) == 0, f"{when} {operation}"
        wait_until(lambda number=number: mounted.status()["counters"]["takeovers"] == number)
        wait_until(lambda: mounted.status()["open"] == {})
        assert not mounted.status()["takeover_active"], f"{when} {operation}"
    assert mounted.unmount() == 0


def test_unlinked_open_file_survives_a_takeover_and_its_memory_is_freed(mounted: Rig) -> None:
    path = mounted.path / "file"
    before = mounted.used()
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    content = os.urandom(64) * (16 * MIB // 64)
    os.write(fd, content)
    path.unlink()
    mounted.kill()
    wait_until(lambda: mounted.status()["counters"]["takeovers"] == 1)
    assert os.fstat(fd).st_size == len(content)
    assert os.pread(fd, len(content), 0) == content
    os.pwrite(fd, b"new", 0)
    assert os.pread(fd, 3, 0) == b"new"
    assert mounted.used() - before >= len(content)
    os.close(fd)
    wait_until(lambda: mounted.used() - before < MIB)


def test_a_big_write_goes_on_over_kills(mounted: Rig) -> None:
    code = """
import hashlib, os, sys
block = os.urandom(1 << 20)
content = block * 200
for k in range(3):
    fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view):]
    os.fsync(fd)
    os.close(fd)
    read = open(sys.argv[1], "rb").read()
    assert read == content, "the content differs"
"""
    writer = program(code, mounted.path / "big")
    chance = random.Random(7)
    kills = 0
    while writer.poll() is None and kills < 8:
        with_delay = threading.Event()
        with_delay.wait(0.2 + chance.random() * 0.3)
        mounted.kill()
        kills += 1
    assert writer.wait(60) == 0
    assert mounted.status()["open"] == {} or wait_until(lambda: mounted.status()["open"] == {})


def test_counts_are_exact_after_kills_at_random_moments(mounted: Rig) -> None:
    code = """
import os, random, sys
directory, seed = sys.argv[1], int(sys.argv[2])
chance = random.Random(seed)
kept = {}
while not os.path.exists(directory + "/stop"):
    name = f"{directory}/f{chance.randrange(4)}"
    text = f"{seed} " * chance.randrange(1, 20000)
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    own = os.open(f"{directory}/own{seed}", os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.write(own, text.encode())
    assert os.pread(own, len(text) + 10, 0).decode() == text
    os.close(own)
    kept.setdefault(name, []).append(fd)
    if chance.random() < 0.1:
        try: os.unlink(name)
        except FileNotFoundError: pass
    if len(kept) > 3 or chance.random() < 0.3:
        for fds in kept.values():
            for fd in fds: os.close(fd)
        kept = {}
fds = [fd for fds in kept.values() for fd in fds]
if not fds: fds = [os.open(f"{directory}/own{seed}", os.O_RDONLY)]
print(" ".join(f"{os.fstat(fd).st_ino}" for fd in fds), flush=True)
sys.stdin.read()
"""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", code, mounted.path, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in (1, 2)
    ]
    chance = random.Random(3)
    for _ in range(KILLS):
        threading.Event().wait(0.25 + chance.random() * 0.2)
        mounted.kill()
    (mounted.root / "stop").touch()
    expected: dict[str, int] = {}
    for each in programs:
        assert each.stdout is not None
        for number in each.stdout.readline().split():
            expected[number.decode()] = expected.get(number.decode(), 0) + 1
    for each in programs:
        assert each.poll() is None, each.stderr.read().decode() if each.stderr is not None else ""
    wait_until(lambda: {n: counts[0] for n, counts in mounted.status()["open"].items()} == expected)
    counters = mounted.status()["counters"]
    assert counters["takeovers"] > KILLS // 3 and counters["resent"] > 0
    for each in programs:
        each.communicate(timeout=20)
        assert each.returncode == 0
    wait_until(lambda: mounted.status()["open"] == {})
    assert mounted.unmount() == 0
