"""Memory limits are read from the kernel's own files, whichever control groups this runs in."""

from __future__ import annotations

import os
from pathlib import Path

from tierfs.ram.memory import _levels, available_memory_bytes, total_memory_bytes


def test_memory_is_at_most_the_machines() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory_bytes() <= total_memory_bytes() <= machine


def test_every_level_above_a_group_counts_and_an_invisible_group_stands_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    assert list(_levels(tmp_path, "/a/b")) == [tmp_path / "a/b", tmp_path / "a", tmp_path]
    assert list(_levels(tmp_path, "/not/here")) == [tmp_path]
    assert list(_levels(tmp_path, "/../../elsewhere")) == [tmp_path]
    assert list(_levels(tmp_path, "/")) == [tmp_path]
