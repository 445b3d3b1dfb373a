"""Steps go to the local disk, leave RAM for it, and come back from it when RAM was lost; whatever the disk does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from disk.conftest import MountDisk
from rig import checkpoints
from rig.instance import CommandFailed, Instance, tierfs, wait_until
from rig.kills import kill_keeper_and_daemon
from rig.plain_steps import MARKER, check_step, shard_names, write_step

MIB = 1 << 20
SIZES = [20 * MIB, 3 * MIB + 17, 1000]


def save(instance: Instance, number: int, *, sizes: list[int] = SIZES, namespace: str = "run") -> Path:
    step = instance.mountpoint / namespace / f"step_{number}"
    write_step(step, number, sizes)
    return step


def save_to_disk(instance: Instance, *numbers: int, sizes: list[int] = SIZES, namespace: str = "run") -> None:
    for number in numbers:
        save(instance, number, sizes=sizes, namespace=namespace)
        wait_on_disk(instance, number, namespace=namespace)


def state(instance: Instance, number: int, namespace: str = "run") -> str:
    step = instance.steps(namespace).get(f"step_{number}")
    return str(step["disk"]["state"]) if step is not None else "gone"


def wait_on_disk(instance: Instance, number: int, *, namespace: str = "run") -> None:
    wait_until(lambda: state(instance, number, namespace) == "stored", f"step {number} is on the disk")


def lose_ram(instance: Instance) -> None:
    """What a reboot leaves: nothing of RAM, and no daemon had time to do anything."""
    kill_keeper_and_daemon(instance)
    tierfs("umount", "--discard", instance.name)


def problems(instance: Instance) -> str:
    return "\n".join(each["message"] for each in instance.status()["problems"])


def steps_on(disk: Path, namespace: str = "run") -> set[str]:
    where = disk / "tier" / "steps" / namespace
    return set(os.listdir(where)) if where.is_dir() else set()


def test_more_steps_than_ram_holds_are_kept_and_come_back_after_a_reboot(mount_disk: MountDisk, disk: Path) -> None:
    numbers = [1, 2, 3, 4, 5]
    with mount_disk(size="80M") as instance:
        save_to_disk(instance, *numbers)
        found = instance.steps("run")
        assert [step["level"] for step in found.values()] == ["disk"] * len(numbers)
        assert found["step_1"]["stubs"] == 2  # RAM holds three of five; what is small stays
        assert found["step_5"]["stubs"] == 0
        check_step(instance.mountpoint / "run" / "step_1", 1, SIZES)
        shutil.rmtree(instance.mountpoint / "run" / "step_2")
        wait_until(lambda: "step_2" not in steps_on(disk), "what is removed leaves the disk")
        numbers.remove(2)
        lose_ram(instance)

        instance.mount()
        root = instance.mountpoint / "run"
        assert sorted(os.listdir(root)) == sorted(["latest", *(f"step_{number}" for number in numbers)])
        assert os.readlink(root / "latest") == "step_5"
        shard = root / "step_5" / shard_names(1)[0]
        assert (shard.stat().st_size, os.getxattr(shard, "user.tierfs.tier")) == (SIZES[0], b"disk")
        for number in numbers:
            check_step(root / f"step_{number}", number, SIZES)
        tierfs("prefetch", root / "step_1")
        assert os.getxattr(root / "step_1" / shard_names(1)[0], "user.tierfs.tier") == b"ram"
        assert "all as sealed" in tierfs("verify", "--tier", "disk", root)
        save_to_disk(instance, 6)  # and it goes on


def test_a_dcp_checkpoint_comes_back_bit_for_bit_and_lies_on_the_disk_as_one(mount_disk: MountDisk, disk: Path) -> None:
    with mount_disk(size="256M") as instance:
        (instance.mountpoint / "run").mkdir()
        checkpoints.save(instance.mountpoint / "run" / "step_1", 1, 24 * MIB)
        tierfs("wait", "--level", "disk", "--timeout", "20", instance.mountpoint / "run" / "step_1")
        lose_ram(instance)
        checkpoints.check(disk / "tier" / "steps" / "run" / "step_1", 1, 24 * MIB)
        instance.mount()
        checkpoints.check(instance.mountpoint / "run" / "latest", 1, 24 * MIB)
        checkpoints.save(instance.mountpoint / "run" / "step_2", 2, 24 * MIB)
        tierfs("umount", "--discard", instance.mountpoint)  # a planned reboot, with no time to settle
        instance.mount()
        checkpoints.check(instance.mountpoint / "run" / "step_2", 2, 24 * MIB)


def test_what_is_damaged_or_half_there_is_never_shown_as_whole(mount_disk: MountDisk, disk: Path) -> None:
    with mount_disk(size="256M") as instance:
        save_to_disk(instance, 1, 2, 3, 4, 5, 6)
        lose_ram(instance)
        steps, shard = disk / "tier" / "steps" / "run", shard_names(1)[0]
        with (steps / "step_6" / shard).open("r+b") as file:
            file.seek(12 * MIB)
            file.write(b"other bytes")
        with (steps / "step_5" / shard).open("r+b") as file:
            file.truncate(MIB)
        (steps / "step_4" / MARKER).unlink()
        manifest = steps / "step_3" / ".tierfs" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"mtime_ns":1', b'"mtime_ns":2', 1))
        shutil.copytree(steps / "step_1", disk / "tier" / "incoming" / "half")

        instance.mount()
        root = instance.mountpoint / "run"
        assert set(os.listdir(root)) == {"latest", "step_1", "step_2", "step_6"}
        assert not os.listdir(disk / "tier" / "incoming")
        assert problems(instance).count("damaged and not shown") == 3
        with pytest.raises(OSError) as failed:
            (root / "step_6" / shard).read_bytes()
        assert failed.value.errno == errno.EIO
        wait_until(lambda: os.readlink(root / "latest") == "step_2", "latest goes back to what is whole")
        assert "other bytes than were stored" in problems(instance)
        check_step(root / "step_2", 2, SIZES)
        lose_ram(instance)

        instance.mount()
        assert set(os.listdir(root)) == {"latest", "step_1", "step_2"}, "it is not forgotten by the next reboot"
        save_to_disk(instance, 3, 6)  # saved again they are whole again
        assert "step_6" not in problems(instance)


def test_an_overwrite_replaces_the_copy_at_once_and_an_unfinished_one_never_does(
    mount_disk: MountDisk, disk: Path
) -> None:
    with mount_disk() as instance:
        step = save(instance, 1)
        wait_on_disk(instance, 1)
        (step / shard_names(1)[0]).write_bytes(b"new")
        lose_ram(instance)
        instance.mount()
        check_step(step, 1, SIZES)
        write_step(step, 7, SIZES)
        wait_until(lambda: instance.steps("run")["step_1"]["generation"] == 2, "it is complete again")
        wait_on_disk(instance, 1)
        (step / "notes.txt").write_text("added later")
        wait_until(lambda: (disk / "tier/steps/run/step_1/notes.txt").exists(), "what was added is there too")
        written = instance.status()["disk"]["bytes_written"]
        assert written < sum(SIZES) + MIB, "what is there already is not copied again"
        lose_ram(instance)
        instance.mount()
        check_step(step, 7, SIZES)
        assert (step / "notes.txt").read_text() == "added later"
        assert instance.steps("run")["step_1"]["generation"] == 2
        tierfs("umount", instance.mountpoint)
        shutil.rmtree(disk / "tier" / "trash")
        instance.mount()  # with RAM as it was
        check_step(step, 7, SIZES)


@pytest.mark.slow
def test_the_oldest_leave_a_full_disk_and_the_newest_and_the_pinned_stay(mount_disk: MountDisk, disk: Path) -> None:
    with mount_disk(size="96M", disk_size="100M") as instance:
        save_to_disk(instance, 1, namespace="other")
        save_to_disk(instance, 1, 2)
        tierfs("pin", instance.mountpoint / "run" / "step_1")
        save_to_disk(instance, 3, 4, 5)
        assert steps_on(disk) == {"step_1", "step_4", "step_5"}
        assert steps_on(disk, "other") == {"step_1"}
        assert set(instance.steps("run")) >= {"step_1", "step_4", "step_5"}
        assert "step_2" not in instance.steps("run"), "it was on the disk only"
        check_step(instance.mountpoint / "other" / "step_1", 1, SIZES)

        tierfs("umount", instance.mountpoint)
        instance.options |= {"retention.disk_steps": "1", "disk.size": "60M"}
        instance.mount()
        tierfs("unpin", instance.mountpoint / "run" / "step_1")
        wait_until(lambda: steps_on(disk) == {"step_5"}, "only the newest stays", 30)

        for number in (6, 7, 8):
            save(instance, number, sizes=[24 * MIB])
        wait_until(lambda: state(instance, 8) == "waiting", "it has no room while the newest one stays")
        assert "does not fit" in problems(instance)
        assert steps_on(disk) == {"step_5"}
        assert "step_4" not in instance.steps("run"), "what only RAM had is evicted as without a disk"
        check_step(instance.mountpoint / "run" / "step_5", 5, SIZES)


@pytest.mark.slow
def test_saves_go_on_when_the_disk_is_full_or_gone_and_it_is_used_again_when_it_is_back(
    mount_disk: MountDisk, disk: Path
) -> None:
    with mount_disk(size="96M") as instance:
        save_to_disk(instance, 1)
        with (disk / "others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 450 * MIB)
        for number in (2, 3, 4, 5, 6, 7):
            save(instance, number)  # more than RAM holds: none may fail
        wait_until(lambda: state(instance, 7) == "waiting", "the newest one waits for room")
        assert "step_1" in steps_on(disk)
        check_step(instance.mountpoint / "run" / "step_7", 7, SIZES)
        (disk / "others").unlink()

        subprocess.run(["umount", "-l", disk], check=True)
        wait_until(lambda: instance.status()["disk"]["state"] == "away", "the loss is noticed", 30)
        assert "can't be used" in problems(instance)
        for number in (8, 9, 10, 11):
            save(instance, number)
        latest = instance.mountpoint / "run" / "latest"
        wait_until(lambda: os.readlink(latest) == "step_11", "the last save is the newest")
        assert "step_1" in instance.steps("run"), "what is on the disk only is not gone for good"
        with pytest.raises(CommandFailed):
            tierfs("wait", "--level", "disk", "--timeout", "1", instance.mountpoint / "run" / "step_11")
        assert not (disk / "tier").exists(), "what the disk was mounted on is not written to"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tierfs-test-disk", disk], check=True)
        (disk / "tier").mkdir()  # another disk took its place
        wait_on_disk(instance, 11)
        assert instance.status()["disk"]["state"] == "ok"


@pytest.mark.slow
def test_a_disk_that_goes_while_its_steps_are_read_condemns_none_and_fails_no_save(
    mount_disk: MountDisk, disk: Path
) -> None:
    with mount_disk(size="96M") as instance:
        root, shard = instance.mountpoint / "run", shard_names(1)[0]
        save_to_disk(instance, 1, 2, 3, 4, 5, 6)
        away = disk.with_name(f"{disk.name}-away")
        away.mkdir()
        (root / "step_1" / shard).read_bytes()  # the larger one of two stubs is in RAM again
        subprocess.run(["mount", "--make-private", "--bind", disk, away], check=True)
        try:
            subprocess.run(["umount", "-l", disk], check=True)
            with pytest.raises(OSError) as failed:
                (root / "step_2" / shard).read_bytes()
            assert failed.value.errno == errno.EIO
            wait_until(lambda: instance.status()["disk"]["state"] == "away", "a read that fails has it looked at", 3)
            for number in (7, 8, 9):
                save(instance, number)
            subprocess.run(["mount", "--bind", away, disk], check=True)
            wait_until(lambda: instance.status()["disk"]["state"] == "ok", "it is back", 20)
            for number in (1, 2, 9):
                check_step(root / f"step_{number}", number, SIZES)
            assert "step_2" not in problems(instance)
        finally:
            subprocess.run(["umount", "-l", away])


@pytest.mark.slow
def test_where_the_disk_is_missing_latest_names_no_step_of_it(mount_disk: MountDisk, disk: Path) -> None:
    with mount_disk(size="96M") as instance:
        save_to_disk(instance, 1, 2)
        lose_ram(instance)
        instance.mount()
        latest = instance.mountpoint / "run" / "latest"
        assert len(os.listdir(latest)) == 4  # stubs are made
        kill_keeper_and_daemon(instance)
        subprocess.run(["umount", "-l", disk], check=True)
        instance.mount()  # an empty mount point: another disk, so to speak
        wait_until(lambda: not os.path.lexists(latest), "latest names no step that can't be read")
        with pytest.raises(OSError) as failed:
            (instance.mountpoint / "run" / "step_2" / shard_names(1)[0]).read_bytes()
        assert failed.value.errno == errno.EIO
        kill_keeper_and_daemon(instance)
        shutil.rmtree(disk / "tier")
        disk.rmdir()
        instance.mount()  # none at all
        assert instance.status()["disk"]["state"] == "away"
        save(instance, 3)
        wait_until(lambda: os.path.lexists(latest) and os.readlink(latest) == "step_3", "a save goes on as ever")


def test_a_damaged_copy_is_made_anew_from_ram_and_what_can_not_be_removed_is_in_nobodys_way(
    mount_disk: MountDisk, disk: Path
) -> None:
    with mount_disk(size="128M") as instance:
        stuck = disk / "tier" / "trash" / "stuck"
        stuck.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tierfs-test-stuck", stuck], check=True)
        try:
            save_to_disk(instance, 1, 2)
            wait_until(lambda: "can't be removed" in problems(instance), "it is said")
        finally:
            subprocess.run(["umount", "-l", stuck], check=True)
        with (disk / "tier/steps/run/step_1" / shard_names(1)[0]).open("r+b") as file:
            file.write(b"other bytes")
        root = instance.mountpoint / "run"
        with pytest.raises(CommandFailed, match="has other bytes"):
            tierfs("verify", "--tier", "disk", root)
        wait_on_disk(instance, 1)
        assert "all as sealed" in tierfs("verify", "--tier", "disk", root)
        assert "step_1" not in problems(instance)


def test_every_so_many_th_step_goes_there_and_none_of_some_namespaces(mount_disk: MountDisk, disk: Path) -> None:
    with mount_disk(
        disk_policy="every", disk_every_steps="2", **{'namespaces_"scratch".disk.policy': "none"}
    ) as instance:
        save(instance, 1)
        save_to_disk(instance, 2)
        save(instance, 3)
        kill_keeper_and_daemon(instance)
        instance.mount()  # the count goes on
        save_to_disk(instance, 4)
        save(instance, 1, namespace="scratch")
        wait_until(lambda: instance.steps("scratch")["step_1"]["state"] == "complete", "it is complete")
        assert steps_on(disk) == {"step_2", "step_4"}
        assert state(instance, 1, "scratch") == "none"
        assert instance.status()["disk"]["steps_owed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["disk:begun", "disk:copied", "disk:committed", "disk:recorded"])
def test_killed_at_any_point_of_a_copy_the_next_daemon_finishes_it(
    mount_disk: MountDisk, disk: Path, point: str
) -> None:
    with mount_disk(debug_crash_at=point) as instance:
        step = save(instance, 1)
        wait_until(lambda: next(instance.ram_path.rglob("%crashed"), None), "the daemon was killed there")
        wait_on_disk(instance, 1)
        assert steps_on(disk) == {"step_1"}
        wait_until(lambda: not os.listdir(disk / "tier/incoming") and not os.listdir(disk / "tier/trash"), "tidied up")
        lose_ram(instance)
        instance.mount()
        check_step(step, 1, SIZES)


@pytest.mark.slow
def test_with_an_object_tier_what_it_is_owed_is_sent_from_the_disk_after_a_reboot(
    mount_disk: MountDisk, disk: Path, scratch: Path
) -> None:
    bucket = scratch / "away" / "bucket"
    with mount_disk(size="96M", object=f"file://{bucket}", persist_settle_s="0.2") as instance:
        save_to_disk(instance, 1, 2, 3, 4, 5)  # the object tier is away, and RAM too small for what is owed to it
        assert {step["object"]["state"] for step in instance.steps("run").values()} <= {"owed", "waiting", "sending"}
        lose_ram(instance)
        bucket.parent.mkdir()
        instance.mount()

        def levels() -> list[str]:
            return [step["level"] for step in instance.steps("run").values()]

        wait_until(lambda: levels() == ["object"] * 5, "all are in the object tier", 60)
        shutil.rmtree(disk / "tier" / "steps" / "run" / "step_1")
        check_step(instance.mountpoint / "run" / "step_1", 1, SIZES)  # what the disk lacks comes from there
