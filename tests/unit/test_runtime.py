"""The runtime directory: who is alive is never guessed, and an instance is found by whatever a user calls it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mount import runtime
from mount.live_process import LiveProcess
from mount.runtime import (
    Instance,
    MountRecord,
    all_instances,
    find_instance,
    instance_name,
    keeper_is_alive,
    lock_keeper,
    make_instance,
    read_process,
    read_record,
    real_mountpoint,
    register,
    unregister,
    write_process,
    write_record,
)
from tests.conftest import wait_until
from tierfs.errors import InstanceError, MountError, NotFound, SettingsError


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default parent of runtime directories, moved into the test's own directory."""
    place = tmp_path / "default"
    monkeypatch.setattr(runtime, "default_parent", lambda environ=None: place)
    return place


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def instance_on(parent: Path, name: str, mountpoint: str) -> Instance:
    instance = make_instance(parent, name)
    write_record(instance, MountRecord(mountpoint, True, kernel_options=("noexec",)))
    return instance


def test_a_pid_file_names_its_process_while_it_lives(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    path = tmp_path / "daemon.pid"
    process = write_process(path, child.pid)
    assert process is not None and read_process(path) == process and process.is_alive()
    assert not process.wait(0)
    child.kill()
    assert process.wait(10)
    assert read_process(path) is None, "a zombie has ended"
    child.wait()
    assert read_process(path) is None
    assert write_process(path, child.pid) is None


def test_a_process_that_was_given_the_pid_later_is_never_taken_for_ours(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "daemon.pid"
    process = write_process(path, child.pid)
    assert process is not None
    path.write_text(f"{child.pid} {process.start_time - 1}\n")
    assert read_process(path) is None
    stranger = LiveProcess(child.pid, process.start_time - 1)
    assert stranger.pidfd() is None
    stranger.send_signal(signal.SIGKILL)
    assert process.is_alive()


@pytest.mark.parametrize("text", ["", "12", "x y", "1 2 3"])
def test_a_damaged_pid_file_names_nobody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "daemon.pid"
    path.write_text(text)
    assert read_process(path) is None


def test_only_one_keeper_can_hold_an_instance_and_its_death_frees_it(tmp_path: Path) -> None:
    instance = instance_on(tmp_path, "one", "/ckpt")
    assert not keeper_is_alive(instance)
    program = (
        "import sys; from pathlib import Path; from mount.runtime import *; "
        "lock_keeper(Instance(Path(sys.argv[1]))); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", program, instance.directory]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == b"held\n"
        assert keeper_is_alive(instance)
        with pytest.raises(MountError, match="'one' is mounted already on /ckpt"):
            lock_keeper(instance, timeout_s=0.05)
        keeper.kill()
    wait_until(lambda: not keeper_is_alive(instance), "the lock is free")
    os.close(lock_keeper(instance))


def test_the_runtime_directory_is_private_and_a_strangers_is_refused(tmp_path: Path) -> None:
    instance = make_instance(tmp_path / "a" / "b", "one")
    assert stat.S_IMODE(instance.directory.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        os.chown(instance.directory, 65534, 65534)
        with pytest.raises(MountError, match="not a directory of this user"):
            make_instance(tmp_path / "a" / "b", "one")
    (tmp_path / "two").symlink_to(tmp_path / "a")
    with pytest.raises(MountError, match="not a directory of this user"):
        make_instance(tmp_path, "two")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "é", "x" * 65])
def test_a_name_that_can_not_be_a_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError):
        make_instance(tmp_path, name)


def test_names_made_from_mount_points_are_readable_and_never_clash() -> None:
    assert instance_name(Path("/ckpt")) == "ckpt"
    assert instance_name(Path("/mnt/ckpt")) == "mnt-ckpt"
    paths = ["/mnt/ckpt", "/mnt-ckpt", "/mnt_ckpt", "/mnt ckpt", "/.x", "/-x", "/ü", "/" + "x" * 200, "/"]
    names = [instance_name(Path(path)) for path in paths]
    assert len(set(names)) == len(names)
    for name in names:
        runtime.check_name(name)


def test_a_record_comes_back_as_it_was_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    instance = instance_on(tmp_path, "one", "/a b/ü")
    assert read_record(instance) == MountRecord("/a b/ü", True, kernel_options=("noexec",))
    for damaged in ("", "{", "[]", '{"mountpoint": "/x"}', '{"unknown": 1}'):
        instance.mount_record.write_text(damaged)
        assert read_record(instance) is None


def test_an_instance_is_found_by_name_mount_point_and_path_below(parent: Path, tmp_path: Path) -> None:
    one = instance_on(parent, "one", str(tmp_path / "ckpt"))
    two = instance_on(parent, "two", str(tmp_path / "other"))
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    assert find_instance("one") == one
    assert find_instance(tmp_path / "ckpt") == one
    assert find_instance(f"{tmp_path}/x/../other/") == two
    assert find_instance(tmp_path / "link") == one
    assert find_instance(tmp_path / "ckpt" / "run1" / "step_5", below=True) == one
    with pytest.raises(NotFound, match=r"known here: one on .*/ckpt, two on .*/other") as caught:
        find_instance(tmp_path / "ckpt" / "run1")
    assert caught.value.exit_code == 4


def test_an_instance_whose_runtime_directory_is_elsewhere_is_found_until_it_is_unregistered(
    parent: Path, tmp_path: Path
) -> None:
    elsewhere = instance_on(tmp_path / "elsewhere", "one", "/ckpt")
    with pytest.raises(NotFound):
        find_instance("/ckpt")
    register(elsewhere)
    assert find_instance("/ckpt") == find_instance("one") == elsewhere
    assert all_instances() == [elsewhere]
    other = instance_on(parent, "one", "/other")
    with pytest.raises(InstanceError, match="give the mount point"):
        find_instance("one")
    assert find_instance("/other") == other
    unregister(elsewhere)
    assert find_instance("one") == other


def test_a_mount_point_is_known_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to("a b")
    assert real_mountpoint(tmp_path / "link") == tmp_path / "a b"
    assert real_mountpoint(f"{tmp_path}/./missing/") == tmp_path / "missing"
    assert real_mountpoint("/proc/../proc") == Path("/proc")
    assert runtime.unescape_mount(r"/a\040b\134c") == "/a b\\c"
