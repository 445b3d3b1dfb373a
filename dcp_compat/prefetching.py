"""Brings this rank's files of the newest step into RAM while the job is still starting: a node that comes new into a
job, or whose RAM is lost, has its shards by the time that NCCL is up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from dcp_compat.mounts import attribute
from dcp_compat.steps import latest, step_path

log = logging.getLogger("tierfs.dcp")

#: The object tier's chunks (docs/object-tier.md).
_CHUNK_BYTES = 16 << 20


class Prefetch:
    """A prefetch that goes on by itself. `wait` is for who wants to know; an error is none of the training's business,
    whose own load says more."""

    def __init__(self, files: Iterator[Path]) -> None:
        self.files: list[Path] = []
        self.problem: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(files,), name="tierfs-prefetch", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all is here or something failed; False where that takes longer. `files` were brought, `problem` is why
        the others were not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, files: Iterator[Path]) -> None:
        try:
            for path in files:
                _bring(path)
                self.files.append(path)
        except OSError as error:
            self.problem = error
            log.warning("prefetching stopped: %s", error)


def prefetch(
    namespace: str | os.PathLike[str],
    *,
    step: int | None = None,
    rank: int | None = None,
    root: str | os.PathLike[str] | None = None,
) -> Prefetch:
    """Begins to bring the marker and the rank's shards of the step (without one: the newest whole one) into RAM.

    `rank` is $RANK, as torchrun sets it, else 0. Files that are in RAM are left alone. A job of another number of ranks
    than saved the step loads other files as well, which come as they are read.
    """
    me = int(os.environ.get("RANK", "0")) if rank is None else rank
    return Prefetch(_files_of(namespace, step, me, root))


def _files_of(
    namespace: str | os.PathLike[str], step: int | None, rank: int, root: str | os.PathLike[str] | None
) -> Iterator[Path]:
    if step is None:
        newest = latest(namespace, root=root)
        path = newest.path if newest is not None else None
    else:
        path = step_path(namespace, step, root=root)
    if path is None or not path.is_dir():
        return
    # Replicated tensors and objects lie in the files of whichever rank saved them; the first has most of them.
    patterns = [".metadata", f"__{rank}.metadata", f"__{rank}_*", *(["__0_*"] if rank else [])]
    for pattern in patterns:
        yield from sorted(file for file in path.glob(pattern) if attribute(file, "tier") not in ("", "ram"))


def _bring(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:  # opening begins to bring all of it; reading waits for it
        buffer = bytearray(_CHUNK_BYTES)
        while file.readinto(buffer):
            pass
