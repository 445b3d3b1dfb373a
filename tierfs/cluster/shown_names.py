"""Names outside of steps' files, made here as the catalogue has them: directories (also steps'), plain files, links.

What a program of this node made, changed or removed, and the catalogue does not know yet, is left as it is.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable

from tierfs.catalog.records import FileRecord, TreeRecord
from tierfs.cluster import placing
from tierfs.cluster.copies import Copies
from tierfs.cluster.local_files import write_joined
from tierfs.cluster.making import FileMaker, plain_place
from tierfs.cluster.view import Seen, View
from tierfs.errors import TierfsError
from tierfs.steps.latest import NAME as LATEST
from tierfs.steps.names import StepPath
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry

log = logging.getLogger("tierfs.cluster")

#: So many complaints are remembered, so as to make each once.
_TOLD = 10_000
#: News of a name may be worked off after later ones; so many versions are looked back.
_VERSIONS_KEPT = 16


class ShownNames:
    """Used from the trio thread. `removed_here` says of a path that a program removed it here and the catalogue was
    not told yet; `is_moving_here` that it is at or below either name of a directory that this node is just renaming:
    the catalogue has the new name already, and the tree still the old one."""

    def __init__(self, registry: StepRegistry, view: View, copies: Copies, maker: FileMaker) -> None:
        self.registry = registry
        self.view = view
        self.copies = copies
        self.maker = maker
        self.root = registry.root
        self.removed_here: Callable[[str], bool] = lambda rel: False
        self.is_moving_here: Callable[[str], bool] = lambda rel: False
        #: What has the name may be on its way to the catalogue: who takes it there looks at the name again afterwards.
        self.is_being_told: Callable[[str], bool] = lambda rel: False
        #: This node has changed the name in the catalogue since that revision.
        self.is_behind: Callable[[str, int], bool] = lambda rel, revision: False
        #: The last few versions of this node's that the catalogue had of plain files, by path.
        self._published: dict[str, tuple[str, ...]] = {}
        self._placed: dict[str, int] = {}  # directories, by path
        self._told: set[tuple[str, str]] = set()

    def is_placed(self, rel: str) -> bool:
        """A directory that was made, or seen to be there, by this daemon, and is still there."""
        seen = self.view.tree.get(rel)
        if seen is None or seen.record.kind != "dir":
            return False
        return self._placed.get(rel) == seen.create_revision and (self.root / rel).is_dir()

    def note_published(self, rel: str, version: str) -> None:
        """The catalogue has, or had, this node's file of that version: another one there may take its place."""
        known = self._published.get(rel, ())
        if version not in known and version.startswith(f"{self.copies.node}/"):
            self._published[rel] = (*known, version)[-_VERSIONS_KEPT:]

    def was_published(self, rel: str, version: str) -> bool:
        """It is of another node, or one of this node's that the catalogue had of the name."""
        is_theirs = bool(version) and version.partition("/")[0] != self.copies.node
        return is_theirs or version in self._published.get(rel, ())

    def forget_name(self, rel: str) -> None:
        """The catalogue does not have it any more."""
        self._published.pop(rel, None)
        self._placed.pop(rel, None)

    async def place_tree(self, rel: str) -> bool:
        """Make the directory, link or plain file that the catalogue has under the name, with what is above it.

        True when something was made. What stands there already stays. OSError, TierfsError.
        """
        seen = self.view.tree.get(rel)
        if seen is None or seen.record.kind == "claim" or self.removed_here(rel) or self.is_moving_here(rel):
            return False
        parent = rel.rpartition("/")[0]
        if parent and placing.look(self.root, parent) is None:
            await self.place_tree(parent)
            if placing.look(self.root, parent) is None or self.view.tree.get(rel) != seen:
                return False  # it goes, with all that is in it
        if seen.record.kind == "file":
            made = await self._place_plain(rel, seen)
        else:
            made = self._place_other(rel, seen)
        if self.registry.names.locate(rel) is None and (made or (self.view.connected and self._is_as_told(rel, seen))):
            write_joined(self.root / rel, seen.create_revision)
        return made

    def _place_other(self, rel: str, seen: Seen[TreeRecord]) -> bool:
        record = seen.record
        if record.kind == "dir":
            made = placing.make_directory(self.root, rel, record)
            where = self.registry.names.locate(rel)
            if where is not None and not where.inner and (made or self.view.connected):
                self.joins(where, seen)
            if self.view.connected:
                self._placed[rel] = seen.create_revision
        else:
            if placing.read_link(self.root, rel) == record.target:
                return False
            self._make_way_for_users_latest(rel)
            if placing.look(self.root, rel) is not None:
                return False
            placing.make_link(self.root, rel, record)
            made = True
        if made:
            self.tell(rel)
        return made

    async def _place_plain(self, rel: str, seen: Seen[TreeRecord]) -> bool:
        file = seen.record.file
        if file is None:
            return False
        self._make_way_for_users_latest(rel)
        if not self._is_plain_wanted(rel, file, seen.mod_revision):
            return False
        fetched = await self.maker.fetch_all([file])
        if self.view.tree.get(rel) != seen or not self._is_plain_wanted(rel, file, seen.mod_revision):
            return False  # news came meanwhile, or a program made it
        self.maker.make(self.root, rel, file, plain_place(rel), fetched.get(file.version))
        self.tell(rel)
        return True

    def _is_plain_wanted(self, rel: str, file: FileRecord, revision: int) -> bool:
        """Nothing is there, or what the catalogue had before: another node's file, or one that this node published."""
        if self.removed_here(rel) or self.is_behind(rel, revision):
            return False
        standing, version = self.maker.standing(self.root, rel, file)
        if standing == "in the way":
            raise FileExistsError(errno.EEXIST, "something else has the name", rel)
        if standing != "other":
            return standing == "absent"
        return self.was_published(rel, version) and not self.is_being_told(rel)

    def _is_as_told(self, rel: str, seen: Seen[TreeRecord]) -> bool:
        """What stands there is what the catalogue has, and not something of this node that it does not know yet."""
        if seen.record.file is not None:
            return self.maker.standing(self.root, rel, seen.record.file)[0] == "same"
        return seen.record.kind == "dir" and self.is_directory(rel)

    def _make_way_for_users_latest(self, rel: str) -> None:
        """A program made its own `latest` on another node: this node's link goes."""
        directory, _, name = rel.rpartition("/")
        if name == LATEST and directory and self.registry.latest.is_ours(directory) and not self.removed_here(rel):
            placing.remove_file(self.root, rel)
            self.registry.latest.made_by_program(directory)

    def joins(self, where: StepPath, seen: Seen[TreeRecord]) -> StepRecord | None:
        """The step's directory is in the catalogue: its record says since when."""
        record = self.registry.at_or_new(where)
        if record is not None and record.manifest.joined == 0:
            record.manifest.joined = seen.create_revision
            record.unsaved = True
            self.registry.wake.set()
        return record

    # --- telling

    def tell(self, rel: str) -> None:
        """The kernel hears of a name that was made, replaced or removed."""
        directory, _, name = rel.rpartition("/")
        self.registry.invalidate(directory, name)

    def cannot(self, rel: str, error: Exception) -> None:
        """Said once for each reason."""
        message = error.message if isinstance(error, TierfsError) else str(error)
        where = self.registry.names.locate(rel)
        extra = (
            {"file": rel} if where is None else {"namespace": where.namespace, "step": where.step, "file": where.inner}
        )
        first = (rel, message) not in self._told
        if len(self._told) > _TOLD:
            self._told.clear()
        self._told.add((rel, message))
        log.log(logging.ERROR if first else logging.DEBUG, "can't be shown here: %s", message, extra=extra)

    def is_directory(self, rel: str) -> bool:
        try:
            info = placing.look(self.root, rel)
        except (OSError, TierfsError):
            return False
        return info is not None and stat.S_ISDIR(info.st_mode)
