"""This node as a member: a key on a lease, which goes when the node gives no sign of life for `lease_s`.

Nothing but liveness hangs on the lease. A lease that was lost is replaced by another; what this node published stays.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import NodeRecord, from_bytes, to_bytes
from tierfs.catalog.store import Compare, KeyStore, KeyValue, Put
from tierfs.cluster.view import Change, View
from tierfs.errors import CatalogError, LeaseLost, RecordDamaged, TierfsError

log = logging.getLogger("tierfs.cluster")

#: The record is put again at most so often, unless the node's state changed.
PUT_EVERY_S = 1.0
#: Free room that changed by less than this part of all of it is no news; and nor is less than the second figure.
NEWS_PART = 50
NEWS_BYTES = 64 << 20
#: Between attempts to join, at most.
MOST_PAUSE_S = 2.0
#: The state of a node that goes deliberately: what vanishes in another state was lost.
LEAVING = "leaving"
#: Nodes that vanished are remembered, so many at most.
MOST_LOST = 4096


class Membership:
    """`member`: the lease was renewed within its time. `lost` are nodes that went without leaving, and when (Unix
    seconds); who comes back is not among them.

    A node of the same name and tier that is still there is an earlier daemon of this node: its key is taken over. One
    of another tier may be this node before its RAM was lost, so it is waited for as long as its lease can last.
    """

    def __init__(self, store: KeyStore, view: View, describe: Callable[[], NodeRecord], *, lease_s: float) -> None:
        self.member = False
        self.lost: dict[str, float] = {}
        self._store = store
        self._view = view
        self._describe = describe
        self._ttl_s = max(1, math.ceil(lease_s))
        self._lease = 0
        self._renewed_at = -math.inf
        self._told: NodeRecord | None = None
        self._news = trio.Event()
        self._leaving = False
        self._is_told = False  # that the lease could not be renewed
        view.listen(self._follow)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled or left. Started at once; the first attempt to join is made at once too.

        TierfsError where another live node has this one's name.
        """
        task_status.started()
        failures = 0
        while not self._leaving:
            try:
                await self._join()
                failures = 0
                await self._stay()
            except LeaseLost as error:
                log.warning("this node was taken for lost; it joins again: %s", error.message)
            except CatalogError as error:
                self._view.doubt()
                if not failures:
                    log.warning("can't join the cluster, trying again: %s", error.message)
                failures += 1
            finally:
                self.member = False
            if failures and not self._leaving:
                longest_s = min(MOST_PAUSE_S, 0.05 * 2.0 ** min(failures, 10))
                await trio.sleep(random.uniform(longest_s / 2, longest_s))

    async def leave(self) -> None:
        """Be no member any more, as others see at once. Where the catalogue is away the lease runs out by itself."""
        self._leaving = True
        self._news.set()
        lease, self._lease, self.member = self._lease, 0, False
        if not lease:
            return
        try:
            mine = replace(self._describe(), state=LEAVING)
            await self._store.put(keys.node_key(mine.node), to_bytes(mine), lease=lease)
            await self._store.revoke(lease)
        except LeaseLost:
            pass  # as good as left
        except CatalogError as error:
            log.warning("could not tell the cluster that this node leaves: %s", error.message)

    def may_count(self) -> bool:
        """Others may still take this node for a member, by the lease that was renewed last."""
        return trio.current_time() - self._renewed_at < self._ttl_s

    def changed(self) -> None:
        """What `describe` says may be another."""
        self._news.set()

    # --- joining

    async def _join(self) -> None:
        given_up_at = trio.current_time() + 2 * self._ttl_s + 1
        lease = await self._store.grant(self._ttl_s)
        try:
            waited_for: NodeRecord | None = None
            while not self._leaving:
                mine = self._describe()
                key = keys.node_key(mine.node)
                found = await self._store.get(key)
                other = self._other(found, mine)
                if other is None:
                    stands = Compare(key, "mod", "equal", found.mod_revision if found is not None else 0)
                    if (await self._store.txn([stands], [Put(key, to_bytes(mine), lease)])).succeeded:
                        self._lease, self._told, self.member = lease, mine, True
                        self._renewed_at = trio.current_time()
                        return
                    continue
                if waited_for is None:
                    log.info("waiting for an earlier node %s to be given up, at %s", other.node, other.addresses)
                    waited_for = other
                if trio.current_time() >= given_up_at:
                    raise TierfsError(
                        f"another node called {mine.node} is in the cluster, at {', '.join(other.addresses)}; "
                        "give this one another name (the setting `node`), or stop that one"
                    )
                await self._store.keep_alive(lease)
                await self._gone(key, min(self._ttl_s / 3, 1.0))
        finally:
            if self._lease != lease:
                with trio.move_on_after(1.0, shield=True):
                    await self._revoke(lease)

    @staticmethod
    def _other(found: KeyValue | None, mine: NodeRecord) -> NodeRecord | None:
        """The node that has the name and is not this one."""
        if found is None:
            return None
        try:
            other = from_bytes(NodeRecord, found.value)
        except RecordDamaged:
            return None
        return other if other.tier != mine.tier else None

    async def _gone(self, key: str, within_s: float) -> None:
        node = key.removeprefix(keys.NODES)
        if self._view.connected and node in self._view.nodes:
            await self._view.until(lambda: node not in self._view.nodes, within_s=within_s)
        else:
            await trio.sleep(within_s)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._store.revoke(lease)
        except CatalogError as error:
            log.info("a lease that is not needed runs out by itself: %s", error.message)

    # --- staying

    async def _stay(self) -> None:
        """Renew the lease each third of its time, and put the record again when there is news. Ends when left.

        LeaseLost also where calls failed until the lease must have run out, and where somebody else has the key.
        """
        every_s = self._ttl_s / 3
        renew_at = trio.current_time() + every_s
        put_at = trio.current_time() + PUT_EVERY_S
        not_before = -math.inf
        while not self._leaving:
            self._news = trio.Event()
            news = self._has_news(self._describe()) if self.member else ""
            due_at = max(put_at if news == "other" else -math.inf, not_before) if news else math.inf
            now = trio.current_time()
            if now < min(renew_at, due_at):
                with trio.move_on_at(min(renew_at, due_at)):
                    await self._news.wait()
                continue
            if now >= renew_at:
                renew_at = now + (every_s if await self._renew() else min(every_s / 3, 1.0))
            if now >= due_at and self.member:
                put_at = now + PUT_EVERY_S
                not_before = -math.inf if await self._put() else put_at

    async def _renew(self) -> bool:
        began_at = trio.current_time()
        try:
            await self._store.keep_alive(self._lease)
        except LeaseLost:
            raise
        except CatalogError as error:
            self._view.doubt()
            log.log(logging.DEBUG if self._is_told else logging.INFO, "could not renew the lease: %s", error.message)
            self._is_told = True
            # Others may see this node as lost from now on; it only knows when the catalogue answers again.
            self.member = trio.current_time() - self._renewed_at < self._ttl_s
            return False
        self._renewed_at, self.member, self._is_told = began_at, True, False
        return True

    async def _put(self) -> bool:
        mine = self._describe()
        try:
            await self._store.put(keys.node_key(mine.node), to_bytes(mine), lease=self._lease)
        except LeaseLost:
            raise
        except CatalogError as error:
            self._view.doubt()
            log.info("could not tell the cluster about this node: %s", error.message)
            return False
        self._told = mine
        return True

    def _has_news(self, mine: NodeRecord) -> str:
        """state, other, or "" where it is not worth telling."""
        told = self._told
        if told is None or mine.state != told.state:
            return "state"
        moved = abs(mine.free_bytes - told.free_bytes)
        if moved >= max(NEWS_BYTES, mine.size_bytes // NEWS_PART):
            return "other"
        return "other" if _but_room(mine) != _but_room(told) else ""

    # --- the others

    def _follow(self, change: Change) -> None:
        told = self._told
        if told is not None and not self._leaving:
            vanished = change.kind == "node" and change.key == told.node and change.new is None
            if vanished or (change.kind == "reset" and told.node not in self._view.nodes):
                # Whoever removed it, or the lease ran out: putting it again tells which.
                self._told = None
                self._news.set()
        if change.kind != "node" or (told is not None and change.key == told.node):
            return
        if change.new is not None:
            self.lost.pop(change.key, None)
        elif change.old is not None and change.old.record.state != LEAVING:
            self.lost[change.key] = time.time()
            while len(self.lost) > MOST_LOST:
                del self.lost[min(self.lost, key=lambda node: self.lost[node])]


def _but_room(record: NodeRecord) -> tuple[object, ...]:
    return tuple(value for name, value in vars(record).items() if name != "free_bytes")
