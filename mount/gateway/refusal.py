"""What a client is told when its request is not done: an HTTP status and a sentence."""

from __future__ import annotations

import errno

from mount.gateway.tree import Unmounted
from tierfs.errors import InstanceError, PathRefused, StepBusy, TierfsError

#: Insufficient Storage (RFC 4918, 11.5).
FULL = 507


class Refusal(Exception):
    """`status` as the library's client sorts them: 404 is "there is none", other 4xx its own mistakes, 5xx ours."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def refusal_of(error: Exception, what: str) -> Refusal | None:
    """The answer for an error that was foreseen; None for any other."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, PathRefused):
        return Refusal(400, error.message)
    if isinstance(error, StepBusy):
        return Refusal(409, error.message)
    if isinstance(error, Unmounted | InstanceError):
        return Refusal(503, error.message)
    if isinstance(error, TierfsError):
        return Refusal(500, error.message)
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Refusal(404, f"{what} is not there")
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Refusal(FULL if full else 500, f"{what}: {error.strerror or error}")
    return None
