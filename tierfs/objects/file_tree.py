"""A directory as a tree of objects: keys turned into files below it, and never out of it.

Each component is opened by itself and no symbolic link is followed, so a link or a '..' that somebody put there leads
nowhere. Directories come into being with the first object in them and go with the last, as prefixes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierfs.errors import (
    ObjectDenied,
    ObjectError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreFull,
    ObjectStoreMissing,
    ObjectUnavailable,
)
from tierfs.steps.names import safe_relative

#: What is being written lies here, below the root; never listed, never an object.
SCRATCH = ".tierfs/scratch"
SCRATCH_PARTS = (".tierfs", "scratch")
#: A tree deeper than this is none of ours; each level that is being listed holds a descriptor.
MOST_LEVELS = 100

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1  # include/uapi/linux/fs.h
#: Another thread may remove a directory that became empty between our making it and our using it.
_PLACING_TRIES = 20

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Entry:
    """A key, or where `info` is None a prefix (it ends with '/')."""

    key: str
    info: os.stat_result | None


class FileTree:
    """The files below `root`. Thread-safe: nothing is kept but whether the root was once there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._seen = False

    @contextlib.contextmanager
    def directory(self, parts: Sequence[str], *, create: bool = False) -> Iterator[list[int]]:
        """Descriptors of the root and of each directory down to `parts`. OSError (ENOENT, ENOTDIR)."""
        fds = [self._open_root()]
        try:
            for name in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=fds[-1])
                fds.append(os.open(name, _DIRECTORY, dir_fd=fds[-1]))
            yield fds
        finally:
            for fd in reversed(fds):
                os.close(fd)

    def open(self, key: str) -> int:
        """A descriptor to read an object's bytes with. ObjectMissing."""
        *parents, name = key_parts(key)
        try:
            with self.directory(parents) as fds:
                # O_NONBLOCK: opening a FIFO that somebody put there must not wait.
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fds[-1])
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(f"there is no object {key} in {self.root}") from None
        except OSError as error:
            raise self.failure(error, "reading", key) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ObjectMissing(f"{self.root}/{key} is not a file, so there is no such object")
        return fd

    def place(self, source_fd: int, source: str, key: str, *, only_if_absent: bool = False) -> None:
        """Give the file `source` in a directory (its bytes are on disk) its key. Returns once that is on disk, too.
        ObjectExists.
        """
        *parents, name = key_parts(key)
        for attempt in range(1, _PLACING_TRIES + 1):
            try:
                with self.directory(parents, create=True) as fds:
                    if only_if_absent:
                        _rename_to_new(source_fd, source, name, fds[-1])
                    else:
                        os.rename(source, name, src_dir_fd=source_fd, dst_dir_fd=fds[-1])
                    # All of them: a directory that another thread made may not be on disk yet.
                    for fd in reversed(fds):
                        sync_directory(fd)
                return
            except FileExistsError:
                raise ObjectExists(f"there is an object {key} in {self.root} already") from None
            except FileNotFoundError as error:
                if attempt == _PLACING_TRIES:
                    raise self.failure(error, "writing", key) from error
            except OSError as error:
                raise self.failure(error, "writing", key) from error

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, and directories that are empty then; returns once that is on disk."""
        by_directory: dict[tuple[str, ...], list[str]] = {}
        for key in keys:
            *parents, name = key_parts(key)
            by_directory.setdefault(tuple(parents), []).append(name)
        for parents_of, names in by_directory.items():
            where = "/".join((*parents_of, names[0]))
            try:
                with self.directory(parents_of) as fds:
                    for name in names:
                        self._unlink(name, fds[-1])
                    sync_directory(_pruned(parents_of, fds))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self.failure(error, "deleting", where) from error

    def entries(self, prefix: str, *, delimited: bool, after: str = "") -> Generator[Entry, None, None]:
        """Objects (and where `delimited`, prefixes) behind `after`, in the order of their keys' bytes, as S3 has it."""
        folder, _, _ = prefix.rpartition("/")
        parts = folder.split("/") if folder else []
        if any(part in ("", ".", "..") for part in parts) or f"{folder}/".startswith(f"{SCRATCH}/"):
            return
        try:
            with self.directory(parts) as fds:
                within = f"{folder}/" if folder else ""
                yield from self._below(fds[-1], within, prefix, delimited, os.fsencode(after), len(parts))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self.failure(error, "listing", prefix or "its top") from error

    def scratch_names(self) -> list[str]:
        """What is unfinished."""
        try:
            with self.directory(SCRATCH_PARTS) as fds:
                return os.listdir(fds[-1])
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.failure(error, "listing", SCRATCH) from error

    def failure(self, error: OSError, doing: str, key: str) -> ObjectError:
        """What an OSError means, as a sentence with what to do."""
        what = f"{doing} {key} in {self.root}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ObjectStoreFull(f"{what}; free space there, or let retention delete more (retention.object_steps)")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return ObjectDenied(f"{what}; tierfs runs as user {os.geteuid()}, which must be able to write there")
        if error.errno in (errno.ENOTDIR, errno.EISDIR):
            return ObjectError(
                f"{what}: in a directory a name can't be an object and the beginning of other keys at once; "
                "remove one of them, or use an s3:// object tier"
            )
        if error.errno == errno.ELOOP:
            return ObjectError(f"{what}: it is a symbolic link, which tierfs does not follow; remove it")
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG):
            return ObjectError(f"{what}; the file system there can't hold such a name or size")
        return ObjectUnavailable(what)

    def _open_root(self) -> int:
        """Makes the root only where this process never saw it: one that went later is a share that is not mounted
        now, and an empty directory in its place would look as if all had been deleted."""
        try:
            try:
                fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                if self._seen:
                    raise
                with contextlib.suppress(FileExistsError):
                    self.root.mkdir()
                fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise ObjectStoreMissing(
                    f"the object tier's directory {self.root} is not there ({error.strerror}); make it, or mount what "
                    "it is on"
                ) from None
            raise self.failure(error, "opening", "the object tier's directory") from error
        self._seen = True
        return fd

    def _unlink(self, name: str, fd: int) -> None:
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            # A directory is no object. Linux says EISDIR, and EPERM on file systems that follow POSIX here.
            if error.errno not in (errno.EISDIR, errno.EPERM) or not _is_directory(name, fd):
                raise

    def _below(self, fd: int, within: str, prefix: str, delimited: bool, after: bytes, level: int) -> Iterator[Entry]:
        if level > MOST_LEVELS:
            raise ObjectError(f"{self.root}/{within} is nested deeper than {MOST_LEVELS} directories")
        for key, name, is_directory in _sorted_entries(fd, within):
            encoded = os.fsencode(key)
            if not key.startswith(prefix) or key == f"{SCRATCH}/":
                continue
            if not is_directory:
                if encoded > after:
                    with contextlib.suppress(FileNotFoundError):
                        yield Entry(key, os.stat(name, dir_fd=fd, follow_symlinks=False))
                continue
            if encoded <= after and (delimited or not after.startswith(encoded)):
                continue
            try:
                inner = os.open(name, _DIRECTORY, dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                below = self._below(inner, key, prefix, False, b"" if delimited else after, level + 1)
                if not delimited:
                    yield from below
                elif next(below, None) is not None:
                    yield Entry(key, None)
            finally:
                os.close(inner)


def key_parts(key: str) -> list[str]:
    """The components of a key; PathRefused for one that can't be a path below the root."""
    safe_relative(key)
    if key == SCRATCH or key.startswith(f"{SCRATCH}/"):
        raise ObjectError(f"the key {key!r} is where a directory's unfinished objects are; use another")
    return key.split("/")


def sync_directory(fd: int) -> None:
    """fsync(2) of a directory; some network file systems (CIFS, several FUSE ones) know none and need none."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def etag_of(info: os.stat_result) -> str:
    """Changes with the content: an object is never written in place, so a new one is another inode or time."""
    return f"{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}"


def _sorted_entries(fd: int, within: str) -> list[tuple[str, str, bool]]:
    """(key, name, is a directory) of a directory's files and directories, a directory's key ending with '/'."""
    found = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append((f"{within}{entry.name}/", entry.name, True))
            elif entry.is_file(follow_symlinks=False):
                found.append((f"{within}{entry.name}", entry.name, False))
    return sorted(found, key=lambda entry: os.fsencode(entry[0]))


def _is_directory(name: str, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    return False


def _pruned(parts: Sequence[str], fds: Sequence[int]) -> int:
    """Remove directories that are empty, upwards; the descriptor of the lowest one that stays."""
    for level in range(len(parts), 0, -1):
        try:
            os.rmdir(parts[level - 1], dir_fd=fds[level - 1])
        except FileNotFoundError:
            continue
        except OSError:
            return fds[level]
    return fds[0]


def _rename_to_new(source_fd: int, source: str, name: str, target_fd: int) -> None:
    """FileExistsError where the name is taken: by link(2), which NFS has, else by renameat2(2), which FAT has."""
    try:
        os.link(source, name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    except FileExistsError:
        if _is_directory(name, target_fd):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name) from None
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if _libc.renameat2(source_fd, os.fsencode(source), target_fd, os.fsencode(name), _RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name) from error
    else:
        os.unlink(source, dir_fd=source_fd)
