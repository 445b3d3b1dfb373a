"""Every failure that tierfs itself reports, as one tree.

TierfsError                     anything below; carries an errno for the kernel and an exit code for the shell
├── SettingsError               a setting is unknown, malformed or contradicts another
├── PathRefused                 a name that must not reach the tree (from the wire or a command)
├── NotAStep                    the path is not inside a step
├── NotFound                    no such instance, namespace, step or file
├── StepBusy                    the step has open writers, so the request can't be done now
├── CommitRefused               a marker was renamed into place but files it names are missing or short (EIO)
├── MarkerUnreadable            a marker file could not be parsed safely
├── ManifestDamaged             a step's manifest in the RAM tier could not be read
├── NoRoom                      the RAM tier is full and nothing in it may be evicted (ENOSPC)
├── ChecksumMismatch            bytes differ from what was sealed (EIO)
├── MountError                  mounting, unmounting or taking over failed
└── InstanceError               a running instance can't be reached or refused the request
"""

from __future__ import annotations

import errno


class TierfsError(Exception):
    """Base of the tree. `message` says what happened, to which path, and what to do next.

    `errno` is what a program that met this failure through the mount is told; `exit_code` is what the
    command line ends with (1 error, 2 usage, 3 degraded, 4 not mounted).
    """

    errno: int = errno.EIO
    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SettingsError(TierfsError):
    """A setting is wrong; `key` names it."""

    errno = errno.EINVAL
    exit_code = 2

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class PathRefused(TierfsError):
    errno = errno.EINVAL
    exit_code = 2


class NotAStep(TierfsError):
    errno = errno.EINVAL
    exit_code = 2


class NotFound(TierfsError):
    errno = errno.ENOENT


class StepBusy(TierfsError):
    errno = errno.EBUSY


class CommitRefused(TierfsError):
    """`missing` and `short` name the files; `short` maps a name to (bytes it has, bytes it must have at least)."""

    errno = errno.EIO

    def __init__(
        self, message: str, *, missing: tuple[str, ...] = (), short: dict[str, tuple[int, int]] | None = None
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.short = short or {}


class MarkerUnreadable(TierfsError):
    errno = errno.EIO


class ManifestDamaged(TierfsError):
    errno = errno.EIO


class NoRoom(TierfsError):
    """`needed_bytes` could not be had; `free_bytes` is what there was."""

    errno = errno.ENOSPC

    def __init__(self, message: str, *, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ChecksumMismatch(TierfsError):
    errno = errno.EIO


class MountError(TierfsError):
    errno = errno.EIO


class InstanceError(TierfsError):
    errno = errno.EIO
    exit_code = 4
