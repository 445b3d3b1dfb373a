"""Two nodes are brought to another version, one after the other, under a training that saves and loads by stock DCP."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rig import cluster_jobs as jobs
from rig.checkpoints import MIB
from rig.cluster import Node, cluster
from rig.cluster_steps import wait_latest
from rig.fixtures import dice
from rig.instance import wait_until
from rig.ranks import Job, run_ranks
from tests.conftest import needs_fuse, repository
from tests.deploy.rolling_jobs import save_and_load_until_stopped

pytestmark = pytest.mark.slow

__all__ = ["dice"]

SIZE = 8 * MIB
RUN = "run"


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of tierfs as it is now, that calls itself 9.9."""
    place = tmp_path_factory.mktemp("version")
    for package in ("tierfs", "mount", "dcp_compat"):
        shutil.copytree(repository() / package, place / package)
    file = place / "tierfs/__init__.py"
    text = file.read_text()
    file.write_text(text.replace('__version__ = "', '__version__ = "9.9+'))
    assert file.read_text() != text
    return place


def replace(node: Node, checkout: Path) -> None:
    """`tierfs mount --replace` of that checkout, as a rolling update does it on each node."""
    options = ",".join(f"{key}={value}" for key, value in node.options.items())
    program = "import sys; from mount.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "mount", str(node.mountpoint), "-o", options, "--replace"]
    done = subprocess.run(
        node.host.command(*command),
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr + node.log()
    assert done.stdout.startswith("replaced "), done.stdout


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_two_nodes_are_updated_under_a_running_training(
    next_version: Path, tmp_path: Path, dice: random.Random
) -> None:
    needs_fuse()
    store = tmp_path / "store"
    store.mkdir()
    with cluster(nodes=2, object=f"file://{store}", persist_settle_s="0") as nodes, nodes.at_most(280):
        (nodes[0].mountpoint / RUN).mkdir()
        stop = tmp_path / "stop"
        job = Job(save_and_load_until_stopped, RUN, SIZE, stop, table=jobs.seats(nodes.nodes))
        try:
            job.next_event()
            began = time.monotonic()
            job.next_event()
            round_s = time.monotonic() - began
            for checkout in (next_version, repository()):  # there, and back
                for node in nodes:
                    daemon = node.daemon_pid()
                    time.sleep(dice.uniform(0, round_s))
                    replace(node, checkout)
                    assert node.status()["version"].startswith("9.9+") == (checkout == next_version)
                    assert node.daemon_pid() != daemon
                    job.next_event()
            stop.touch()
            seeds = job.wait()[0]
        finally:
            job.kill()
        wait_latest(nodes.nodes, f"step_{seeds[-1]}", RUN)
        steps = {f"{RUN}/step_{seed}": seed for seed in seeds}
        for table in (jobs.seats(nodes.nodes), jobs.seats(nodes[1:])):
            run_ranks(jobs.check_steps, steps, SIZE, table=table)
        nodes.wait_members()
        for node in nodes:
            assert node.status()["takeovers"] == 2
            wait_until(lambda node=node: not node.status()["cluster"]["lost"], "nobody is missed")  # type: ignore[misc]
            wait_until(
                lambda node=node: {step["level"] for step in node.status()["steps"]} == {"object"},  # type: ignore[misc]
                "what was saved meanwhile is durable",
            )
