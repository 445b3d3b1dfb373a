"""The directory on the disk: where steps lie, and how one comes there and goes, each at once as far as anybody sees.

    tier.json                         the disk's id
    lock                              held by the one daemon that uses it
    steps/<namespace>/<step>/...      the files under their own names, an ordinary checkpoint
                             .tierfs/manifest.json
    incoming/<token>/                 what is being copied; renamed to its place when all of it is on the disk
    trash/<token>/                    what is being removed

A '/' in a namespace is `%2F`, so that no step lies in another. Everything here blocks, and is to be called in a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tierfs.disk.direct_io import sum_range, sync_directory
from tierfs.disk.disk_step import MAX_BYTES, DiskStep, from_bytes, to_bytes
from tierfs.errors import DiskError, PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.layout import MANIFEST, OWN
from tierfs.ram import syscalls
from tierfs.steps.names import escape_namespace, safe_component
from tierfs.steps.overwrite import remove_tree
from tierfs.whole_files import write_whole

log = logging.getLogger("tierfs.disk")

Key = tuple[str, str]
IDENTITY = "tier.json"
#: What the manifest of a step is called after one of its files was found to be damaged.
DAMAGED = f"{OWN}/manifest.damaged"


@dataclass
class Found:
    """What lies on the disk. `damaged` says why a directory is no step, with the bytes that it takes."""

    disk_id: str
    steps: list[DiskStep] = field(default_factory=list)
    damaged: dict[Path, tuple[str, int]] = field(default_factory=dict)


class DiskStore:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1
        self._was_open = False

    # --- opening

    def open(self) -> Found:
        """Make what is missing, keep others out, put away what was left half done, and read what there is.

        DiskError with the reason where it can't be used.
        """
        try:
            if not self._was_open:
                self.path.mkdir(mode=0o700, exist_ok=True)
            elif not self.path.is_dir():  # not made on whatever the disk was mounted on
                raise DiskError(f"{self.path} is not there any more; make it if another disk is to take its place")
            for name in ("steps", "incoming", "trash"):
                with contextlib.suppress(FileExistsError):
                    (self.path / name).mkdir(mode=0o700)
                _check_directory(self.path / name)
            self._lock()
            found = Found(self._identity())
            for left in (self.path / "incoming").iterdir():
                left.rename(self._trash())
            for namespace in sorted((self.path / "steps").iterdir()):
                self._look_into(namespace, found)
        except FileNotFoundError as error:
            raise DiskError(f"{error.filename} is not there; disk.path is made where its parent exists") from None
        except OSError as error:
            raise DiskError(f"{self.path} can't be used: {error.strerror or error}") from None
        self._was_open = True
        return found

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def check(self, disk_id: str) -> None:
        """The disk that was opened is still there. DiskError."""
        try:
            found = self._read_identity()
            sum_range(self.path / IDENTITY, 0, 1)  # from the disk itself, where memory has it still
        except OSError as error:
            raise DiskError(f"{self.path} can't be read: {error.strerror}") from None
        if found != disk_id:
            raise DiskError(f"{self.path} is another disk than before, or it is not mounted")

    def _lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise DiskError(f"{self.path} is used by another instance; give each a disk.path of its own") from None

    def _identity(self) -> str:
        """What power failure left of it is no reason to hide the steps: the disk gets a new one."""
        try:
            return self._read_identity()
        except FileNotFoundError:
            pass
        except _IdentityDamaged as error:
            log.warning("%s; the disk gets a new id", error, extra={"tier": "disk"})
        made = uuid.uuid4().hex
        write_whole(self.path / IDENTITY, json.dumps({"version": 1, "id": made}).encode("ascii"))
        _sync_file(self.path / IDENTITY)
        sync_directory(self.path)
        return made

    def _read_identity(self) -> str:
        data = _read_regular(self.path / IDENTITY, 4096)
        try:
            fields = Fields(json.loads(data, parse_constant=refuse_constant), IDENTITY)
            version, found = fields.integer("version"), fields.text("id")
            fields.end()
        except (ValueError, RecursionError, Wrong) as error:
            raise _IdentityDamaged(f"{self.path / IDENTITY} is damaged: {error}") from None
        if version != 1 or not found:
            raise DiskError(f"{self.path / IDENTITY} is of another version of this program")
        return found

    def _look_into(self, namespace: Path, found: Found) -> None:
        """What is no namespace of ours, or can't be read, does not hide the others."""
        try:
            _check_directory(namespace)
            directories = sorted(namespace.iterdir())
        except OSError as error:
            found.damaged[namespace] = (f"{namespace} can't be read: {error.strerror}", 0)
            return
        except DiskError as error:
            found.damaged[namespace] = (error.message, 0)
            return
        for directory in directories:
            self._look_at(directory, found)

    def _look_at(self, directory: Path, found: Found) -> None:
        try:
            _check_directory(directory)
            stored = self.read(directory)
            for above in _directories_in(stored.step.files):
                _check_directory(directory / above)
            for inner, file in stored.step.files.items():
                info = (directory / inner).lstat()
                if not stat.S_ISREG(info.st_mode) or info.st_size != file.size_bytes:
                    raise DiskError(f"{directory / inner} is not the file of {file.size_bytes} bytes that was stored")
            found.steps.append(stored)
        except FileNotFoundError as error:
            is_known = os.path.lexists(directory / DAMAGED)
            why = f"{directory} was found to be damaged" if is_known else f"{error.filename} is missing"
            found.damaged[directory] = (why, _bytes_below(directory))
        except DiskError as error:
            found.damaged[directory] = (error.message, _bytes_below(directory))
        except OSError as error:
            found.damaged[directory] = (f"{directory} can't be read: {error.strerror}", 0)
        except PathRefused as error:
            found.damaged[directory] = (f"the manifest in {directory} is damaged: {error.message}", 0)

    def read(self, directory: Path) -> DiskStep:
        """DiskError, PathRefused, OSError."""
        _check_directory(directory / OWN)
        stored = from_bytes(_read_regular(directory / MANIFEST, MAX_BYTES), directory)
        if self.place(stored.key) != directory:
            raise DiskError(f"{directory} holds {'/'.join(stored.key)}, which belongs elsewhere")
        return stored

    # --- steps

    def place(self, key: Key) -> Path:
        return self.path / "steps" / escape_namespace(key[0]) / safe_component(key[1])

    def begin(self) -> Path:
        """A new empty directory for a step that is copied. OSError."""
        directory = self.path / "incoming" / uuid.uuid4().hex
        directory.mkdir(mode=0o700)
        return directory

    def commit(self, stored: DiskStep) -> Path | None:
        """The files in `stored.directory` (incoming) are whole and on the disk: write the manifest, then give it its
        place, where what was there goes. Returns where that lies now, for `discard`. OSError, with nothing changed."""
        incoming, place = stored.directory, self.place(stored.key)
        (incoming / OWN).mkdir(mode=0o700, exist_ok=True)
        write_whole(incoming / MANIFEST, to_bytes(stored))
        _sync_file(incoming / MANIFEST)
        for directory, _, _ in os.walk(incoming, topdown=False):
            sync_directory(Path(directory))
        self._make_namespace(place.parent)
        old: Path | None = None
        try:
            syscalls.exchange(syscalls.AT_FDCWD, str(place), incoming)
            old = incoming
        except FileNotFoundError:
            incoming.rename(place)
        sync_directory(place.parent)
        return old

    def _make_namespace(self, directory: Path) -> None:
        try:
            _check_directory(directory)
        except FileNotFoundError:
            pass
        except DiskError:  # somebody's file or link, which is in the way of every step
            directory.rename(self._trash())
        else:
            return
        directory.mkdir(mode=0o700)
        sync_directory(directory.parent)

    def discard(self, directory: Path) -> None:
        """Take it out of sight for good; `empty_trash` frees it. OSError; gone already is fine."""
        parent = directory.parent
        with contextlib.suppress(FileNotFoundError):
            directory.rename(self._trash())
            sync_directory(parent)
        with contextlib.suppress(OSError):
            if parent.parent == self.path / "steps":
                parent.rmdir()  # the last step of a namespace

    def condemn(self, directory: Path) -> None:
        """A file of the step turned out to be damaged: nobody shall take it for whole again. OSError; gone is fine."""
        with contextlib.suppress(FileNotFoundError):
            (directory / MANIFEST).rename(directory / DAMAGED)
            sync_directory(directory / OWN)

    def empty_trash(self) -> None:
        """OSError, once all that can be removed is."""
        failed: OSError | None = None
        for left in (self.path / "trash").iterdir():
            try:
                remove_tree(left)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def free_bytes(self) -> tuple[int, int]:
        """What the file system has left, and its size. OSError."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def _trash(self) -> Path:
        return self.path / "trash" / uuid.uuid4().hex


class _IdentityDamaged(DiskError):
    pass


def _check_directory(path: Path) -> None:
    """Nothing that is followed leads out of the disk's own directory. DiskError for a link or a file, OSError."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise DiskError(f"{path} is no directory")


def _directories_in(names: Iterable[str]) -> list[str]:
    """The directories that the files lie in, those above first."""
    found = {above.as_posix() for name in names for above in PurePosixPath(name).parents}
    return sorted(found - {"."})


def _read_regular(path: Path, most: int) -> bytes:
    """All of a file that has to be an ordinary one: a pipe would never end. DiskError, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DiskError(f"{path} is no ordinary file")
    with open(fd, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DiskError(f"{path} is larger than {most} bytes")
    return data


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _bytes_below(top: Path) -> int:
    total = 0
    if top.is_symlink():
        return total
    for directory, _, names in os.walk(top):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(directory) / name).lstat().st_size
    return total
