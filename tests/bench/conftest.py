"""The benchmarks' own modules, for tests that take a few of their ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig.fixtures import pytest_runtest_makereport, scratch

__all__ = ["pytest_runtest_makereport", "scratch"]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found for these tests alone: bench/catalog.py would hide tests/catalog from the others."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
