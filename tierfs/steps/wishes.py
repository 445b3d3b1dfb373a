"""What a program asks of one step alone, ahead of the settings: `tiers` and `durability`; and of a namespace, where the
settings leave it open: `ram_max_steps`.

A wish is an extended attribute of the directory in the RAM tier, so it goes with the directory: it outlives the
daemon, and a step that is removed takes it along. Root keeps it in `trusted.tierfs.*`; others in `user.tierfs.*`, which
a tmpfs has since Linux 6.6 (without it a wish is refused). Through the mount both are `user.tierfs.*`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tierfs.errors import PathRefused, WishRefused

TIERS = ("ram", "replica", "object")
NAMES = ("tiers", "durability")
MAX_STEPS = "ram_max_steps"
_MOST_STEPS = 1_000_000
_ABSENT = (errno.ENODATA, errno.ENOTSUP, errno.ENOENT, errno.ENOTDIR)


def put(directory: Path, name: str, value: str, *, has_object_tier: bool) -> None:
    """Keeps a wish; an empty one takes it back.

    `tiers` lists what the step may go to, by commas, `ram` among it: with `object` it is owed to the object tier,
    without it is not, whatever `persist.policy` says. `durability` is what the completing rename waits for, ahead of
    `durability.commit`. Raises PathRefused for what is neither, WishRefused where the step can't get there, OSError.
    """
    wanted = [word.strip() for word in value.split(",")] if value else []
    if name not in NAMES or any(word not in TIERS for word in wanted) or (name == "durability" and len(wanted) > 1):
        raise PathRefused(f"{name} = {value!r} is no wish; there are tiers (of {', '.join(TIERS)}) and durability")
    if name == "tiers" and wanted and "ram" not in wanted:
        raise PathRefused(f"tiers = {value!r} lacks ram, where each step is written")
    if "object" in wanted and not has_object_tier:
        raise WishRefused(f"{directory.name} can't go to an object tier: there is none, or persist.policy is none")
    _keep(directory, name, ",".join(wanted))


def put_max_steps(namespace: Path, value: str) -> None:
    """Keeps how many complete steps of the namespace are to stay in RAM at most, as `retention.ram_max_steps` says it;
    an empty one takes it back. Raises PathRefused for what is no such number, or no directory; OSError."""
    if value and not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= _MOST_STEPS):
        raise PathRefused(f"{MAX_STEPS} = {value!r} is no number of steps from 1 to {_MOST_STEPS}")
    if namespace.is_symlink() or not namespace.is_dir():
        raise PathRefused(f"{namespace.name} is no directory, so there are no steps in it")
    _keep(namespace, MAX_STEPS, value)


def max_steps_of(namespace: Path) -> int:
    """0 where nobody wished for anything."""
    value = _get(namespace, MAX_STEPS)
    return int(value) if value.isdigit() else 0


def of(directory: Path) -> dict[str, str]:
    """The wishes that are kept with a step's directory, by name."""
    found = {}
    for name in NAMES:
        value = _get(directory, name)
        if value:
            found[name] = value
    return found


def tiers_of(directory: Path) -> frozenset[str] | None:
    """What the step may go to; None where nobody wished for anything."""
    value = _get(directory, "tiers")
    return frozenset(value.split(",")) if value else None


def durability_of(directory: Path) -> str:
    """What the completing rename waits for: ram, replica or object; "" where nobody wished for anything."""
    return _get(directory, "durability")


def _keep(directory: Path, name: str, value: str) -> None:
    if value:
        os.setxattr(directory, _attribute(name), value.encode())
        return
    try:
        os.removexattr(directory, _attribute(name))
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def _get(directory: Path, name: str) -> str:
    try:
        return os.getxattr(directory, _attribute(name)).decode("ascii", "replace")
    except OSError as error:
        if error.errno in _ABSENT:
            return ""
        raise


def _attribute(name: str) -> str:
    return f"{'trusted' if os.geteuid() == 0 else 'user'}.tierfs.{name}"
