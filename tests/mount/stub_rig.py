"""A mount with stubs in it (`stub_daemon.py`), its objects, and what was fetched of them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mount.channel_rig import Rig, wait_until
from tests.mount.stub_objects import MIB, put_step

_libc = ctypes.CDLL(None, use_errno=True)
_MS_NOSUID_NODEV = 6


class StubRig(Rig):
    """`steps` are in the object tier from the start: {"run/step_1": {"file": size}}."""

    def __init__(
        self,
        base: Path,
        steps: dict[str, dict[str, int]],
        *,
        size: int = 512 * MIB,
        passthrough: str = "on",
        **config: Any,
    ) -> None:
        super().__init__(base, "auto", passthrough)
        self.objects, self.size, self.config = base / "objects", size, config
        for rel, files in steps.items():
            namespace, _, step = rel.rpartition("/")
            put_step(self.objects, namespace, step, files)

    def start(self) -> None:
        self.tmpfs.mkdir()
        self.path.mkdir()
        self.objects.mkdir(exist_ok=True)
        (self.base / "config.json").write_text(json.dumps({"size": self.size, **self.config}))
        options = f"size={self.size},inode64,mode=700".encode()
        if _libc.mount(b"tmpfs", os.fsencode(self.tmpfs), b"tmpfs", _MS_NOSUID_NODEV, options) != 0:
            raise OSError(ctypes.get_errno(), "mounting a tmpfs")
        repository = Path(__file__).parents[2]
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [
                    sys.executable,
                    Path(__file__).with_name("channel_keeper.py"),
                    self.base,
                    self.kind,
                    self.passthrough,
                    "stub_daemon.py",
                ],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(repository)},
            )
        wait_until((self.base / "daemon.pid").exists)
        self.ask("status")

    def status(self) -> dict[str, Any]:
        return self.ask("status")  # type: ignore[no-any-return]

    def handles(self, number: int) -> tuple[int, int] | None:
        """(opens, writers) of an inode, None where nothing is kept of it."""
        got = self.status()["handles"].get(str(number))
        return tuple(got) if got else None

    def ask(self, what: str) -> Any:
        return json.loads(os.getxattr(self.path, f"user.test.{what}"))

    def order(self, **orders: Any) -> None:  # type: ignore[override]
        """What goes wrong in the object tier from now on; see `LocalClient`."""
        (self.objects / "orders.new").write_text(json.dumps(orders))
        (self.objects / "orders.new").rename(self.objects / "orders.json")

    def fetched(self) -> Counter[str]:
        """How often each "KEY CHUNK" was asked for."""
        path = self.objects / "fetches"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.rpartition(" ")[0] for line in lines)

    def reads(self) -> int:
        """READ requests that the kernel sent: none by passthrough."""
        return int(self.ask("status")["counters"].get("read", 0))

    def whole(self, rel: str) -> bool:
        return os.getxattr(self.path / rel, "user.tierfs.tier") == b"ram"


@contextlib.contextmanager
def stub_rig(base: Path, steps: dict[str, dict[str, int]], **config: Any) -> Iterator[StubRig]:
    made = StubRig(base, steps, **config)
    try:
        made.start()
        yield made
        assert "Traceback" not in made.log.read_text(errors="replace")
    finally:
        made.destroy()
        if made.log.exists():
            sys.stderr.write(made.log.read_text(errors="replace")[-8000:])
