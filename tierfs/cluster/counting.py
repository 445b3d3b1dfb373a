"""Which nodes hold which bytes, and how many copies are missing. Pure.

A node holds a sealed file when it wrote it, unless its Holding of that generation says otherwise (its RAM was lost, or
it let go of it; a Holding that has the node's own part says nothing of files that were added later); when its Holding
lists the part that the file is in; or when its Holding lists the file's version.
Only live nodes count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tierfs.catalog.keys import ADDED
from tierfs.catalog.records import FileRecord, Holding
from tierfs.cluster.step_files import StepFiles


class Holders:
    """Of the files of one generation, as the holdings say that were read."""

    def __init__(self, files: StepFiles, holdings: Mapping[str, Holding], live: Collection[str]) -> None:
        self._files = files
        self._live = frozenset(live)
        self._current = {node: each for node, each in holdings.items() if each.generation == files.generation}
        self._of_part: dict[str, set[str]] = {}
        self._of_version: dict[str, set[str]] = {}
        for node, holding in holdings.items():
            if node not in self._live:
                continue
            # A version names bytes for good, whichever generation it was held for; a part's name does not.
            for version in holding.versions:
                self._of_version.setdefault(version, set()).add(node)
            if node in self._current:
                for part in holding.parts:
                    self._of_part.setdefault(part, set()).add(node)

    def of(self, file: FileRecord) -> set[str]:
        """Live nodes with the file's bytes."""
        found = set(self._of_version.get(file.version, ()))
        in_parts = self._files.parts_of_version.get(file.version, ())
        if file.node in self._live and self._is_held_by_author(file, is_addition=not in_parts):
            found.add(file.node)
        for part in in_parts:
            found |= self._of_part.get(part, set())
        return found

    def _is_held_by_author(self, file: FileRecord, *, is_addition: bool) -> bool:
        holding = self._current.get(file.node)
        if holding is None:
            return True
        return is_addition and (file.node in holding.parts or file.node not in self._files.parts)

    def parts(self) -> Iterator[tuple[str, list[FileRecord]]]:
        """Each part with those files of it that the step holds; additions as NODE+. Parts without any are left out."""
        shown = self._files.files
        for parts, ending in ((self._files.parts, ""), (self._files.added, ADDED)):
            for node, files in parts.items():
                counted = [file for inner, file in files.items() if shown.get(inner) == file]
                if counted:
                    yield node + ending, counted

    def copies(self) -> dict[str, set[str]]:
        """By part, the live nodes that hold it whole."""
        return {part: set.intersection(*map(self.of, files)) for part, files in self.parts()}

    def has_lost_file(self) -> bool:
        """Some file of the step has no holder."""
        return any(not self.of(file) for file in self._files.files.values())


def missing_copies(holders: Holders, *, serving: Collection[str], replicas: int) -> dict[str, int]:
    """By part, how many copies are to be made: as many nodes as `replicas` (or all that there are) shall hold it.

    Copies on nodes that are about to go (not `serving`) are not counted, unless there are only such.
    """
    counted = frozenset(serving)
    needed = min(replicas, len(counted))
    missing = {part: needed - len(nodes & counted) for part, nodes in holders.copies().items()}
    return {part: count for part, count in missing.items() if count > 0}
