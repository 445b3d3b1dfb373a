"""`tierfs upgrade`: over the stub daemon, which tells no version, and on a real mount with a file open for writing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

import tierfs as package
from mount.runtime import is_running
from tests.conftest import wait_until
from tests.mount.keeper_rig import STUB, Rig, rig, tierfs


@pytest.fixture
def stub() -> Iterator[Rig]:
    with rig(STUB) as made:
        yield made


def test_an_upgrade_keeps_mount_and_settings(stub: Rig) -> None:
    stub.mount("ram.huge_pages=never")
    keeper, settings = stub.keeper, stub.instance.settings.read_text()
    shown = tierfs("upgrade", stub.place, "--dry-run", "--daemon-module", STUB)
    assert shown.returncode == 0 and "would upgrade" in shown.stdout, shown.stderr
    assert stub.starts == ["fresh"]
    done = tierfs("upgrade", stub.place, "--daemon-module", STUB)
    assert done.returncode == 0, done.stderr + stub.log()
    assert done.stdout.strip().endswith(f"upgraded, unknown version -> {package.__version__}"), done.stdout
    assert keeper.wait(10) and stub.keeper.pid != keeper.pid
    assert stub.starts == ["fresh", "takeover"] and stub.instance.settings.read_text() == settings


def test_a_version_that_does_not_serve_is_told_and_the_old_one_goes_on(stub: Rig) -> None:
    stub.mount()
    keeper = stub.keeper
    done = tierfs("upgrade", stub.place, "--daemon-module", "tests.deploy.no_such_daemon")
    assert done.returncode == 1, done.stdout
    assert "not upgraded, goes on as it was" in done.stderr and "no_such_daemon" in done.stderr, done.stderr
    wait_until(lambda: stub.starts == ["fresh", "takeover"], f"the old keeper took it back\n{stub.log()}")
    assert os.stat(stub.place).st_nlink == 2 and stub.keeper.pid == keeper.pid


def test_what_is_not_mounted_can_not_be_upgraded(stub: Rig) -> None:
    assert tierfs("upgrade", stub.place).returncode == 4
    stub.mount()
    assert tierfs("umount", stub.place).returncode == 0
    done = tierfs("upgrade", stub.place, "--daemon-module", STUB)
    assert done.returncode == 4, done.stderr


def test_a_real_mount_is_upgraded_while_a_file_is_written() -> None:
    with rig("mount.daemon") as real:
        real.mount()
        assert real.is_mounted() and is_running(real.instance)
        current = json.loads(tierfs("upgrade", real.place, "--json").stdout)
        assert [each["outcome"] for each in current] == ["current"]
        daemon = real.daemon
        shard = real.place / "shard"
        with shard.open("wb") as file:
            file.write(b"before")
            file.flush()
            done = tierfs("upgrade", real.place, "--force")
            assert done.returncode == 0 and "upgraded" in done.stdout, done.stderr + real.log()
            file.write(b" and after")
        assert shard.read_bytes() == b"before and after"
        assert daemon.wait(10) and real.daemon.pid != daemon.pid
        assert tierfs("umount", "--discard", real.place).returncode == 0


@pytest.mark.slow
def test_each_instance_is_upgraded_whatever_became_of_the_one_before(stub: Rig) -> None:
    stub.mount()
    with rig(STUB) as unmounted, rig(STUB) as broken:
        unmounted.mount()
        for process in (unmounted.keeper, unmounted.daemon):
            process.send_signal(signal.SIGKILL)
            assert process.wait(10)
        broken.mount()
        broken.instance.settings.unlink()
        asked = ["upgrade", unmounted.place, broken.place, stub.place, "--json", "--daemon-module", STUB]
        for dry, outcomes in (
            (["--dry-run"], ["not mounted", "would upgrade", "would upgrade"]),
            ([], ["not mounted", "failed", "upgraded"]),
        ):
            done = tierfs(*asked, *dry)
            told = json.loads(done.stdout)
            assert [each["outcome"] for each in told] == outcomes, done.stderr
            assert done.returncode == (4 if dry else 1)
        assert "goes on as it was" in told[1]["error"] and "settings" in told[1]["error"]
        assert broken.starts == ["fresh"] and stub.starts == ["fresh", "takeover"]


def test_who_has_no_keeper_that_takes_it_back_is_not_said_to_go_on(stub: Rig) -> None:
    stub.mount()
    keeper = stub.keeper
    keeper.send_signal(signal.SIGKILL)
    assert keeper.wait(10)
    done = tierfs("upgrade", stub.place, "--daemon-module", "tests.deploy.no_such_daemon")
    assert done.returncode == 1, done.stdout
    is_there = is_running(stub.instance)
    assert ("goes on as it was" in done.stderr) == is_there, done.stderr + stub.log()
    assert ("is not mounted any more" in done.stderr) != is_there
