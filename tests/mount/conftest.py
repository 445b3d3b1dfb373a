"""A real mounted instance for each way the kernel and the daemon can be joined, in a temporary place.

`mounted` runs a test once per mode; set TIERFS_TEST_MODES=passthrough,... to run fewer. The mount is made once a
session and mode, each test gets a fresh directory in it (`mounted.dir`) and one on a plain tmpfs beside it
(`mounted.plain`). When a test fails the daemon's log is printed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import needs_fuse, repository

# What is forced on `tierfs mount` in each mode.
MODES = {
    "passthrough": (),
    "fallback": ("passthrough=off",),
    "socketpair": ("channel=socketpair",),
}
SIZE = "1GiB"


@dataclass
class Mounted:
    """`path` is the mount, `dir` this test's own directory in it, `plain` an empty one on an ordinary tmpfs."""

    mode: str
    path: Path
    dir: Path
    plain: Path
    log_file: Path

    @property
    def tier(self) -> Path:
        """The RAM tier's directory behind the mount."""
        return self.log_file.parent.parent / "ram"

    def daemon_pid(self) -> int:
        """The process that answers now; 0 while there is none."""
        try:
            return int((self.log_file.parent.parent / "daemon.pid").read_text().split()[0])
        except (FileNotFoundError, ValueError, IndexError):
            return 0

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""


@dataclass
class Instance:
    mode: str
    path: Path
    plain: Path
    log_file: Path


@contextmanager
def plain_tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755,inode64", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def real_instance(base: Path, mode: str, *options: str) -> Iterator[Instance]:
    """`tierfs mount` in `base`; taken down with all its processes, also when the daemon died."""
    mountpoint, name = base / "mnt", f"{mode}-{os.getpid()}"
    given = [f"name={name}", f"size={SIZE}", f"runtime_dir={base}/run", *MODES[mode], *options]
    command = Path(sys.executable).parent / "tierfs"
    with plain_tmpfs(base / "plain", "1g") as plain:
        done = subprocess.run(
            [command, "mount", mountpoint, "-o", ",".join(given)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        log_file = base / "run" / name / "log" / "daemon.log"
        try:
            yield Instance(mode, mountpoint, plain, log_file)
            faults = log_file.read_text(errors="replace")
            assert "Traceback" not in faults, faults
        finally:
            down = subprocess.run(
                [command, "umount", mountpoint, "--discard", "--lazy"], capture_output=True, text=True, timeout=60
            )
            assert down.returncode == 0, down.stdout + down.stderr


@contextmanager
def harness_instance(base: Path, *, size: str = "1g", descriptors: int = 4096) -> Iterator[Instance]:
    """`TierFs` alone on plain pyfuse3; see fs_harness.py."""
    needs_fuse()
    log_file, mountpoint = base / "daemon.log", base / "mnt"
    mountpoint.mkdir()
    with plain_tmpfs(base / "ram", size) as ram, plain_tmpfs(base / "plain", size) as plain, log_file.open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "tests/mount/fs_harness.py", str(ram), str(mountpoint), str(descriptors)],
            cwd=repository(),
            env={**os.environ, "PYTHONPATH": str(repository())},
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == b"ready\n", log_file.read_text()
            yield Instance("harness", mountpoint, plain, log_file)
        finally:
            subprocess.run(["umount", "-l", mountpoint], check=False, capture_output=True)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Instances:
    """The instances of this session, made when first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, Instance] = {}

    def get(self, mode: str) -> Instance:
        if mode not in self._made:
            base = Path(tempfile.mkdtemp(prefix="tierfs-test-"))
            base.chmod(0o755)
            self._stack.callback(shutil.rmtree, base, ignore_errors=True)
            self._made[mode] = self._stack.enter_context(real_instance(base, mode))
        return self._made[mode]


@pytest.fixture(scope="session")
def instances() -> Iterator[Instances]:
    with ExitStack() as stack:
        yield Instances(stack)


def chosen_modes() -> list[str]:
    wanted = os.environ.get("TIERFS_TEST_MODES")
    return [m for m in MODES if wanted is None or m in wanted.split(",")]


@pytest.fixture(params=chosen_modes())
def mounted(request: pytest.FixtureRequest, instances: Instances) -> Iterator[Mounted]:
    needs_fuse()
    instance = instances.get(request.param)
    name = f"t{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}"
    there, plain = instance.path / name, instance.plain / name
    there.mkdir()
    plain.mkdir()
    try:
        yield Mounted(instance.mode, instance.path, there, plain, instance.log_file)
    finally:
        shutil.rmtree(there, ignore_errors=True)
        shutil.rmtree(plain, ignore_errors=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    mounted = getattr(item, "funcargs", {}).get("mounted")
    if report.failed and isinstance(mounted, Mounted):
        report.sections.append((f"daemon log ({mounted.mode})", mounted.log()[-20_000:]))
