"""Waiting until other nodes hold copies of what this node wrote: what `durability` asks for in fsync and commits."""

from __future__ import annotations

import logging

import trio

from tierfs.cluster.grouping import Groups
from tierfs.cluster.pulling import ShelfPlaces
from tierfs.cluster.view import View
from tierfs.errors import PeerError
from tierfs.steps.registry import Key
from tierfs.transport.peers import Peers

log = logging.getLogger("tierfs.cluster")

#: Who waits for a file's copies asks so often.
ASK_EVERY_S = 0.02
MOST_ASK_EVERY_S = 0.2
_LOOK_AGAIN_S = 3600.0


class CopyWaits:
    """Neither wait is bounded in time: who waits is."""

    def __init__(self, view: View, peers: Peers, shelf: ShelfPlaces, groups: Groups, node: str) -> None:
        self._view = view
        self._peers = peers
        self._shelf = shelf
        self._groups = groups
        self._node = node

    async def wait_replicated(self, key: Key, generation: int) -> None:
        """Until the generation is replicated, another one is complete, the step is gone, or nobody could hold it.

        Where the step is not complete yet, that is waited for too.
        """

        def is_over() -> bool:
            state = self._view.states.get(key)
            if not self._partners(key[0]):
                return True
            if state is None:
                return "/".join(key) not in self._view.tree and self._view.connected
            if state.record.generation != generation:
                return state.record.generation > generation
            return state.record.level == "replicated"

        while not await self._view.until(is_over, within_s=_LOOK_AGAIN_S):
            pass

    async def wait_file(self, namespace: str, version: str) -> None:
        """Until the partners hold the sealed file, whole and verified, or it is no longer here.

        They are asked, again and again, while somebody waits (fsync); that costs them a look at a table.
        """
        holding: set[str] = set()
        pause = ASK_EVERY_S
        while self._shelf.has(version):
            lacking = self._partners(namespace) - holding
            if not lacking:
                return
            async with trio.open_nursery() as nursery:
                for partner in sorted(lacking):
                    nursery.start_soon(self._ask, partner, version, holding)
            if lacking - holding:
                await trio.sleep(pause)
                pause = min(1.5 * pause, MOST_ASK_EVERY_S)

    async def _ask(self, partner: str, version: str, holding: set[str]) -> None:
        try:
            await self._peers.checksum(partner, version)
            holding.add(partner)
        except PeerError as error:
            log.debug("%s does not hold %s yet: %s", partner, version, error)

    def _partners(self, namespace: str) -> set[str]:
        """The nodes that are to hold copies of what this node writes."""
        return set(self._groups.partners(self._node, self._groups.replicas(namespace)))
