"""The stores that contract tests run against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.s3_servers import S3Server
from tierfs.objects.opening import StoreSettings
from tierfs.objects.store import ObjectStore

BUCKET = "contract"
FILE, SEAWEEDFS, MINISTACK = "file", "seaweedfs", "ministack"


@dataclass
class Target:
    """A store that is empty, and what it is on."""

    kind: str
    store: ObjectStore
    settings: StoreSettings
    root: Path | None = None
    server: S3Server | None = None


def use_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch, *, read_only: bool = False) -> None:
    for name, value in server.environment(read_only=read_only).items():
        monkeypatch.setenv(name, value)
