"""What a setting is: a field of a settings class, with how its text is parsed and what it is for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MIB = 1 << 20


def setting(default: Any, doc: str, *, kind: str, choices: tuple[str, ...] = (), least: int = 0) -> Any:
    """A field of a settings class. `kind` says how its text form is parsed:

    text, bool, int, size (bytes, `3GiB`), share (bytes or a percentage of memory), duration (seconds, `30s`),
    path, choice, texts (a list), patterns (a list of regular expressions), table (a mapping of name to text, laid
    over the default's entries), room (auto, off or a size), name (of an instance), url (of an object tier),
    endpoint (a URL of http or https), command (split as a shell would), catalog (etcd://…), addresses (HOST:PORT,
    several with commas).
    `least` is the smallest number accepted.
    """
    metadata = {"doc": doc, "kind": kind, "choices": choices, "least": least}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
