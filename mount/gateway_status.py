"""What `status` says of the gateway: whether it serves, what it has done, and which namespaces were made by it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mount.runtime import Instance, read_process
from tierfs.sagemaker.layout import NAMESPACE_NOTE
from tierfs.transport.addresses import join_address, split_setting

_MOST_BYTES = 4096
_COUNTED = ("started_at", "connections", "requests", "refused", "failed", "received_bytes", "sent_bytes")


class GatewayStatus:
    """Of one instance: asked for by the daemon, which reads what its gateway left in the runtime directory."""

    def __init__(self, instance: Instance, listen: str, root: Path) -> None:
        """`root` is the tree that the mount shows."""
        self._instance = instance
        self._addresses = [join_address(host, port) for host, port in split_setting(listen, "gateway.listen")]
        self._root = root

    def describe(self) -> dict[str, Any]:
        """See docs/cli.md. Reads some small files."""
        process = read_process(self._instance.gateway_pid)
        counted = _numbers(self._instance.gateway_counts) if process is not None else {}
        return {
            "addresses": self._addresses,
            "pid": process.pid if process is not None else None,
            **{name: counted.get(name) for name in _COUNTED},
            "namespaces": list(self._namespaces()),
        }

    def _namespaces(self) -> Iterator[dict[str, Any]]:
        """Those whose note lies on this node."""
        with os.scandir(self._root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        for name in names:
            note = _numbers(self._root / name / NAMESPACE_NOTE)
            if note:
                wanted = {key: note.get(key) for key in ("num_ranks", "steps_retained")}
                yield {"namespace": name, **wanted}


def _numbers(path: Path) -> dict[str, int | float]:
    """The numbers of a small JSON object; {} where there is none. What lies there may be anybody's."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            value = json.loads(os.read(fd, _MOST_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {name: number for name, number in value.items() if type(number) in (int, float)}
