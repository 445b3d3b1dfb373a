"""The RDMA devices that this node uses, open: each with its port and what takes its completions."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import trio

from tierfs.settings import Settings
from tierfs.transport.verbs_device import DevicePort
from tierfs.transport.verbs_devices import Found, find_devices
from tierfs.transport.verbs_port import Capabilities, Port
from tierfs.transport.verbs_reading import Reader

log = logging.getLogger("tierfs.transport")

#: Unless they are named. A machine's memory has no more bandwidth than so many of 200 Gb/s (p5en), and the others are
#: left to the training's own communication.
MOST_DEVICES = 8
#: Devices that went, or were not there when they were looked for, are looked for so often.
LOOK_EVERY_S = 60.0
#: How long a start waits until they are open; they are used later as well.
READY_WITHIN_S = 5.0
#: At the end: how long what others have registered is waited for before the devices are closed all the same.
RELEASED_WITHIN_S = 10.0
#: Registering holds the interpreter lock, so that more would not be faster.
_THREADS = 4
_NODES = Path("/sys/devices/system/node")


@dataclass(eq=False)
class OpenPort:
    """A device in use. It is another one after the device was gone and came back."""

    port: Port
    reader: Reader

    @property
    def name(self) -> str:
        return self.port.capabilities.device

    @property
    def gone(self) -> str:
        """Why it carries nothing any more; "" while it does. Its links and regions are useless then, but have to be
        closed all the same before the port is."""
        return self.reader.gone


class Fabric(Protocol):
    """What asking and serving share."""

    @property
    def ports(self) -> tuple[OpenPort, ...]:
        """Those that can be used now, the nearest to this node's memory first."""
        ...

    @property
    def reason(self) -> str:
        """One sentence: why there is none. "" where there is."""
        ...

    @property
    def threads(self) -> trio.CapacityLimiter:
        """For `register`, `Region.close` and opening."""
        ...

    def keep(self, port: OpenPort) -> None:
        """Somebody has links or regions of it: it is closed, when it is gone, only after `release`."""
        ...

    def release(self, port: OpenPort) -> None: ...


@dataclass(eq=False)
class _InUse:
    open: OpenPort
    #: Where it comes among the others.
    rank: int
    kept: int
    released: trio.Event


def why_unused(settings: Settings) -> str:
    """Why these settings leave devices alone, whatever there is; "" where they don't."""
    if settings.peer.transport == "tcp":
        return "peer.transport is tcp"
    if (
        settings.peer.transport == "auto"
        and settings.cluster.tls_cert is not None
        and settings.cluster.encryption != "off"
    ):
        return (
            "what goes by TCP is encrypted (cluster.tls_cert, cluster.encryption), and RDMA is not; peer.transport = "
            "verbs uses it all the same"
        )
    return ""


class Devices:
    """`Fabric` of this machine's devices, as the settings choose them. They are found and opened while `run` runs; one
    that goes is closed, and looked for again."""

    def __init__(
        self,
        settings: Settings,
        *,
        find: Callable[[str], Found] = find_devices,
        open_port: Callable[[Capabilities], Port] = DevicePort,
    ) -> None:
        """`find` and `open_port` are called in threads; OSError of `open_port`: it can't be used now."""
        self._transport = settings.peer.transport
        self._wanted = settings.peer.verbs_devices
        self._find = find
        self._open_port = open_port
        self._threads = trio.CapacityLimiter(_THREADS)
        self._in_use: dict[str, _InUse] = {}
        #: Of those that are looked for: they went, or did not open.
        self._missing: set[str] = set()
        unused = why_unused(settings)
        self._is_unused = bool(unused)
        self._reason = unused or "the RDMA devices are being looked for"
        self._logged = ""
        #: Devices that went while they were used.
        self.lost = 0

    # --- Fabric

    @property
    def ports(self) -> tuple[OpenPort, ...]:
        usable = (each for each in self._in_use.values() if not each.open.gone)
        return tuple(each.open for each in sorted(usable, key=lambda each: each.rank))

    @property
    def reason(self) -> str:
        return "" if self.ports else self._reason

    @property
    def threads(self) -> trio.CapacityLimiter:
        return self._threads

    def keep(self, port: OpenPort) -> None:
        """ValueError where it was closed: which it is not as long as it is in `ports`."""
        entry = self._entry(port)
        if entry is None:
            raise ValueError(f"{port.name} was closed already")
        entry.kept += 1

    def release(self, port: OpenPort) -> None:
        entry = self._entry(port)
        if entry is None:
            return  # it could not be waited for any longer
        entry.kept -= 1
        if not entry.kept:
            entry.released.set()

    def _entry(self, port: OpenPort) -> _InUse | None:
        entry = self._in_use.get(port.name)
        return entry if entry is not None and entry.open is port else None

    # --- telling

    @property
    def is_wanted(self) -> bool:
        """That there is none is a problem."""
        return self._transport == "verbs"

    def describe(self) -> dict[str, Any]:
        """For `status --json`: the setting, the devices in use, and why there is none."""
        devices = [each.port.capabilities for each in self.ports]
        return {
            "transport": self._transport,
            "devices": [{"name": each.device, "kind": each.kind, "numa_node": each.numa_node} for each in devices],
            "reason": self.reason,
        }

    # --- running

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started when the devices are open or there are none, or READY_WITHIN_S later. Cancelled, it
        closes them after those who keep any released them, or RELEASED_WITHIN_S later."""
        if self._is_unused:
            task_status.started()
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            looked = trio.Event()
            nursery.start_soon(self._look_for_them, nursery, looked)
            with trio.move_on_after(READY_WITHIN_S):
                await looked.wait()
            task_status.started()

    async def _look_for_them(self, nursery: trio.Nursery, looked: trio.Event) -> None:
        while True:
            if self._missing or not self.ports:
                await self._look(nursery)
            looked.set()
            await trio.sleep(LOOK_EVERY_S)

    async def _look(self, nursery: trio.Nursery) -> None:
        try:
            found = await trio.to_thread.run_sync(self._find, self._wanted, limiter=self._threads)
        except Exception as error:  # of a version of pyverbs that nobody tried: TCP goes on without
            found = Found((), f"the RDMA devices can't be looked for: {type(error).__name__}: {error}")
        is_named = bool(self._wanted.strip())
        failed: list[str] = []
        for rank, each in enumerate(found.devices if is_named else choose(found.devices, nodes_here())):
            if each.device in self._in_use:
                continue  # also one that is gone, until it is closed
            if len(self._in_use) >= MOST_DEVICES and not is_named:
                break
            try:
                port = await trio.to_thread.run_sync(self._open_port, each, limiter=self._threads)
            except Exception as error:  # as above
                self._missing.add(each.device)
                failed.append(f"{each.device}: {error}")
                continue
            self._missing.discard(each.device)
            entry = self._in_use[each.device] = _InUse(OpenPort(port, Reader(port)), rank, 0, trio.Event())
            nursery.start_soon(self._serve, entry)
        if not self.ports:
            self._reason = found.reason or f"no RDMA device can be opened: {'; '.join(failed) or 'they are closing'}"
        self._tell()

    async def _serve(self, entry: _InUse) -> None:
        """One device, until it is gone and nobody has anything of it."""
        port = entry.open
        try:
            try:
                await port.reader.run()
            except Exception:  # of a pyverbs that nobody tried: TCP goes on
                log.exception("%s failed in a way that nobody thought of", port.name)
            self.lost += 1
            self._missing.add(port.name)
            self._reason = port.gone
            self._tell()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(RELEASED_WITHIN_S) as waiting:
                while entry.kept:
                    entry.released = trio.Event()
                    await entry.released.wait()
            if waiting.cancelled_caught:
                log.warning("%s is closed though memory is registered with it", port.name)
            del self._in_use[port.name]
            try:
                port.port.close()
            except Exception:  # it is gone, say, and its driver fails for that
                log.exception("%s did not close", port.name)

    def _tell(self) -> None:
        """Once for each change."""
        names = ", ".join(f"{each.name} ({each.port.capabilities.kind})" for each in self.ports)
        said = f"files come by RDMA where other nodes have it too, through {names}" if names else self.reason
        if said == self._logged:
            return
        self._logged = said
        if names or not self.is_wanted:
            log.info("%s", said if names else f"files come by TCP: {said}")
        else:
            log.warning("peer.transport is verbs, and files come by TCP: %s", said)


def choose(
    devices: Sequence[Capabilities], here: Iterable[int], *, most: int = MOST_DEVICES
) -> tuple[Capabilities, ...]:
    """At most `most` of them, the near ones first: of the memory nodes in `here`, or of none that is known. They are
    taken from these nodes in turn, so that no node's links to its devices are the narrow place."""
    near = set(here)
    by_node: dict[tuple[bool, int], list[Capabilities]] = {}
    for each in devices:
        is_far = bool(near) and each.numa_node >= 0 and each.numa_node not in near
        by_node.setdefault((is_far, each.numa_node), []).append(each)
    in_turn = sorted(
        (is_far, turn, node, each)
        for (is_far, node), of_node in by_node.items()
        for turn, each in enumerate(of_node)
    )  # fmt: skip
    return tuple(each for *_, each in in_turn[:most])


def nodes_here() -> frozenset[int]:
    """The memory nodes of the processors that this process may run on; none where the kernel does not say."""
    allowed = os.sched_getaffinity(0)
    found = set()
    for each in _NODES.glob("node[0-9]*"):
        try:
            listed = (each / "cpulist").read_text()
        except OSError:
            continue
        if allowed & set(_numbers(listed)):
            found.add(int(each.name.removeprefix("node")))
    return frozenset(found)


def _numbers(listed: str) -> list[int]:
    """Of a list as the kernel writes it: 0-3,8,10-11."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed):
        found += range(int(first), int(last or first) + 1)
    return found
