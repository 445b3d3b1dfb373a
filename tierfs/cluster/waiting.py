"""Waiting until other nodes hold copies of what this node wrote: what `durability` asks for in fsync and commits."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from tierfs.cluster.copies import Copies
from tierfs.cluster.grouping import Groups
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

    def __init__(self, view: View, peers: Peers, copies: Copies, groups: Groups, node: str) -> None:
        self._view = view
        self._peers = peers
        self._copies = copies
        self._groups = groups
        self._node = node
        #: Whether a step's level still holds, though nodes were lost since it was told.
        self.is_believed: Callable[[Key], bool] = lambda key: True

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
            return state.record.level == "replicated" and self.is_believed(key)

        # That a level is believed again is no change of the catalogue.
        while not await self._view.until(
            is_over, within_s=_LOOK_AGAIN_S if self.is_believed(key) else MOST_ASK_EVERY_S
        ):
            pass

    async def wait_file(self, namespace: str, version: str) -> None:
        """Until the partners hold the sealed file, whole and verified, or it is no longer here.

        They are asked, again and again, while somebody waits (fsync); that costs them a look at a table.
        """
        await self._wait(namespace, version, 0, lambda: self._copies.has(version))

    async def wait_growing(self, namespace: str, ino: int) -> None:
        """At an fsync of an open file: until the partners have as much of it as is written now.

        Only the seal compares their bytes with these: before it, no step can be complete with them. A file that is
        sealed meanwhile is waited for as such.
        """
        version = self._copies.growing_version(ino)
        size = self._copies.tell_growth(ino)
        if version is not None and size:
            await self._wait(namespace, version, size, lambda: self._copies.growing_version(ino) == version)
        final = self._copies.version_of(ino)
        if final is not None:
            await self.wait_file(namespace, final)

    async def _wait(self, namespace: str, version: str, size: int, is_here: Callable[[], bool]) -> None:
        holding: set[str] = set()
        pause = ASK_EVERY_S
        while is_here():
            lacking = self._partners(namespace) - holding
            if not lacking:
                return
            async with trio.open_nursery() as nursery:
                for partner in sorted(lacking):
                    nursery.start_soon(self._ask, partner, version, size, holding)
            if lacking - holding:
                await trio.sleep(pause)
                pause = min(1.5 * pause, MOST_ASK_EVERY_S)

    async def _ask(self, partner: str, version: str, size: int, holding: set[str]) -> None:
        try:
            if (await self._peers.checksum(partner, version)).size_bytes >= size:
                holding.add(partner)
        except PeerError as error:
            log.debug("%s does not hold %s yet: %s", partner, version, error)

    def _partners(self, namespace: str) -> set[str]:
        """The nodes that are to hold copies of what this node writes."""
        return set(self._groups.partners(self._node, self._groups.replicas(namespace)))
