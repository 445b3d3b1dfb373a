"""The `latest` symlink in each namespace: it names the newest whole step, and the file system itself keeps it.

A `latest` that a program made is that program's own and is left alone; so are namespaces whose framework keeps a
file of that name (DeepSpeed).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from tierfs.errors import PathRefused
from tierfs.steps.manifest import Manifest
from tierfs.steps.names import StepNames, StepPath, escape_namespace, unescape_namespace

NAME = "latest"
_USERS = ".user"


class LatestLink:
    """Keeps the symlinks below `root`. Which ones are a program's own is remembered below `meta`."""

    def __init__(self, root: Path, meta: Path, names: StepNames, *, mode: str) -> None:
        self._root = root
        self._meta = meta
        self._names = names
        self.mode = mode

    def update(self, namespace: str, newest: Manifest | None) -> bool:
        """Make the link of a namespace name `newest`; True when it changed. Never raises OSError."""
        if self.mode == "off" or self.is_users(namespace):
            return False
        link = self._root / namespace / NAME
        wanted = newest.step if newest is not None else None
        if wanted is not None and self._names.has_own_latest(wanted):
            return False
        try:
            found = str(link.readlink())
        except FileNotFoundError:
            found = None
        except OSError:
            return False  # not a symlink, so a program's own
        if found is not None and self._names.locate(f"{namespace}/{found}") is None:
            return False
        if found == wanted:
            return False
        with contextlib.suppress(OSError):
            self._replace(link, wanted)
            return True
        return False

    def _replace(self, link: Path, wanted: str | None) -> None:
        directory = link.parent
        before = directory.stat()
        if wanted is None:
            link.unlink()
        else:
            scratch = self._meta / f".{NAME}.link"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(wanted)
            os.lchown(scratch, before.st_uid, before.st_gid)
            scratch.rename(link)
        # Programs tell the age of checkpoints by directory times; this change is not theirs.
        os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))

    def is_ours(self, namespace: str) -> bool:
        """True when the namespace holds a `latest` that we keep."""
        if self.mode == "off" or self.is_users(namespace):
            return False
        try:
            target = (self._root / namespace / NAME).readlink()
        except OSError:
            return False
        return self._names.locate(f"{namespace}/{target}") is not None

    def named(self, namespace: str) -> StepPath | None:
        """The step that our link of the namespace names now."""
        if not self.is_ours(namespace):
            return None
        try:
            return self._names.locate(f"{namespace}/{(self._root / namespace / NAME).readlink()}")
        except OSError:
            return None

    def is_users(self, namespace: str) -> bool:
        """True when a program made its own `latest` in this namespace."""
        return self._flag(namespace).exists()

    def made_by_program(self, namespace: str) -> None:
        """A program made an entry called `latest`: from now on it is the program's."""
        flag = self._flag(namespace)
        flag.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flag.touch(mode=0o600)

    def removed_by_program(self, namespace: str) -> None:
        """A program removed the `latest` of a namespace: the next one is ours again."""
        self._flag(namespace).unlink(missing_ok=True)

    def moved(self, old: str, new: str) -> None:
        """A directory was renamed: what is known of the namespaces at and below it goes along."""
        directory = self._flag("x").parent
        for name in os.listdir(directory) if directory.is_dir() else ():
            with contextlib.suppress(PathRefused):
                namespace = unescape_namespace(name.removesuffix(_USERS))
                if namespace == old or namespace.startswith(old + "/"):
                    (directory / name).rename(self._flag(new + namespace[len(old) :]))

    def removed_below(self, namespace: str) -> None:
        """A directory was removed with all that is below it."""
        directory = self._flag("x").parent
        for name in os.listdir(directory) if directory.is_dir() else ():
            with contextlib.suppress(PathRefused):
                found = unescape_namespace(name.removesuffix(_USERS))
                if found == namespace or found.startswith(namespace + "/"):
                    (directory / name).unlink()

    def clear_for_rmdir(self, directory_rel: str) -> bool:
        """Remove our link where it is the only thing left in a namespace that is about to be removed."""
        if not directory_rel or not self.is_ours(directory_rel):
            return False
        path = self._root / directory_rel
        if os.listdir(path) != [NAME] or not stat.S_ISLNK(os.lstat(path / NAME).st_mode):
            return False
        (path / NAME).unlink()
        return True

    def _flag(self, namespace: str) -> Path:
        return self._meta / "%latest" / (escape_namespace(namespace) + _USERS)
