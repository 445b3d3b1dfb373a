"""The kernel channel where the kernel, the machine or a program lets it down at the worst moment."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from channel_rig import Rig, rig, wait_until, with_faults

if os.geteuid() != 0:
    pytest.skip("mounting needs root", allow_module_level=True)
if not os.path.exists("/dev/fuse"):
    pytest.skip("there is no /dev/fuse", allow_module_level=True)

MIB = 1 << 20


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """channel_faults.c, compiled."""
    made = tmp_path_factory.mktemp("faults") / "channel_faults.so"
    source = Path(__file__).with_name("channel_faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", source, "-o", made, "-ldl"], check=True)
    return made


@pytest.fixture(params=["customio", "socketpair"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path, faults: Path) -> Iterator[Rig]:
    with rig(tmp_path, request.param, "on", faults=faults) as made:
        status = made.status()
        if not status["passthrough"] or not status["resend"]:
            pytest.skip(status["reason"])
        yield made


def start(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


OPEN = "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY); print('open', flush=True); sys.stdin.read()"


def test_a_file_that_can_not_be_registered_is_served_by_the_daemon(mounted: Rig) -> None:
    path = mounted.path / "file"
    path.write_bytes(b"before")
    wait_until(lambda: mounted.status()["open"] == {})
    mounted.order("backing_open", "errno 40")  # ELOOP: file systems are stacked too deep
    with path.open("r+b", buffering=0) as refused:
        refused.write(b"served")
        assert mounted.status()["counters"]["bytes_written"] == 6
        with path.open("r+b", buffering=0) as beside:  # the kernel would take it now, but does not mix the two
            assert beside.read() == b"served"
            beside.write(b", too")
        assert os.pread(refused.fileno(), 100, 0) == b"served, too"
        assert mounted.status()["counters"]["bytes_written"] == 11
    wait_until(lambda: mounted.status()["open"] == {})
    with path.open("r+b", buffering=0) as granted:
        granted.write(b"passed")
    assert mounted.status()["counters"]["bytes_written"] == 11
    assert path.read_bytes() == b"passed, too"
    wait_until(lambda: mounted.status()["open"] == {})
    assert mounted.unmount() == 0


@pytest.mark.parametrize("kind", ["customio", "socketpair"])
def test_a_kernel_that_refuses_passthrough_is_found_out_at_the_start(tmp_path: Path, faults: Path, kind: str) -> None:
    with rig(tmp_path, kind, "on", faults=faults, orders={"backing_open": "errno 1"}) as made:
        status = made.status()
        assert not status["passthrough"] and "Operation not permitted" in status["reason"]
        content = os.urandom(3 * MIB)
        (made.path / "file").write_bytes(content)
        assert (made.path / "file").read_bytes() == content
        assert made.unmount() == 0


def test_a_backing_id_lost_with_the_daemon_keeps_no_memory(mounted: Rig) -> None:
    before = mounted.used()
    path = mounted.path / "file"
    (mounted.root / "file").write_bytes(b"x" * (16 * MIB))
    mounted.order("backing_open", "die before\ndie after\ndie after\n")
    assert path.read_bytes() == b"x" * (16 * MIB)
    assert mounted.status()["counters"]["takeovers"] == 3
    path.unlink()
    wait_until(lambda: mounted.used() - before < MIB)
    assert mounted.status()["open"] == {}


@pytest.mark.parametrize("moment", ["die before", "die after"])
def test_an_open_is_counted_once_whenever_the_daemon_dies_at_its_answer(mounted: Rig, moment: str) -> None:
    path = mounted.path / "file"
    path.write_bytes(b"x")
    number = path.stat().st_ino
    wait_until(lambda: mounted.status()["open"] == {})
    mounted.order("answer_open", moment)
    fd = os.open(path, os.O_WRONLY)
    wait_until(lambda: mounted.status()["counters"]["takeovers"] == 1)
    assert mounted.handles(number) == (1, 1)
    os.close(fd)
    wait_until(lambda: mounted.status()["open"] == {})


def test_an_open_taken_back_by_a_killed_program_is_not_counted_for_ever(mounted: Rig) -> None:
    path = mounted.path / "file"
    path.write_bytes(b"x")
    wait_until(lambda: mounted.status()["open"] == {})
    mounted.order("resend", "wait")
    mounted.order("answer_open", "die before")
    opener = start(OPEN, path)
    wait_until(lambda: not (mounted.faults / "resend").exists())  # queued again, not yet read
    opener.kill()
    opener.wait(10)
    mounted.order("go", "")
    wait_until(lambda: mounted.status()["counters"]["takeovers"] == 1)
    if tuple(mounted.status()["proto"]) < (7, 45):
        path.unlink()  # older kernels forget an inode in their time only
    wait_until(lambda: mounted.status()["open"] == {})
    if path.exists():
        assert path.read_bytes() == b"x"
        wait_until(lambda: mounted.status()["open"] == {})
    assert mounted.unmount() == 0


def test_other_opens_of_a_doubtful_file_stay_counted(mounted: Rig) -> None:
    path = mounted.path / "file"
    path.write_bytes(b"x")
    number = path.stat().st_ino
    kept = os.open(path, os.O_RDONLY)
    mounted.order("resend", "wait")
    mounted.order("answer_open", "die before")
    opener = start(OPEN, path)
    wait_until(lambda: not (mounted.faults / "resend").exists())
    opener.kill()
    opener.wait(10)
    mounted.order("go", "")
    wait_until(lambda: mounted.status()["counters"]["takeovers"] == 1)
    assert mounted.handles(number) in ((2, 1), (1, 0))
    assert os.fstat(kept).st_size == 1
    os.close(kept)
    path.unlink()
    wait_until(lambda: mounted.status()["open"] == {})


def test_requests_are_answered_while_a_large_file_without_a_name_is_freed(mounted: Rig) -> None:
    before = mounted.used()
    path = mounted.path / "file"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(fd, b"x" * (24 * MIB))
    path.unlink()
    mounted.order("close", "wait")
    os.close(fd)
    wait_until(lambda: not (mounted.faults / "close").exists())
    assert mounted.status()["open"] == {}
    (mounted.path / "other").write_bytes(b"x")
    assert mounted.used() - before > 20 * MIB
    mounted.order("go", "")
    wait_until(lambda: mounted.used() - before < MIB)


def test_files_are_let_go_while_an_open_waits(mounted: Rig) -> None:
    (mounted.path / "held").write_bytes(b"x")
    (mounted.tmpfs / "crash" / "open").write_text("hold")
    waiting = start(OPEN, mounted.path / "held")
    wait_until(lambda: mounted.status()["counters"].get("open"))
    for k in range(20):
        (mounted.path / f"file{k}").write_bytes(b"x")
        assert (mounted.path / f"file{k}").read_bytes() == b"x"
    held = str((mounted.path / "held").stat().st_ino)
    wait_until(lambda: set(mounted.status()["open"]) <= {held})
    (mounted.tmpfs / "crash" / "open").unlink()
    assert waiting.stdout is not None and waiting.stdout.readline() == b"open\n"
    assert mounted.handles(int(held)) == (1, 1)
    waiting.kill()
    waiting.wait(10)
    wait_until(lambda: mounted.status()["open"] == {})


@pytest.mark.parametrize("passthrough", ["on", "off"])
@pytest.mark.parametrize("kind", ["customio", "socketpair"])
def test_unmounting_by_force_ends_the_daemon_cleanly(tmp_path: Path, kind: str, passthrough: str) -> None:
    with rig(tmp_path, kind, passthrough) as made:
        (made.path / "held").write_bytes(b"x")
        (made.tmpfs / "crash" / "open").write_text("hold")
        waiting = start(OPEN, made.path / "held")
        wait_until(lambda: made.status()["counters"].get("open"))
        made.force()  # the program's open fails, and its answer finds nobody
        assert waiting.wait(10) == 1
        (made.tmpfs / "crash" / "open").unlink()
        wait_until(made.exits)
        assert made.exits() == [0]


def attempt(state: Path, code: str, faults: Path | None = None) -> list[str]:
    """What a process prints that can `make()` a channel over `state`, or says why it can't."""
    before = """
import os, sys
from pathlib import Path
from mount.channel import Channel
from tierfs.errors import MountError
state = Path(sys.argv[1])
def make(**more):
    arguments = dict(kind="auto", passthrough=True, resend=True, takeover=False) | more
    try:
        return Channel(os.open("/dev/fuse", os.O_RDWR), state, **arguments)
    except MountError as e:
        return str(e)
"""
    ended = subprocess.run(
        [sys.executable, "-c", before + code, state],
        stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=with_faults(faults, state.with_name("faults")),
    )  # fmt: skip
    return ended.stdout.splitlines()


def test_wrong_use_is_refused_clearly(tmp_path: Path) -> None:
    lines = attempt(tmp_path / "state", 'print(make(kind="magic")); make(); print(make())')
    assert "magic" in lines[0] and "has a channel already" in lines[1]


def test_a_state_file_that_is_not_whole_or_not_ours_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert "not the state" in attempt(state, "print(make(takeover=True))")[0]
    assert not state.exists()
    attempt(state, "make()")
    whole = state.read_bytes()
    number = struct.Struct("I")
    damaged = {
        "another version": b"tierfXXX" + whole[8:],
        "cut short": whole[:-4096],
        "longer": whole + b"x",
        "INIT longer than its room": whole[:16] + number.pack(1) + number.pack(5000) + whole[24:],
        "a backing id for no row": whole[:48] + number.pack(1 << 30) + whole[52:],
        "rows and journal of noise": whole[:2000] + b"\xee" * (len(whole) - 2000),
    }
    for what, content in damaged.items():
        state.write_bytes(content)
        assert "not the state" in attempt(state, "print(make(takeover=True))")[0], what
        assert state.read_bytes() == content, what


def test_a_full_disk_refuses_the_state_file(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", tmp_path], check=True)
    try:
        assert "No space left" in attempt(tmp_path / "state", "print(make())")[0]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_full_table_refuses_an_open(tmp_path: Path, faults: Path) -> None:
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "duplicate").write_text("same")
    code = """
channel = make()
print([channel.attach(n, 0, b"h") for n in range(2, 65538)] == [None] * 65536, len(channel.open_nodes()))
try:
    channel.attach(70000, 0, b"h")
except OSError as e:
    print(e)
"""
    lines = attempt(tmp_path / "state", code, faults)
    assert lines[0] == "True 65536"
    assert "Too many open files in system" in lines[1]
