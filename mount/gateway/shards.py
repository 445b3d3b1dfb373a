"""A rank's shard of a step, and the library's metadata as that of one rank more: files of the mount, with a note beside
each that holds its checksum. Blocking: for threads.

A shard without a note is not there (yet). Its note goes when it is written anew, and comes once all of it was received
and verified.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import xxhash

from mount.gateway.daemon import Daemon, is_whole
from mount.gateway.refusal import FULL, Refusal
from mount.gateway.tree import Tree
from tierfs.errors import CommitRefused, MarkerUnreadable, TierfsError
from tierfs.sagemaker.layout import DCP_METADATA, METADATA, note_name, shard_name, step_name
from tierfs.sagemaker.metadata import for_dcp
from tierfs.steps.markers import MAX_DCP_BYTES

log = logging.getLogger("tierfs.gateway")

#: The only one that the library knows (its `storage/clients/inmemory/models.py`).
ALGORITHM = "xxh3_128"
#: docs/semantics.md, "Extended attributes".
_SIZE_AHEAD = "user.tierfs.size"
_NOTE_BYTES = 4096
_PIECE_BYTES = 4 << 20
_LOOK_S = 0.05


@dataclass(frozen=True)
class Place:
    """Where a shard is: the shard `rank` of `ranks`, of which the last is the metadata, where there are several."""

    namespace: str
    step: int
    rank: int
    ranks: int

    @property
    def is_last(self) -> bool:
        return self.rank == self.ranks - 1

    @property
    def step_rel(self) -> str:
        return f"{self.namespace}/{step_name(self.step)}"

    @property
    def rel(self) -> str:
        return f"{self.step_rel}/{METADATA if self.is_last and self.rank > 0 else shard_name(self.rank)}"

    @property
    def note_rel(self) -> str:
        return note_name(self.rel)

    def of_rank(self, rank: int) -> Place:
        return Place(self.namespace, self.step, rank, self.ranks)


@dataclass(frozen=True)
class Note:
    """`checksum` is base64 of the digest, as the header `Shard-Meta` has it."""

    checksum: str
    size_bytes: int

    def header(self) -> str:
        return json.dumps({"checksum": self.checksum, "algorithm": ALGORITHM})

    def to_bytes(self) -> bytes:
        return json.dumps({"checksum": self.checksum, "algorithm": ALGORITHM, "size_bytes": self.size_bytes}).encode()


def claimed_checksum(header: str | None) -> str | None:
    """What a client says of its body; None where it says nothing. Refusal for what can't be understood."""
    if header is None:
        return None
    try:
        value = json.loads(header)
        algorithm, checksum = value.get("algorithm", ALGORITHM), value["checksum"]
        if algorithm == ALGORITHM and len(base64.b64decode(checksum, validate=True)) == 16:
            return str(checksum)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, binascii.Error):
        pass
    raise Refusal(400, f"Shard-Meta has no checksum of {ALGORITHM} in base64: {header[:200]!r}")


class Incoming:
    """A body that becomes a shard: `open`, `write` in pieces, then `seal`; or `discard` at any time."""

    def __init__(self, tree: Tree, place: Place) -> None:
        self._tree = tree
        self._place = place
        self._open = ExitStack()
        self._fd = -1
        self._sum = xxhash.xxh3_128()
        self._size_bytes = 0

    def open(self, expected_bytes: int | None) -> None:
        """Refusal for what no tier of this size can hold: nothing is evicted, or overwritten, for its sake."""
        if expected_bytes is not None and expected_bytes > self._tree.capacity_bytes():
            raise Refusal(
                FULL, f"{self._place.rel} is to have {expected_bytes} bytes, more than the RAM tier has in all"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._fd = self._open.enter_context(self._tree.file(self._place.rel, flags))
        if expected_bytes is not None:
            with suppress(OSError):  # then room is made as the file grows
                os.setxattr(self._fd, _SIZE_AHEAD, str(expected_bytes).encode())
        with suppress(FileNotFoundError):
            self._tree.unlink(self._place.note_rel)

    def write(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            view = memoryview(piece)
            self._sum.update(view)
            self._size_bytes += len(view)
            while view and self._fd >= 0:
                view = view[os.write(self._fd, view) :]

    def seal(self, claimed: str | None) -> None:
        """Refusal, with nothing left of it, where its checksum is another one than was claimed."""
        note = self.verified(claimed)
        self._open.close()
        self._tree.write_whole(self._place.note_rel, note.to_bytes())

    def verified(self, claimed: str | None) -> Note:
        found = base64.b64encode(self._sum.digest()).decode()
        if claimed is not None and claimed != found:
            raise Refusal(400, f"the body has the checksum {found}, its Shard-Meta says {claimed}; send it again")
        return Note(found, self._size_bytes)

    def discard(self) -> None:
        """Also after `open` failed half-way."""
        was_open = self._fd >= 0
        self._fd = -1
        self._open.close()
        if was_open:
            with suppress(OSError, TierfsError):
                self._tree.unlink(self._place.rel)


@dataclass(frozen=True)
class Found:
    """A shard that is there, open for reading."""

    fd: int
    note: Note


class Shards:
    """Reads, deletes and completes; `Incoming` writes.

    What other nodes' gateways have just received may be seen here a moment later: it is waited for for `wait_s`.
    """

    def __init__(self, tree: Tree, daemon: Daemon, *, wait_s: float = 0.0) -> None:
        self._tree = tree
        self._daemon = daemon
        self._wait_s = wait_s

    @contextmanager
    def found(self, place: Place) -> Iterator[Found]:
        """FileNotFoundError where it is not (wholly) there."""
        with self._tree.file(place.rel, os.O_RDONLY) as fd:
            size_bytes = os.fstat(fd).st_size
            note = self.note(place)
            if note is None and is_whole(self._daemon.step(place.step_rel)):
                note = _sum_up(fd)  # steps that were imported have no notes
            if note is None or note.size_bytes != size_bytes:
                raise FileNotFoundError(place.rel)
            yield Found(fd, note)

    def note(self, place: Place) -> Note | None:
        """None where there is none, or one that nobody wrote so."""
        try:
            value = json.loads(self._tree.read(place.note_rel, _NOTE_BYTES))
            checksum, size_bytes = value["checksum"], value["size_bytes"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return Note(checksum, size_bytes) if isinstance(checksum, str) and isinstance(size_bytes, int) else None

    def is_committed(self, place: Place, claimed: str | None) -> bool:
        """The metadata with this checksum is what its step, which is whole, was completed with: it was only sent again,
        since the answer to the first time was lost."""
        if claimed is None or not place.is_last or place.rank == 0:
            return False
        note = self.note(place)
        return note is not None and note.checksum == claimed and is_whole(self._daemon.step(place.step_rel))

    def complete(self, place: Place) -> None:
        """Makes the step of a shard that just came complete, where it was the last one. Refusal where it can't be,
        which concerns only who sent the last rank: that is the library's last word of a step."""
        deadline = time.monotonic() + (self._wait_s if place.is_last else 0.0)
        while self._lacks_shard(place):
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_S)
        if not place.is_last:
            step = self._daemon.step(place.step_rel)
            if step is None or step["overwriting"] or step["state"] == "complete":
                return  # of a save that has begun anew, whose metadata is still to come
        try:
            self._commit(place.of_rank(place.ranks - 1))
        except (OSError, CommitRefused) as error:
            step = self._daemon.step(place.step_rel) or {}
            why = step.get("note") or getattr(error, "message", "") or os.strerror(getattr(error, "errno", 0) or 0)
            log.warning("the step can't be completed: %s", why, extra=_extra(place))
            if place.is_last:
                # Not a 500: the library's client swallows what is said with one.
                raise Refusal(409, f"{place.step_rel} can't be completed: {why}") from None

    def _lacks_shard(self, place: Place) -> bool:
        # The metadata comes last, so that the other ranks' puts look for one name only.
        return any(self._tree.size(place.of_rank(rank).note_rel) is None for rank in reversed(range(place.ranks)))

    def _commit(self, last: Place) -> None:
        if last.rank == 0:
            self._daemon.commit(last.step_rel)
            return
        try:
            translated = for_dcp(self._tree.read(last.rel, MAX_DCP_BYTES))
        except MarkerUnreadable as error:
            log.warning("%s; the step is completed without DCP's", error.message, extra=_extra(last))
            self._daemon.commit(last.step_rel)
            return
        # As DCP does it: the file system holds it against the shards, and refuses the rename where one is not whole.
        self._tree.write_whole(f"{last.step_rel}/{DCP_METADATA}", translated.data)
        log.info("complete", extra=_extra(last))

    def delete(self, place: Place) -> None:
        """FileNotFoundError where it is not there. With its last shard all of the step goes."""
        self._tree.unlink(place.rel)
        with suppress(FileNotFoundError):
            self._tree.unlink(place.note_rel)
        with suppress(OSError):
            self._tree.rmdir(place.rel.rpartition("/")[0])
        if not any(name.startswith("rank_") for name in self._tree.directories(place.step_rel)):
            self._daemon.remove(place.step_rel)


def read_piece(fd: int, offset: int) -> bytes:
    """b"" at the end."""
    return os.pread(fd, _PIECE_BYTES, offset)


def _sum_up(fd: int) -> Note:
    total, offset = xxhash.xxh3_128(), 0
    while piece := read_piece(fd, offset):
        total.update(piece)
        offset += len(piece)
    return Note(base64.b64encode(total.digest()).decode(), offset)


def _extra(place: Place) -> dict[str, str]:
    return {"namespace": place.namespace, "step": step_name(place.step), "file": "", "tier": ""}
