"""Which versions of files are whole on this node, and where: in the tree, in old generations, on the shelf, or on the
node's disk.

The shelf, `<tier>/shelf/<namespace>/<step>/<node>.<token>`, holds replicas that have no name in their step (yet). What
is being pulled there ends with `.pull` and goes at the next start. The truth is the attribute of each inode
(`tierfs.cluster.versions`); the index here only says where to look, and every answer is checked against the inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tierfs.catalog.records import check_version
from tierfs.cluster.versions import (
    files_below,
    new_version,
    read_version,
    remove_version,
    whole_version,
    write_version,
)
from tierfs.steps.names import NAME_BYTES, escape_namespace, safe_component
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.cluster")

#: Ends the name of what is being pulled.
PULLING = ".pull"
#: Names that are remembered of one inode.
_PLACES_KEPT = 4


@dataclass
class _Copy:
    """Where a version was seen, relative to the tier; the newest place first."""

    ino: int
    places: list[str] = field(default_factory=list)


class CopyIndex:
    """Used from the trio thread."""

    def __init__(self, registry: StepRegistry, node: str) -> None:
        self.node = node
        self._registry = registry
        self._tier = registry.tier
        self.shelf = self._tier.path / "shelf"
        self.shelf.mkdir(mode=0o700, exist_ok=True)
        self._copies: dict[str, _Copy] = {}
        self._by_ino: dict[int, str] = {}
        self._shelved: dict[Key, set[str]] = {}  # by the names of the shelf's directories
        self._on_shelf: dict[str, str] = {}
        #: The inode is this version no longer: it is written again, was removed, or is damaged. May be told of one that
        #: others have left long ago.
        self.on_left: Callable[[int, str], None] = lambda ino, version: None
        #: Where this node's disk has the version whole; None for nowhere. What is in RAM is looked for first.
        self.on_disk: Callable[[str], Path | None] = lambda version: None
        #: The disk's copy of the version is damaged: it is one no more.
        self.forget_on_disk: Callable[[str], None] = lambda version: None

    # --- the index

    def scan(self) -> None:
        """Find every copy of the tier, and remove what was being pulled. Blocking, at start; some 5 ms a thousand."""
        self._copies.clear()
        self._by_ino.clear()
        self._shelved.clear()
        self._on_shelf.clear()
        tier = self._tier
        for path in list(files_below(self.shelf)):
            if path.name.endswith(PULLING):
                path.unlink(missing_ok=True)
        for top in (self.shelf, tier.generations, tier.path / "unlinked", tier.root):
            for path in files_below(top):
                with contextlib.suppress(OSError):
                    version = whole_version(path)
                    if version is not None:
                        self._note(version, path.lstat().st_ino, path)
                        continue
                if top == self.shelf:  # nobody can tell what it is
                    log.error("%s is on the shelf without a version; it is removed", path)
                    path.unlink(missing_ok=True)

    def seal(self, path: Path, ino: int) -> str:
        """The version of a file that is not being written: the one it has, else a new one.

        `path` is where the inode lies; FileNotFoundError where another lies there, OSError (ENOSPC).
        """
        _check_inode(path, ino)
        version = read_version(path)
        if version is None:
            version = new_version(self.node)
            write_version(path, version)
        self._note(version, ino, path)
        return version

    def adopt(self, path: Path, ino: int, version: str) -> None:
        """The file at `path` is whole and has the bytes of `version` (verified): it counts as a copy. OSError.

        To be called before a stub's mark is removed, so that at no moment the file is taken for one of this node's own;
        until the mark is gone it is no copy.
        """
        _check_inode(path, ino)
        write_version(path, version)
        self._note(version, ino, path)

    def version_of(self, ino: int) -> str | None:
        """The version that an inode of the tier has; None where it has none, is being written, or is a stub."""
        version = self._by_ino.get(ino)
        if version is None or self.path_in_ram(version) is None or self._copies[version].ino != ino:
            return None
        return version

    def withdraw(self, ino: int, path: Path) -> str | None:
        """The file is opened for writing: its bytes will be others. Returns the version it had. OSError."""
        version = self._by_ino.pop(ino, None)
        _check_inode(path, ino)
        version = read_version(path) or version
        remove_version(path)
        if version is not None:
            known = self._copies.get(version)
            if known is not None and known.ino == ino:
                del self._copies[version]
            self.on_left(ino, version)
        return version

    def path(self, version: str) -> Path | None:
        """Where the version lies here, whole, in RAM or else on the disk; None where it does not (any more)."""
        return self.path_in_ram(version) or self.on_disk(version)

    def path_in_ram(self, version: str) -> Path | None:
        """The same of the RAM tier alone."""
        copy = self._copies.get(version)
        if copy is None:
            return None
        for place in self._places(version, copy):
            path = self._tier.path / place
            with contextlib.suppress(OSError):
                ino = path.lstat().st_ino
                if (ino == copy.ino or place == self._on_shelf.get(version)) and whole_version(path) == version:
                    self._note(version, ino, path)
                    return path
        if not self._is_adopted(version, copy):
            del self._copies[version]
            if self._by_ino.get(copy.ino) == version:
                del self._by_ino[copy.ino]
            self.on_left(copy.ino, version)
        return None

    def has(self, version: str) -> bool:
        return self.path(version) is not None

    def noted(self, version: str, ino: int, path: Path) -> None:
        """A file that has the version as its attribute is at this name (too)."""
        self._note(version, ino, path)

    def moved(self, old: Path, new: Path) -> None:
        """A file or directory of the tree has another name: its copies are looked for there."""
        before, after = self._place(old), self._place(new)
        for copy in self._copies.values():
            for place in list(copy.places):
                if place == before or place.startswith(before + "/"):
                    _put_first(copy.places, after + place[len(before) :])

    # --- the shelf

    def place(self, key: Key, version: str) -> Path:
        """The shelf's name for a version of this step; its directories are made. OSError."""
        node, _, token = check_version(version).rpartition("/")
        name = f"{node}.{token}"
        if len(os.fsencode(name)) + len(PULLING) > NAME_BYTES:
            name = f"{hashlib.sha256(os.fsencode(node)).hexdigest()}.{token}"
        directory = self._shelf_of(key)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory / safe_component(name)

    def shelved(self, key: Key, version: str, path: Path) -> None:
        """A replica lies whole and verified at `path`, its name on the shelf, with its attribute set."""
        self._note(version, path.lstat().st_ino, path)

    def unshelve(self, key: Key, version: str, shown_at: Path) -> None:
        """The replica has a name in the tree now: the shelf lets go of it."""
        place = self.place(key, version)
        self._note(version, shown_at.lstat().st_ino, shown_at)
        with contextlib.suppress(FileNotFoundError):
            if place.lstat().st_ino == self._copies[version].ino:
                place.unlink()
                self._left_shelf(key, version)

    def forget_step(self, key: Key) -> None:
        """The step is gone: so is what the shelf has of it."""
        shelf_key = self._shelf_key(key)
        size = self.bytes_of(key)
        for version in self._shelved.pop(shelf_key, ()):
            self._on_shelf.pop(version, None)
            copy = self._copies.get(version)
            if copy is not None:
                copy.places = [place for place in copy.places if not place.startswith("shelf/")]
                if not copy.places:
                    del self._copies[version]
                    self._by_ino.pop(copy.ino, None)
                    self.on_left(copy.ino, version)
        self._registry.discard(self._shelf_of(key), size_bytes=size)

    def step_moved(self, old: Key, new: Key) -> None:
        """The step has another name: so has its place on the shelf."""
        source, target = self._shelf_of(old), self._shelf_of(new)
        versions = self._shelved.pop(self._shelf_key(old), set())
        if source.is_dir():
            self.forget_step(new)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            source.rename(target)
            self.moved(source, target)
            for version in versions:
                self._note_shelf(version, self._place(target / self.place(new, version).name))

    def shelved_versions(self, key: Key) -> list[str]:
        """The versions of the step that are on the shelf."""
        return sorted(version for version in self._shelved.get(self._shelf_key(key), ()) if self.path_in_ram(version))

    def forget(self, key: Key, version: str) -> None:
        """What lies here is not what the version names (it is damaged), and about to be replaced: it is no copy."""
        copy = self._copies.pop(version, None)
        if copy is None:
            self.forget_on_disk(version)
        if copy is not None and self._by_ino.get(copy.ino) == version:
            del self._by_ino[copy.ino]
        if copy is not None:
            self.on_left(copy.ino, version)
        if version in self._on_shelf:
            self.drop(key, version)

    def drop(self, key: Key, version: str) -> None:
        """A replica on the shelf is not needed (any more)."""
        place = self.place(key, version)
        with contextlib.suppress(FileNotFoundError):
            info = place.lstat()
            place.unlink()
            if info.st_nlink == 1:
                self.on_left(info.st_ino, version)
        self._left_shelf(key, version)

    def bytes_of(self, key: Key) -> int:
        """Bytes of the shelf's files of a step that have no other name."""
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._shelf_of(key)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    total += min(info.st_size, info.st_blocks * 512) if info.st_nlink == 1 else 0
        return total

    # --- inside

    def _note(self, version: str, ino: int, path: Path) -> None:
        place = self._place(path)
        copy = self._copies.get(version)
        if copy is None or copy.ino != ino:
            # Of two copies of the same bytes the one with a name in the tree stays known.
            if copy is not None and place.startswith("shelf/") and self._lies_in_tree(version, copy):
                self._note_shelf(version, place)
                return
            copy = self._copies[version] = _Copy(ino)
        self._by_ino[ino] = version
        _put_first(copy.places, place)
        self._note_shelf(version, place)

    def _note_shelf(self, version: str, place: str) -> None:
        if place.startswith("shelf/"):
            _, namespace, step, _ = place.split("/")
            self._shelved.setdefault((namespace, step), set()).add(version)
            self._on_shelf[version] = place

    def _left_shelf(self, key: Key, version: str) -> None:
        self._shelved.get(self._shelf_key(key), set()).discard(version)
        self._on_shelf.pop(version, None)

    def _lies_in_tree(self, version: str, copy: _Copy) -> bool:
        with contextlib.suppress(OSError):
            for place in copy.places:
                path = self._tier.path / place
                if not place.startswith("shelf/") and path.lstat().st_ino == copy.ino:
                    return whole_version(path) == version
        return False

    def _is_adopted(self, version: str, copy: _Copy) -> bool:
        """It is a stub that is about to be whole."""
        for place in copy.places:
            with contextlib.suppress(OSError):
                path = self._tier.path / place
                if path.lstat().st_ino == copy.ino and read_version(path) == version:
                    return True
        return False

    def _places(self, version: str, copy: _Copy) -> Iterator[str]:
        """Where the version may lie."""
        yield from list(copy.places)
        if version in self._on_shelf:
            yield self._on_shelf[version]
        yield f"unlinked/{copy.ino}"
        for record in list(self._registry.records.values()):
            current, old = record.manifest.overwrite, self._registry.old_directory(record)
            tops = [(record.directory, record.manifest.files)]
            if current is not None and old is not None:
                tops.append((old, current.old_files))
            for top, files in tops:
                for inner, entry in files.items():
                    if entry.ino == copy.ino:
                        yield self._place(top / inner)

    def _place(self, path: Path) -> str:
        return str(path.relative_to(self._tier.path))

    def _shelf_key(self, key: Key) -> Key:
        return escape_namespace(key[0]), safe_component(key[1])

    def _shelf_of(self, key: Key) -> Path:
        return self.shelf.joinpath(*self._shelf_key(key))


def _put_first(places: list[str], place: str) -> None:
    if place in places:
        places.remove(place)
    places.insert(0, place)
    del places[_PLACES_KEPT:]


def _check_inode(path: Path, ino: int) -> None:
    info = path.lstat()
    if info.st_ino != ino or not stat.S_ISREG(info.st_mode):
        raise FileNotFoundError(f"{path} is not the file with inode {ino}")
