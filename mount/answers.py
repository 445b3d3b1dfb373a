"""What the kernel is told when a handler fails: one wrapper round every handler of the file system.

pyfuse3 lets any exception but FUSEError out of its main loop, which ends the mount for everybody. So each handler
is wrapped once: FUSEError passes, OSError and TierfsError become their errno, anything else is a fault of ours, gets
its traceback logged and is answered with EIO. Cancellation passes, since trio needs it.
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, TypeVar

import pyfuse3

from mount.request_times import RequestTimes
from tierfs.errors import TierfsError

_OperationsClass = TypeVar("_OperationsClass", bound=type[pyfuse3.Operations])

_TIMES = "_request_times"

# These have nobody waiting for an answer: an error of theirs is logged and swallowed.
_WITHOUT_ANSWER = frozenset({"forget"})


def errno_of(error: BaseException) -> int:
    """The one place that turns an exception into the errno a program sees."""
    if isinstance(error, pyfuse3.FUSEError | TierfsError):
        return error.errno
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO


def answered(cls: _OperationsClass) -> _OperationsClass:
    """Class decorator: wraps every request handler that `cls` defines."""
    for name, handler in list(vars(cls).items()):
        if not name.startswith("_") and inspect.iscoroutinefunction(handler) and hasattr(pyfuse3.Operations, name):
            setattr(cls, name, _answer(name, handler))
    return cls


def measure(operations: pyfuse3.Operations, times: RequestTimes) -> None:
    """From now on each request of these operations is timed. `operations` are of a class that is `answered`."""
    vars(operations)[_TIMES] = times


def _answer(name: str, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    plain = _refusing(name, handler)

    @functools.wraps(handler)
    async def answer(self: Any, *args: Any) -> Any:
        times: RequestTimes | None = self.__dict__.get(_TIMES)
        if times is None:
            return await plain(self, *args)
        times.in_hand += 1
        began = perf_counter()
        try:
            return await plain(self, *args)
        except pyfuse3.FUSEError as error:
            times.failed(name, error.errno)
            raise
        finally:
            times.took(name, perf_counter() - began)
            times.in_hand -= 1

    return answer


def _refusing(name: str, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answer(self: Any, *args: Any) -> Any:
        try:
            return await handler(self, *args)
        except pyfuse3.FUSEError:
            raise
        except OSError as error:
            raise pyfuse3.FUSEError(errno_of(error)) from None
        except TierfsError as error:
            _log_of(self).warning("%s: %s", name, error.message)
            raise pyfuse3.FUSEError(error.errno) from None
        except Exception:
            _log_of(self).exception("%s%r failed; the program was told EIO", name, _printable(args))
            if name in _WITHOUT_ANSWER:
                return None
            raise pyfuse3.FUSEError(errno.EIO) from None

    return answer


def _log_of(operations: Any) -> logging.Logger:
    log = getattr(operations, "log", None)
    return log if isinstance(log, logging.Logger) else logging.getLogger("tierfs.mount")


def _printable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for a log line: ids and names, never the bytes of a file."""
    return tuple(
        a if isinstance(a, int | str) or (isinstance(a, bytes) and len(a) < 256) else type(a).__name__ for a in args
    )
