"""A mounted instance with an object tier, pages and both kinds of hooks, for all tests here."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from rig.fixtures import pytest_runtest_makereport, scratch
from rig.instance import Instance
from tests.conftest import needs_fuse
from tests.watch.watched import Receiver, Watched, watched_instance

__all__ = ["pytest_runtest_makereport", "scratch"]


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """What the webhook of `watched` sends to."""
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Watched]:
    needs_fuse()
    directory = tmp_path_factory.mktemp("watched")
    token = directory / "token"
    token.write_text("sesame\n")
    options = {"events.webhook": receiver.url, "events.webhook_token_file": str(token)}
    with watched_instance(directory / "shared", **options) as watched:
        yield watched


@pytest.fixture
def run(watched: Watched) -> str:
    """A namespace of its own."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    (watched.mountpoint / name).mkdir()
    return name


@pytest.fixture
def instance(watched: Watched) -> Instance:
    return watched.instance
