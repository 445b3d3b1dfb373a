"""The steps of a namespace, as a training script asks for them: which there are, the newest, where one lies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_compat.mounts import attribute, is_tierfs
from tierfs.errors import NotFound
from tierfs.settings import StepSettings
from tierfs.steps.names import StepNames

ROOT_VARIABLE = "TIERFS_ROOT"
DEFAULT_ROOT = "/ckpt"

#: Where nobody tells which steps are whole (a plain directory), DCP's own markers do.
_MARKERS = (".metadata", "__0.metadata")


@dataclass(frozen=True)
class Step:
    """A step that is whole. `number` is the one in its name."""

    number: int
    path: Path


def namespace_path(namespace: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Path:
    """`/ckpt/run1` of "run1": below `root`, else below $TIERFS_ROOT, else below /ckpt. An absolute path stays."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT) / namespace


def step_path(namespace: str | os.PathLike[str], step: int, *, root: str | os.PathLike[str] | None = None) -> Path:
    """Where the step lies, whatever its name is (`step_500`, `iter_0000500` …); where none is there `step_500`."""
    directory = namespace_path(namespace, root)
    for found in _numbered(directory):
        if found.number == step:
            return found.path
    return directory / f"step_{step}"


def step_number(path: Path) -> int | None:
    """The number that the directory's name carries; None where it names no step."""
    return StepNames(StepSettings().patterns).number(path.name)


def list_steps(namespace: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> list[Step]:
    """The steps that are whole, over all tiers, oldest number first. None for a namespace that is not there."""
    return sorted(
        (found for found in _numbered(namespace_path(namespace, root)) if _is_whole(found.path)),
        key=lambda found: (found.number, found.path.name),
    )


def latest(namespace: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> Step | None:
    """The newest of them; None where there is none."""
    return next(iter(reversed(list_steps(namespace, root=root))), None)


def newest(namespace: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None) -> Step:
    """The same; NotFound where there is none."""
    found = latest(namespace, root=root)
    if found is None:
        raise NotFound(f"{namespace_path(namespace, root)} holds no whole step")
    return found


def _numbered(directory: Path) -> Iterator[Step]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        number = step_number(Path(entry.path))
        if number is not None and entry.is_dir(follow_symlinks=False):
            yield Step(number, Path(entry.path))


def _is_whole(path: Path) -> bool:
    if is_tierfs(path):
        return attribute(path, "state") == "complete"
    return any((path / marker).exists() for marker in _MARKERS)
