"""The status page of a real mount: sound HTML that loads nothing and shows where each step's bytes are; and the server
under readers that misbehave."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mount.status_page import MOST_STEPS, render_page
from rig.instance import tierfs, wait_until
from rig.plain_steps import write_step
from tests.watch.watched import Watched, get, watched_instance

MIB = 1 << 20
SIZES = [3 * MIB, MIB]
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Document(HTMLParser):
    """Fails where tags don't match. `tables` are rows of cells' texts, after the heading that they stand below."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.headings: list[str] = []
        self.texts: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"
        if tag == "table":
            head, *rows = self._rows
            self.tables[self.headings[-1]] = [dict(zip(head, row, strict=True)) for row in rows]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "h2" in self.open:
            self.headings[-1] += data
        if self.open and ("td" in self.open or "th" in self.open):
            self._rows[-1][-1] += data


def page(watched: Watched) -> Document:
    status, head, text = watched.get("/")
    assert (status, head["content-type"]) == (200, "text/html; charset=utf-8")
    return Document(text)


def row(watched: Watched, run: str, step: str) -> dict[str, str]:
    """What is shown of the step; cells that are empty where it is not shown yet."""
    return next((row for row in page(watched).tables.get(run, []) if row["Step"] == step), defaultdict(str))


def test_the_page_shows_where_the_bytes_of_each_step_are(watched: Watched, run: str) -> None:
    write_step(watched.mountpoint / run / "step_1", 1, SIZES)
    wait_until(lambda: row(watched, run, "step_1")["Survives"] == "object", "it is shown as stored")
    shown = row(watched, run, "step_1")
    assert (shown["State"], shown["Size"], shown["Note"]) == ("complete", "4 MiB", "latest")
    assert shown["In RAM here"] == shown["Object tier"] == "4 MiB 100%"
    wait_until(lambda: watched.instance.steps(run)["step_1"]["checksummed"] == 3, "checksums are known")
    tierfs("evict", watched.mountpoint / run / "step_1", "--force")
    wait_until(lambda: row(watched, run, "step_1")["In RAM here"].endswith(" 0%"), "it is shown as gone from RAM")
    (watched.mountpoint / run / "step_2").mkdir()
    (watched.mountpoint / run / "step_2" / "weights.bin").write_bytes(b"x" * MIB)
    wait_until(lambda: row(watched, run, "step_2")["State"] == "writing", "what is written is shown")


def test_the_page_loads_nothing_and_names_are_no_markup(watched: Watched) -> None:
    namespace = "<img src=x onerror=alert(1)>&amp;"
    (watched.mountpoint / namespace).mkdir()
    write_step(watched.mountpoint / namespace / "step_1", 1, SIZES)
    wait_until(lambda: namespace in page(watched).tables, "the namespace is shown by its name")
    found = page(watched)
    tags = {tag for tag, _, _ in found.attributes}
    assert not tags & {"script", "img", "link", "iframe", "form", "a"}
    assert not [each for each in found.attributes if each[1] in ("src", "href", "style") or each[1].startswith("on")]
    policy = watched.get("/")[1]["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    shutil.rmtree(watched.mountpoint / namespace)


def test_problems_are_shown(watched: Watched, run: str) -> None:
    (watched.mountpoint / run / "step_1").mkdir()
    (watched.mountpoint / run / "step_1" / ".metadata.tmp").write_bytes(b"no pickle")
    (watched.mountpoint / run / "step_1" / ".metadata.tmp").rename(watched.mountpoint / run / "step_1" / ".metadata")

    def told() -> bool:
        return any(f"{run}/step_1" in text for text in page(watched).texts)

    wait_until(told, "the damaged marker is shown as a problem")
    assert watched.metrics()['tierfs_problems{severity="warning"}'] >= 1


def test_other_addresses_and_methods(watched: Watched) -> None:
    url = watched.url
    assert get(url, "/nope")[0] == get(url, "/../etc/passwd")[0] == 404
    assert get(url, "/", method="POST")[0] == get(url, "/metrics", method="DELETE")[0] == 405
    status, head, text = get(url, "/metrics?x=1", method="HEAD")
    assert (status, text) == (200, "") and int(head["content-length"]) > 1000
    assert get(url, "/healthz")[::2] == (200, "mounted\n")
    shown = json.loads(get(url, "/status.json")[2])
    assert shown["pages"] == [url] and shown["mountpoint"] == str(watched.mountpoint)


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
        b"GET /\r\n\r\n",
    ],
    ids=["tls", "endless head", "no version"],
)
def test_what_is_no_request_is_refused_and_nothing_breaks(watched: Watched, sent: bytes) -> None:
    with closing(connect(watched.url)) as stream:
        answer = b""
        try:
            stream.sendall(sent)
            while data := stream.recv(1 << 16):
                answer += data
        except ConnectionError:
            pass  # it was closed while much was still being sent
        assert not answer or b" 4" in answer.partition(b"\r\n")[0]
    assert watched.get("/healthz")[0] == 200


def test_several_requests_on_one_connection(watched: Watched) -> None:
    with closing(connect(watched.url)) as stream:
        stream.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        answer = b""
        while answer.count(b"mounted\n") < 3:
            data = stream.recv(1 << 16)
            assert data, answer
            answer += data
        assert answer.count(b"HTTP/1.1 200") == 3


def test_readers_that_say_nothing_keep_nobody_else_out_of_the_mount(watched: Watched, run: str) -> None:
    url = watched.url
    idle = [connect(url) for _ in range(60)]
    try:
        began = time.monotonic()
        write_step(watched.mountpoint / run / "step_1", 1, SIZES)
        assert time.monotonic() - began < 5
        assert json.loads(tierfs("status", watched.mountpoint, "--json", may_be_degraded=True))["mounted"]
    finally:
        for each in idle:
            each.close()
    wait_until(lambda: watched.get("/healthz")[0] == 200, "pages are served again")


def test_an_address_that_is_taken_is_a_problem_of_status_and_no_more(scratch: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with watched_instance(scratch / "taken", **{"metrics.listen": listen}) as watched:
            status = watched.instance.status()
            assert status["pages"] == []
            assert [problem["severity"] for problem in status["problems"]] == ["warning"]
            assert f"{listen} can't be listened at: Address already in use" in status["problems"][0]["message"]
            (watched.mountpoint / "run").mkdir()
            write_step(watched.mountpoint / "run" / "step_1", 1, SIZES)


def test_a_package_that_is_missing_is_a_problem_of_status_and_no_more(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = scratch / "missing"
    missing.mkdir()
    (missing / "h11.py").write_text("raise ModuleNotFoundError('no h11', name='h11')\n")
    monkeypatch.setenv("PYTHONPATH", str(missing))
    with watched_instance(scratch / "lacking") as watched:
        status = watched.instance.status()
        assert status["pages"] == []
        assert "pip install 'tierfs[metrics]'" in status["problems"][0]["message"]


def test_many_steps_are_cut(watched: Watched, run: str) -> None:
    write_step(watched.mountpoint / run / "step_1", 1, SIZES)
    status = watched.instance.status()
    namespace = next(each for each in status["namespaces"] if each["namespace"] == run)
    namespace["steps"] = [{**namespace["steps"][0], "step": f"step_{n}", "number": n} for n in range(500)]
    status["namespaces"] = [namespace]
    found = Document(render_page(status, {"nodes": []}, time.time()))
    assert [row["Step"] for row in found.tables[run]] == [f"step_{n}" for n in range(499, 499 - MOST_STEPS, -1)]
    assert any(f"and {500 - MOST_STEPS} older ones" in text for text in found.texts)


def test_a_real_browser_shows_it(watched: Watched, run: str, scratch: Path) -> None:
    """By hand, since a browser is large: `TIERFS_TEST_CHROMIUM=chromium make test TESTS=tests/watch/test_pages.py`."""
    browser = os.environ.get("TIERFS_TEST_CHROMIUM", "")
    if not browser:
        pytest.skip("TIERFS_TEST_CHROMIUM names no browser")
    write_step(watched.mountpoint / run / "step_1", 1, SIZES)
    wait_until(lambda: row(watched, run, "step_1")["Survives"] == "object", "it is shown as stored")
    picture = scratch / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
               "--window-size=1100,800", f"--user-data-dir={scratch}/browser"]  # fmt: skip
    done = subprocess.run([*command, watched.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = next(row for row in Document(done.stdout).tables[run] if row["Step"] == "step_1")
    assert shown["Object tier"].startswith("4 MiB")
    assert "Refused to" not in done.stderr and "Content Security Policy" not in done.stderr, done.stderr
    command.remove("--dump-dom")
    subprocess.run([*command, f"--screenshot={picture}", watched.url], capture_output=True, timeout=60, check=True)
    assert picture.stat().st_size > 10_000
