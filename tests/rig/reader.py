"""Somebody who sits at a machine and types what a page of the documentation says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig.documents import Block, differences
from rig.instance import Instance

_REPOSITORY = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent

#: This is root already.
_SUDO = 'sudo() { if [ "$1" = -E ]; then shift; fi; "$@"; }\n'


class Reader:
    """`place` is a directory of the test's own: `/ckpt` is there, and what else a page names outside of the checkout.

    `replaced` says what stands for what; `not_run` are commands that are left out; those that begin with one of
    `background` are not waited for. `prefix` goes before the shell, to run it on another host.
    """

    def __init__(
        self,
        place: Path,
        name: str,
        *,
        environment: Mapping[str, str],
        replaced: Mapping[str, str],
        not_run: Sequence[str] = (),
        background: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self.name = place, name
        self.mountpoint = place / "ckpt"
        self.ran: list[str] = []
        self._replaced = {"/ckpt": str(self.mountpoint), ".venv/bin/": f"{_BIN}/", **replaced}
        self._not_run, self._background, self._prefix = not_run, background, prefix
        self._environment = {
            **os.environ,
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(_REPOSITORY),
            "TIERFS_NAME": name,
            "TIERFS_RUNTIME_DIR": str(place / "run"),
            **environment,
        }

    @property
    def instance(self) -> Instance:
        """What was mounted on `/ckpt`."""
        found = Instance(self.mountpoint, self.name, size="")
        found._ram_path = self.place / "run" / self.name / "ram"
        return found

    def follow(self, block: Block, *, fails: bool = False, timeout_s: float = 240) -> str:
        """Types the block, and returns what was printed; AssertionError when a command fails or says something else."""
        printed = self.type(block.commands, where=block.where, fails=fails, timeout_s=timeout_s)
        missing = differences(block.expected, printed)
        assert not missing, f"{block.where} promises what does not come:\n{chr(10).join(missing)}\n--- but:\n{printed}"
        return printed

    def type(self, commands: Sequence[str], *, where: str = "", fails: bool = False, timeout_s: float = 240) -> str:
        script = "".join(self._line(command) for command in commands if command not in self._not_run)
        self.ran += [command for command in commands if command not in self._not_run]
        command = [*self._prefix, "bash", "-euo", "pipefail", "-c", _SUDO + script]
        typed = subprocess.Popen(
            command,
            cwd=_REPOSITORY,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = typed.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{where}: not done within {timeout_s:g} s:\n{script}\n{error.stdout}") from None
        finally:
            if typed.poll() is None:  # with what it began
                os.killpg(typed.pid, signal.SIGKILL)
                typed.wait(10)
        ends = "fails" if fails else "ends with 0"
        assert (typed.returncode != 0) == fails, f"{where} {ends}, but {typed.returncode}:\n{script}\n{printed}"
        return self._as_on_the_page(printed)

    def _line(self, command: str) -> str:
        for written, here in self._replaced.items():
            begins = r"(?:(?<=://)|(?<![\w./]))" if written.startswith(("/", ".")) else ""  # not within another path
            command = re.sub(begins + re.escape(written), here.replace("\\", r"\\"), command)
        in_background = command.startswith(tuple(self._background)) if self._background else False
        return f"{command} >{self.place}/background.log 2>&1 &\n" if in_background else f"{command}\n"

    def _as_on_the_page(self, printed: str) -> str:
        for written, here in self._replaced.items():
            if here.startswith("/") and written.startswith("/"):
                printed = printed.replace(here, written)
        return printed.replace(self.name, "ckpt")

    def leave(self) -> None:
        """Nothing of it is left."""
        self.instance.discard()
