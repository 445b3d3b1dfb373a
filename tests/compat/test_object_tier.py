"""The bucket's copy of a step is an ordinary DCP checkpoint: s3torchconnector and plain copies load it without tierfs,
and what s3torchconnector saved into the bucket becomes a step of the mount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rig import checkpoints
from rig.buckets import Bucket
from rig.checkpoints import MIB
from rig.fault_jobs import check_step, save_steps
from rig.instance import tierfs, wait_until
from rig.object_fixtures import Mount, wait_persisted
from rig.ranks import run_ranks
from rig.s3_servers import S3Server

pytestmark = pytest.mark.slow

pytest.importorskip("s3torchconnector.dcp", reason="s3torchconnector[dcp] is not installed", exc_type=ImportError)

SIZE = 24 * MIB

# In a process of its own: the native client has threads, and its environment is the server's.
CONNECTOR = """
import sys
import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from rig import checkpoints

verb, uri, seed, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = S3ClientConfig(force_path_style=True)
with checkpoints.quiet():
    if verb == "save":
        writer = S3StorageWriter("us-east-1", uri, s3client_config=config, overwrite=True)
        dcp.save(checkpoints.state(seed, size), storage_writer=writer)
    else:
        loaded = checkpoints.empty_state(size)
        dcp.load(loaded, storage_reader=S3StorageReader("us-east-1", uri, s3client_config=config))
        wrong = checkpoints.differences(loaded, seed, size)
        assert not wrong, wrong
"""


def connector(verb: str, bucket: Bucket, step: str, seed: int) -> None:
    """Saves or loads with s3torchconnector, straight to and from the bucket."""
    uri = f"{bucket.url}/{step}/"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CONNECTOR, verb, uri, str(seed), str(SIZE)],
        env={**bucket.server.environment(), "PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_what_the_mount_persisted_loads_without_tierfs(mount: Mount, bucket: Bucket, tmp_path: Path) -> None:
    with mount() as instance:
        root = instance.mountpoint / "run"
        root.mkdir()
        run_ranks(save_steps, root, [7], SIZE)
        wait_persisted(instance, "step_7")
    connector("load", bucket, "run/step_7", 7)
    bucket.download("run/step_7", tmp_path / "copy")
    checkpoints.check(tmp_path / "copy", 7, SIZE)


def test_what_s3torchconnector_saved_is_imported_in_place(
    mount: Mount, bucket: Bucket, seaweedfs_server: S3Server
) -> None:
    connector("save", bucket, "run/step_3", 3)
    with mount() as instance:
        step = instance.mountpoint / "run" / "step_3"
        wait_until(lambda: (instance.status()["object"] or {}).get("reachable"), "the bucket was looked at")
        assert not step.exists(), "nothing is a step before somebody says so"
        tierfs("import", step)
        assert bucket.check_whole() == {"run/step_3"}
        run_ranks(check_step, step, 3, SIZE, world=1)
        run_ranks(check_step, step.parent / "latest", 3, SIZE)
    connector("load", bucket, "run/step_3", 3)
