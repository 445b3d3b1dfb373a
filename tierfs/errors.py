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
├── LevelNotReached             a step is not as durable in time as `durability` asks for (EIO)
├── WishRefused                 a program asks for one step what this mount can't do (EOPNOTSUPP)
├── ObjectError                 the object tier refused or failed; says whether trying again may help
│   ├── ObjectMissing           no such object
│   ├── ObjectExists            a conditional PUT found the object there (412), or another is just being made (409)
│   ├── UploadMissing           the store does not know (any more) an upload in parts
│   ├── ObjectThrottled         SlowDown: fewer requests at a time
│   ├── ObjectUnavailable       no answer, a reset, a time-out, a 5xx: may pass
│   ├── ObjectDenied            credentials are missing, expired, or lack a permission
│   ├── ObjectStoreMissing      the bucket or directory is not there
│   ├── ObjectStoreFull         no space left in the store (a `file://` tier)
│   └── ObjectCorrupt           bytes or checksums differ from what was sent or recorded
├── DiskError                   the local disk refused or failed, or what lies there is damaged
├── CatalogError                the catalogue refused or failed
│   ├── CatalogUnavailable      no answer in time, no leader: may pass; what was asked may have been done all the same
│   ├── CatalogDenied           authentication failed, or a permission is missing
│   ├── CatalogCompacted        a watch asks for revisions that are gone: read all of it again
│   ├── LeaseLost               the lease ran out: this node is no member any more until it joins again
│   └── RecordDamaged           a value in the catalogue is not what this program writes
├── PeerError                   another node did not do what it was asked
│   ├── PeerUnavailable         no connection, a reset, a stall: another holder, or later
│   ├── PeerRefused             authentication failed, or the protocol was not kept
│   └── PeerLacks               it does not hold (any more) these bytes
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


class LevelNotReached(TierfsError):
    errno = errno.EIO


class WishRefused(TierfsError):
    errno = errno.EOPNOTSUPP


class ObjectError(TierfsError):
    """`kind` counts it in statistics; `may_pass`: the same request may succeed later without anybody doing anything."""

    errno = errno.EIO
    may_pass = False

    @property
    def kind(self) -> str:
        return type(self).__name__


class ObjectMissing(ObjectError):
    errno = errno.ENOENT


class ObjectExists(ObjectError):
    errno = errno.EEXIST


class UploadMissing(ObjectError):
    pass


class ObjectThrottled(ObjectError):
    may_pass = True


class ObjectUnavailable(ObjectError):
    may_pass = True


class ObjectDenied(ObjectError):
    """Worth trying again, seldom: credentials are renewed by others, a policy is corrected."""

    errno = errno.EACCES
    may_pass = True


class ObjectStoreMissing(ObjectError):
    may_pass = True


class ObjectStoreFull(ObjectError):
    errno = errno.ENOSPC
    may_pass = True


class ObjectCorrupt(ObjectError):
    """Tried again a few times only: a flipped bit on the way passes, a damaged object stays."""

    may_pass = True


class DiskError(TierfsError):
    """`is_full`: there is no room for it, and nothing there may go."""

    may_pass = True

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class CatalogError(TierfsError):
    """`may_pass`: the same request may succeed later without anybody doing anything."""

    may_pass = False


class CatalogUnavailable(CatalogError):
    may_pass = True


class CatalogDenied(CatalogError):
    errno = errno.EACCES
    may_pass = True


class CatalogCompacted(CatalogError):
    """`revision` is the oldest that can still be watched from."""

    may_pass = True

    def __init__(self, message: str, *, revision: int = 0) -> None:
        super().__init__(message)
        self.revision = revision


class LeaseLost(CatalogError):
    may_pass = True


class RecordDamaged(CatalogError):
    pass


class PeerError(TierfsError):
    """`may_pass` as for CatalogError."""

    may_pass = False


class PeerUnavailable(PeerError):
    may_pass = True


class PeerRefused(PeerError):
    errno = errno.EACCES


class PeerLacks(PeerError):
    errno = errno.ENOENT


class MountError(TierfsError):
    errno = errno.EIO


class InstanceError(TierfsError):
    errno = errno.EIO
    exit_code = 4
