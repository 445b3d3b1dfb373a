"""The library's own integration tests, unmodified, out of its source distribution on PyPI: they start a server of their
own, in whose place the gateway answers. Run by another pytest, whose outcome is looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from rig.buckets import Bucket
from rig.instance import Instance
from rig.s3_servers import S3Server

pytestmark = pytest.mark.slow

pytest.importorskip("amzn_sagemaker_checkpointing", reason="amzn-sagemaker-checkpointing is not installed")

#: Where its tests (9202) and its script (9201) look for a server.
OPTIONS = {"gateway.listen": '"127.0.0.1:9201,127.0.0.1:9202"', "gateway.allow_reset": "on"}

NAME = "amzn_sagemaker_checkpointing-1.1.3"
SDIST = "amzn-sagemaker-checkpointing==1.1.3"
SHA256 = "c6e88ba0f09932b141305288530262c53914ec4fdd53c70909e469a24bda3794"
#: In the place of the package by which its tests serve: theirs must not answer.
NO_SERVER = "raise SystemExit('the gateway serves')\n"


@pytest.fixture(scope="module")
def published(scratch: Path) -> Path:
    """What was published, unpacked."""
    place = scratch / "published"
    place.mkdir()
    (place / "wanted.txt").write_text(f"{SDIST} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--require-hashes", "--dest", str(place), "--requirement", str(place / "wanted.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"the library's source distribution can't be had: {done.stderr.strip().splitlines()[-1]}")
    with tarfile.open(place / f"{NAME}.tar.gz") as archive:
        archive.extractall(place, filter="data")
    (place / "uvicorn.py").write_text(NO_SERVER)
    return place / NAME


def run(published: Path, arguments: list[str], environment: Mapping[str, str], *, within_s: int = 150) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=published,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": str(published.parent)},
        capture_output=True,
        text=True,
        timeout=within_s,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def passed(report: str) -> int:
    """How many tests passed; fails where any did not."""
    found = re.search(r"^(\d+) passed\b(?!.*(failed|skipped|error)).* in ", report, re.MULTILINE)
    assert found, report[-2000:]
    return int(found[1])


def pytest_of(*files: str) -> list[str]:
    plain = ["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return ["-m", "pytest", *plain, *(f"tests/local_tests/{name}" for name in files)]


def test_its_script_for_a_client_of_a_running_service(published: Path, instance: Instance) -> None:
    assert "All tests passed!" in run(published, ["src/scripts/test_inmemory_client.py"], {})


def test_its_two_ranks_save_and_load_one_step_and_the_latest_of_several(published: Path, instance: Instance) -> None:
    assert passed(run(published, pytest_of("test_distributed_checkpoint.py"), {})) == 2
    assert {"test-single-checkpoint", "test-multi-step"} <= {step["namespace"] for step in instance.status()["steps"]}


@pytest.mark.timeout(300)  # eight processes that import torch
def test_its_four_ranks_load_from_s3_once_the_service_was_reset(
    published: Path, instance: Instance, bucket: Bucket, seaweedfs_server: S3Server
) -> None:
    environment = {**seaweedfs_server.environment(), "SM_CHKPT_BUCKET": bucket.name}
    assert passed(run(published, pytest_of("test_s3_checkpoint.py"), environment, within_s=240)) == 2
    gateway = instance.status()["gateway"]
    assert gateway["received_bytes"] > 0 and gateway["failed"] == 0
