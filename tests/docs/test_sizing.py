"""The formula of docs/sizing.md: its examples as printed, and that a tier of that size is enough on a real mount."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount.cli.sizing_command import MARGIN, size_tier
from rig.documents import blocks, differences
from rig.instance import CommandFailed, mounted, tierfs, wait_until
from tests.conftest import needs_fuse, repository

EXAMPLES = blocks(repository() / "docs" / "sizing.md", "docs/sizing.md")
MIB = 1 << 20


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.where)
def test_example_of_the_sizing_page(block) -> None:  # type: ignore[no-untyped-def]
    (command,) = block.commands
    assert differences(block.expected, tierfs(*command.split()[1:])) == [] and block.expected


@given(
    checkpoint=st.integers(1, 10**15),
    nodes=st.integers(1, 4096),
    replicas=st.integers(1, 4),
    kept=st.integers(1, 10),
    waiting=st.integers(0, 10),
)
def test_every_copy_of_every_step_fits(checkpoint: int, nodes: int, replicas: int, kept: int, waiting: int) -> None:
    found = size_tier(checkpoint, nodes=nodes, replicas=replicas, kept=kept, waiting=waiting)
    copies = min(replicas, nodes)
    assert found.size_bytes * nodes >= checkpoint * copies * (kept + 1 + waiting)
    assert found.network_bytes == found.shard_bytes * (copies - 1)
    more = size_tier(checkpoint, nodes=nodes, replicas=replicas, kept=kept + 1, waiting=waiting)
    assert more.size_bytes - found.size_bytes >= found.step_bytes
    assert found.size_bytes <= (checkpoint + nodes) * copies * (kept + 1 + waiting) * (1 + MARGIN) / nodes + copies + 1


def test_json_and_refusals() -> None:
    answer = json.loads(tierfs("sizing", "--parameters", "1.5T", "--world-size", "64", "--json"))
    assert answer["checkpoint_bytes"] == 21 * 10**12 and answer["nodes"] == 8
    for wrong in (
        ["--parameters", "70X", "--world-size", "8"],
        ["--parameters", "70B", "--world-size", "0"],
        ["--world-size", "8"],
        ["--parameters", "70B", "--checkpoint", "1G", "--world-size", "8"],
        ["--parameters", "70B"],
    ):
        with pytest.raises(CommandFailed, match="ended with 2"):
            tierfs("sizing", *wrong)


def test_a_tier_of_that_size_takes_one_save_after_the_other(tmp_path: Path) -> None:
    """More saves than the tier holds: none meets ENOSPC, the newest two stay. With room for a step less one does."""
    needs_fuse()
    size = 120 * MIB
    right = size_tier(size, nodes=1, replicas=2, kept=2).size_bytes
    for tier_bytes, is_enough in ((right, True), (right - size, False)):
        with mounted(tmp_path / str(is_enough), f"sizing-{uuid.uuid4().hex[:8]}", size=str(tier_bytes)) as instance:
            run = instance.mountpoint / "run"
            run.mkdir()
            saved = []
            for number in range(1, 6):
                try:
                    save(run / f"step_{number}", size)
                except OSError:
                    break
                saved.append(f"step_{number}")
                wait_until(lambda: complete(instance.steps("run")) >= {saved[-1]}, f"{saved[-1]} is complete")  # noqa: B023
            assert (len(saved) == 5) == is_enough, saved
            assert complete(instance.steps("run")) >= set(saved[-2:])


def save(step: Path, size: int) -> None:
    step.mkdir()
    for shard in range(4):
        with open(step / f"shard-{shard}.pt", "wb", buffering=0) as file:
            for _ in range(size // 4 // MIB):
                file.write(b"s" * MIB)
    (step / "commit_success.txt").touch()


def complete(steps: dict[str, dict[str, object]]) -> set[str]:
    return {name for name, step in steps.items() if step["state"] == "complete"}
