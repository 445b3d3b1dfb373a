"""Persisted steps are copied to the archive by a real S3 server, and parts of others go to the bucket."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from mount.object_doctor import examine_object_tier, of_archive
from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_proxy import FaultProxy
from rig.instance import Instance, tierfs, wait_until
from rig.object_fixtures import Mount, wait_persisted
from rig.plain_steps import check_step, shard_names, write_step
from tierfs.settings import S3Settings, Settings
from tierfs.settings_archive import ArchiveSettings

SIZES = [3 * MIB, MIB, 40_000]


@pytest.fixture
def archive(bucket: Bucket) -> Bucket:
    return dataclasses.replace(bucket, prefix=f"{bucket.prefix}-archive")


def wait_archived(instance: Instance, *steps: str) -> None:
    def are_there() -> bool:
        found = instance.steps("run")
        return all(found[step]["archive"]["state"] == "done" for step in steps)

    wait_until(are_there, f"{steps} are archived: {instance.steps('run')}", 40, every_s=0.1)


def test_the_store_copies_what_the_rule_picks_and_a_daemon_that_dies_meanwhile_costs_nothing(
    mount: Mount, archive: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERFS_DEBUG_CRASH_AT", "archive:file-copied:2")
    options = {
        "archive_object": archive.url,
        "archive_every_steps": "2",
        "archive_storage_class": "STANDARD_IA",
    }
    with mount(**options) as instance:
        first = instance.daemon_pid()
        for number in range(1, 4):
            write_step(instance.mountpoint / "run" / f"step_{number}", number, SIZES)
            wait_persisted(instance, f"step_{number}")
        wait_archived(instance, "step_2")
        assert instance.daemon_pid() != first, "it died half way"
        assert archive.check_whole() == {"run/step_2"} and archive.leftovers() == []
        copied = [each for each in proxy.exchanges("PUT", f"{archive.prefix}/run/step_2/[^.]") if each.status == 200]
        assert len(copied) <= 2 * len(SIZES) + 1, "what was copied before is not copied again"
        assert not any(each.request_bytes for each in copied), "no byte of it comes by this node"
        shown = instance.status()["object"]["archive"]
        assert (shown["url"], shown["steps_owed"], shown["steps_done"], shown["problem"]) == (archive.url, 0, 1, "")
        assert "archived" in tierfs("ls", instance.mountpoint / "run")
        head = archive.client.head_object(Bucket=archive.name, Key=f"{archive.prefix}/run/step_2/{shard_names(3)[0]}")
        assert head.get("StorageClass") == "STANDARD_IA"
        archive.download("run/step_2", tmp_path / "plain")
        check_step(tmp_path / "plain", 2, SIZES)
    with mount(name="reader", object=archive.url) as reader:
        wait_until(lambda: list(reader.steps("run")) == ["step_2"], "a mount of the archive shows it")
        check_step(reader.mountpoint / "run" / "step_2", 2, SIZES)
        assert os.readlink(reader.mountpoint / "run" / "latest") == "step_2"


def test_weights_lie_in_the_bucket_without_the_rest_and_no_mount_takes_them_for_a_step(
    mount: Mount, bucket: Bucket
) -> None:
    name = shard_names(3)[0]
    with mount(persist_policy="every", persist_every_steps="3", persist_files=f"{name}=1") as instance:
        for number in range(1, 4):
            write_step(instance.mountpoint / "run" / f"step_{number}", number, SIZES)
        wait_persisted(instance, "step_3")
        for number in (1, 2):
            wait_until(lambda n=number: instance.steps("run")[f"step_{n}"]["part"]["state"] == "sent", "a part is sent")  # type: ignore[misc]
        assert bucket.check_whole() == {"run/step_3"}
        assert {key for key in bucket.sizes("run/step_2/") if "/.tierfs/" not in key} == {f"run/step_2/{name}"}
        assert instance.steps("run")["step_2"]["level"] == "ram"
        assert f"part: 1 of {len(SIZES) + 1} files" in tierfs("ls", instance.mountpoint / "run")
        tierfs("umount", "--discard", instance.mountpoint)
    with mount(name="after") as after:
        wait_until(lambda: list(after.steps("run")) == ["step_3"], "only what is whole comes back")
        assert os.readlink(after.mountpoint / "run" / "latest") == "step_3"


def test_doctor_tries_the_archive_and_a_mount_refuses_one_that_the_store_can_not_copy_to(
    mount: Mount, bucket: Bucket, archive: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = S3Settings(endpoint_url=proxy.url, read_timeout_s=3)
    settings = Settings(object=bucket.url, archive=ArchiveSettings(object=archive.url), s3=s3)
    found = [each.found for each in examine_object_tier(of_archive(settings), whose="the archive ")]
    assert f"the archive {archive.url} is reachable, written to and read back" in found
    for url, why in (
        ("file:///tmp/archive", "of the kind"),
        (f"{bucket.url}/archive", "lie in each other"),
    ):
        monkeypatch.setenv("TIERFS_ARCHIVE_OBJECT", url)
        with pytest.raises(AssertionError, match=why), mount(name="refused"):
            pass
