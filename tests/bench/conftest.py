"""The benchmarks' own modules, for tests that take a few of their ratios."""

from __future__ import annotations

import sys
from pathlib import Path

from rig.fixtures import pytest_runtest_makereport, scratch

__all__ = ["pytest_runtest_makereport", "scratch"]

sys.path.append(str(Path(__file__).parents[2] / "bench"))
