"""A command that asks while the daemon dies gets its answer from the next one, unless twice would not be as once."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mount.cli import client
from mount.runtime import Instance
from tierfs.errors import InstanceError


class DyingDaemons:
    """As many daemons as it is told die over a request, the next one answers. `asked` are the requests they read."""

    def __init__(self, instance: Instance, deaths: int) -> None:
        self.asked: list[str] = []
        self._deaths = deaths
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(instance.control_socket))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                asked = json.loads(connection.makefile().readline())["op"]
                self.asked.append(asked)
                if len(self.asked) > self._deaths:
                    connection.sendall(b'{"ok": true, "result": "alive"}\n')

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setattr(client, "is_running", lambda instance: True)
    yield Instance(tmp_path)


def test_a_question_is_asked_again_and_a_removal_is_not(instance: Instance) -> None:
    daemons = DyingDaemons(instance, deaths=2)
    try:
        assert client.request(instance, "status") == "alive"
        assert daemons.asked == ["status"] * 3
    finally:
        daemons.close()
    instance.control_socket.unlink()
    daemons = DyingDaemons(instance, deaths=1)
    try:
        with pytest.raises(InstanceError, match="without an answer"):
            client.request(instance, "rm", path="run/step_1")
        assert daemons.asked == ["rm"]
    finally:
        daemons.close()


def test_daemons_that_die_of_the_question_are_not_asked_for_ever(instance: Instance) -> None:
    daemons = DyingDaemons(instance, deaths=100)
    try:
        with pytest.raises(InstanceError):
            client.request(instance, "status")
        assert 1 < len(daemons.asked) < 10
    finally:
        daemons.close()
