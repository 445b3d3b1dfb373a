"""The keeper alone, over a stub daemon that dies, stalls and disobeys as it is told."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mount import kernel_mount
from mount.keeper import Keeper
from mount.processes import package_environment
from mount.runtime import Instance, lock_daemon, read_process, read_record
from tests.conftest import wait_until
from tests.mount.keeper_rig import STUB, Rig, rig, tierfs
from tierfs.errors import MountError
from tierfs.settings_sources import settings_from_json


@pytest.fixture
def stub() -> Iterator[Rig]:
    with rig(STUB) as made:
        yield made


class Asker:
    """A program with a request in flight: a stat that the stub is told to stall in."""

    def __init__(self, stub: Rig) -> None:
        self.error: int | None = None
        self.done = threading.Event()
        (stub.instance.directory / "stall").touch()
        threading.Thread(target=self._ask, args=(stub.place,), daemon=True).start()
        wait_until((stub.instance.directory / "stalled").exists, "the daemon stalls in the request")

    def _ask(self, place: Path) -> None:
        try:
            os.stat(place)
        except OSError as error:
            self.error = error.errno
        self.done.set()


def test_a_request_in_flight_survives_the_daemons_death(stub: Rig) -> None:
    stub.mount()
    held = os.open(stub.place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        asker = Asker(stub)
        stub.daemon.send_signal(signal.SIGKILL)
        (stub.instance.directory / "stall").unlink()
        assert asker.done.wait(10), stub.log()
        assert asker.error is None
        os.fstat(held)
        assert stub.starts == ["fresh", "takeover"]
    finally:
        os.close(held)


@pytest.mark.parametrize("why", ["setting", "kernel"])
def test_without_resend_the_mount_is_made_anew_and_nobody_hangs(stub: Rig, why: str) -> None:
    if why == "kernel":
        stub.wish("no-resend")
    stub.mount(*(["resend=off"] if why == "setting" else []))
    asker = Asker(stub)
    stub.daemon.send_signal(signal.SIGKILL)
    (stub.instance.directory / "stall").unlink()
    assert asker.done.wait(10), stub.log()
    assert asker.error in (errno.ECONNABORTED, errno.ENOTCONN)
    wait_until(lambda: stub.starts == ["fresh", "fresh"], "a daemon was started on a new connection")
    wait_until(lambda: answers(stub.place), "the new mount answers")
    assert len([entry for entry in kernel_mount.mount_table() if entry.mountpoint == str(stub.place)]) == 1


def answers(place: Path) -> bool:
    try:
        os.stat(place)
    except OSError:
        return False
    return True


def test_an_aborted_connection_is_mounted_anew(stub: Rig) -> None:
    stub.mount()
    with hold(stub.place):  # busy, so that MNT_FORCE can only abort
        kernel_mount._libc.umount2(os.fsencode(stub.place), kernel_mount.MNT_FORCE)
    wait_until(lambda: stub.starts == ["fresh", "fresh"], "a daemon was started on a new connection")
    wait_until(lambda: answers(stub.place), "the new mount answers")


@contextmanager
def hold(place: Path) -> Iterator[int]:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_daemon_that_dies_at_each_start_is_given_up_with_a_clear_end(stub: Rig) -> None:
    stub.wish("die")
    done = tierfs(*stub.mount_arguments())
    assert done.returncode == 1
    assert "I die before I am ready" in done.stderr
    assert "given up: the daemon died 5 times in a row" in done.stderr
    stub.wait_for_end()
    assert stub.starts == ["fresh"] * 5
    assert kernel_mount.find_mount(str(stub.instance.ram)) is None, "an empty tier is given back"


def test_a_daemon_that_can_not_be_replaced_leaves_the_ram_tier(stub: Rig) -> None:
    stub.mount()
    (stub.instance.ram / "root" / "shard").write_bytes(b"kept")
    stub.wish("die")
    stub.daemon.send_signal(signal.SIGKILL)
    stub.wait_for_end()
    assert "given up" in stub.log()
    assert (stub.instance.ram / "root" / "shard").read_bytes() == b"kept"
    stub.wish("")
    stub.mount()
    assert (stub.instance.ram / "root" / "shard").read_bytes() == b"kept"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_keeper_ends_daemon_and_mount(stub: Rig, number: signal.Signals) -> None:
    stub.mount()
    stub.keeper.send_signal(number)
    stub.wait_for_end()
    assert not stub.instance.directory.exists(), "nothing was in the tier, so nothing stays"


def test_a_second_signal_ends_a_daemon_that_disobeys(stub: Rig) -> None:
    stub.wish("stubborn")
    stub.mount()
    keeper, daemon = stub.keeper, stub.daemon
    keeper.send_signal(signal.SIGTERM)
    assert not daemon.wait(0.3)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(15), stub.log()
    stub.wait_for_end()


@pytest.mark.parametrize("command", [["umount"], ["fusermount3", "-u"]], ids=lambda command: command[0])
def test_a_plain_umount_ends_both_processes(stub: Rig, command: list[str]) -> None:
    stub.mount()
    daemon, keeper = stub.daemon, stub.keeper
    subprocess.run([*command, stub.place], check=True)
    assert daemon.wait(10) and keeper.wait(10)
    stub.wait_for_end()


def test_a_lazily_unmounted_instance_lives_until_its_last_file_is_closed(stub: Rig) -> None:
    stub.mount()
    keeper = stub.keeper
    with hold(stub.place) as held:
        subprocess.run(["umount", "-l", stub.place], check=True)
        assert stub.kill_daemon(), "also then the daemon is replaced"
        os.fstat(held)
    assert keeper.wait(10), stub.log()
    stub.wait_for_end()


def test_a_killed_keeper_leaves_a_serving_daemon_and_the_next_mount_adopts_it(stub: Rig) -> None:
    stub.mount()
    daemon = stub.daemon
    with hold(stub.place) as held:
        stub.keeper.send_signal(signal.SIGKILL)
        wait_until(lambda: read_process(stub.instance.keeper_pid) is None, "the keeper is dead")
        os.fstat(held)
        assert daemon.is_alive()

        done = stub.mount()
        assert f"adopted the running daemon {daemon.pid}" in done.stderr
        assert stub.daemon == daemon

        asker = Asker(stub)
        stub.kill_daemon()
        (stub.instance.directory / "stall").unlink()
        assert asker.done.wait(10), stub.log()
        assert asker.error is None
        os.fstat(held)
    assert stub.starts == ["fresh", "takeover"]
    assert tierfs("umount", stub.place).returncode == 0
    stub.wait_for_end()


def test_an_adopted_daemon_that_is_unmounted_ends_its_keeper(stub: Rig) -> None:
    stub.mount()
    stub.keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: read_process(stub.instance.keeper_pid) is None, "the keeper is dead")
    stub.mount()
    keeper = stub.keeper
    subprocess.run(["umount", stub.place], check=True)
    assert keeper.wait(10), stub.log()
    stub.wait_for_end()


def test_after_both_were_killed_the_next_mount_finds_the_ram_tier(stub: Rig) -> None:
    stub.mount()
    (stub.instance.ram / "root" / "shard").write_bytes(b"kept")
    keeper, daemon = stub.keeper, stub.daemon
    keeper.send_signal(signal.SIGKILL)
    assert keeper.wait(10)
    daemon.send_signal(signal.SIGKILL)
    assert daemon.wait(10)
    with pytest.raises(OSError) as caught:
        os.stat(stub.place)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    stub.mount()
    os.stat(stub.place)
    assert (stub.instance.ram / "root" / "shard").read_bytes() == b"kept"
    assert len([entry for entry in kernel_mount.mount_table() if entry.mountpoint == str(stub.place)]) == 1


def test_two_daemons_never_work_on_one_tier_though_the_first_was_not_written_down(stub: Rig) -> None:
    """The keeper may be killed between the start of a daemon and its pid file."""
    stub.mount()
    keeper, daemon = stub.keeper, stub.daemon
    keeper.send_signal(signal.SIGKILL)
    assert keeper.wait(10)
    stub.instance.daemon_pid.unlink()
    with pytest.raises(MountError, match="an earlier daemon"):
        lock_daemon(stub.instance, timeout_s=0)
    (stub.instance.ram / "root" / "shard").write_bytes(b"kept")
    done = tierfs(*stub.mount_arguments())
    if done.returncode != 0:  # the mount answers, and so nobody may take it away
        assert "unmount it first" in done.stderr
        assert tierfs("umount", stub.place).returncode == 0
        stub.mount()
    assert daemon.wait(10)
    assert stub.daemon.is_alive()


def test_another_instance_on_the_same_mount_point_is_never_taken_for_this_one(stub: Rig) -> None:
    stub.mount()
    (stub.instance.ram / "root" / "shard").write_bytes(b"kept")
    assert tierfs("umount", stub.place).returncode == 0
    other = Rig.__new__(Rig)
    other.__dict__ = {**stub.__dict__, "name": f"{stub.name}-b", "instance": Instance(stub.parent / f"{stub.name}-b")}
    other.mount()
    try:
        done = tierfs("umount", stub.name)
        assert done.returncode == 4 and "is not mounted" in done.stderr
        stub.place = stub.directory / "elsewhere"
        stub.mount()
        assert other.is_mounted() and answers(other.place)
        assert tierfs("umount", stub.place).returncode == 0
        assert tierfs("umount", "--discard", stub.name).returncode == 0
        assert tierfs("umount", other.place).returncode == 0
        other.wait_for_end()
    finally:
        tierfs("umount", "--discard", other.name)


def test_an_instance_that_died_can_be_mounted_elsewhere(stub: Rig) -> None:
    stub.mount()
    for process in (stub.keeper, stub.daemon):
        process.send_signal(signal.SIGKILL)
        assert process.wait(10)
    old, stub.place = stub.place, stub.directory / "elsewhere"
    stub.mount()
    assert kernel_mount.find_mount(str(old)) is None
    assert answers(stub.place)
    assert tierfs("umount", stub.place).returncode == 0


def test_in_the_foreground_systemd_is_told_once_the_mount_answers(stub: Rig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(stub.directory / "notify"))
        notify.settimeout(20)
        keeper = subprocess.Popen(
            [sys.executable, "-m", "mount.cli.main", *stub.mount_arguments(), "--foreground"],
            env={**package_environment(), "NOTIFY_SOCKET": str(stub.directory / "notify")},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert notify.recv(100) == b"READY=1"
            assert stub.is_mounted()
            assert b"NOTIFY_SOCKET" not in Path(f"/proc/{stub.daemon.pid}/environ").read_bytes()
            keeper.send_signal(signal.SIGTERM)
            assert notify.recv(100) == b"STOPPING=1"
            assert notify.recv(100) == b"EXTEND_TIMEOUT_USEC=30000000"
            _, log = keeper.communicate(timeout=20)
        finally:
            keeper.kill()
            keeper.wait()
    assert keeper.returncode == 0
    assert "is ready" in log
    stub.wait_for_end()


def test_a_daemon_that_sends_what_is_owed_gets_its_time_and_a_second_sigterm_ends_it(stub: Rig) -> None:
    stub.wish("stubborn")
    stub.mount(f"object=file://{stub.directory}/store", "persist.flush_timeout_s=1h")
    settings, record = settings_from_json(stub.instance.settings.read_text()), read_record(stub.instance)
    assert record is not None
    assert Keeper(stub.instance, settings, record)._ends_within_s() >= 3600 + 30
    settings.persist.flush_on_umount = False
    assert Keeper(stub.instance, settings, record)._ends_within_s() < 120
    keeper = stub.keeper
    keeper.send_signal(signal.SIGTERM)
    wait_until(lambda: "asked to stop" in stub.log(), "the keeper has heard it")
    assert not keeper.wait(1), "it waits for its daemon"
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(15), stub.log()
    stub.wait_for_end()


@pytest.mark.parametrize("url", ["file://relative", "s3://", "http://bucket/x"])
def test_a_wrong_object_tier_is_refused_before_anything_is_mounted(stub: Rig, url: str) -> None:
    done = tierfs(*stub.mount_arguments(f"object={url}"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "object" in done.stderr, done.stderr
    assert not stub.is_mounted() and not stub.instance.directory.exists()


def test_a_bucket_without_the_package_for_it_is_refused_with_what_to_install(
    stub: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stub.directory / "boto3.py").write_text("raise ModuleNotFoundError('No module named boto3', name='boto3')")
    monkeypatch.setenv("PYTHONPATH", str(stub.directory))
    done = tierfs(*stub.mount_arguments("object=s3://bucket/ckpt"))
    assert done.returncode == 2 and "pip install 'tierfs[s3]'" in done.stderr, done.stderr
    assert not stub.is_mounted()
    found = tierfs("doctor", "-o", "object=s3://bucket/ckpt")
    assert found.returncode == 1 and "pip install 'tierfs[s3]'" in found.stdout
