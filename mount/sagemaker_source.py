"""A source of `tierfs import` in which the SageMaker library saved: one step of it, under the names of the mount."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mount.copying import Passing, Source, SourceFile
from tierfs.errors import NotFound, TierfsError
from tierfs.sagemaker.layout import DCP_METADATA, METADATA, names_in_step, steps_saved
from tierfs.sagemaker.metadata import for_dcp
from tierfs.steps.markers import MAX_DCP_BYTES


def as_step(source: Source, step: int) -> Source:
    """The source as it is, unless the library saved there: then its step of that number, with DCP's metadata.

    The library has two layouts. Both may be named by their namespace, `s3://bucket/base/NAMESPACE`, the one for Ray by
    its step too. NotFound where it saved other steps there, MarkerUnreadable where the metadata is not its own.
    """
    files = source.files()
    by_path = {file.inner: file for file in files}
    if DCP_METADATA in by_path:
        return source
    names = names_in_step(by_path, step)
    if names:
        return SageMakerSource(source, {name: by_path[path] for name, path in names.items()})
    if found := steps_saved(by_path):
        known = ", ".join(f"step_{number}" for number in found[:20])
        raise NotFound(
            f"SageMaker's library saved there, but nothing of a step {step} that has its metadata; there is {known}. "
            f"The number in the destination's name says which one to import"
        )
    return source


class SageMakerSource:
    """`originals` are the files by their names in the mount."""

    def __init__(self, source: Source, originals: Mapping[str, SourceFile]) -> None:
        self._source = source
        self._originals = originals
        self._translated = for_dcp(_whole(source, originals[METADATA])).data

    def files(self) -> Sequence[SourceFile]:
        named = [replace(file, inner=name) for name, file in self._originals.items()]
        metadata = self._originals[METADATA]
        return [*named, SourceFile(DCP_METADATA, len(self._translated), metadata.mtime_ns, metadata.mode)]

    def copy(self, file: SourceFile, fd: int, passing: Passing) -> None:
        if file.inner != DCP_METADATA:
            self._source.copy(self._originals[file.inner], fd, passing)
            return
        with open(fd, "wb", closefd=False) as writing:
            writing.write(self._translated)
        passing(len(self._translated))


def _whole(source: Source, file: SourceFile) -> bytes:
    if file.size_bytes > MAX_DCP_BYTES:
        raise TierfsError(
            f"{file.inner} has {file.size_bytes} bytes; metadata of more than {MAX_DCP_BYTES} is not read"
        )
    with tempfile.TemporaryFile() as scratch:
        source.copy(file, scratch.fileno(), lambda size_bytes: None)
        return os.pread(scratch.fileno(), file.size_bytes, 0)
