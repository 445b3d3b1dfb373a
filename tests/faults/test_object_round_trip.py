"""Steps go to the bucket and come back when all memory is lost; what is removed here is removed there, in order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rig import checkpoints
from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_jobs import check_step, save_steps
from rig.fault_proxy import Exchange, FaultProxy, Rule
from rig.instance import tierfs, wait_until
from rig.kills import kill_keeper_and_daemon
from rig.object_fixtures import Mount, levels, wait_persisted
from rig.plain_steps import check_step as check_plain_step
from rig.plain_steps import content, shard_names, write_step
from rig.ranks import run_ranks

pytestmark = pytest.mark.slow

SIZE = 24 * MIB
CHUNK = 16 * MIB


def test_after_all_memory_is_lost_the_newest_persisted_step_loads_bit_for_bit(
    mount: Mount, bucket: Bucket, tmp_path: Path
) -> None:
    with mount(name="before", persist_policy="every", persist_every_steps="2") as before:
        root = before.mountpoint / "run"
        root.mkdir()
        run_ranks(save_steps, root, [1, 2, 3, 4, 5], SIZE)
        tierfs("umount", "--discard", before.mountpoint)
    persisted = bucket.check_whole()
    assert len(persisted) == 2
    newest = max(persisted)
    assert not bucket.leftovers()
    with mount(name="after") as after:
        root = after.mountpoint / "run"
        wait_until(lambda: (root / "latest").is_symlink(), "the index is read")
        assert os.readlink(root / "latest") == newest.removeprefix("run/")
        assert {f"run/{name}" for name in after.steps("run")} == persisted
        seed = int(newest.rpartition("_")[2])
        run_ranks(check_step, root / "latest", seed, SIZE)
    bucket.download(newest, tmp_path / "plain")
    checkpoints.check(tmp_path / "plain", seed, SIZE)


def test_a_shard_larger_than_the_tier_is_read_in_the_middle_by_chunks(
    mount: Mount, bucket: Bucket, proxy: FaultProxy
) -> None:
    sizes = [90 * MIB]
    with mount(name="large") as large:
        write_step(large.mountpoint / "run" / "step_1", 1, sizes)
        wait_persisted(large, "step_1")
        tierfs("umount", "--discard", large.mountpoint)
    with mount(size="64M", name="small") as small:
        shard = small.mountpoint / "run" / "step_1" / shard_names(1)[0]
        wait_until(shard.exists, "the index is read")
        assert shard.stat().st_size == sizes[0]
        others = rf"bytes=(?!{32 * MIB}-).*"
        proxy.add(Rule("stall_answer", path="safetensors", range=others, times=None, seconds=60))
        offset = 45 * MIB + 12345
        with shard.open("rb", buffering=0) as file:
            file.seek(offset)
            assert file.read(MIB) == content(1, 0, sizes[0])[offset : offset + MIB]
        asked = [each.range for each in proxy.exchanges("GET", "safetensors$")]
        assert asked == [(32 * MIB, CHUNK)], "what can't be held whole is not fetched ahead"
        proxy.clear()


def test_two_daemons_that_persist_the_same_step_at_once_make_one_commit(
    mount: Mount, bucket: Bucket, proxy: FaultProxy
) -> None:
    sizes = [20 * MIB, 3 * MIB]
    with mount(name="a", persist_policy="demand") as one, mount(name="b", persist_policy="demand") as other:
        both = (one, other)
        write_step(one.mountpoint / "run" / "step_1", 1, sizes)
        (other.mountpoint / "run").mkdir()
        subprocess.run(["cp", "-a", one.mountpoint / "run" / "step_1", other.mountpoint / "run"], check=True)
        for instance in both:
            wait_until(lambda i=instance: levels(i).get("step_1"), "the step is complete")  # type: ignore[misc]
            tierfs("flush", instance.mountpoint / "run" / "step_1")
        for instance in both:
            wait_persisted(instance, "step_1")
        assert bucket.check_whole() == {"run/step_1"}
        assert not bucket.leftovers()
        commits = [each for each in proxy.exchanges("PUT", "manifest.json$") if each.status == 200]
        assert len(commits) == 1, commits
        for instance in both:
            check_plain_step(instance.mountpoint / "run" / "step_1", 1, sizes)
            assert bucket.check_whole() == {"run/step_1"}


def removals(proxy: FaultProxy, step: str) -> list[Exchange]:
    """Requests that remove something of the step, or several keys of it at once."""
    one = proxy.exchanges("DELETE", step)
    several = [each for each in proxy.exchanges("POST") if "delete" in each.query]
    return sorted(one + several, key=lambda each: each.at)


def test_a_removed_step_loses_its_manifest_first_and_nothing_is_left(
    mount: Mount, bucket: Bucket, proxy: FaultProxy
) -> None:
    with mount() as instance:
        for number in (1, 2):
            write_step(instance.mountpoint / "run" / f"step_{number}", number, [2 * MIB, MIB])
        wait_persisted(instance, "step_1", "step_2")
        proxy.log.clear()
        shutil.rmtree(instance.mountpoint / "run" / "step_1")
        wait_until(lambda: not bucket.sizes("run/step_1/"), "the bucket has nothing of it", 30)
        requests = removals(proxy, "step_1")
        assert len(requests) >= 2
        assert requests[0].method == "DELETE"
        assert requests[0].path.endswith("run/step_1/.tierfs/manifest.json")
        assert bucket.check_whole() == {"run/step_2"}
        assert not bucket.leftovers()


def test_a_removal_that_was_killed_in_the_middle_is_finished_by_the_next_mount(
    mount: Mount, bucket: Bucket, proxy: FaultProxy
) -> None:
    with mount() as instance:
        for number in (1, 2):
            write_step(instance.mountpoint / "run" / f"step_{number}", number, [2 * MIB, MIB])
        wait_persisted(instance, "step_1", "step_2")
        proxy.add(
            Rule("stall_request", method="POST", path=r"\?delete", times=None, seconds=60),
            Rule("stall_request", method="DELETE", path="step_1/(?!.tierfs/manifest)", times=None, seconds=60),
        )
        shutil.rmtree(instance.mountpoint / "run" / "step_1")
        wait_until(lambda: "run/step_1" not in bucket.committed(), "its manifest is gone")
        kill_keeper_and_daemon(instance)
        assert bucket.check_whole() == {"run/step_2"}
        proxy.clear()
        instance.mount()
        assert "step_1" not in os.listdir(instance.mountpoint / "run")
        wait_until(lambda: not bucket.sizes("run/step_1/"), "the bucket has nothing of it", 30)
        assert "step_1" not in os.listdir(instance.mountpoint / "run")
        check_plain_step(instance.mountpoint / "run" / "step_2", 2, [2 * MIB, MIB])
        assert not bucket.leftovers()


@pytest.mark.parametrize("how", ["tierfs umount", "umount", "SIGTERM"])
def test_leaving_sends_first_what_is_owed(mount: Mount, bucket: Bucket, how: str) -> None:
    with mount(persist_settle_s="3600") as instance:
        write_step(instance.mountpoint / "run" / "step_1", 1, [30 * MIB])
        wait_until(lambda: levels(instance) == {"step_1": "ram"}, "the step is complete")
        if how == "tierfs umount":
            tierfs("umount", instance.mountpoint)
            assert bucket.check_whole() == {"run/step_1"}
        elif how == "umount":
            subprocess.run(["umount", instance.mountpoint], check=True)
        else:
            os.kill(instance.status()["keeper_pid"], signal.SIGTERM)
        wait_until(lambda: bucket.check_whole() == {"run/step_1"}, "the step is in the bucket", 30)
        assert not bucket.leftovers()


def test_without_flush_the_next_mount_goes_on(mount: Mount, bucket: Bucket, proxy: FaultProxy) -> None:
    sizes = [48 * MIB]
    with mount() as instance:
        proxy.add(Rule("slow_request", method="PUT", path="partNumber=1&", times=None, bytes_s=1 << 17))
        write_step(instance.mountpoint / "run" / "step_1", 1, sizes)
        wait_until(lambda: any(part == 2 for _, part in proxy.whole_bodies()), "the second part is sent", 30)
        tierfs("umount", "--no-flush", instance.mountpoint)
        assert not bucket.check_whole(), [
            (round(each.at % 1000, 2), each.method, each.path, each.query, each.fault, each.request_bytes, each.status)
            for each in proxy.exchanges("PUT|POST")
        ]
        proxy.clear()
        instance.mount()
        wait_persisted(instance, "step_1")
        assert max(proxy.whole_bodies("safetensors$").values()) == 1, "a part that was sent is not sent again"
        assert bucket.check_whole() == {"run/step_1"}
        assert not bucket.leftovers()
