"""What `tierfs doctor` finds out about RDMA: the devices that a node with these settings would use, or why not."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence

from mount.doctor import FAIL, OK, WARN, Finding
from tierfs.capabilities import IPC_LOCK, is_capable
from tierfs.settings import Settings
from tierfs.transport.verbs_devices import Found, find_devices
from tierfs.transport.verbs_fabric import why_unused
from tierfs.units import format_size

CHECK = "RDMA"
_MORE = "`tierfs verbs-selftest` tries what is there, docs/rdma.md says what each reason takes"


def examine_rdma(asked: Sequence[tuple[str, Settings]]) -> Iterator[Finding]:
    """Settings, each with whose they are; of those that ask for the same only the first is told of. Opens each device
    for a moment. Never raises."""
    told: dict[tuple[str, str, str], str] = {}
    for whose, settings in asked:
        told.setdefault((settings.peer.transport, settings.peer.verbs_devices, why_unused(settings)), whose)
    found: dict[str, Found] = {}
    for (transport, devices, unused), whose in told.items():
        if unused:
            yield Finding(CHECK, OK, f"{whose}not looked at: {unused}")
            continue
        if devices not in found:
            found[devices] = find_devices(devices)
        yield from _told(found[devices], transport, whose)


def _told(found: Found, transport: str, whose: str) -> Iterator[Finding]:
    if found.devices:
        names = ", ".join(f"{each.device} ({each.kind})" for each in found.devices)
        yield Finding(CHECK, OK, f"{whose}{names}")
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY and not is_capable(IPC_LOCK):
            yield Finding(
                "locked memory",
                WARN,
                f"{whose}at most {format_size(soft)}: files beyond that go by TCP",
                "ulimit -l unlimited, LimitMEMLOCK=infinity",
            )
    elif transport == "verbs":
        what = f"{whose}peer.transport is verbs, and there is no device to use: {found.reason}"
        yield Finding(CHECK, FAIL, what, f"{_MORE}; with peer.transport = auto it is no problem, TCP is used")
    else:
        yield Finding(CHECK, OK, f"{whose}files go from node to node by TCP: {found.reason}")
