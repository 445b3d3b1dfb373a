"""A rolling update of the DaemonSet, as pods see it: the mount goes on in a new pod with every file open."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mount.processes import package_environment
from mount.runtime import keeper_is_alive
from tests.conftest import wait_until
from tests.deploy.pods import Node, node

pytestmark = pytest.mark.slow

TRAINER = """
import hashlib, os, sys
place = {place!r}
os.makedirs(place + "/run", exist_ok=True)
print("begun", flush=True)
held = open(place + "/run/held", "w+b", buffering=0)
count = 0
while not os.path.exists({stop!r}):
    count += 1
    step = f"{{place}}/run/step_{{count}}"
    os.mkdir(step)
    data = os.urandom(1 << 20) * 4
    with open(step + "/shard", "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    os.rename(step + "/shard", step + "/weights")
    with open(step + "/weights", "rb") as file:
        assert hashlib.sha256(file.read()).digest() == hashlib.sha256(data).digest(), step
    held.write(count.to_bytes(8, "little"))
    held.seek(-8, 2)
    assert int.from_bytes(held.read(8), "little") == count
    if count > 4:
        old = f"{{place}}/run/step_{{count - 4}}"
        os.remove(old + "/weights")
        os.rmdir(old)
print("done", count, held.seek(0, 2) // 8, flush=True)
"""


@pytest.fixture
def host() -> Iterator[Node]:
    with node() as made:
        yield made


def status(host: Node) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "mount.cli.main", "status", str(host.mountpoint), "--json"],
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode in (0, 3), done.stderr + host.logs()
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_rolling_update_goes_on_under_a_running_training(host: Node) -> None:
    """As the DaemonSet controller does it with maxSurge: the new pod comes, is ready, and then the old one goes."""
    first = host.pod("first")
    first.wait_until_ready()
    mount_id = host_mount_id(host)
    stop = host.directory / "stop"
    at = host.directory / "in-the-pod"
    trainer = host.trainer(TRAINER.format(place=str(at / "ckpt"), stop=str(stop)), volume=host.mounts, at=at)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "begun\n"
    old, daemon = first, host.daemon
    for name, size in (("second", "160MiB"), ("third", "192MiB")):
        new = host.pod(name, size=size)
        new.wait_until_ready()
        assert not old.is_ready, "it must not be taken for the one that serves"
        assert old.process.poll() is None, "Kubernetes would start it again"
        assert host.daemon.pid != daemon.pid
        assert old.delete() == 0
        assert host.is_mounted() and host_mount_id(host) == mount_id
        assert trainer.poll() is None
        old, daemon = new, host.daemon
    now = status(host)
    assert now["takeovers"] == 2 and now["keeper_pid"] == old.process.pid
    assert isinstance(now["ram"], dict) and now["ram"]["size_bytes"] == 192 << 20, "the last pod's settings hold"
    stop.touch()
    said, _ = trainer.communicate(timeout=30)
    word, steps, counted = said.split() if len(said.split()) == 3 else (said, "0", "-1")
    assert word == "done" and steps == counted, said + host.logs()
    assert old.delete() == 0
    assert not host.is_mounted() and not host.mountpoint.exists(), "the last pod took the mount with it"


def host_mount_id(host: Node) -> str:
    return f"{os.stat(host.mountpoint).st_dev}"


def test_a_version_that_does_not_work_leaves_the_mount_to_the_old_pod(host: Node) -> None:
    first = host.pod("first")
    first.wait_until_ready()
    with open(host.mountpoint / "file", "w+b", buffering=0) as file:
        file.write(b"before")
        broken = host.pod("broken", daemon_module="tests.deploy.no_such_daemon")
        assert broken.process.wait(30) == 1, host.logs()
        assert "given up" in broken.log() and "left to the keeper that was" in broken.log()
        wait_until(lambda: first.is_ready, f"the old pod took it back\n{host.logs()}", timeout_s=20)
        file.write(b", after")
        file.seek(0)
        assert file.read() == b"before, after"
    assert status(host)["keeper_pid"] == first.process.pid
    assert first.delete() == 0
    assert not host.is_mounted()


def test_a_new_pod_that_is_killed_while_the_old_one_is_there_costs_nothing(host: Node) -> None:
    first = host.pod("first")
    first.wait_until_ready()
    second = host.pod("second")
    second.wait_until_ready()
    daemon = host.daemon
    with open(host.mountpoint / "file", "w+b", buffering=0) as file:
        second.process.kill()
        daemon.send_signal(signal.SIGKILL)  # with its main process all of a container's processes end
        wait_until(lambda: first.is_ready, f"the old pod took it back\n{host.logs()}", timeout_s=20)
        file.write(b"after")
        file.seek(0)
        assert file.read() == b"after"
    assert host.daemon.pid != daemon.pid


def test_a_pod_that_is_deleted_before_it_serves_leaves_the_mount(host: Node) -> None:
    first = host.pod("first")
    first.wait_until_ready()
    stuck = host.pod("stuck", daemon_module="tests.deploy.stuck_daemon")
    wait_until(lambda: "started the daemon" in stuck.log(), "the stuck daemon was started")
    assert stuck.delete() == 0
    wait_until(lambda: first.is_ready, f"the old pod took it back\n{host.logs()}", timeout_s=20)
    (host.mountpoint / "file").write_text("still there")
    assert (host.mountpoint / "file").read_text() == "still there"


def test_a_trainer_that_came_first_sees_the_mount_once_it_is_there(host: Node) -> None:
    """With the parent directory as its volume, and with the mount point itself as in the example job."""
    host.mountpoint.mkdir()
    stop, script = host.directory / "stop", "import os\nplace, stop = {!r}, {!r}\n"
    script += "import time\nprint('begun', flush=True)\nwhile not os.path.exists(stop): time.sleep(0.01)\n"
    script += "print(os.stat(place).st_dev == os.stat(place + '/..').st_dev, os.path.exists(place + '/run'))"
    parent, itself = host.directory / "parent", host.directory / "itself"
    trainers = [
        host.trainer(script.format(str(parent / "ckpt"), str(stop)), volume=host.mounts, at=parent),
        host.trainer(script.format(str(itself), str(stop)), volume=host.mountpoint, at=itself),
    ]
    for trainer in trainers:
        assert trainer.stdout is not None and trainer.stdout.readline() == "begun\n"
    pod = host.pod("pod")
    pod.wait_until_ready()
    (host.mountpoint / "run").mkdir()
    stop.touch()
    for trainer in trainers:
        assert trainer.communicate(timeout=20)[0] == "False True\n"
    assert pod.delete() == 0
    assert not keeper_is_alive(host.instance)


def test_after_a_crash_of_the_whole_pod_the_next_one_finds_the_ram_tier(host: Node) -> None:
    """What a surge can't help: the pod is killed. A trainer that has the parent directory sees the new mount."""
    first = host.pod("first")
    first.wait_until_ready()
    (host.mountpoint / "file").write_text("in RAM")
    at = host.directory / "parent"
    stop, script = host.directory / "stop", "import os, time\nplace, stop = {!r}, {!r}\nprint('begun', flush=True)\n"
    script += "while not os.path.exists(stop): time.sleep(0.01)\nprint(open(place + '/file').read())"
    trainer = host.trainer(script.format(str(at / "ckpt"), str(stop)), volume=host.mounts, at=at)
    assert trainer.stdout is not None and trainer.stdout.readline() == "begun\n"
    daemon = host.daemon
    first.process.kill()
    daemon.send_signal(signal.SIGKILL)
    assert daemon.wait(10)
    began = time.monotonic()
    second = host.pod("second")
    second.wait_until_ready()
    assert time.monotonic() - began < 20
    assert (host.mountpoint / "file").read_text() == "in RAM"
    stop.touch()
    assert trainer.communicate(timeout=20)[0] == "in RAM\n"
    assert second.delete() == 0
    assert not host.mountpoint.exists(), "a trainer that comes now must wait (hostPath, type: Directory)"
