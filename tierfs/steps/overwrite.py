"""Setting a complete step aside while it is written again, and putting it back.

A step's old generation is kept as a second tree of hard links, so that keeping it costs no bytes. A file that is
rewritten gets a new inode under the same name; the old inode, and whoever has it open or mapped, stays as it was.
Everything here may be interrupted at any instruction and done again: the caller records in the manifest what it is
about to do, and calls the same function once more after a crash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from tierfs.steps.manifest import FileEntry

COPY_CHUNK_BYTES = 8 << 20
#: What is added to the name of an old generation while it is being linked.
BUILDING = ".building"


def set_aside(step_dir: Path, old_dir: Path) -> dict[str, FileEntry]:
    """Mirror `step_dir` in `old_dir` by hard links; returns the files by their path inside the step.

    `old_dir` appears whole or not at all. Directory times are copied, so that putting back restores them too.
    """
    building = old_dir.with_name(old_dir.name + BUILDING)
    remove_tree(building)
    remove_tree(old_dir)
    kept: dict[str, FileEntry] = {}
    for inner, info in walk(step_dir):
        target = building / inner if inner else building
        if stat.S_ISDIR(info.st_mode):
            target.mkdir(mode=0o700)
        else:
            os.link(step_dir / inner, target, follow_symlinks=False)
            kept[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino)
    for inner, info in walk(step_dir):
        if stat.S_ISDIR(info.st_mode):
            target = building / inner if inner else building
            if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(target, info.st_uid, info.st_gid)
            target.chmod(stat.S_IMODE(info.st_mode) | stat.S_IRWXU)  # so that it can be removed again
            os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    building.rename(old_dir)
    return kept


def make_empty(kept: Path, scratch: Path) -> None:
    """Make a new, empty file `scratch` with the owner, mode and user xattrs of `kept`. Nothing is left on failure."""
    with _removed_on_failure(scratch):
        _make_like(kept, scratch, kept.stat(follow_symlinks=False)).close()


def make_copy(kept: Path, scratch: Path) -> None:
    """Make a new file `scratch` with the bytes, times, owner, mode and user xattrs of `kept`.

    Blocking for as long as the copy takes: call it in a thread. Nothing is left on failure (ENOSPC).
    """
    info = kept.stat(follow_symlinks=False)
    with (
        _removed_on_failure(scratch),
        kept.open("rb", buffering=0) as source,
        _make_like(kept, scratch, info) as target,
    ):
        offset = 0
        while offset < info.st_size:
            moved = os.sendfile(target.fileno(), source.fileno(), offset, COPY_CHUNK_BYTES)
            if moved == 0:
                break
            offset += moved
        os.utime(target.fileno(), ns=(info.st_atime_ns, info.st_mtime_ns))


def put_in_place(scratch: Path, path: Path) -> None:
    """Give a file that was made the name `path`, in place of what has it. The directory's times stay as they are.

    A program that opens a file changes no directory, and frameworks tell the age of a checkpoint by its directory.
    """
    with keeping_times(path.parent):
        scratch.rename(path)


@contextlib.contextmanager
def keeping_times(directory: Path) -> Iterator[None]:
    """What is done in the block leaves the directory's times as they were."""
    before = directory.stat()
    try:
        yield
    finally:
        os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_back(step_dir: Path, old_dir: Path, kept: Mapping[str, FileEntry], markers: frozenset[str]) -> list[str]:
    """Make `step_dir` the old generation again; returns the changed paths inside the step.

    Markers go last, so that at no moment a marker stands beside files that are not its own. Files which the failed
    generation added are removed. Done again after a crash it finishes what is left.
    """
    changed: list[str] = []
    present = {inner: info for inner, info in walk(step_dir) if inner}
    # Names before those below them in `walk`, so from the end: what is in a directory goes before it.
    for inner, info in sorted(present.items(), reverse=True):
        if stat.S_ISDIR(info.st_mode):
            if not _is_directory(old_dir / inner):
                with contextlib.suppress(FileNotFoundError):
                    (step_dir / inner).rmdir()
                changed.append(inner)
        elif inner not in kept:
            (step_dir / inner).unlink(missing_ok=True)
            changed.append(inner)
    for inner in sorted(kept, key=lambda name: (name in markers, name)):
        info_now = present.get(inner)
        if info_now is not None and info_now.st_ino == kept[inner].ino:
            continue
        target = step_dir / inner
        _make_parents(step_dir, old_dir, target.parent)
        scratch = old_dir.with_name(old_dir.name + ".link")
        scratch.unlink(missing_ok=True)
        os.link(old_dir / inner, scratch, follow_symlinks=False)
        # rename(2) does nothing when both names are the same inode, hence the check above.
        scratch.rename(target)
        changed.append(inner)
    for inner, info in walk(old_dir):
        if inner and stat.S_ISDIR(info.st_mode):
            _make_parents(step_dir, old_dir, step_dir / inner)  # directories without files
    _restore_directory_times(step_dir, old_dir)
    return changed


def remove_tree(path: Path) -> None:
    """Remove a tree of ours; gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def walk(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """`("", stat)` for `top`, then each entry below it, parents first, by its path relative to `top`."""
    yield "", top.stat(follow_symlinks=False)
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(top / directory) as entries:
            for entry in sorted(entries, key=lambda found: found.name):
                inner = f"{directory}/{entry.name}" if directory else entry.name
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield inner, info
                if stat.S_ISDIR(info.st_mode):
                    pending.append(inner)


class _OwnedFile:
    """A descriptor that closes with its block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> _OwnedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_like(path: Path, scratch: Path, info: os.stat_result) -> _OwnedFile:
    scratch.unlink(missing_ok=True)
    fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, stat.S_IMODE(info.st_mode))
        with contextlib.suppress(OSError):  # a tmpfs older than Linux 6.6 has no user xattrs
            for name in os.listxattr(path, follow_symlinks=False):
                if name.startswith("user.") and not name.startswith("user.tierfs."):  # our own: a stub's mark
                    os.setxattr(fd, name, os.getxattr(path, name, follow_symlinks=False))
    except BaseException:
        os.close(fd)
        raise
    return _OwnedFile(fd)


def _make_parents(step_dir: Path, old_dir: Path, directory: Path) -> None:
    """Make a directory of the old generation again, with its owner and mode, and those above it."""
    if _is_directory(directory):
        return
    _make_parents(step_dir, old_dir, directory.parent)
    directory.mkdir()
    like = (old_dir / directory.relative_to(step_dir)).stat()
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(directory, like.st_uid, like.st_gid)
    directory.chmod(stat.S_IMODE(like.st_mode))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextlib.contextmanager
def _removed_on_failure(scratch: Path) -> Iterator[None]:
    try:
        yield
    except Exception:
        scratch.unlink(missing_ok=True)
        raise


def _restore_directory_times(step_dir: Path, old_dir: Path) -> None:
    for inner, info in walk(old_dir):
        if stat.S_ISDIR(info.st_mode):
            with contextlib.suppress(FileNotFoundError):
                os.utime(step_dir / inner if inner else step_dir, ns=(info.st_atime_ns, info.st_mtime_ns))
