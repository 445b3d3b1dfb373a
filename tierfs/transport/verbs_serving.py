"""What this node gives those who READ its files: ends of links, and where the memory of a range lies.

Each connection has a session. Its links and the one export that it was given last end with it, and an export ends with
the next one. This node itself posts no READ here; its part is to have the memory registered.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

import trio

from tierfs.errors import PeerLacks, PeerUnavailable
from tierfs.transport.peers import Shelf
from tierfs.transport.verbs_exports import LOOK_EVERY_S, Export, Exports, NotExported
from tierfs.transport.verbs_fabric import Fabric, OpenPort
from tierfs.transport.verbs_messages import Exported, Links, Proposal
from tierfs.transport.verbs_port import Kind, Link, LinkAddress

log = logging.getLogger("tierfs.transport")


@dataclass(eq=False)
class _End:
    """This node's end of a link."""

    port: OpenPort
    link: Link


class VerbsServing:
    """`LinkServing` of `tierfs.transport.server`. Links and exports are given while `run` runs."""

    def __init__(self, shelf: Shelf, fabric: Fabric, *, most_registered_bytes: int) -> None:
        """With each port at most so many bytes are registered."""
        self.exports = Exports(fabric, most_registered_bytes=most_registered_bytes)
        self._shelf = shelf
        self._fabric = fabric
        self._sessions: set[VerbsSession] = set()
        self._is_running = False
        self._changed = trio.Event()
        #: Devices that gave no link when they were last asked: told once.
        self.without_links: WeakSet[OpenPort] = WeakSet()

    @property
    def links(self) -> int:
        """Open now."""
        return sum(session.links for session in self._sessions)

    def session(self) -> VerbsSession:
        return VerbsSession(self, self._shelf, self._fabric)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; nothing can be read by RDMA any more then."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.exports.run)
            self._is_running = True
            try:
                task_status.started()
                await self._close_links_of_lost_ports()
            finally:
                self._is_running = False
                for session in list(self._sessions):
                    session.close()

    async def _close_links_of_lost_ports(self) -> None:
        """Their ports are closed only after them."""
        while True:
            self._changed = trio.Event()
            for session in self._sessions:
                session.close_lost()
            with trio.move_on_after(LOOK_EVERY_S if self._sessions else math.inf):
                await self._changed.wait()

    # --- for its sessions

    @property
    def refusal(self) -> str:
        """Why no links can be made now, in a sentence; "" where they can."""
        if not self._is_running:
            return "nothing can be read from this node by RDMA now"
        return "" if self._fabric.ports else self._fabric.reason or "this node has no RDMA device now"

    def opened(self, session: VerbsSession) -> None:
        self._sessions.add(session)
        self._changed.set()

    def serves(self, session: VerbsSession) -> bool:
        """It was `opened`, and nobody closed it since."""
        return session in self._sessions

    def closed(self, session: VerbsSession) -> None:
        self._sessions.discard(session)


class VerbsSession:
    """`LinkSession` of `tierfs.transport.server`. One call at a time."""

    def __init__(self, serving: VerbsServing, shelf: Shelf, fabric: Fabric) -> None:
        self._serving = serving
        self._exports = serving.exports
        self._shelf = shelf
        self._fabric = fabric
        #: In the order of the proposals.
        self._ends: list[_End | None] = []
        self._export: Export | None = None

    @property
    def links(self) -> int:
        return sum(each is not None for each in self._ends)

    async def link(self, proposals: Sequence[Proposal]) -> Links:
        self.close()
        reason = self._serving.refusal
        if reason:
            return Links((None,) * len(proposals), reason)
        self._serving.opened(self)
        ports = [each for each in self._fabric.ports if not each.gone]
        asked: Counter[Kind] = Counter()
        reasons = []
        try:
            for proposal in proposals:
                fitting = [each for each in ports if each.port.capabilities.kind == proposal.kind]
                end, reason = None, f"this node has no RDMA device of the kind {proposal.kind}"
                if fitting:
                    end, reason = self._connect(fitting[asked[proposal.kind] % len(fitting)], proposal.address)
                asked[proposal.kind] += 1
                self._ends.append(end)
                reasons.append(reason)
                await trio.lowlevel.checkpoint()
                if not self._serving.serves(self):
                    raise PeerUnavailable("this node's RDMA devices are not in use any more")
        except BaseException:
            self.close()
            raise
        if self.links:
            return Links(tuple(None if each is None else each.link.address for each in self._ends))
        self.close()
        return Links((None,) * len(proposals), reasons[0])

    async def export(self, version: str, offset: int, length: int, *, growing: bool) -> Exported:
        await self._end_export()
        fd = (self._shelf.open_growing if growing else self._shelf.open_version)(version)
        try:
            size = os.fstat(fd).st_size
            given = min(length, max(0, size - offset))
            if given < length and not growing:
                raise PeerLacks(f"{version} has {size} bytes here: too few for what is asked for")
            nowhere = (None,) * len(self._ends)
            if not given:
                return Exported(size, offset, 0, nowhere)
            ports = list(dict.fromkeys(port for port in self._ports() if port is not None))
            try:
                export = await self._exports.give(fd, version, offset, given, ports, growing=growing)
            except NotExported as error:
                return Exported(size, offset, 0, nowhere, error.reason)
        finally:
            os.close(fd)
        self._export = export
        given = min(given, export.start + export.length - offset)
        remotes = tuple(None if port is None else export.remote(port, offset, given) for port in self._ports())
        if not any(remotes):
            return Exported(size, offset, 0, nowhere, "no link of this connection leads to it")
        return Exported(size, offset, given, remotes)

    def close(self) -> None:
        """May be called again."""
        ends, self._ends = self._ends, []
        for each in ends:
            self._close_end(each)
        export, self._export = self._export, None
        if export is not None:
            self._exports.give_back(export)
        self._serving.closed(self)

    def close_lost(self) -> None:
        """Links of devices that are gone; the others stay."""
        for index, each in enumerate(self._ends):
            if each is not None and each.port.gone:
                self._ends[index] = None
                self._close_end(each)

    # --- inside

    def _ports(self) -> list[OpenPort | None]:
        """Of the links; None for those that carry nothing any more."""
        return [None if each is None or each.port.gone else each.port for each in self._ends]

    async def _end_export(self) -> None:
        """Before there is another: one connection has no more than one window in use."""
        export, self._export = self._export, None
        if export is not None:
            self._exports.give_back(export)
            await self._exports.close_unless_kept(export)

    def _connect(self, port: OpenPort, address: LinkAddress) -> tuple[_End | None, str]:
        """An end of a link to that address, or why there is none. PeerRefused."""
        if port.gone:
            return None, port.gone
        try:
            link = port.port.link()
        except OSError as error:
            is_told = port in self._serving.without_links
            log.log(
                logging.DEBUG if is_told else logging.WARNING, "no link for another node: %s", error.strerror or error
            )
            self._serving.without_links.add(port)
            return None, f"this node's device gives no further link: {error.strerror or error}"
        self._serving.without_links.discard(port)
        self._fabric.keep(port)
        end = _End(port, link)
        try:
            link.connect(address)
        except PeerUnavailable as error:
            self._close_end(end)
            return None, error.message
        except BaseException:
            self._close_end(end)
            raise
        return end, ""

    def _close_end(self, end: _End | None) -> None:
        if end is None:
            return
        try:
            end.link.close()
        except Exception:  # the others must be closed all the same
            log.exception("a link of %s did not close", end.port.name)
        finally:
            self._fabric.release(end.port)
