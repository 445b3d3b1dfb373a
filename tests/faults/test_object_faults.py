"""Whatever the object store or the way to it does: no reader gets a wrong byte, no save in RAM waits or fails, no
finished step is lost, and once the trouble is over everything arrives."""

from __future__ import annotations

import errno
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_proxy import FaultProxy, Rule
from rig.instance import Instance, tierfs, wait_until
from rig.object_fixtures import Mount, levels, wait_persisted
from rig.plain_steps import check_step, content, shard_names, write_step
from rig.s3_servers import S3Server

pytestmark = pytest.mark.slow

SIZES = [40 * MIB, 5 * MIB, 40_000]


def every_fault(probability: float) -> list[Rule]:
    """Each fault that there is, at random requests of both directions."""
    return (
        [
            Rule(
                action,
                times=None,
                probability=probability,
                status=status,
                code=code,
                after_bytes=after,
                seconds=6,
                bytes_s=8 * MIB,
            )
            for action, status, code, after in (
                ("answer", 503, "SlowDown", 0),
                ("answer", 500, "InternalError", 0),
                ("answer", 403, "AccessDenied", 0),
                ("answer", 400, "ExpiredToken", 0),
                ("refuse", 503, "SlowDown", 0),
                ("cut_request", 0, "", 0),
                ("cut_request", 0, "", 100_000),
                ("stall_request", 0, "", 200_000),
                ("slow_request", 0, "", 0),
                ("flip_request", 0, "", 30_000),
                ("lose_answer", 0, "", 0),
            )
        ]
        + [
            Rule(action, "GET", times=None, probability=probability, after_bytes=after, seconds=6, bytes_s=8 * MIB)
            for action, after in (
                ("cut_answer", 100_000),
                ("truncate_answer", 30_000),
                ("stall_answer", 200_000),
                ("slow_answer", 0),
                ("flip_answer", 30_000),
                ("ignore_range", 0),
            )
        ]
        + [
            Rule("answer", "POST", "uploadId=", times=None, probability=0.3, status=200, code="InternalError"),
            Rule(
                "answer", "PUT", "manifest", times=None, probability=0.3, status=409, code="ConditionalRequestConflict"
            ),
        ]
    )


def save_seconds(instance: Instance, steps: list[int]) -> list[float]:
    seconds = []
    for number in steps:
        begin = time.monotonic()
        write_step(instance.mountpoint / "run" / f"step_{number}", number, SIZES)
        seconds.append(time.monotonic() - begin)
    return seconds


def read_pieces(step: Path, number: int, dice: random.Random, pieces: int) -> int:
    """Reads here and there; every byte that comes is the right one. Returns how many reads failed (EIO only)."""
    failed = 0
    wanted = {name: content(number, index, SIZES[index]) for index, name in enumerate(shard_names(len(SIZES)))}
    for _ in range(pieces):
        name = dice.choice(list(wanted))
        offset = dice.randrange(len(wanted[name]))
        try:
            with (step / name).open("rb") as file:
                file.seek(offset)
                got = file.read(300_000)
        except OSError as error:
            assert error.errno == errno.EIO, error
            failed += 1
            continue
        assert got == wanted[name][offset : offset + 300_000], f"{name} at {offset}"
    return failed


def test_random_faults_never_give_a_wrong_byte_nor_lose_a_step(
    mount: Mount, bucket: Bucket, proxy: FaultProxy, dice: random.Random
) -> None:
    proxy.reseed(dice.randrange(1 << 30))
    rounds = int(os.environ.get("TIERFS_KILLS", "8")) // 8  # `make soak-kills` asks for 12
    steps = ["step_1", "step_2", "step_3", "step_4"]
    with mount(transfer_read_retry_for_s="4", s3_read_timeout_s="1.5") as instance:
        quiet = save_seconds(instance, [1, 2])
        wait_persisted(instance, *steps[:2])
        proxy.add(*every_fault(0.025))
        noisy = save_seconds(instance, [3, 4])
        assert statistics.median(noisy) < 5 * statistics.median(quiet) + 2, (quiet, noisy)
        hits: set[str] = set()
        for turn in range(rounds + 20):
            if turn >= rounds and len(hits) >= 4:
                break
            for number in (1, 2):
                step = instance.mountpoint / "run" / f"step_{number}"
                tierfs("evict", step)
                read_pieces(step, number, dice, 8)
                bucket.check_whole()
            hits = {rule.action for rule in proxy.rules if rule.hits}
        assert len(hits) >= 4, "too few faults to mean anything"
        proxy.clear()
        wait_persisted(instance, *steps, timeout_s=90)
        for number in (1, 2, 3, 4):
            check_step(instance.mountpoint / "run" / f"step_{number}", number, SIZES)
        assert bucket.check_whole() == {f"run/{step}" for step in steps}
        wait_until(lambda: not bucket.leftovers(), f"nothing is left over: {bucket.leftovers()}", 30)


def test_a_bit_that_flips_in_every_fetch_is_an_error_and_never_a_wrong_byte(
    mount: Mount, proxy: FaultProxy, bucket: Bucket
) -> None:
    sizes = [20 * MIB]
    with mount(transfer_read_retry_for_s="2") as instance:
        step = instance.mountpoint / "run" / "step_1"
        write_step(step, 1, sizes)
        wait_persisted(instance, "step_1")
        tierfs("evict", step)
        proxy.add(Rule("flip_answer", method="GET", path="safetensors", times=None, after_bytes=5 * MIB))
        with pytest.raises(OSError) as refused:
            (step / shard_names(1)[0]).read_bytes()
        assert refused.value.errno == errno.EIO
        proxy.clear()
        check_step(step, 1, sizes)


def problems(instance: Instance) -> str:
    """All that `tierfs status` has to say about what goes wrong."""
    status = instance.status()
    sentences = [problem["message"] for problem in status["problems"]]
    tier = status["object"] or {}
    sentences += [tier.get("problem") or "", tier.get("last_error") or ""]
    return " ".join(sentences + [each.get("error") or "" for each in tier.get("sending", [])])


def wait_for_problem(instance: Instance, *words: str) -> None:
    def is_said() -> bool:
        said = problems(instance).lower()
        return any(word.lower() in said for word in words)

    try:
        wait_until(is_said, f"status says one of {words}", 30, every_s=0.2)
    except AssertionError as error:
        raise AssertionError(f"{error}; it says {problems(instance)!r}") from None


def test_a_server_that_is_down_at_mount_delays_nothing_and_gets_all_when_it_is_back(
    mount: Mount, bucket: Bucket, proxy: FaultProxy
) -> None:
    proxy.pause()
    begin = time.monotonic()
    with mount() as instance:
        assert time.monotonic() - begin < 15
        write_step(instance.mountpoint / "run" / "step_1", 1, SIZES)
        wait_until(lambda: levels(instance) == {"step_1": "ram"}, "the step is complete")
        wait_for_problem(instance, "connect", "refused", "reach")
        proxy.resume()
        wait_persisted(instance, "step_1")
        assert bucket.check_whole() == {"run/step_1"}


def test_a_server_that_is_killed_half_way_gets_the_rest_when_it_is_back(
    mount: Mount, bucket: Bucket, proxy: FaultProxy, seaweedfs_server: S3Server
) -> None:
    with mount() as instance:
        proxy.add(Rule("slow_request", method="PUT", path="partNumber=1&", bytes_s=8 * MIB))
        write_step(instance.mountpoint / "run" / "step_1", 1, SIZES)
        wait_until(lambda: any(part == 2 for _, part in proxy.whole_bodies()), "the second part is sent", 30)
        seaweedfs_server.restart()
        wait_persisted(instance, "step_1")
        assert bucket.check_whole() == {"run/step_1"}
        assert not bucket.leftovers()


def test_a_bucket_that_is_made_later_gets_all(mount: Mount, seaweedfs_server: S3Server) -> None:
    name = f"later-{os.getpid()}"
    later = Bucket(seaweedfs_server, name, "ckpt")
    with mount(object=later.url) as instance:
        write_step(instance.mountpoint / "run" / "step_1", 1, [MIB])
        wait_for_problem(instance, "bucket")
        seaweedfs_server.make_bucket(name)
        wait_persisted(instance, "step_1")
        assert later.check_whole() == {"run/step_1"}


def test_credentials_that_are_corrected_are_used_without_a_restart(
    mount: Mount, bucket: Bucket, seaweedfs_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = tmp_path / "credentials"

    def write_credentials(secret: str) -> None:
        credentials.write_text(
            f"[default]\naws_access_key_id = {seaweedfs_server.access_key}\naws_secret_access_key = {secret}\n"
        )

    write_credentials("wrong")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    with mount() as instance:
        write_step(instance.mountpoint / "run" / "step_1", 1, [MIB])
        wait_for_problem(instance, "denied", "credential", "signature", "403")
        assert "wrong" not in instance.log(10_000)
        write_credentials(seaweedfs_server.secret_key)
        wait_persisted(instance, "step_1")
        assert bucket.check_whole() == {"run/step_1"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_gets_all_once_it_has_room(mount: Mount, small_disk: Path, tmp_path: Path) -> None:
    other_data = small_disk / "other-data"
    other_data.write_bytes(bytes(30 * MIB))
    sizes = [25 * MIB, MIB]
    with mount(object=f"file://{small_disk}/tier") as instance:
        write_step(instance.mountpoint / "run" / "step_1", 1, sizes)
        wait_for_problem(instance, "space", "full")
        assert not list(small_disk.rglob("manifest.json"))
        other_data.unlink()
        wait_persisted(instance, "step_1")
        check_step(small_disk / "tier" / "run" / "step_1", 1, sizes)
        tierfs("evict", instance.mountpoint / "run" / "step_1")
        check_step(instance.mountpoint / "run" / "step_1", 1, sizes)
