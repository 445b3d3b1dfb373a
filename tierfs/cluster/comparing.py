"""Which bytes of a file are the right ones, and who has them: what its holders have now, held against what was sealed.

Where nobody wrote down what a file was sealed with, the holders' sums of earlier decide: who copies a file compares it
with its writer's sum at that time, and remembers that. Of two that differ neither is believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from tierfs.catalog.records import FileRecord
from tierfs.checksum import FileChecksum
from tierfs.errors import PeerError, PeerUnavailable
from tierfs.steps.record import StepRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tierfs.cluster.copies import Copies
    from tierfs.transport.peers import Peers

#: A holder that reads slower than this is as good as lost, and so is one that takes this long to begin.
LEAST_READ_BYTES_S = 100e6
BEGIN_WITHIN_S = 15.0


@dataclass
class Sums:
    """By node: the sum of what it has, or why it told none. `silent` are those of the latter that may have it."""

    found: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)


class Comparing:
    def __init__(self, copies: Copies, peers: Peers) -> None:
        self._copies = copies
        self._peers = peers

    async def now(self, file: FileRecord, nodes: Collection[str]) -> Sums:
        """What each of the nodes has now. They read the file, all at once."""
        return await self._ask(file, nodes, self._copies.verify, self._peers.verify)

    def written_down(self, record: StepRecord, inner: str, file: FileRecord) -> str | None:
        """What is known here of what was sealed, without asking anybody."""
        if file.checksum is not None:
            return file.checksum
        entry = record.manifest.files.get(inner)
        if entry is not None and entry.checksum is not None and self._copies.version_of(entry.ino) == file.version:
            return entry.checksum
        summed = self._copies.checksum_of(file.version)
        return summed.text if summed is not None else None

    async def sealed(
        self, record: StepRecord, inner: str, file: FileRecord, nodes: Collection[str], seen: Sums
    ) -> str | None:
        """What the file was sealed with; None where nobody can tell. `seen` are sums of now."""
        if (known := self.written_down(record, inner, file)) is not None:
            return known
        if len(set(seen.found.values())) == 1 and len(seen.found) > 1:
            return next(iter(seen.found.values()))
        sums = await self._ask(file, nodes, self._copies.checksum, self._peers.checksum)
        votes = Counter(sums.found.values()).most_common(2)
        if not votes or (len(votes) > 1 and votes[0][1] == votes[1][1]):
            return None
        return votes[0][0]

    async def _ask(
        self,
        file: FileRecord,
        nodes: Collection[str],
        here: Callable[[str], Awaitable[FileChecksum]],
        there: Callable[[str, str], Awaitable[FileChecksum]],
    ) -> Sums:
        sums = Sums()

        async def one(node: str) -> None:
            try:
                with trio.fail_after(BEGIN_WITHIN_S + file.size_bytes / LEAST_READ_BYTES_S):
                    summed = await (here(file.version) if node == self._copies.node else there(node, file.version))
            except trio.TooSlowError:
                sums.failed[node] = "does not give it in time"
                sums.silent.add(node)
            except PeerError as error:
                sums.failed[node] = f"does not give it: {error.message}"
                if isinstance(error, PeerUnavailable):
                    sums.silent.add(node)
            except OSError as error:
                sums.failed[node] = f"can't read it: {error.strerror}"
            else:
                is_so_long = summed.size_bytes == file.size_bytes
                sums.found[node] = summed.text if is_so_long else f"of {summed.size_bytes} bytes"

        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(one, node)
        return sums
