"""What docs/semantics.md promises: its examples, and the promises an example can't show, on real mounts."""

# It makes system calls by their own names.

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import repository, wait_until
from tests.mount.conftest import Mounted, harness_instance
from tests.mount.keeper_rig import rig

_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.S | re.M)
_BEFORE, _STUBS, _AFTER = re.split(
    r"^## (?:Stubs|When the daemon is replaced)$", (repository() / "docs" / "semantics.md").read_text(), flags=re.M
)
ALICE, BOB = 4001, 4002


def examples_in(text: str) -> list[Any]:
    found = _BLOCK.findall(text)
    assert found
    return [pytest.param(language, code, id=f"{language}-{at}") for at, (language, code) in enumerate(found)]


def run_example(language: str, code: str, directory: Path) -> None:
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("language", "code"), examples_in(_BEFORE + _AFTER))
def test_example_of_the_semantics_page(mounted: Mounted, language: str, code: str) -> None:
    run_example(language, code, mounted.dir)


@pytest.mark.parametrize(("language", "code"), examples_in(_STUBS))
def test_example_of_stubs(language: str, code: str) -> None:
    with rig("mount.daemon") as tiered:
        tiered.mount(f"object=file://{tiered.directory}/store", "persist.settle_s=0", "size=200MiB")
        # The command finds instances in the usual places; this one's is below its own directory.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIERFS_RUNTIME_DIR", str(tiered.parent))
            run_example(language, code, tiered.place)


def as_user(uid: int, action: Callable[[], object], *, gid: int | None = None) -> str:
    """Run `action` in a child of that user: "ok", or the name of the errno it failed with."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid if gid is None else gid)
            os.setuid(uid)
            os.umask(0o022)
            action()
            os.write(writer, b"ok")
        except OSError as error:
            os.write(writer, errno.errorcode[error.errno or 0].encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read().decode()


def test_permissions_hold_between_users(mounted: Mounted) -> None:
    shared = mounted.dir / "shared"
    shared.mkdir()
    os.chmod(shared, 0o1777)
    secret, public = shared / "secret", shared / "public"

    def make() -> None:
        with os.fdopen(os.open(secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write("mine")
        public.write_text("ours")
        (shared / "dir").mkdir()
        os.symlink("public", shared / "link")

    assert as_user(ALICE, make) == "ok"
    for path in (secret, public, shared / "dir", shared / "link"):
        st = os.lstat(path)
        assert (st.st_uid, st.st_gid) == (ALICE, ALICE), path
    assert as_user(BOB, lambda: secret.read_text()) == "EACCES"
    assert as_user(BOB, lambda: public.read_text()) == "ok"
    assert as_user(BOB, lambda: public.write_text("theirs")) == "EACCES"
    assert as_user(BOB, lambda: os.truncate(public, 0)) == "EACCES"
    assert as_user(BOB, lambda: os.unlink(public)) == "EPERM"  # the sticky bit
    assert as_user(BOB, lambda: os.rename(public, shared / "stolen")) == "EPERM"
    assert as_user(BOB, lambda: os.chmod(public, 0o777)) == "EPERM"
    assert as_user(BOB, lambda: os.chown(public, BOB, BOB)) == "EPERM"
    assert as_user(BOB, lambda: os.utime(public, (1, 1))) == "EPERM"
    assert as_user(BOB, lambda: (shared / "dir" / "x").write_text("")) == "EACCES"
    assert as_user(BOB, lambda: os.setxattr(public, "user.x", b"")) == "EACCES"
    assert as_user(BOB, lambda: os.mknod(shared / "null", 0o20666, os.makedev(1, 3))) == "EPERM"
    assert as_user(ALICE, lambda: public.write_text("again")) == "ok"
    assert as_user(ALICE, lambda: os.chmod(secret, 0o644)) == "ok"
    assert as_user(BOB, lambda: secret.read_text()) == "ok"


def test_a_truncation_by_its_owner_clears_set_user_id(mounted: Mounted) -> None:
    os.chmod(mounted.dir, 0o777)
    tool = mounted.dir / "tool"
    assert as_user(ALICE, lambda: tool.write_text("x")) == "ok"
    assert as_user(ALICE, lambda: os.chmod(tool, 0o4755)) == "ok"
    assert tool.stat().st_mode & 0o7777 == 0o4755
    assert as_user(ALICE, lambda: os.truncate(tool, 0)) == "ok"
    assert tool.stat().st_mode & 0o7777 == 0o755


def test_copying_tools_end_with_success(mounted: Mounted) -> None:
    source = mounted.dir / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_bytes(os.urandom(3_000_001))
    (source / "empty").touch()
    os.link(source / "sub" / "file", source / "hard")
    os.symlink("sub/file", source / "soft")
    os.mkfifo(source / "fifo", 0o640)
    os.chmod(source / "sub", 0o2750)
    os.setxattr(source / "empty", "user.note", b"kept")
    os.chown(source / "empty", ALICE, BOB)
    os.utime(source / "sub", ns=(10**18, 10**18 + 7))

    def tree(base: Path) -> dict[str, object]:
        seen: dict[str, object] = {}
        for path in sorted(base.rglob("*")):
            st = path.lstat()
            data = path.read_bytes() if path.is_file() else None
            notes = os.listxattr(path, follow_symlinks=False)
            seen[str(path.relative_to(base))] = st.st_mode, st.st_uid, st.st_gid, st.st_nlink, data, notes
        seen["mtime"] = (base / "sub").stat().st_mtime_ns
        return seen

    commands = {
        "cp": "cp -a source cp",
        "tar": "mkdir tar && tar --acls --xattrs -C source -cf - . | tar --acls --xattrs -C tar -xpf -",
        "mv": "cp -a source moving && mv moving mv",
        "out-and-in": f"cp -a source {mounted.plain}/out && cp -a {mounted.plain}/out out-and-in",
    }
    if shutil.which("rsync"):
        commands["rsync"] = "rsync -aHAX source/ rsync/"
    wanted = tree(source)
    for name, command in commands.items():
        done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=mounted.dir, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), name
        assert tree(mounted.dir / name) == wanted, name
    script = (
        "dd if=/dev/zero of=direct bs=1M count=4 oflag=direct status=none && du -s . && find . | wc -l && df . && "
        "echo one > redirect && echo two >> redirect && test $(wc -l < redirect) = 2 && rm -rf source cp"
    )
    subprocess.run(["bash", "-ec", script], cwd=mounted.dir, check=True, capture_output=True)


def test_a_listing_names_each_lasting_entry_once_while_others_come_and_go(mounted: Mounted) -> None:
    lasting = {f"file-{number:04}" for number in range(2000)}
    for name in lasting:
        (mounted.dir / name).touch()
    listed = []
    with os.scandir(mounted.dir) as entries:
        for at, entry in enumerate(entries):
            listed.append(entry.name)
            if at % 10 == 0:
                (mounted.dir / f"new-{at}").touch()
                (mounted.dir / f"new-{at - 100}").unlink(missing_ok=True)
    assert sorted(name for name in listed if name in lasting) == sorted(lasting)
    assert lasting <= set(os.listdir(mounted.dir))
    shutil.rmtree(mounted.dir)
    assert not mounted.dir.exists()
    mounted.dir.mkdir()


def test_removing_a_large_file_frees_its_room_at_once(mounted: Mounted) -> None:
    def used() -> int:
        st = os.statvfs(mounted.path)
        return (st.f_blocks - st.f_bavail) * st.f_frsize

    large, size = mounted.dir / "large", 200 << 20
    with large.open("wb") as file:
        file.write(b"\1" * size)
    before = used()
    assert before >= size
    large.unlink()
    assert used() <= before - size


def test_a_mapping_outlives_handle_and_name(mounted: Mounted) -> None:
    path = mounted.dir / "mapped"
    path.write_bytes(b"x" * 100_000)
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    path.unlink()
    (mounted.dir / "other").write_bytes(b"y" * 100_000)
    assert mapping[:] == b"x" * 100_000
    mapping[:5] = b"hello"
    assert mapping[:6] == b"hellox"


def test_two_appenders_lose_nothing(mounted: Mounted) -> None:
    path = mounted.dir / "log"
    code = f"f = open({str(path)!r}, 'ab', buffering=0)\nfor i in range(300): f.write(b'%d %d\\n' % (ID, i))"
    writers = [
        subprocess.Popen([sys.executable, "-c", code.replace("ID", str(number))], stdout=subprocess.DEVNULL)
        for number in range(2)
    ]
    assert [writer.wait(30) for writer in writers] == [0, 0]
    wanted = sorted(b"%d %d" % (number, line) for number in range(2) for line in range(300))
    assert sorted(path.read_bytes().split(b"\n")[:-1]) == wanted


def test_a_file_that_came_behind_the_kernels_back_is_not_hidden(mounted: Mounted) -> None:
    """Names that don't exist are not cached."""
    path = mounted.dir / "late"
    assert not path.exists()
    path.touch()
    assert path.exists()


def kill_daemon(mounted: Mounted) -> None:
    before = mounted.daemon_pid()
    assert before > 1
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: mounted.daemon_pid() not in (0, before), "a new daemon")


@pytest.fixture
def descriptors() -> Iterator[Callable[[Path, int], int]]:
    """os.open, with every descriptor closed at the end also when the test failed: an open file keeps a mount up."""
    opened: list[int] = []

    def open_one(path: Path, flags: int) -> int:
        opened.append(os.open(path, flags))
        return opened[-1]

    yield open_one
    for fd in opened:
        with suppress(OSError):
            os.close(fd)


def test_a_new_daemon_goes_on_where_the_killed_one_stopped(
    mounted: Mounted, descriptors: Callable[[Path, int], int]
) -> None:
    deep = mounted.dir / "one" / "two"
    deep.mkdir(parents=True)
    names = {f"entry-{number}" for number in range(500)}
    for name in names:
        (deep / name).touch()
    kept = descriptors(deep / "kept", os.O_RDWR | os.O_CREAT)
    gone = descriptors(deep / "gone", os.O_RDWR | os.O_CREAT)
    os.write(kept, b"kept")
    os.write(gone, b"gone")
    os.unlink(deep / "gone")
    directory = descriptors(deep, os.O_RDONLY)
    with os.scandir(deep) as entries:
        listed = [next(entries).name for _ in range(5)]
        kill_daemon(mounted)
        listed += [entry.name for entry in entries]
    assert sorted(listed) == sorted(names | {"kept"})
    assert os.fstat(gone).st_nlink == 0
    assert os.pread(gone, 9, 0) == b"gone"
    os.write(gone, b"!")
    assert os.fstat(gone).st_size == 5
    os.ftruncate(gone, 2)
    assert os.fstat(gone).st_size == 2
    os.rename(mounted.dir / "one", mounted.dir / "renamed")
    os.write(kept, b" on")
    os.fsync(kept)
    os.unlink("entry-7", dir_fd=directory)
    assert (mounted.dir / "renamed" / "two" / "kept").read_bytes() == b"kept on"
    assert len(os.listdir(directory)) == 500
    kill_daemon(mounted)
    assert os.pread(gone, 9, 0) == b"go"
    assert os.stat("kept", dir_fd=directory).st_size == 7
    os.close(gone)
    wait_until(lambda: not any(mounted.tier.joinpath("unlinked").iterdir()), "the nameless file is freed")


def test_no_exception_in_a_handler_ends_the_mount(tmp_path: Path) -> None:
    with harness_instance(tmp_path) as instance:
        with pytest.raises(OSError) as failed:
            os.stat(instance.path / "raise-ZeroDivisionError")
        assert failed.value.errno == errno.EIO
        with pytest.raises(OSError) as refused:
            os.stat(instance.path / "raise-NoRoom")
        assert refused.value.errno == errno.ENOSPC
        (instance.path / "file").write_text("still there")
        assert (instance.path / "file").read_text() == "still there"
        log = instance.log_file.read_text()
        assert "ZeroDivisionError" in log and "Traceback" in log
        assert "the tier is full, said the test" in log


def test_more_nodes_than_descriptors_are_found_again(tmp_path: Path) -> None:
    with harness_instance(tmp_path, descriptors=200) as instance:
        top = instance.path / "top"
        files = [top / f"{number // 50}" / f"{number}" for number in range(1000)]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name)
        held = [file.open() for file in files[::100]]
        for file in files[::100]:
            file.unlink()
        os.rename(top, instance.path / "moved")
        for file in files:
            moved = instance.path / "moved" / file.relative_to(top)
            if file not in files[::100]:
                os.chmod(moved, 0o600)
                assert moved.read_text() == file.name
        assert [os.fstat(file.fileno()).st_nlink for file in held] == [0] * 10
        assert [file.read() for file in held] == [file.name for file in files[::100]]
        for opened in held:
            opened.close()
        assert "Traceback" not in instance.log_file.read_text()


def test_a_file_that_is_replaced_all_the_time_is_always_there(mounted: Mounted) -> None:
    pointer = mounted.dir / "pointer"
    pointer.write_text("whole")
    replacing = (
        "import os, pathlib\n"
        "for _ in range(1500):\n"
        "    name = f'new{os.getpid()}'\n"
        "    pathlib.Path(name).write_text('whole')\n"
        "    os.replace(name, 'pointer')\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", replacing], cwd=mounted.dir) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert pointer.read_text() == "whole"
        assert pointer.stat().st_size == 5
        os.truncate(pointer, 5)
    assert [writer.returncode for writer in writers] == [0, 0]
