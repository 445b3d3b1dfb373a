"""`tierfs mount --replace`, the watchdog, and what a service manager is told; over the stub daemon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mount import kernel_mount
from mount.notify import watchdog_s
from mount.processes import package_environment
from mount.runtime import keeper_is_alive
from tests.conftest import wait_until
from tests.mount.keeper_rig import STUB, Rig, rig, tierfs


@pytest.fixture
def stub() -> Iterator[Rig]:
    with rig(STUB) as made:
        yield made


def test_replacing_keeps_the_mount_and_answers_a_request_in_flight(stub: Rig) -> None:
    stub.mount()
    keeper, daemon, entry = stub.keeper, stub.daemon, kernel_mount.find_mount(str(stub.place))
    answered: list[os.stat_result] = []
    (stub.instance.directory / "stall").touch()
    asker = threading.Thread(target=lambda: answered.append(os.stat(stub.place)), daemon=True)
    asker.start()
    wait_until((stub.instance.directory / "stalled").exists, "the daemon stalls in the request")
    replacing = threading.Thread(target=lambda: done.append(tierfs(*stub.mount_arguments(), "--replace")))
    done: list[subprocess.CompletedProcess[str]] = []
    replacing.start()
    assert daemon.wait(20), stub.log()
    (stub.instance.directory / "stall").unlink()
    replacing.join(30)
    assert done[0].returncode == 0, done[0].stderr + stub.log()
    assert done[0].stdout.startswith("replaced the processes of ")
    asker.join(10)
    assert answered, stub.log()
    assert keeper.wait(10), "the old keeper ends once the new one serves"
    assert stub.keeper.pid != keeper.pid and stub.starts == ["fresh", "takeover"]
    assert kernel_mount.find_mount(str(stub.place)) == entry
    assert not stub.instance.next_settings.exists() and not stub.instance.spare_pid.exists()
    stub.kill_daemon()
    assert tierfs("umount", stub.place).returncode == 0
    stub.wait_for_end()


def test_replacing_what_is_not_mounted_mounts_it(stub: Rig) -> None:
    done = tierfs(*stub.mount_arguments(), "--replace")
    assert done.returncode == 0 and done.stdout.startswith("mounted "), done.stderr
    assert stub.starts == ["fresh"]


def test_a_keeper_that_was_killed_is_replaced_with_its_daemon(stub: Rig) -> None:
    stub.mount()
    daemon = stub.daemon
    stub.keeper.send_signal(signal.SIGKILL)
    wait_until(lambda: not keeper_is_alive(stub.instance), "the keeper has ended")
    done = tierfs(*stub.mount_arguments(), "--replace")
    assert done.returncode == 0, done.stderr
    assert not daemon.is_alive() and stub.starts == ["fresh", "takeover"]


def test_where_requests_are_not_sent_again_replacing_is_refused_and_changes_nothing(stub: Rig) -> None:
    stub.wish("no-resend")
    stub.mount()
    keeper, daemon = stub.keeper, stub.daemon
    done = tierfs(*stub.mount_arguments("size=128MiB"), "--replace")
    assert done.returncode == 1 and "unmount it, then mount it" in done.stderr, done.stderr
    assert keeper.is_alive() and daemon.is_alive()
    assert '"size": 67108864' in stub.instance.settings.read_text()


def test_a_new_version_that_dies_gives_the_mount_back(stub: Rig) -> None:
    """By the command: its exit code and message tell, and the keeper that was goes on with its own settings."""
    stub.mount()
    keeper = stub.keeper
    arguments = stub.mount_arguments("size=128MiB")
    arguments[arguments.index(STUB)] = "tests.deploy.no_such_daemon"
    done = tierfs(*arguments, "--replace")
    assert done.returncode == 1 and "no_such_daemon" in done.stderr, done.stderr
    wait_until(lambda: stub.starts == ["fresh", "takeover"], f"the old keeper took it back\n{stub.log()}")
    wait_until(lambda: stub.instance.daemon_ready.exists(), "its daemon is ready")
    assert os.stat(stub.place).st_nlink == 2
    assert stub.keeper.pid == keeper.pid
    assert '"size": 67108864' in stub.instance.settings.read_text()
    assert tierfs("umount", stub.place).returncode == 0
    stub.wait_for_end()


def test_a_hung_daemon_is_replaced_and_the_service_manager_hears_of_the_keeper_meanwhile(stub: Rig) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(stub.directory / "notify"))
        notify.settimeout(20)
        keeper = subprocess.Popen(
            [sys.executable, "-m", "mount.cli.main", *stub.mount_arguments(), "--foreground"],
            env={
                **package_environment(),
                "NOTIFY_SOCKET": str(stub.directory / "notify"),
                "WATCHDOG_USEC": "900000",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said = {notify.recv(100) for _ in range(8)}
            assert said == {b"READY=1", b"WATCHDOG=1"}
            hung = stub.daemon
            hung.send_signal(signal.SIGSTOP)
            assert hung.wait(20), "it is killed"
            for _ in range(3):
                assert notify.recv(100) == b"WATCHDOG=1"
            wait_until(lambda: stub.starts == ["fresh", "takeover"], "another one is started")
            assert os.stat(stub.place).st_nlink == 2
            keeper.send_signal(signal.SIGTERM)
            while (last := notify.recv(100)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1"
            _, log = keeper.communicate(timeout=20)
        finally:
            keeper.kill()
            keeper.wait()
    assert keeper.returncode == 0
    assert "the mount did not answer for 0.9 s" in log
    stub.wait_for_end()


@pytest.mark.parametrize("when", ["at its first question", "as a watchdog"])
def test_a_keeper_that_asks_the_mount_can_be_killed_with_its_daemon(stub: Rig, when: str) -> None:
    """As when a container is killed. Were its question a thread of its own, it could not end, nor could who waits."""
    stall, stalled = stub.instance.directory / "stall", stub.instance.directory / "stalled"
    if when == "at its first question":
        stub.instance.directory.mkdir(parents=True)
        stall.touch()
    keeper = subprocess.Popen(
        [sys.executable, "-m", "mount.cli.main", *stub.mount_arguments(), "--foreground", "--watchdog", "6"],
        env=package_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        if when == "as a watchdog":
            wait_until(stub.instance.daemon_ready.exists, "it serves")
            stall.touch()
        wait_until(stalled.exists, "the daemon stalls in the keeper's question")
        stub.daemon.send_signal(signal.SIGKILL)
        keeper.kill()
        keeper.wait(10)
    finally:
        if keeper.poll() is None:
            kernel_mount.unmount(str(stub.place), force=True)  # or nothing could end it
            keeper.wait(10)


def test_a_keeper_that_replaces_the_services_main_process_says_so(stub: Rig) -> None:
    """systemctl reload: the unit goes on with the new keeper as its main process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(stub.directory / "notify"))
        notify.settimeout(20)
        environment = {**package_environment(), "NOTIFY_SOCKET": str(stub.directory / "notify")}
        command = [sys.executable, "-m", "mount.cli.main", *stub.mount_arguments()]
        keeper = subprocess.Popen([*command, "--foreground"], env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert notify.recv(100) == b"READY=1"
            subprocess.run([*command, "--replace"], env=environment, check=True, capture_output=True, timeout=30)
            assert notify.recv(100) == f"MAINPID={stub.keeper.pid}".encode()
            _, log = keeper.communicate(timeout=20)
        finally:
            keeper.kill()
            keeper.wait()
    assert keeper.returncode == 0, log
    assert stub.is_mounted() and stub.keeper.pid != keeper.pid


@pytest.mark.parametrize(
    ("microseconds", "pid", "expected"),
    [("30000000", None, 30.0), ("30000000", "1", None), ("0", None, None), ("", None, None), ("soon", None, None)],
)
def test_the_watchdog_is_for_this_process_only(
    monkeypatch: pytest.MonkeyPatch, microseconds: str, pid: str | None, expected: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert watchdog_s() == expected


@pytest.mark.parametrize("option", [["--watchdog", "5"], ["--ready-file", "/tmp/x"]])
def test_what_is_for_the_foreground_is_refused_elsewhere(stub: Rig, option: list[str]) -> None:
    done = tierfs(*stub.mount_arguments(), *option)
    assert done.returncode == 2 and "--foreground" in done.stderr, done.stderr
    assert not stub.is_mounted()
