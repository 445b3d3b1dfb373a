"""A terminal that is drawn again and again: its own page, keys, its size; frames one after the other elsewhere."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

#: The size of the terminal is looked at so often while nothing else happens, seconds.
_LOOK_S = 0.2
#: xterm's control sequences: the alternate page, the cursor, home, clear to the end of the line and of the page.
_PAGE, _PAGE_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _LINE_END, _REST = "\x1b[H", "\x1b[K\r\n", "\x1b[J"

#: Makes the lines of a frame for so many columns and rows.
FrameMaker = Callable[[int, int], Sequence[str]]


def show(frame: FrameMaker, *, every_s: float, once: bool = False, stream: TextIO | None = None) -> None:
    """On a terminal: until `q`, Ctrl-C or the end of its input. In a pipe one frame after the other with an empty line
    between, until the reader goes. `once`: a single frame, and nothing is cleared.

    `frame` is called anew for each frame, and for the same figures once more when the terminal gets another size.
    """
    stream = stream or sys.stdout
    if once or not stream.isatty():
        _print(frame, stream)
        while not once:
            time.sleep(every_s)
            stream.write("\n")
            _print(frame, stream)
        return
    with _own_page(stream), _keys() as pressed:
        while True:
            size = shutil.get_terminal_size()
            lines = list(frame(size.columns, size.lines))[: size.lines]
            stream.write(_HOME + _LINE_END.join(lines) + "\x1b[K" + _REST)
            stream.flush()
            until = time.monotonic() + every_s
            while (left_s := until - time.monotonic()) > 0 and shutil.get_terminal_size() == size:
                if "q" in pressed(min(left_s, _LOOK_S)):
                    return


def _print(frame: FrameMaker, stream: TextIO) -> None:
    size = shutil.get_terminal_size((100, 10_000))
    lines = frame(size.columns, size.lines if stream.isatty() else 10_000)
    stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


@contextmanager
def _own_page(stream: TextIO) -> Iterator[None]:
    """What was on the terminal is there again afterwards."""
    stream.write(_PAGE)
    try:
        yield
    finally:
        stream.write(_PAGE_BACK)
        stream.flush()


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for keys, so many seconds at most, and says which came; "q" also at the input's end.

    Without a terminal to read from it only waits.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # keys come at once and are not shown; Ctrl-C still interrupts

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 64).decode("utf-8", "replace").lower() or "q"

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
