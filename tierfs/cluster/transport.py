"""How bytes go between this node and others, put together: TCP, and RDMA where there are devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio

from tierfs.cluster.copies import Copies
from tierfs.hydrate.hydration import Hydration
from tierfs.settings import Settings
from tierfs.steps.registry import StepRegistry
from tierfs.transport.client import TcpPeers
from tierfs.transport.server import TcpServer
from tierfs.transport.verbs import VerbsPeers
from tierfs.transport.verbs_fabric import Devices
from tierfs.transport.verbs_serving import VerbsServing


class Transport:
    """`server` lets others read, `peers` reads from them, `exports` is what others may READ by RDMA just now."""

    def __init__(
        self, copies: Copies, settings: Settings, node: str, address_of: Callable[[str], Sequence[str]]
    ) -> None:
        """SettingsError where the settings contradict each other."""
        self.devices = Devices(settings)
        self.serving = VerbsServing(
            copies, self.devices, most_registered_bytes=settings.peer.verbs_registered_bytes
        )  # fmt: skip
        self.exports = self.serving.exports
        self.server = TcpServer(copies, settings, node, self.serving)
        self.peers = VerbsPeers(settings, TcpPeers(settings, node, address_of), self.devices)

    def follow(self, registry: StepRegistry, copies: Copies, hydration: Hydration) -> None:
        """What leaves this node, or is freed, is exported no more: it would keep its room."""
        copies.on_left = hydration.on_version_left = self.exports.leave
        registry.before_freeing = self.exports.free_tree
        self.exports.on_freed = registry.tier.released_room
        self.exports.device = registry.tier.path.stat().st_dev

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Started when the server listens. SettingsError where it can't."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.devices.run)
            await nursery.start(self.serving.run)
            await nursery.start(self.server.run)
            await nursery.start(self.peers.run)
            task_status.started()

    def describe(self) -> dict[str, Any]:
        """For `status --json`: see docs/cli.md."""
        return {
            **self.devices.describe(),
            "peers": self.peers.describe(),
            "registered_bytes": {port.name: count for port, count in self.exports.registered.items() if count},
            "links": self.serving.links,
            "given": self.exports.given,
            "not_given": dict(self.exports.refused),
        }

    def by(self, node: str) -> str:
        """How files come from that node: verbs, tcp, or "" where none of its large ones was asked for yet."""
        told = self.peers.describe().get(node)
        return str(told["transport"]) if told is not None else ""

    def problem(self) -> str:
        """That RDMA was asked for and there is none; "" where it is not so."""
        if not self.devices.is_wanted or not self.devices.reason:
            return ""
        return f"peer.transport is verbs, and files come by TCP: {self.devices.reason}"
