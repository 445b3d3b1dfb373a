"""What a trainer's or a reader's process does when it is told to: real system calls on its own node's mount, timed.

Each function gets its `Seat`'s root and returns plain data. Errors come back as data too (`failure`): who asked judges.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig import checkpoints
from rig.plain_steps import MARKER, content, shard_names

MIB = 1 << 20
BLOCK = bytes(range(256)) * 4096


@dataclass
class Timer:
    """The longest of the calls that were made within `call`, and which it was."""

    seconds: float = 0.0
    what: str = ""
    doing: str = ""
    total: float = field(default_factory=lambda: -time.monotonic())

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        self.doing, begin = what, time.monotonic()
        yield
        took = time.monotonic() - begin
        if took > self.seconds:
            self.seconds, self.what = took, what

    def told(self) -> dict[str, Any]:
        return {"longest_s": self.seconds, "what": self.what, "took_s": self.total + time.monotonic()}


def plain_sizes(seed: int) -> list[int]:
    """Of the shards; each twelfth save has one that goes to the object tier in several parts."""
    return [(24 if seed % 12 == 0 else 1) * MIB + seed % 7 * 100_000, 400_000 + seed % 5 * 1000, 70_000]


def save_plain(root: Path, path: str, seed: int) -> dict[str, Any]:
    """Shards, each fsynced, then the marker by rename, as Hugging Face's writers do it."""
    timer, step, sizes = Timer(), root / path, plain_sizes(seed)
    names = shard_names(len(sizes))
    with timer.call("mkdir"):
        step.mkdir(parents=True, exist_ok=True)
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        data = content(seed, index, size)
        with timer.call("open"):
            fd = os.open(step / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with timer.call("write"):
                offset = 0
                while offset < size:
                    offset += os.write(fd, memoryview(data)[offset : offset + 4 * MIB])
            with timer.call("fsync"):
                os.fsync(fd)
        finally:
            with timer.call("close"):
                os.close(fd)
    weights = {f"w{name}": name for name in names}
    with timer.call("write of the marker"):
        (step / MARKER).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return timer.told()


def save_dcp(root: Path, path: str, seed: int, size_bytes: int, state: Any = None) -> dict[str, Any]:
    """By stock `dcp.save`: of this process alone, or of all ranks where there is a process group."""
    state = checkpoints.state(seed, size_bytes) if state is None else state
    timer = Timer()
    with timer.call("dcp.save"):
        checkpoints.save_state(root / path, state)
    return timer.told()


def load(root: Path, path: str, kind: str, seeds: Sequence[int], size_bytes: int) -> dict[str, Any]:
    """`seed`: which of these it holds as a whole, None for none, with `wrong` saying what it holds instead. `before`
    and `after` are what the mount says of the step: where they differ it was exchanged meanwhile."""
    before = look(root / path)
    timer = Timer()
    with timer.call("load"):
        found, wrong, nbytes = whole(root / path, kind, seeds, size_bytes)
    return {
        "seed": found,
        "wrong": wrong,
        "bytes": nbytes,
        "before": before,
        "after": look(root / path),
        **timer.told(),
    }


def whole(step: Path, kind: str, seeds: Sequence[int], size_bytes: int) -> tuple[int | None, str, int]:
    if kind == "plain":
        return _whole_plain(step, seeds)
    loaded = checkpoints.load(step, size_bytes)
    wrong = {seed: checkpoints.differences(loaded, seed, size_bytes) for seed in seeds}
    nbytes = sum(path.stat().st_size for path in step.glob("*.distcp"))
    return next((seed for seed, names in wrong.items() if not names), None), f"step {loaded['step']}; {wrong}", nbytes


def _whole_plain(step: Path, seeds: Sequence[int]) -> tuple[int | None, str, int]:
    names = list(json.loads((step / MARKER).read_text())["weight_map"].values())
    found = [(step / name).read_bytes() for name in names]
    matches = []
    for index, data in enumerate(found):
        matches.append([seed for seed in seeds if data == content(seed, index, plain_sizes(seed)[index])])
    common = set(matches[0]).intersection(*matches[1:])
    lengths = [len(data) for data in found]
    return min(common, default=None), f"shards hold {matches} of {list(seeds)}, lengths {lengths}", sum(lengths)


def look(step: Path) -> list[Any]:
    told: list[Any] = []
    for name in ("generation", "state", "level", "tier"):
        try:
            told.append(os.getxattr(step, f"user.tierfs.{name}").decode())
        except OSError as error:
            told.append(error.errno)
    for marker in (MARKER, ".metadata"):
        with contextlib.suppress(OSError):
            info = (step / marker).stat()
            told.append((info.st_ino, info.st_mtime_ns))
    return told[:2] + told[4:] + [told[2:4]]


def same(before: list[Any], after: list[Any]) -> bool:
    """Generation, state and marker are those that were there before."""
    return before[:-1] == after[:-1] and len(before) > 3


def remove(root: Path, path: str) -> dict[str, Any]:
    timer = Timer()
    with timer.call("rm -r"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(root / path)
    return timer.told()


def fill(root: Path, path: str) -> dict[str, Any]:
    """Writes until there is no room; `errno` is what it got then."""
    written = 0
    fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        while True:
            written += os.write(fd, BLOCK)
    except OSError as error:
        return {"errno": error.errno, "bytes": written}
    finally:
        os.close(fd)


def unlink(root: Path, path: str) -> dict[str, Any]:
    (root / path).unlink(missing_ok=True)
    return {}


def failure(error: BaseException) -> dict[str, Any]:
    """An error as data: `errno` of the first OSError that it was caused by, 0 for none."""
    found, waiting, seen = 0, [error], set()
    while waiting and not found:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, OSError) and each.errno:
            found = each.errno
        waiting += [one for one in (each.__cause__, each.__context__) if one is not None]
        waiting += [one[0] for one in getattr(each, "failures", {}).values()]
    inner = "; ".join(f"{each[0]!r}" for each in getattr(error, "failures", {}).values())
    text = "".join(traceback.format_exception(error))
    return {
        "failure": f"{type(error).__name__}: {inner or error}"[:600],
        "errno": found,
        "name": errno.errorcode.get(found, ""),
        "traceback": text[-3500:],
    }


WORK = {function.__name__: function for function in (save_plain, save_dcp, load, remove, fill, unlink)}
