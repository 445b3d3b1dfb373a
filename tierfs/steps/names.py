"""Which part of a path is a step, and which names are safe to use.

Pure: nothing here looks at the file system. A step is a directory below a namespace whose name carries a number;
the patterns are a setting (`steps.patterns`). `StepNames.locate` is asked for each request, so answers are kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tierfs.errors import PathRefused, SettingsError

#: Linux's NAME_MAX (include/uapi/linux/limits.h), in bytes.
NAME_BYTES = 255
#: A longer name is no step: its manifest's file name (name, suffix, writer's mark) has to fit NAME_BYTES.
STEP_NAME_BYTES = 200
#: An escaped namespace is at most so long, so that a suffix (`.log`) can follow it.
ESCAPED_BYTES = 240
#: How many paths' answers are kept. About 0.5 KiB each; several times the files of a large step on one node.
CACHED_PATHS = 16384

#: DeepSpeed writes a text file called `latest` beside these (deepspeed/runtime/engine.py, save_checkpoint).
_DEEPSPEED_STEP = re.compile(r"global_step[0-9]+", re.ASCII)


@dataclass(frozen=True)
class StepPath:
    """A path at or below a step. `inner` is the path inside the step, "" for the step's directory itself."""

    namespace: str
    step: str
    number: int
    inner: str

    @property
    def step_rel(self) -> str:
        """The step's directory, relative to the mount's root."""
        return f"{self.namespace}/{self.step}"

    @property
    def rel(self) -> str:
        """The whole path, relative to the mount's root."""
        return f"{self.namespace}/{self.step}/{self.inner}" if self.inner else self.step_rel


class StepNames:
    """Recognises steps by the whole name of a directory.

    A step is never the first component of a path, for that is its namespace; a namespace may be nested
    (`team/run`). Of several components that match, the leftmost from the second on is the step, but a name of digits
    only counts when no other matches: in `run/2024/step_5` the step is `step_5`, in `run/5/0` it is `5`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises SettingsError for a pattern that is no regular expression or lacks the group `step`."""
        self._patterns = tuple(_compile(pattern) for pattern in patterns)
        self._cached = lru_cache(maxsize=CACHED_PATHS)(self._find)

    def locate(self, rel: str) -> StepPath | None:
        """The step that the path (relative to the mount's root, "" is the root) lies in, or None."""
        return self._cached(rel)

    def number(self, name: str) -> int | None:
        """The step number that a directory's name carries, or None where it is no step's name."""
        if len(name) > STEP_NAME_BYTES or len(name.encode("utf-8", "surrogateescape")) > STEP_NAME_BYTES:
            return None
        for pattern in self._patterns:
            match = pattern.fullmatch(name)
            if match:
                digits = match["step"]
                if digits and digits.isascii() and digits.isdigit():
                    return int(digits)
        return None

    @staticmethod
    def has_own_latest(step_name: str) -> bool:
        """True where the framework that uses such names keeps a file `latest` of its own beside its steps."""
        return _DEEPSPEED_STEP.fullmatch(step_name) is not None

    def _find(self, rel: str) -> StepPath | None:
        parts = rel.split("/")
        bare: StepPath | None = None
        for at in range(1, len(parts)):
            name = parts[at]
            number = self.number(name)
            if number is None:
                continue
            found = StepPath("/".join(parts[:at]), name, number, "/".join(parts[at + 1 :]))
            if not (name.isascii() and name.isdigit()):
                return found
            bare = bare or found
        return bare


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise SettingsError(
            f"steps.patterns: {pattern!r} is not a regular expression: {error}", key="steps.patterns"
        ) from None
    if "step" not in compiled.groupindex:
        raise SettingsError(
            f"steps.patterns: {pattern!r} lacks the group (?P<step>…) that gives the step's number",
            key="steps.patterns",
        )
    return compiled


def safe_component(name: str) -> str:
    """`name` unchanged where it can be one component of a path; else PathRefused."""
    if name in ("", ".", ".."):
        raise PathRefused(f"{name!r} can't be the name of a file or directory")
    if "/" in name or "\0" in name:
        raise PathRefused(f"the name {name!r} holds a '/' or a NUL byte")
    _bounded(name, name)
    return name


def safe_relative(path: str) -> str:
    """`path` unchanged where it is a relative path that stays below its start: safe components between single '/'."""
    if path.startswith("/"):
        raise PathRefused(f"the path {path!r} is absolute; a path relative to the mount's root is wanted")
    for name in path.split("/"):
        if name in ("", ".", ".."):
            raise PathRefused(f"the path {path!r} holds an empty, '.' or '..' component")
        if "\0" in name:
            raise PathRefused(f"the path {path!r} holds a NUL byte")
        _bounded(name, path)
    return path


def _bounded(name: str, whole: str) -> None:
    if 4 * len(name) <= NAME_BYTES and name.isascii():
        return
    try:
        size = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise PathRefused(f"the path {whole!r} can't be encoded as a file name") from None
    if size > NAME_BYTES:
        raise PathRefused(f"a component of {whole!r} is longer than {NAME_BYTES} bytes")


def escape_namespace(namespace: str) -> str:
    """A flat file name for a namespace, the same for ever; `unescape_namespace` turns it back.

    '%' and '/' become '%25' and '%2F'. What would be longer than ESCAPED_BYTES is cut and ends with a digest
    (after '%~'), which can't be turned back; the manifest holds the namespace itself.
    """
    flat = safe_relative(namespace).replace("%", "%25").replace("/", "%2F")
    encoded = flat.encode("utf-8", "surrogateescape")
    if len(encoded) <= ESCAPED_BYTES:
        return flat
    digest = hashlib.sha256(namespace.encode("utf-8", "surrogateescape")).hexdigest()[:40]
    # Cut between characters: a half of one would be an undecodable byte, which is legal but ugly in listings.
    head = encoded[: ESCAPED_BYTES - 42].decode("utf-8", "ignore")
    return f"{head}%~{digest}"


def unescape_namespace(flat: str) -> str:
    """The namespace that `escape_namespace` made this name of; PathRefused for any other name."""
    safe_component(flat)
    namespace = flat.replace("%2F", "/").replace("%25", "%")
    if re.search(r"%(?!25|2F)", flat):
        raise PathRefused(f"{flat!r} is not an escaped namespace")
    return safe_relative(namespace)
