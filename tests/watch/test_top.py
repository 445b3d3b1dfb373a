"""`tierfs top` and `status --watch`: what they draw, on any width, and on a real terminal of a real mount."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mount.cli.tables import Screen
from mount.cli.top_frame import Snapshot, render_frame
from rig.instance import TIERFS, wait_until
from rig.plain_steps import write_step
from tests.watch.watched import Watched

MIB = 1 << 20
GIB = 1 << 30
COLOURS = re.compile(r"\x1b\[\d+m")


def step(number: int, **facts: Any) -> dict[str, Any]:
    return {
        "namespace": "run", "step": f"step_{number}", "number": number, "state": "complete", "bytes": GIB,
        "ram_bytes": GIB, "stubs": 0, "latest": False, "pinned": False, "note": "", "age_s": 60.0, "level": "ram",
        "completed_at": 1000.0 + number, "object": {"state": "none", "bytes_sent": 0, "bytes": GIB},
        "replica": {"state": "replicated", "wanted": 2, "copies": 2}, **facts,
    }  # fmt: skip


def status(*steps: dict[str, Any], sent: int = 0, requests: int = 0) -> dict[str, Any]:
    return {
        "name": "job", "mountpoint": "/ckpt", "mounted": True, "uptime_s": 3600.0, "requests": {"lookup": requests},
        "ram": {"used_bytes": 24 * GIB, "size_bytes": 32 * GIB},
        "object": {"reachable": True, "bytes_owed": GIB, "steps_owed": 1, "bytes_sent": sent, "bytes_received": 0},
        "cluster": {"nodes": 2, "connected": True, "under_replicated": 0, "draining": False},
        "problems": [{"severity": "warning", "message": "a long story of what is wrong " * 9, "path": "run/step_1"}],
        "steps": list(steps), "namespaces": [{"namespace": "run", "steps": list(steps)}],
    }  # fmt: skip


NODES = {
    "nodes": [
        {"node": f"node-{n}", "this": n == 1, "state": "lost" if n == 3 else "serving", "size_bytes": 32 * GIB,
         "free_bytes": 8 * GIB, "domain": f"rack-{n}", "lost_s": 75.0 if n == 3 else None}
        for n in range(1, 4)
    ]
}  # fmt: skip
PLAIN, COLOUR = Screen(colour=False, unicode=False), Screen(colour=True, unicode=True)


def frame(now: dict[str, Any], before: dict[str, Any] | None = None, *, columns: int = 120, rows: int = 50) -> str:
    earlier = Snapshot(before, NODES, 100.0) if before is not None else None
    return "\n".join(render_frame(Snapshot(now, NODES, 102.0), earlier, PLAIN, columns, rows))


@pytest.mark.parametrize("screen", [PLAIN, COLOUR], ids=["plain", "colour"])
@pytest.mark.parametrize("columns", [1, 10, 25, 40, 60, 80, 100, 250])
def test_no_line_is_longer_than_the_terminal_and_no_frame_higher(screen: Screen, columns: int) -> None:
    now = Snapshot(status(*(step(n) for n in range(100))), NODES, 102.0)
    for rows in (1, 5, 24):
        lines = render_frame(now, None, screen, columns, rows)
        assert len(lines) <= rows
        assert max(len(COLOURS.sub("", line)) for line in lines) <= columns
    if columns >= 25:
        assert any("step_99" in line for line in render_frame(now, None, screen, columns, 24))


def test_rates_and_lag_come_of_two_looks() -> None:
    sending = {"state": "sending", "bytes_sent": 256 * MIB, "bytes": GIB}
    before = status(step(1, level="object", object={"state": "persisted", "bytes_sent": 0, "bytes": GIB}), step(30),
                    step(31, state="writing", bytes=100 * MIB, completed_at=None))  # fmt: skip
    now = status(before["steps"][0], step(30, object=sending), step(31, state="writing", bytes=500 * MIB,
                 completed_at=None), sent=256 * MIB, requests=500)  # fmt: skip
    shown = frame(now, before)
    assert "250 requests/s" in shown
    assert "out 128 MiB/s  in 0 B/s  lag 29 s" in shown  # of the object tier: step 30 after step 1
    lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith("run/")}
    assert "##........ 25%  128 MiB/s" in lines["run/step_30"] and "200 MiB/s" in lines["run/step_31"]
    assert list(lines) == ["run/step_31", "run/step_30", "run/step_1"]  # what moves comes first
    assert "1 min 15 s ago" in next(line for line in shown.splitlines() if line.startswith("node-3"))
    assert "B/s" not in frame(now) and "requests/s" not in frame(now)  # of one look there are no rates


def test_a_narrow_terminal_leaves_out_what_is_worth_least() -> None:
    now = status(step(7, object={"state": "waiting", "bytes_sent": 0, "bytes": GIB}))
    wide, narrow = frame(now, columns=120), frame(now, columns=40)
    assert "IN RAM" in wide and "AGE" in wide and "OBJECT TIER" in wide
    assert "AGE" not in narrow and "IN RAM" not in narrow
    assert "run/step_7" in narrow and "waiting" in narrow


def test_control_characters_of_names_reach_no_terminal() -> None:
    assert "\x1b" not in frame(status(step(1, step="step_1\x1b[2J")))


@contextmanager
def on_terminal(*arguments: str | os.PathLike[str], columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    parent, child = pty.openpty()
    terminal = Terminal(parent)
    terminal.resize(columns, rows)
    environ = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    before = termios.tcgetattr(child)
    process = subprocess.Popen(
        [TIERFS, *arguments], stdin=child, stdout=child, stderr=child, env=environ, start_new_session=True
    )
    terminal.process = process
    try:
        yield terminal
        assert termios.tcgetattr(child)[3] == before[3], "the terminal is left as it was"
    finally:
        process.kill()
        process.wait()
        os.close(child)
        os.close(parent)


class Terminal:
    """What a program wrote to its terminal so far; `frames` are its pages without colours."""

    process: subprocess.Popen[bytes]

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.written = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def frames(self) -> list[str]:
        while select.select([self._fd], [], [], 0)[0]:
            try:
                self.written += os.read(self._fd, 1 << 16).decode("utf-8", "replace")
            except OSError:  # EIO: nobody has the other end any more
                break
        whole = COLOURS.sub("", self.written).split("\x1b[H")[1:]
        return [each.replace("\x1b[K", "").replace("\x1b[J", "").replace("\r", "") for each in whole]

    def last(self) -> str:
        found = self.frames()
        return found[-1] if found else ""

    def ended(self) -> int:
        """The exit code. What it writes at its end is read, or it would wait for that."""
        wait_until(lambda: (self.frames(), self.process.poll() is not None)[1], "it has ended")
        return self.process.returncode


def test_top_on_a_terminal_follows_a_save_and_gives_the_terminal_back(watched: Watched, run: str) -> None:
    with on_terminal("top", watched.mountpoint, "--every", "0.2") as terminal:
        wait_until(lambda: str(watched.mountpoint) in terminal.last(), "the first frame is drawn")
        write_step(watched.mountpoint / run / "step_1", 1, [4 * MIB, MIB])
        wait_until(lambda: f"{run}/step_1" in terminal.last(), "the step is shown")
        wait_until(lambda: "requests/s" in terminal.last(), "rates are shown")
        terminal.resize(30, 10)
        wait_until(
            lambda: max(map(len, terminal.last().split("\n"))) <= 30 and terminal.last().count("\n") < 10,
            "it is drawn anew for a small terminal",
        )
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.written.startswith("\x1b[?1049h\x1b[?25l")
        assert terminal.written.endswith("\x1b[?25h\x1b[?1049l")


def test_ctrl_c_ends_it_too(watched: Watched) -> None:
    with on_terminal("status", watched.mountpoint, "--watch", "--every", "0.2") as terminal:
        wait_until(lambda: len(terminal.frames()) > 2 and "passthrough" in terminal.last(), "it is drawn again")
        os.killpg(terminal.process.pid, 2)
        assert terminal.ended() == 130
        assert terminal.written.endswith("\x1b[?25h\x1b[?1049l")


def test_in_a_pipe_top_prints_one_frame(watched: Watched, run: str) -> None:
    write_step(watched.mountpoint / run / "step_1", 1, [MIB])
    done = subprocess.run([TIERFS, "top", watched.mountpoint], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{run}/step_1" in done.stdout and "\x1b" not in done.stdout


def test_status_watch_gives_programs_one_document_a_line(watched: Watched) -> None:
    command = [TIERFS, "status", watched.mountpoint, "--watch", "--json", "--every", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        uptimes = [json.loads(process.stdout.readline())["uptime_s"] for _ in range(3)]
        assert uptimes == sorted(set(uptimes))
    finally:
        process.kill()
        process.wait()


def test_top_of_what_is_not_mounted(tmp_path: Any) -> None:
    done = subprocess.run([TIERFS, "top", tmp_path / "no"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 4 and done.stderr.startswith("tierfs: no tierfs instance")
