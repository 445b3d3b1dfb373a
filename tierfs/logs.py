"""The daemon's log, in text or JSON lines, and one log a namespace that training people read.

Messages carry facts as `extra`, under the names in FIELDS; nothing else is put into records. A log is never the
reason that a step fails: whatever goes wrong while writing one is swallowed, and counted where it can be.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from tierfs.settings import LogSettings
from tierfs.units import format_duration, format_local, format_rate, format_size, format_utc

ROOT_LOGGER = "tierfs"
FIELDS = ("namespace", "step", "file", "tier")
"""Names of `extra` facts, in the order they are written: `log.info("sealed", extra={"step": "step_5"})`."""

LOG_BYTES = 8 << 20
"""A log file is turned over at this size; one older file is kept beside it, so a log takes twice this at most."""

_OPEN_NAMESPACE_LOGS = 64
_OWN_LOGS = ("daemon", "gateway", "keeper")  # their logs may lie in the same directory
_QUIET_CHARACTERS = str.maketrans({"\n": "\\n", "\r": "\\r", "\x1b": "\\x1b", "\x00": "\\x00"})


def configure_logging(
    settings: LogSettings, directory: Path | None = None, *, stream: TextIO | None = None, name: str = "daemon"
) -> None:
    """Sends the `tierfs` logger to `<directory>/<name>.log`, or to `stream` (default stderr) without a directory.

    Called once, by a process at its start; a second call replaces the first. A directory that can't be written
    falls back to the stream, and says so there.
    """
    logger = logging.getLogger(ROOT_LOGGER)
    logger.setLevel(settings.level.upper())
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    target = settings.directory or directory
    chosen: logging.Handler = logging.StreamHandler(stream or sys.stderr)
    trouble = ""
    if target is not None:
        file = BoundedFile(target / f"{name}.log")
        if file.is_writable():
            chosen = _FileHandler(file)
        else:
            trouble = f"cannot write {file.path}: {file.trouble}; logging to stderr"
    chosen.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    logger.addHandler(chosen)
    logging.raiseExceptions = False  # a full disk must not print tracebacks into the keeper's stderr
    if trouble:
        logger.warning(trouble)


def logger_for(part: str) -> logging.Logger:
    """The logger of one part of the product, such as `step`, `channel`, `ram`; lines name it."""
    return logging.getLogger(f"{ROOT_LOGGER}.{part}")


def part_of(record: logging.LogRecord) -> str:
    """`step` of the logger `tierfs.step`; the logger's name as it is for loggers of others."""
    return record.name.removeprefix(f"{ROOT_LOGGER}.")


class TextFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.123Z INFO step: sealed namespace=run1 step=step_5 file=__0_0.distcp`, one line a record.

    Control characters in names are escaped, so that a file's name can't forge a line. A traceback follows in lines
    that start with a space.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {field}={_quoted(getattr(record, field))}" for field in _present(record))
        message = record.getMessage().translate(_QUIET_CHARACTERS)
        line = f"{format_utc(record.created)} {record.levelname} {part_of(record)}: {message}{facts}"
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            line += "".join(f"\n {each}" for each in trace.splitlines())
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, part, message, the fields that are set, and error with the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": format_utc(record.created),
            "level": record.levelname.lower(),
            "part": part_of(record),
            "message": record.getMessage(),
        }
        entry.update((field, getattr(record, field)) for field in _present(record))
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return json.dumps(entry, default=str)


class NamespaceLog:
    """Writes `<directory>/<namespace>.log`, a log for the people who train in that namespace.

        [2026-01-01 00:00:00] [run1] [INFO] [rank 0] step 240: written 1.2 GiB in 0.41 s (2.9 GiB/s)

    Times are local. Files are private (0600) and bounded (LOG_BYTES). Safe to call from any thread; never raises.
    The namespace is escaped for the file's name (`team/run1` is `team%2Frun1.log`).
    """

    def __init__(
        self, directory: Path, *, clock: Callable[[], float] = time.time, limit_bytes: int = LOG_BYTES
    ) -> None:
        self.directory = directory
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._files: dict[str, BoundedFile] = {}
        self._lock = threading.Lock()
        self.lost_lines = 0
        """How many lines could not be written."""

    def write(
        self,
        namespace: str,
        message: str,
        *,
        level: str = "INFO",
        rank: int | None = None,
        step: int | str | None = None,
    ) -> None:
        """One line. `step` is its number or, for names without one, its name."""
        parts = [f"[{format_local(self._clock())}]", f"[{namespace or '/'}]", f"[{level.upper()}]"]
        if rank is not None:
            parts.append(f"[rank {rank}]")
        if step is not None:
            parts.append(f"step {step}:")
        line = f"{' '.join(parts)} {message}".translate(_QUIET_CHARACTERS)
        with self._lock:
            if not self._file_of(namespace).write_line(line):
                self.lost_lines += 1

    def written(
        self, namespace: str, step: int | str, size_bytes: int, seconds: float, *, rank: int | None = None
    ) -> None:
        """`step 240: written 1.2 GiB in 0.41 s (2.9 GiB/s)`."""
        rate = f" ({format_rate(size_bytes, seconds)})" if seconds > 0 else ""
        message = f"written {format_size(size_bytes)} in {format_duration(seconds)}{rate}"
        self.write(namespace, message, rank=rank, step=step)

    def path(self, namespace: str) -> Path:
        return self.directory / f"{escape_namespace(namespace)}.log"

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _file_of(self, namespace: str) -> BoundedFile:
        file = self._files.pop(namespace, None)
        if file is None:
            if len(self._files) >= _OPEN_NAMESPACE_LOGS:  # the one unused for longest: dicts keep their order
                self._files.pop(next(iter(self._files))).close()
            file = BoundedFile(self.path(namespace), limit_bytes=self._limit_bytes)
        self._files[namespace] = file
        return file


class BoundedFile:
    """A log file of mode 0600 that is renamed to `NAME.1` when it would pass `limit_bytes`. Never raises."""

    def __init__(self, path: Path, *, limit_bytes: int = LOG_BYTES) -> None:
        self.path = path
        self.trouble = ""
        self._limit_bytes = limit_bytes
        self._fd = -1

    def is_writable(self) -> bool:
        """Opens the file, making it and its directory (0700); `trouble` says why that failed."""
        return self._fd >= 0 or self._open()

    def write_line(self, line: str) -> bool:
        """Appends one line; False when it could not be written."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            if not self.is_writable():
                return False
            if 0 < os.fstat(self._fd).st_size > self._limit_bytes - len(data):
                self.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                if not self._open():
                    return False
            os.write(self._fd, data)  # one write with O_APPEND: lines of two processes don't mix
            return True
        except OSError as error:
            self.trouble = error.strerror or str(error)
            self.close()
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
            return True
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return False


def escape_namespace(namespace: str) -> str:
    """A file name for a namespace: different namespaces never share one, none is hidden or longer than 200 bytes."""
    escaped = quote(namespace.encode("utf-8", "surrogateescape"), safe=" =+,@") or "%"  # the root itself
    if escaped.startswith(".") or escaped in _OWN_LOGS:
        escaped = f"%{ord(escaped[0]):02X}{escaped[1:]}"
    if len(escaped) > 200:
        from hashlib import sha256

        escaped = f"{escaped[:160]}%{sha256(os.fsencode(namespace)).hexdigest()[:16]}"
    return escaped


class _FileHandler(logging.Handler):
    def __init__(self, file: BoundedFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write_line(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._file.close()
        super().close()


def _present(record: logging.LogRecord) -> list[str]:
    return [field for field in FIELDS if getattr(record, field, None) is not None]


def _quoted(value: object) -> str:
    text = str(value)
    if text and not any(character in text for character in ' "=\\') and text.isprintable():
        return text
    return json.dumps(text)
