"""Stubs: sparse files of the right size, times, mode and owner whose bytes are (partly) elsewhere: in the object tier,
or in the RAM of other nodes.

What makes a file a stub is an extended attribute of its inode, so it survives renames, hard links and the daemon: a
mark that says where the bytes are and what they are. It is set before the file gets its visible name, and removed only
once all bytes are there and verified, so that a hole is never taken for data. Root uses `trusted.tierfs.stub`; others
have `user.tierfs.stub`, which a tmpfs has since Linux 6.6 (without it stubs can't be made, and `make_stub` says so).
Neither can be seen or set through the mount.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierfs.catalog.records import check_version
from tierfs.checksum import from_text, to_text
from tierfs.errors import PathRefused, RecordDamaged, TierfsError
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.steps.names import safe_component, safe_relative

#: Marks of the object tier's stubs are written in format 1, as earlier programs did and understand; those that only a
#: cluster has, with a version or without a checksum, in format 2.
FORMATS = (1, 2)
ATTRIBUTES = ("trusted.tierfs.stub", "user.tierfs.stub")
_ABSENT = (errno.ENODATA, errno.ENOTSUP)


class MarkDamaged(TierfsError):
    """A file says that it is a stub, but not of what: its bytes can't be told from holes."""


@dataclass(frozen=True)
class StubMark:
    """What holds the bytes. `file` is the path inside the step, by which the object tier has them if it has them;
    `version` names them in the cluster, "" where only the object tier has them. `checksum` is None while nobody summed
    them up. `mtime_ns` is the file's: bringing bytes moves the inode's own."""

    namespace: str
    step: str
    file: str
    size_bytes: int
    checksum: int | None
    mtime_ns: int
    version: str = ""

    @property
    def key(self) -> str:
        """The object's key (`tierfs.persist.layout.file_key`)."""
        return f"{self.namespace}/{self.step}/{self.file}"

    @property
    def checksum_text(self) -> str | None:
        return None if self.checksum is None else to_text(self.checksum)

    def to_bytes(self) -> bytes:
        is_old = self.checksum is not None and not self.version
        value: dict[str, Any] = {
            "v": 1 if is_old else 2,
            "namespace": self.namespace,
            "step": self.step,
            "file": self.file,
            "size": self.size_bytes,
            "crc64nvme": self.checksum_text,
            "mtime_ns": self.mtime_ns,
        }
        if not is_old:
            value["version"] = self.version
        return json.dumps(value).encode("ascii")


def attribute() -> str:
    """The attribute that this process sets."""
    return ATTRIBUTES[0] if os.geteuid() == 0 else ATTRIBUTES[1]


def mark_from_bytes(data: bytes) -> StubMark:
    """Raises MarkDamaged for anything but a sound mark."""
    try:
        fields = Fields(json.loads(data, parse_constant=refuse_constant), "the mark")
        written_in = fields.integer("v")
        if written_in not in FORMATS:
            raise Wrong("its version is unknown")
        checksum = fields.text_or_none("crc64nvme") if written_in >= 2 else fields.text("crc64nvme")
        version = fields.text("version") if written_in >= 2 else ""
        mark = StubMark(
            namespace=safe_relative(fields.text("namespace")),
            step=safe_component(fields.text("step")),
            file=safe_relative(fields.text("file")),
            size_bytes=fields.integer("size"),
            checksum=None if checksum is None else from_text(checksum),
            mtime_ns=fields.integer("mtime_ns", least=-(1 << 63)),
            version=check_version(version) if version else "",
        )
        fields.end()
    except (ValueError, RecursionError, Wrong, PathRefused, RecordDamaged) as error:
        raise MarkDamaged(f"the mark of a stub is damaged: {error}") from None
    return mark


def read_mark(file: int | str | Path) -> StubMark | None:
    """The mark of a file, by path (symbolic links are not followed) or descriptor. None for what is no stub.

    Raises MarkDamaged, OSError.
    """
    for name in ATTRIBUTES:
        try:
            data = os.getxattr(file, name) if isinstance(file, int) else os.getxattr(file, name, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise
        return mark_from_bytes(data)
    return None


def write_mark(fd: int, mark: StubMark) -> None:
    """Raises TierfsError where this file system takes no such attribute."""
    name = attribute()
    try:
        os.setxattr(fd, name, mark.to_bytes())
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EPERM):
            raise
        raise TierfsError(
            f"stubs can't be made here: the RAM tier takes no attribute {name} ({error.strerror}). A tmpfs has "
            f"attributes for users since Linux 6.6; mount as root, or without an object tier"
        ) from None


def remove_mark(fd: int) -> None:
    """The file is an ordinary one from now on."""
    for name in ATTRIBUTES:
        try:
            os.removexattr(fd, name)
        except OSError as error:
            if error.errno not in (*_ABSENT, errno.EPERM):
                raise


def make_stub(scratch: Path, mark: StubMark, *, mode: int, uid: int, gid: int, atime_ns: int | None = None) -> int:
    """Make the file `scratch`, to be renamed into place; returns its inode number. Nothing is left on failure.

    A file of no bytes is not marked: it has all it needs. Raises TierfsError, OSError (ENOSPC: no inode).
    """
    scratch.unlink(missing_ok=True)
    fd = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if mark.size_bytes:
            write_mark(fd, mark)
            os.ftruncate(fd, mark.size_bytes)
        if (uid, gid) != (os.geteuid(), os.getegid()):
            # Who is not root can't give files away, as everywhere.
            with contextlib.suppress(PermissionError):
                os.fchown(fd, uid, gid)
        os.fchmod(fd, stat.S_IMODE(mode))
        os.utime(fd, ns=(mark.mtime_ns if atime_ns is None else atime_ns, mark.mtime_ns))
        return os.fstat(fd).st_ino
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def restore_times(fd: int, mark: StubMark) -> None:
    """Bringing bytes, and giving them up, is no change of the file."""
    os.utime(fd, ns=(os.fstat(fd).st_atime_ns, mark.mtime_ns))


def with_mtime(mark: StubMark, mtime_ns: int) -> StubMark:
    return replace(mark, mtime_ns=mtime_ns)
