"""examples/multi-tier.toml on two nodes, with other places and smaller numbers: what lies where after some saves."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rig import checkpoints
from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import BOUND_S, Cluster
from rig.cluster_steps import wait_replicated
from rig.instance import wait_until
from rig.ranks import run_ranks
from tests.conftest import repository

pytestmark = [pytest.mark.alone, pytest.mark.slow]
NODES = 2
STORES = Path(tempfile.gettempdir()) / f"tierfs-multi-tier-{os.getpid()}"
TIER, ARCHIVE = STORES / "tier", STORES / "archive"
#: A directory has no storage classes; `catalog` is the test's own.
OPTIONS = {
    "object": f"file://{TIER}",
    "persist_every_steps": "4",
    "retention_object_steps": "2",
    "archive_object": f"file://{ARCHIVE}",
    "archive_storage_class": "",
    "archive_every_s": "1ms",
}
SIZE = 4 * MIB
SAVES = list(range(1, 9))


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[None]:
    shutil.rmtree(STORES, ignore_errors=True)
    STORES.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERFS_CONFIG", str(repository() / "examples" / "multi-tier.toml"))
        yield
    shutil.rmtree(STORES, ignore_errors=True)


def committed(store: Path, run: str) -> set[str]:
    return {path.parents[1].name for path in (store / run).glob("*/.tierfs/manifest.json")}


def files_of(step: Path) -> set[str]:
    found = (path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())
    return {name for name in found if not name.startswith(".tierfs/")}


def test_every_save_is_in_ram_and_at_a_peer_some_in_the_bucket_and_few_in_the_archive(
    nodes: Cluster, run: str, tmp_path: Path
) -> None:
    run_ranks(jobs.save_with_weights, run, SAVES, SIZE, table=jobs.seats(nodes.nodes))
    wait_replicated(nodes.nodes, *(f"{run}/step_{number}" for number in SAVES))

    wait_until(lambda: committed(TIER, run) == {"step_4", "step_8"}, "each fourth step is in the bucket", BOUND_S)
    wait_until(lambda: committed(ARCHIVE, run) == {"step_4", "step_8"}, "and then in the archive", BOUND_S)
    weights = {f"model/weights_{rank}.pt" for rank in range(NODES)}
    wait_until(lambda: files_of(TIER / run / "step_6") == weights, "the weights of each second one are there", BOUND_S)
    wait_until(lambda: not (TIER / run / "step_2").exists(), "but not those of before the oldest step", BOUND_S)
    assert {path.name for path in (TIER / run).iterdir()} == {"step_4", "step_6", "step_8"}

    shown = nodes[0].steps(run)
    assert {shown[f"step_{number}"]["level"] for number in (4, 8)} == {"object"}
    wait_until(lambda: nodes[0].steps(run)["step_6"]["part"], "the part is told of")
    part = nodes[0].steps(run)["step_6"]["part"]
    assert (part["state"], part["files"], part["patterns"]) == ("sent", 1, ["model/*"]), "each node sends its own"
    wait_until(lambda: nodes[1].steps(run)["step_8"]["archive"]["state"] == "done", "each node knows", BOUND_S)

    # What the archive has is a plain checkpoint; weights of a part load as they lie there.
    shutil.copytree(ARCHIVE / run / "step_8", tmp_path / "plain")
    checkpoints.check(tmp_path / "plain", 8, SIZE)
    assert torch.load(TIER / run / "step_6" / "model" / "weights_1.pt", weights_only=True) == "seed 6"
    with pytest.raises(BaseException, match="metadata"):
        dcp.load(checkpoints.empty_state(SIZE), checkpoint_id=TIER / run / "step_6")
    told = [json.loads(path.read_bytes()) for path in (TIER / run / "step_6" / ".tierfs" / "parts").iterdir()]
    assert {name for each in told for name in each["sent"]["files"]} == weights
    assert all(".metadata" in each["left_out"] for each in told)
