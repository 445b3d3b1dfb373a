"""Each contract test runs against a directory, SeaweedFS and ministack."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from objects.targets import BUCKET, FILE, MINISTACK, SEAWEEDFS, Target, use_environment
from rig.s3_servers import S3Server, ministack_server, seaweedfs_server
from tierfs.objects.opening import StoreSettings, open_store
from tierfs.settings import S3Settings

__all__ = ["ministack_server", "seaweedfs_server"]


@pytest.fixture(scope="session")
def seaweedfs_bucket(seaweedfs_server: S3Server) -> S3Server:
    seaweedfs_server.make_bucket(BUCKET)
    return seaweedfs_server


@pytest.fixture(scope="session")
def ministack_bucket(ministack_server: S3Server) -> S3Server:
    ministack_server.make_bucket(BUCKET)
    return ministack_server


@pytest.fixture(params=[FILE, SEAWEEDFS, MINISTACK])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    yield from _opened(request, request.param, tmp_path, monkeypatch)


@pytest.fixture
def on_seaweedfs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    yield from _opened(request, SEAWEEDFS, tmp_path, monkeypatch)


@pytest.fixture
def on_files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    yield from _opened(request, FILE, tmp_path, monkeypatch)


def _opened(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    if kind == FILE:
        root = tmp_path / "objects"
        target = _target(kind, StoreSettings(url=f"file://{root}"), root=root)
    else:
        server: S3Server = request.getfixturevalue(f"{kind}_bucket")
        use_environment(server, monkeypatch)
        s3 = S3Settings(endpoint_url=server.endpoint_url, read_timeout_s=10)
        url = f"s3://{BUCKET}/pre fix/{uuid.uuid4().hex}"
        target = _target(kind, StoreSettings(url=url, s3=s3), server=server)
    yield target
    target.store.close()


def _target(kind: str, settings: StoreSettings, *, root: Path | None = None, server: S3Server | None = None) -> Target:
    return Target(kind, open_store(settings), settings, root, server)
