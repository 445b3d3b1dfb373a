"""The daemon's log and the logs of namespaces."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.logs import NamespaceLog, configure_logging, escape_namespace, logger_for
from tierfs.settings import LogSettings

LINE_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    yield
    logger = logging.getLogger("tierfs")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logging.raiseExceptions = True


def test_text_lines_name_part_and_facts() -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(), stream=stream)
    extra = {"namespace": "run1", "step": "step_5", "file": "a b", "tier": "ram"}
    logger_for("step").info("sealed %d files", 4, extra=extra)
    logger_for("step").debug("not written")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(
        LINE_TIME + r' INFO step: sealed 4 files namespace=run1 step=step_5 file="a b" tier=ram', lines[0]
    )


def test_a_name_cannot_forge_a_line_and_a_traceback_is_indented() -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(), stream=stream)
    logger_for("step").error("bad name x\n2026 forged", extra={"file": "y\nforged"})
    try:
        raise OSError("broken")
    except OSError:
        logger_for("step").exception("failed")
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [lines[0], lines[1]]
    assert "OSError: broken" in lines[-1]


def test_json_lines_hold_the_same_facts() -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(format="json", level="debug"), stream=stream)
    logger_for("ram").debug("full", extra={"namespace": "run1"})
    entry = json.loads(stream.getvalue())
    assert re.fullmatch(LINE_TIME, entry.pop("time"))
    assert entry == {"level": "debug", "part": "ram", "message": "full", "namespace": "run1"}


def test_the_daemons_log_is_private_and_a_bad_directory_falls_back(tmp_path: Path) -> None:
    configure_logging(LogSettings(), tmp_path / "log")
    logger_for("daemon").info("ready")
    path = tmp_path / "log" / "daemon.log"
    assert path.read_text().endswith(" INFO daemon: ready\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    stream = io.StringIO()
    configure_logging(LogSettings(), tmp_path / "file", stream=stream)
    logger_for("daemon").info("ready")
    assert "logging to stderr" in stream.getvalue()
    assert "ready" in stream.getvalue()


def test_a_namespace_log_reads_as_the_docs_say(tmp_path: Path) -> None:
    log = NamespaceLog(tmp_path, clock=lambda: 1767225600.0)
    log.written("run1", 240, int(1.2 * (1 << 30)), 0.41, rank=0)
    log.write("run1", "not complete: 2 files missing", level="warning", step="best")
    lines = log.path("run1").read_text().splitlines()
    time = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"
    assert re.fullmatch(
        time + re.escape(" [run1] [INFO] [rank 0] step 240: written 1.2 GiB in 0.41 s (2.9 GiB/s)"), lines[0]
    )
    assert re.fullmatch(time + re.escape(" [run1] [WARNING] step best: not complete: 2 files missing"), lines[1])
    assert stat.S_IMODE(log.path("run1").stat().st_mode) == 0o600
    log.close()


def test_a_namespace_log_is_bounded_and_keeps_its_newest_lines(tmp_path: Path) -> None:
    log = NamespaceLog(tmp_path, limit_bytes=1000)
    for number in range(200):
        log.write("run1", "x" * 50, step=number)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"run1.log", "run1.log.1"}
    assert max(sizes.values()) <= 1000
    assert "step 199:" in log.path("run1").read_text()


def test_a_namespace_log_never_raises_and_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    directory.touch()
    log = NamespaceLog(directory)
    log.write("run1", "lost\udc80")
    assert log.lost_lines == 1
    directory.unlink()
    log.write("run1", "kept \udc80 \n [run1] forged")
    text = log.path("run1").read_text()
    assert text.count("\n") == 1
    assert "kept" in text


def test_many_namespaces_and_threads_keep_few_files_open_and_whole_lines(tmp_path: Path) -> None:
    log = NamespaceLog(tmp_path)

    def write(rank: int) -> None:
        for number in range(100):
            log.write(f"team/run{number}", "written", rank=rank)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    assert len(list(tmp_path.iterdir())) == 100
    assert len(log.path("team/run7").read_text().splitlines()) == 4
    log.close()


def test_namespaces_never_share_a_file_and_never_leave_the_directory() -> None:
    names = [
        "daemon",
        "%64aemon",
        "",
        "run1",
        "team/run1",
        "team%2Frun1",
        "..",
        ".",
        ".hidden",
        "a" * 300,
        "a" * 301,
        "ü",
        "a\nb",
    ]
    escaped = [escape_namespace(name) for name in names]
    assert len(set(escaped)) == len(names)
    assert not {"daemon", "keeper"} & set(escaped)
    assert all("/" not in name and not name.startswith(".") and len(name) <= 200 for name in escaped)
