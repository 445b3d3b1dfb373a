"""A mount with a keeper of a few lines, for the tests of the kernel channel."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"the condition did not become true in {seconds} s"
        time.sleep(0.005)


def with_faults(library: Path | None, orders: Path) -> dict[str, str]:
    """The environment with channel_faults.c loaded, after what is loaded already (an address sanitizer)."""
    if library is None:
        return dict(os.environ)
    before = os.environ.get("LD_PRELOAD", "")
    return os.environ | {"LD_PRELOAD": f"{before} {library}".strip(), "TIERFS_FAULTS": str(orders)}


class Rig:
    """`path` is the mount, `root` the directory behind it on a tmpfs of its own."""

    def __init__(self, base: Path, kind: str, passthrough: str, faults: Path | None = None) -> None:
        self.base, self.kind, self.passthrough = base, kind, passthrough
        self.faults = base / "faults"
        self._preload = faults
        self.tmpfs, self.path, self.log = base / "ram", base / "mount", base / "log"
        self.root = self.tmpfs / "root"
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.tmpfs.mkdir()
        self.path.mkdir()
        if _libc.mount(b"tmpfs", os.fsencode(self.tmpfs), b"tmpfs", 6, b"size=3g,inode64,mode=700") != 0:
            raise OSError(ctypes.get_errno(), "mounting a tmpfs")
        self.root.mkdir()
        (self.tmpfs / "crash").mkdir()
        (self.tmpfs / "kept").mkdir()
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("channel_keeper.py"), self.base, self.kind, self.passthrough],
                stdout=log,
                stderr=log,
                env=with_faults(self._preload, self.faults),
            )
        wait_until((self.base / "daemon.pid").exists)
        self.status()

    @property
    def pid(self) -> int:
        return int((self.base / "daemon.pid").read_text())

    def exits(self) -> list[int]:
        path = self.base / "exits"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self) -> None:
        """Kills the daemon that runs now."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def order(self, name: str, what: str) -> None:
        """A fault for channel_faults.c, which must be loaded."""
        self.faults.mkdir(exist_ok=True)
        (self.faults / f"{name}.new").write_text(what)
        (self.faults / f"{name}.new").rename(self.faults / name)

    def crash_in(self, operation: str, when: str = "before") -> None:
        (self.tmpfs / "crash" / operation).write_text(when)

    def status(self) -> dict[str, Any]:
        return json.loads(os.getxattr(self.path, "user.test.channel"))  # type: ignore[no-any-return]

    def handles(self, number: int) -> tuple[int, int] | None:
        """(opens, writers) of an inode, None where nothing is kept of it."""
        got = self.status()["open"].get(str(number))
        return tuple(got) if got else None

    def used(self) -> int:
        st = os.statvfs(self.tmpfs)
        return (st.f_blocks - st.f_bfree) * st.f_frsize

    def unmount(self) -> int:
        """Unmounts and returns the daemon's exit code."""
        assert _libc.umount2(os.fsencode(self.path), 0) == 0, os.strerror(ctypes.get_errno())
        assert self._keeper is not None
        self._keeper.wait(10)
        return self.exits()[-1]

    def force(self) -> None:
        """Ends the connection: what waits for an answer gets an error."""
        _libc.umount2(os.fsencode(self.path), 1)
        _libc.umount2(os.fsencode(self.path), 2)

    def destroy(self) -> None:
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.kill()
            self._keeper.wait(10)
            self.kill()
            _libc.umount2(os.fsencode(self.path), 1)  # MNT_FORCE ends what still waits for an answer
        _libc.umount2(os.fsencode(self.path), 2)
        _libc.umount2(os.fsencode(self.tmpfs), 2)


@contextlib.contextmanager
def rig(
    base: Path, kind: str, passthrough: str, *, faults: Path | None = None, orders: dict[str, str] | None = None
) -> Iterator[Rig]:
    """`faults`: channel_faults.c, compiled; `orders` are given to it before the start."""
    made = Rig(base, kind, passthrough, faults)
    for name, what in (orders or {}).items():
        made.order(name, what)
    try:
        made.start()
        yield made
    finally:
        made.destroy()
        if made.log.exists():
            sys.stderr.write(made.log.read_text(errors="replace")[-8000:])
