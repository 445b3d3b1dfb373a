"""Small files that are replaced as a whole: a reader finds what was there or what is there now, whoever dies."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tierfs.ram.books import with_room

UNFINISHED = ".tmp"
"""The suffix of what a writer that died left beside the file. Its name begins with a dot."""


def write_whole(path: Path, data: bytes, *, writer: str = "") -> None:
    """Write a file of mode 0600, with its directories, also in a RAM tier that data has filled. Raises OSError (ENOSPC:
    what was there stays).

    Writers that may be at the same file at once have different `writer` names. Nothing is fsynced: these files lie in
    the tmpfs whose content they describe, and live exactly as long.
    """
    with_room(path, len(data), lambda: _write_whole(path, data, writer))


def _write_whole(path: Path, data: bytes, writer: str) -> None:
    unfinished = path.with_name(f".{path.stem}.{writer or path.suffix.lstrip('.')}{UNFINISHED}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(unfinished, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(unfinished, flags, 0o600)
    try:
        with open(fd, "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
