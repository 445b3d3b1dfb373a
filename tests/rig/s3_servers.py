"""Real S3 servers on the loopback, as fixtures for tests and as contexts for plain scripts.

SeaweedFS checks signatures and checksums and survives being killed; ministack checks neither but has more of Amazon's
small print. Each runs from this virtual environment, keeps its data in a directory of its own, and is killed (SIGKILL:
SeaweedFS takes over 10 s to end itself) when the context ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

_BIN = Path(sys.executable).parent
_START_S = 60.0
_READY_BUCKET = "rig-ready"
#: SeaweedFS listens at each port and, for gRPC, at the one 10,000 above it. Below Linux's ephemeral ports (32768).
_PORTS = range(12_000, 20_000)
_SEAWEEDFS_PORTS = 4


class ServerDidNotStart(AssertionError):
    """The message holds the end of the server's log."""


@dataclass
class S3Server:
    """A server that runs. `access_key` may do everything, `read_only_key` (SeaweedFS) only read and list."""

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    directory: Path
    command: Sequence[str]
    ready_path: str
    extra_environment: dict[str, str] = field(default_factory=dict)
    read_only_key: str = ""
    read_only_secret: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def environment(self, *, read_only: bool = False) -> dict[str, str]:
        """What a child process needs to use the server: the AWS_* variables, and nothing of this host's own."""
        return {
            "AWS_ACCESS_KEY_ID": self.read_only_key if read_only else self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.read_only_secret if read_only else self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, *, attempts: int = 5) -> Any:
        """A boto3 client, to look at the server past tierfs."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "max_attempts": attempts}),
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def start(self) -> None:
        """Returns when it answers; ServerDidNotStart."""
        self._log = (self.directory / "log").open("ab")
        self._process = subprocess.Popen(
            self.command,
            cwd=self.directory,
            env={**os.environ, **self.extra_environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerDidNotStart(f"{self.name} did not start: {' '.join(self.command)}\n{self.log()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """At once, as a crash of its host would; what it answered for is on its disk."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def restart(self) -> None:
        """Killed and started again at the same address, with the same data."""
        self.stop()
        self.start()

    def log(self, lines: int = 60) -> str:
        """The end of what it printed."""
        text = (self.directory / "log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint_url + self.ready_path, timeout=2) as answer:
                if answer.status != 200:
                    return False
        except (urllib.error.URLError, OSError):
            return False
        return self._stores_objects()

    def _stores_objects(self) -> bool:
        """A gateway may answer before what it stores objects on does."""
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client(attempts=1)
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=_READY_BUCKET)
            client.put_object(Bucket=_READY_BUCKET, Key="ready", Body=b"ready")
            return bool(client.get_object(Bucket=_READY_BUCKET, Key="ready")["Body"].read() == b"ready")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Server]:
    with _directory("seaweedfs") as directory:
        identities = [
            {
                "name": "all",
                "credentials": [{"accessKey": "testkey", "secretKey": "testsecret"}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            },
            {
                "name": "reader",
                "credentials": [{"accessKey": "readkey", "secretKey": "readsecret"}],
                "actions": ["Read", "List"],
            },
        ]
        (directory / "s3.json").write_text(json.dumps({"identities": identities}))
        (directory / "data").mkdir()
        s3, master, volume, filer = _free_ports(_SEAWEEDFS_PORTS, and_above=10_000)
        server = S3Server(
            name="seaweedfs",
            endpoint_url=f"http://127.0.0.1:{s3}",
            access_key="testkey",
            secret_key="testsecret",
            read_only_key="readkey",
            read_only_secret="readsecret",
            directory=directory,
            command=[
                str(_BIN / "weed"),
                *["-logtostderr", "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.config=s3.json"],
                *f"-master.port={master} -volume.port={volume} -filer -filer.port={filer} -s3 -s3.port={s3}".split(),
                *["-master.electionTimeout=1s", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"],
                *["-master.volumeSizeLimitMB=1024", "-volume.max=100"],
            ],
            ready_path="/status",
            extra_environment={"WEED_S3_SSE_KEK": "11" * 32},
        )
        try:
            with _running(server):
                yield server
        finally:
            # It makes a socket for each port where it has no flag to put it elsewhere, and killed it leaves them.
            for port in (s3, master, volume, filer):
                for each in (port, port + 10_000):
                    for left in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):
                        left.unlink(missing_ok=True)


@contextlib.contextmanager
def ministack() -> Iterator[S3Server]:
    with _directory("ministack") as directory:
        (port,) = _free_ports(1)
        server = S3Server(
            name="ministack",
            endpoint_url=f"http://127.0.0.1:{port}",
            access_key="test",
            secret_key="test",
            directory=directory,
            command=[str(_BIN / "ministack")],
            ready_path="/_ministack/health",
            extra_environment={
                "BIND_HOST": "127.0.0.1",
                "GATEWAY_PORT": str(port),
                "SERVICES": "s3",
                "S3_PERSIST": "1",
                "S3_DATA_DIR": str(directory / "data"),
                "TMPDIR": str(directory),
                "LOG_LEVEL": "WARNING",
            },
        )
        with _running(server):
            yield server


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    """One SeaweedFS for all tests of a run; each takes a bucket or prefix of its own."""
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def ministack_server() -> Iterator[S3Server]:
    with ministack() as server:
        yield server


@contextlib.contextmanager
def _running(server: S3Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.stop()


@contextlib.contextmanager
def _directory(name: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=f"tierfs-test-{name}-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _free_ports(count: int, *, and_above: int = 0) -> list[int]:
    """Ports that nobody listens at, also not at those `and_above` them."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if all(_is_free(each) for each in {port, port + and_above}):
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError(f"no {count} free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
