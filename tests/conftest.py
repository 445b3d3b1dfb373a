"""What every kind of test may need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_MOST_OF_A_RERUN = 6000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By several workers (`--dist loadgroup`): each file whole in one of them, and all clusters in the same one."""
    for item in items:
        group = "clusters" if item.get_closest_marker("alone") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was run once more: what passes only then is no secret."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"failed at first: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-_MOST_OF_A_RERUN:])


def repository() -> Path:
    return Path(__file__).resolve().parent.parent


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def needs_fuse() -> None:
    needs_root()
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = 10.0) -> None:
    """Wait for a condition, with a bound; the message names what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
