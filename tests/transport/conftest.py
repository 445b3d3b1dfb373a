"""A secret, a shelf, and a file to pull into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.settings import Settings
from transport.nodes import FolderShelf, usual_settings


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def settings(secret: Path) -> Settings:
    return usual_settings(secret)


@pytest.fixture
def shelf(tmp_path: Path) -> FolderShelf:
    directory = tmp_path / "shelf"
    directory.mkdir()
    return FolderShelf(directory)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)
