"""promtool, Prometheus' own checker: from the path, or out of the distribution's package without installing it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

_WITHIN_S = 60


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """What it printed. Fails where it finds fault; skips where it can't be had, and says so."""
    program, why = _program()
    if program is None:
        pytest.skip(f"no promtool here: {why}")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=_WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@cache
def _program() -> tuple[Path | None, str]:
    """Kept for later runs, since the package has 20 MB. None, and why."""
    if found := shutil.which("promtool"):
        return Path(found), ""
    kept = Path.home() / ".cache" / "tierfs-tests" / "promtool"
    if kept.exists():
        return kept, ""
    if not shutil.which("apt-get"):
        return None, "it is not on the path, and there is no apt-get to download the package prometheus"
    with tempfile.TemporaryDirectory() as directory:
        for command in (["apt-get", "download", "-q", "prometheus"], ["sh", "-c", "dpkg-deb -x prometheus_*.deb ."]):
            try:
                done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_WITHIN_S)
            except subprocess.TimeoutExpired:
                return None, f"{command[0]} took longer than {_WITHIN_S} s"
            if done.returncode:
                return None, f"{' '.join(command)} failed: {done.stderr.strip()[-200:]}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(directory) / "usr/bin/promtool", kept.with_suffix(".new"))
        kept.with_suffix(".new").rename(kept)
    return kept, ""
