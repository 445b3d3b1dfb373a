"""Markers: the files whose appearance completes a step, and what they say that the step must hold.

A DCP marker (`.metadata`) is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read here without
unpickling (`tierfs.steps.inert_pickle`): no class is imported and no code of the file runs, and classes of other
planners and frameworks are as good as DCP's own, since only attribute names count.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tierfs.errors import MarkerUnreadable, PathRefused, SettingsError
from tierfs.steps.inert_pickle import InertDict, InertObject, PickleRefused, read_pickle
from tierfs.steps.names import safe_relative

#: DCP's metadata has 143 bytes a shard of a tensor (measured, torch 2.13): this is 1.8 million of them.
MAX_DCP_BYTES = 256 << 20
#: An index has about 100 bytes a tensor.
MAX_INDEX_BYTES = 64 << 20

Kind = Literal["dcp", "dcp-per-rank", "close"]
KINDS = ("dcp", "dcp-per-rank", "close")

_RANK = "(rank)"
#: What DCP adds to a marker's name while it writes it (torch/distributed/checkpoint/filesystem.py, `finish`).
_UNFINISHED = ".tmp"
#: `f"{prefix}{file_count}{DEFAULT_SUFFIX}"` with the prefix `__{rank}_` (the same file).
_DATA_FILE = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")


@dataclass(frozen=True)
class MarkerContent:
    """`files` maps each file that the marker names (relative to the marker's directory) to its least size in bytes.

    `unknown_entries` counts those of its entries that named no file in a way known here; for them nothing is checked.
    """

    files: dict[str, int]
    unknown_entries: int = 0


@dataclass(frozen=True)
class Marker:
    """A marker file of a step. `directory` is its directory inside the step ("" is the step's own)."""

    kind: Kind
    name: str
    directory: str
    rank: int | None = None

    @property
    def name_inside(self) -> str:
        """Its path inside the step."""
        return f"{self.directory}/{self.name}" if self.directory else self.name


class MarkerRules:
    """Which file names are markers: the setting `steps.markers`, where `(rank)` in a name stands for a number."""

    def __init__(self, markers: Mapping[str, str]) -> None:
        """Raises SettingsError for a kind that is unknown or a name that is none."""
        self._plain: dict[str, Kind] = {}
        self._ranked: list[tuple[re.Pattern[str], Kind]] = []
        for name, kind in markers.items():
            if kind not in KINDS:
                raise SettingsError(
                    f"steps.markers: {name!r} is of the kind {kind!r}; known are {', '.join(KINDS)}",
                    key="steps.markers",
                )
            if not name or "/" in name or name.count(_RANK) > 1:
                raise SettingsError(
                    f"steps.markers: {name!r} is not a file name (with at most one {_RANK})", key="steps.markers"
                )
            before, ranked, after = name.partition(_RANK)
            if ranked:
                pattern = re.compile(f"{re.escape(before)}([0-9]{{1,9}}){re.escape(after)}")
                self._ranked.append((pattern, cast("Kind", kind)))
            else:
                self._plain[name] = cast("Kind", kind)

    def match(self, inner: str) -> Marker | None:
        """The marker that the file with this path inside a step is, or None."""
        directory, _, name = inner.rpartition("/")
        kind = self._plain.get(name)
        if kind is not None:
            return Marker(kind, name, directory)
        for pattern, kind in self._ranked:
            match = pattern.fullmatch(name)
            if match:
                return Marker(kind, name, directory, int(match[1]))
        return None

    def commit_rename(self, old_inner: str, new_inner: str) -> Marker | None:
        """The marker, where renaming one path inside a step to the other is the framework's own commit.

        That is DCP's rename of `.metadata.tmp` to `.metadata` in one directory (or of a rank's own). A user who moves
        some file over a marker does not commit.
        """
        if old_inner != new_inner + _UNFINISHED:
            return None
        marker = self.match(new_inner)
        return marker if marker is not None and marker.kind != "close" else None


def is_data_file_name(name: str) -> int | None:
    """The rank that DCP's data file of this name (`__{rank}_{count}.distcp`) is of, which may be 0; else None."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[1]) if match else None


def read_dcp_marker(path_or_fd: int | Path) -> MarkerContent:
    """What a `.metadata` names. A file's least size is the end of its furthest item.

    Takes some 0.1 s a MB and a few tens of bytes of memory a byte: call it in a thread. Raises MarkerUnreadable, which
    says the path and why.
    """
    data, path = _read(path_or_fd, MAX_DCP_BYTES)
    try:
        return _dcp_content(read_pickle(data))
    except (PickleRefused, PathRefused) as error:
        raise MarkerUnreadable(f"the marker {path} can't be read: {error}") from None


def read_index_marker(path_or_fd: int | Path) -> MarkerContent:
    """What a Hugging Face `*.index.json` names: the files of its `weight_map`, with no least size.

    Raises MarkerUnreadable, which says the path and why.
    """
    data, path = _read(path_or_fd, MAX_INDEX_BYTES)
    try:
        value = json.loads(data)
        names = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(names, dict):
            raise PickleRefused("it has no weight_map")
        return MarkerContent({_file_name(name): 0 for name in names.values()})
    except (ValueError, RecursionError) as error:
        raise MarkerUnreadable(f"the marker {path} is not JSON: {error}") from None
    except (PickleRefused, PathRefused) as error:
        raise MarkerUnreadable(f"the marker {path} can't be read: {error}") from None


def _read(path_or_fd: int | Path, most: int) -> tuple[bytes, str]:
    """The whole file, which must be a regular one of at most so many bytes, and its path for messages."""
    if isinstance(path_or_fd, int):
        try:
            path = str(Path(f"/proc/self/fd/{path_or_fd}").readlink())
        except OSError:
            path = f"fd {path_or_fd}"
        fd = path_or_fd
    else:
        path = str(path_or_fd)
        try:
            # Neither follow a link out of the tier nor wait for the writer of a pipe.
            fd = os.open(path_or_fd, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise MarkerUnreadable(f"the marker {path} can't be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise MarkerUnreadable(f"the marker {path} is not a regular file")
        if status.st_size > most:
            raise MarkerUnreadable(f"the marker {path} has {status.st_size} bytes; more than {most} are not read")
        pieces: list[bytes] = []
        at = 0
        # The bound once more: the file may grow meanwhile.
        while at <= most and (piece := os.pread(fd, min(most + 1 - at, 16 << 20), at)):
            pieces.append(piece)
            at += len(piece)
    except OSError as error:
        raise MarkerUnreadable(f"the marker {path} can't be read: {error.strerror}") from error
    finally:
        if fd is not path_or_fd:
            os.close(fd)
    if at > most:
        raise MarkerUnreadable(f"the marker {path} has more than {most} bytes; so many are not read")
    return b"".join(pieces), path


def _file_name(name: object) -> str:
    if not isinstance(name, str):
        raise PickleRefused("it names a file by what is no text")
    return safe_relative(name)


def _dcp_content(value: object) -> MarkerContent:
    state = _attributes(value)
    if "storage_data" not in state:
        raise PickleRefused("it is not the metadata of a checkpoint: it has no storage_data")
    files: dict[str, int] = {}
    unknown = 0
    # DCP's storage_data is one dictionary of infos. Other planners may nest; each object is visited once.
    waiting: list[Any] = [state["storage_data"]]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        if isinstance(item, InertObject | list | tuple):
            seen.add(id(item))
        if type(item) is InertObject and item.items is None:
            attributes = _attributes(item, _ENTRY_ATTRIBUTES)
            if "relative_path" in attributes:
                name = _file_name(attributes["relative_path"])
                files[name] = max(files.get(name, 0), _end(attributes, name))
            else:
                unknown += 1
        elif type(item) is InertObject:
            waiting.append(item.items)
        elif type(item) is InertDict:
            waiting += item[1::2]
        elif isinstance(item, list | tuple):
            waiting += item
        elif item is not None:
            unknown += 1
    return MarkerContent(files, unknown)


#: What is looked for in an object. An entry of storage_data with very many attributes is no info of a file; it would
#: also let a small file name one large state a million times.
_WANTED = frozenset(("storage_data", "relative_path", "offset", "length"))
_ENTRY_ATTRIBUTES = 64


def _attributes(value: object, most: int | None = None) -> dict[str, Any]:
    """The wanted attributes of an object that the pickle describes: from its state, {} where it has none."""
    if type(value) is not InertObject:
        return {}
    found: dict[str, Any] = {}
    # Objects with slots have a pair: dictionary or None, and the slots' values.
    states = value.state if type(value.state) is tuple and len(value.state) == 2 else (value.state,)
    for state in states:
        if type(state) is InertDict and (most is None or len(state) <= 2 * most):
            for at in range(0, len(state), 2):
                key = state[at]
                if type(key) is str and key in _WANTED:
                    found[key] = state[at + 1]
    return found


def _end(attributes: Mapping[str, Any], name: str) -> int:
    """Where the item ends in its file. Infos without offset and length (safetensors) give 0."""
    offset, length = attributes.get("offset", 0), attributes.get("length", 0)
    for number in (offset, length):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise PickleRefused(f"an item of {name!r} has the offset or length {str(number)[:60]}")
    return cast("int", offset + length)
