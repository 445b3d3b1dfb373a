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


def set_aside(step_dir: Path, old_dir: Path) -> dict[str, FileEntry]:
    """Mirror `step_dir` in `old_dir` by hard links; returns the files by their path inside the step.

    `old_dir` appears whole or not at all. Directory times are copied, so that putting back restores them too.
    """
    building = old_dir.with_name(old_dir.name + ".building")
    remove_tree(building)
    remove_tree(old_dir)
    kept: dict[str, FileEntry] = {}
    for inner, info in walk(step_dir):
        target = building / inner if inner else building
        if stat.S_ISDIR(info.st_mode):
            target.mkdir(mode=0o700, parents=True)
        else:
            os.link(step_dir / inner, target, follow_symlinks=False)
            kept[inner] = FileEntry(info.st_size, info.st_mtime_ns, info.st_ino)
    for inner, info in walk(step_dir):
        if stat.S_ISDIR(info.st_mode):
            os.utime(building / inner if inner else building, ns=(info.st_atime_ns, info.st_mtime_ns))
    building.rename(old_dir)
    return kept


def replace_with_empty(path: Path, scratch: Path) -> None:
    """Put a new, empty inode with the same owner, mode and user xattrs under `path` at once."""
    info = path.stat(follow_symlinks=False)
    _make_like(path, scratch, info).close()
    scratch.rename(path)


def replace_with_copy(path: Path, scratch: Path) -> None:
    """Put a new inode with the same bytes, times, owner, mode and user xattrs under `path` at once.

    Blocking for as long as the copy takes: call it in a thread. The old inode stays with whoever holds it.
    """
    info = path.stat(follow_symlinks=False)
    with path.open("rb", buffering=0) as source, _make_like(path, scratch, info) as target:
        offset = 0
        while offset < info.st_size:
            moved = os.sendfile(target.fileno(), source.fileno(), offset, COPY_CHUNK_BYTES)
            if moved == 0:
                break
            offset += moved
        os.utime(target.fileno(), ns=(info.st_atime_ns, info.st_mtime_ns))
    scratch.rename(path)


def put_back(step_dir: Path, old_dir: Path, kept: Mapping[str, FileEntry], markers: frozenset[str]) -> list[str]:
    """Make `step_dir` the old generation again; returns the changed paths inside the step.

    Markers go last, so that at no moment a marker stands beside files that are not its own. Files which the failed
    generation added are removed. Done again after a crash it finishes what is left.
    """
    changed: list[str] = []
    present = {inner: info for inner, info in walk(step_dir) if inner}
    for inner, info in sorted(present.items(), reverse=True):
        if inner not in kept and not stat.S_ISDIR(info.st_mode):
            (step_dir / inner).unlink()
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
    for inner, info in sorted(present.items(), reverse=True):
        if stat.S_ISDIR(info.st_mode) and not (old_dir / inner).is_dir():
            with contextlib.suppress(OSError):
                (step_dir / inner).rmdir()
                changed.append(inner)
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
                if name.startswith("user."):
                    os.setxattr(fd, name, os.getxattr(path, name, follow_symlinks=False))
    except BaseException:
        os.close(fd)
        raise
    return _OwnedFile(fd)


def _make_parents(step_dir: Path, old_dir: Path, directory: Path) -> None:
    """Make a directory of the old generation again, with the owner and mode of the step directory."""
    if directory.is_dir():
        return
    _make_parents(step_dir, old_dir, directory.parent)
    directory.mkdir()
    like = step_dir.stat()
    os.chown(directory, like.st_uid, like.st_gid)
    directory.chmod(stat.S_IMODE(like.st_mode))


def _restore_directory_times(step_dir: Path, old_dir: Path) -> None:
    for inner, info in walk(old_dir):
        if stat.S_ISDIR(info.st_mode):
            with contextlib.suppress(FileNotFoundError):
                os.utime(step_dir / inner if inner else step_dir, ns=(info.st_atime_ns, info.st_mtime_ns))
