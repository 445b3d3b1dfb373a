"""An instance that is watched: its pages as a reader gets them, and what its hooks were told."""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from rig.instance import Instance, mounted, wait_until


class Watched:
    """`told` are the events that the command got, in their order."""

    def __init__(self, instance: Instance, events: Path) -> None:
        self.instance = instance
        self._events = events

    @property
    def mountpoint(self) -> Path:
        return self.instance.mountpoint

    @property
    def url(self) -> str:
        """The daemon's own, which changes when another one begins."""
        return wait_until(lambda: self.instance.status()["pages"], "pages are served")[0]

    def get(self, path: str, **fields: str) -> tuple[int, Mapping[str, str], str]:
        """Status, header fields in lower case, text."""
        return get(self.url, path, **fields)

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels as they are written: `tierfs_steps{namespace="run",state="writing"}`."""
        return samples(self.get("/metrics")[2])

    def told(self, namespace: str = "") -> list[dict[str, Any]]:
        """Events of the namespace, or of none and all."""
        if not self._events.exists():
            return []
        events = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [event for event in events if not namespace or event["namespace"] == namespace]

    def wait_told(self, namespace: str, **facts: Any) -> dict[str, Any]:
        """The first event of the namespace with these facts."""

        def find() -> list[dict[str, Any]]:
            told = self.told(namespace)
            return [event for event in told if all(event.get(name) == value for name, value in facts.items())]

        return wait_until(find, f"an event of {namespace} with {facts}")[0]


@contextmanager
def watched_instance(directory: Path, **options: str) -> Iterator[Watched]:
    """With an object tier in a directory, and a command that writes each event it gets into a file."""
    directory.mkdir()
    events = directory / "events.jsonl"
    command = directory / "on-event"
    command.write_text(f"#!/bin/sh\ntest -n \"$TIERFS_EVENT\" && cat >> '{events}'\n")
    command.chmod(0o755)
    given = {
        "object": f"file://{directory}/objects",
        "persist.settle_s": "0.2",
        "metrics.listen": "127.0.0.1:0",
        "events.command": str(command),
        **options,
    }
    with mounted(directory, f"watch-{uuid.uuid4().hex[:8]}", size="256M", options=given) as instance:
        yield Watched(instance, events)


def get(url: str, path: str, *, method: str = "GET", **fields: str) -> tuple[int, Mapping[str, str], str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.request(method, path, headers=fields)
        answer = connection.getresponse()
        head = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, head, answer.read().decode()
    finally:
        connection.close()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


class Receiver:
    """A web server that takes events; `answers` are the codes of the next answers, after that 204."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.requests: list[tuple[Mapping[str, str], dict[str, Any]]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._received))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/events"

    def _received(self, fields: Mapping[str, str], body: bytes) -> int:
        self.requests.append((fields, json.loads(body)))
        return self.answers.pop(0) if self.answers else 204

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _handler(received: Callable[[Mapping[str, str], bytes], int]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(received({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    return Handler
