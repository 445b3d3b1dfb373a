"""The files of a step that the SageMaker library saved, and how its two layouts in a bucket name them.

In the mount a step has the names of the library's own layout for Ray, `step_N/rank_R/checkpoint.pt`, so that a bucket
with steps of the mount is one that the library reads by itself. Two things are added: a note beside each file with the
checksum that came with it, and DCP's `.metadata`, which makes the step complete and lets every DCP reader load it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Written in a rank's directory, the metadata in that of rank 0 (the library's `config/s3_path_strategy.py`, and
#: `checkpointing/filesystem/writer.py`, `write_data` and `finish`).
SHARD_FILE = "checkpoint.pt"
METADATA_FILE = "metadata.metadata"
METADATA = f"rank_0/{METADATA_FILE}"
DCP_METADATA = ".metadata"
NOTE_SUFFIX = ".shard-meta.json"

#: In a namespace that was made by the library's protocol: for how many ranks, and how many steps are to stay.
NAMESPACE_NOTE = ".sagemaker.json"

#: More ranks, and steps with more digits, than anybody has.
MOST_RANKS = 1_000_000
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_RANK = re.compile(rf"rank_{_NUMBER}", re.ASCII)
_STEP = re.compile(rf"step_{_NUMBER}", re.ASCII)


def step_name(step: int) -> str:
    """The step's directory in its namespace."""
    return f"step_{step}"


def shard_name(rank: int) -> str:
    """The shard of a rank, relative to the step."""
    return f"rank_{rank}/{SHARD_FILE}"


def note_name(inner: str) -> str:
    """The note beside a shard or the metadata."""
    return inner + NOTE_SUFFIX


def rank_of(directory: str) -> int | None:
    """The rank that a directory of this name is of."""
    match = _RANK.fullmatch(directory)
    rank = int(match[1]) if match else MOST_RANKS
    return rank if rank < MOST_RANKS else None


def step_of(directory: str) -> int | None:
    """The step that a directory of this name is of."""
    match = _STEP.fullmatch(directory)
    return int(match[1]) if match else None


def steps_saved(paths: Iterable[str]) -> list[int]:
    """The steps of which files lie below a namespace of the library's, in either layout, the highest number first."""
    found: set[int] = set()
    for path in paths:
        *directories, name = path.split("/")
        if name in (SHARD_FILE, METADATA_FILE) and any(rank_of(each) is not None for each in directories):
            found.update(number for each in directories if (number := step_of(each)) is not None)
    return sorted(found, reverse=True)


def names_in_step(paths: Iterable[str], step: int) -> dict[str, str]:
    """Of files below a namespace of the library's, or below one step of it: those of the step, by their name in the
    mount. Both layouts, `rank_R/step_N/FILE` and `step_N/rank_R/FILE`, and the latter without `step_N`. Empty where
    the metadata is not among them: then this is nothing that the library saved, or a save that it did not finish."""
    found: dict[str, str] = {}
    for path in paths:
        *directories, name = path.split("/")
        if name not in (SHARD_FILE, METADATA_FILE) or len(directories) not in (1, 2):
            continue
        ranks = [rank for each in directories if (rank := rank_of(each)) is not None]
        steps = [number for each in directories if (number := step_of(each)) is not None]
        if len(ranks) == 1 and (not steps or steps == [step]) and len(ranks) + len(steps) == len(directories):
            found[f"rank_{ranks[0]}/{name}"] = path
    return found if METADATA in found else {}
