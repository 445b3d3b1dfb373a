"""The handbook followed: failures are brought about, its commands typed, and their answers compared with its own."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import remove_leftovers
from rig.documents import Block, below
from rig.instance import wait_until
from rig.reader import Reader
from tests.conftest import needs_fuse, repository

PAGE = repository() / "docs" / "failures.md"


@pytest.fixture(scope="module")
def operator() -> Iterator[Reader]:
    """At a machine with a mount, an object tier and two steps in both."""
    needs_fuse()
    place = Path("/tmp") / f"tierfs-docs-{uuid.uuid4().hex[:8]}"
    typist = Reader(place, place.name, environment={}, replaced={})
    try:
        store = place / "objects"
        typist.type([f"tierfs mount /ckpt -o size=256MiB,object=file://{store},persist.settle_s=0"])
        (typist.mountpoint / "run1").mkdir()
        typist.type(["python examples/save_and_load.py /ckpt/run1", "tierfs flush /ckpt/run1 --wait --timeout 60"])
        wait_until(lambda: all_summed_up(typist), "every file has a checksum")
        yield typist
    finally:
        typist.leave()
        remove_leftovers(place.name)


def section(heading: str) -> list[Block]:
    return below(PAGE, f"{heading} ✓")


def all_summed_up(operator: Reader) -> bool:
    return all(step["checksummed"] == step["files"] for step in operator.instance.status()["steps"])


def test_the_sections_that_claim_it_are_followed() -> None:
    claimed = set(re.findall(r"^## (.+) ✓$", PAGE.read_text(), re.M))
    tests = Path(__file__).parent.glob("test_handbook*.py")
    followed = {name for test in tests for name in re.findall(r"section\(\"(.+?)\"\)", test.read_text())}
    assert claimed == followed


def test_a_killed_daemon(operator: Reader) -> None:
    daemon = operator.instance.daemon_pid()
    os.kill(daemon, signal.SIGKILL)
    assert (operator.mountpoint / "run1" / "step_2" / ".metadata").stat().st_size > 0  # waits for the next one
    operator.instance.wait_for_new_daemon(daemon)
    for block in section("A killed daemon"):
        operator.follow(block)


def test_a_killed_keeper(operator: Reader) -> None:
    keeper = operator.instance.status()["keeper_pid"]
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: operator.instance.status()["keeper_pid"] is None, "the keeper is gone")
    for block in section("A killed keeper"):
        operator.follow(block)


def test_damaged_bytes(operator: Reader) -> None:
    backing = operator.instance.ram_path / "root" / "run1" / "step_2" / "__0_0.distcp"
    with open(backing, "r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    for block in section("Damaged bytes"):
        operator.follow(block)
    operator.type(["python - <<'EOF'\n" + LOADED + "EOF"])


LOADED = """\
import torch, torch.distributed.checkpoint as dcp
loaded = {"weight": torch.empty(8 << 20), "step": 0}
dcp.load(loaded, checkpoint_id="/ckpt/run1/step_2")
assert loaded["step"] == 2 and bool((loaded["weight"] == 2).all())
"""


def test_the_object_store_is_away(operator: Reader) -> None:
    store, away = operator.place / "objects", operator.place / "away"
    store.rename(away)
    try:
        store.touch()  # a file: the directory can't be made anew
        step = operator.mountpoint / "run1" / "step_3"
        step.mkdir()
        (step / "model.pt").write_bytes(b"w" * (1 << 20))
        (step / "commit_success.txt").touch()
        wait_until(lambda: not operator.instance.status()["object"]["reachable"], "the store's loss is noticed")
        away_block, back_block = section("The object store is away")
        operator.follow(away_block)
    finally:
        store.unlink()
        away.rename(store)
    operator.follow(back_block)


def test_a_full_tier(operator: Reader) -> None:
    step = operator.mountpoint / "run1" / "step_6"
    step.mkdir()
    with open(step / "model.pt", "wb", buffering=0) as file, pytest.raises(OSError) as failed:
        for _ in range(300):
            file.write(b"w" * (1 << 20))
    assert failed.value.errno == errno.ENOSPC
    for block in section("The tier is full"):
        operator.follow(block)
    operator.type(["tierfs rm /ckpt/run1/step_6"])


def test_a_step_that_never_completes(operator: Reader) -> None:
    step = operator.mountpoint / "run1" / "step_7"
    step.mkdir()
    (step / "__0_0.distcp").write_bytes(b"half")
    for block in section("A step that never completes"):
        operator.follow(block)
    operator.type(["tierfs rm /ckpt/run1/step_7"])


def test_umount_is_refused(operator: Reader) -> None:
    held = operator.mountpoint / "run1" / "step_1" / ".metadata"
    command = [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"]
    holder = subprocess.Popen([*command, held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        for block in section("Umount is refused"):
            operator.follow(block)
    finally:
        holder.communicate(timeout=20)
