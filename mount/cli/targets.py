"""From a path that the user typed to the running instance it lies in, and its path from the mount's root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierfs.errors import InstanceError, PathRefused


@dataclass(frozen=True)
class Target:
    """`instance` is a mount point or a name, None for the only one there is; `rel` is `run1/step_5`, "" the root."""

    instance: str | None
    rel: str

    def request(self, op: str, **arguments: Any) -> Any:
        """Asks the instance about `rel`. Raises what `mount.cli.client.request` raises."""
        from mount.cli.client import request

        return request(self.instance, op, path=self.rel, **arguments)


def find_target(path: str | None, *, follow: bool = False) -> Target:
    """Where `path` lies. Without a path: here, if here is in a mount, else the root of the only instance.

    A symbolic link at the path's end is kept, so that `latest` is asked about as it is, unless `follow`.
    NotFound (exit code 4) when the path lies in no mount.
    """
    from mount.runtime import find_instance, read_record
    from tierfs.errors import NotFound

    if path == "":
        raise PathRefused("an empty path names nothing; give a path below a mount point")
    try:
        instance = find_instance(path or ".", below=True)
    except NotFound:
        if path is None:
            return Target(None, "")
        raise
    record = read_record(instance)
    if record is None:
        raise InstanceError(f"the instance {instance.name!r} has no record of its mount; mount it again")
    root = Path(record.mountpoint)
    typed = Path(os.path.normpath(Path.cwd() / (path or ".")))
    if follow and typed.is_symlink():
        typed = Path(os.path.realpath(typed))
    if path == instance.name and not typed.is_relative_to(root):
        return Target(record.mountpoint, "")  # an instance's name stands for its root
    for candidate in (typed, Path(os.path.realpath(typed.parent)) / typed.name):
        if candidate.is_relative_to(root):
            rel = candidate.relative_to(root).as_posix()
            return Target(record.mountpoint, "" if rel == "." else rel)
    raise InstanceError(f"{path} is not below {root}")


def require_inside(target: Target, path: str, verb: str) -> Target:
    """`target`, unless it is the mount's root. PathRefused then, since it is no step."""
    if not target.rel:
        raise PathRefused(
            f"{path} is the mount itself; name the step to {verb}, such as {path.rstrip('/')}/run1/step_5"
        )
    return target
