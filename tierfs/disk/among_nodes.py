"""The disk of a node among others: what lies there counts as this node's copies, and goes where they go.

Each file on the disk carries its version, so it is held, told to the catalogue and served to other nodes as if it lay
in RAM. The catalogue says which steps there are: after RAM was lost nothing is shown from the disk by itself.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tierfs.disk.disk_step import DiskStep
from tierfs.disk.tier import DiskTier
from tierfs.hydrate.stubs import StubMark
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key

if TYPE_CHECKING:
    from tierfs.cluster.tier import ClusterTier
    from tierfs.cluster.view import Change

log = logging.getLogger("tierfs.disk")


class DiskAmongNodes:
    """Wires the two together; made before either runs."""

    def __init__(self, disk: DiskTier, cluster: ClusterTier) -> None:
        self._disk, self._cluster = disk, cluster
        self._registry = disk.registry
        #: Steps of which copies came here, or whose commit was seen: they are looked at once they are complete here.
        self._seen: set[Key] = set()
        index, keeping, copies = disk.index, disk.keeping, cluster.copies
        copies.on_disk = index.path_of_version
        copies.summed_on_disk = index.summed
        copies.forget_on_disk = self._forget
        index.version_of = self._version_of
        index.on_change = cluster.holdings.changed
        disk.attendance.shows_steps = False
        keeping.cluster_of = lambda record: cluster.view.cluster_id if self._registry.is_shared(record) else ""
        keeping.show_names = lambda record: cluster.show_listing(record.rel)
        keeping.is_gone = self._is_gone
        keeping.is_spare = self._is_spare
        keeping.can_retire = lambda: cluster.view.connected
        keeping.before_round = self._look
        disk.hydration.tier_of = self._tier_of
        arrived, whole = cluster.replicator.on_arrived, disk.hydration.on_whole_version

        def on_arrived(key: Key, inner: str, version: str) -> None:
            arrived(key, inner, version)
            self._seen.add(key)
            keeping.look_again()

        def on_whole(ino: int, path: Path, version: str) -> None:
            whole(ino, path, version)
            self._came_whole(path, version)

        cluster.replicator.on_arrived = on_arrived
        disk.hydration.on_whole_version = on_whole
        cluster.view.listen(self._changed)

    # --- what comes

    def _changed(self, change: Change) -> None:
        if change.kind == "state" and change.step is not None and change.new is not None:
            self._seen.add(change.step)
            self._disk.keeping.look_again()
        elif change.kind == "reset" or (change.kind == "tree" and change.new is None):
            self._disk.keeping.look_again()

    def _look(self) -> None:
        """Of a step that others committed, and of which nobody looked for a file here, only the shelf tells."""
        for key in list(self._seen):
            record, state = self._registry.records.get(key), self._cluster.view.states.get(key)
            if state is None:
                self._seen.discard(key)
            elif record is not None and record.is_complete and record.manifest.generation == state.record.generation:
                self._seen.discard(key)
                if self._disk.index.holds(record):
                    continue
                if record.manifest.populated:  # then it was told of when it was complete
                    self._owe_if_kept(record)
                elif self._cluster.copies.shelved_versions(key):
                    self._disk.owe_if_chosen(record)

    def _came_whole(self, path: Path, version: str) -> None:
        """A program read a file of another node to its end: one more copy, which may leave RAM once it is stored."""
        if self._disk.index.path_of_version(version) is not None or not path.is_relative_to(self._registry.root):
            return
        where = self._registry.names.locate(str(path.relative_to(self._registry.root)))
        record = self._registry.at(where) if where is not None and where.inner else None
        if record is not None and record.is_complete:
            self._owe_if_kept(record)

    def _owe_if_kept(self, record: StepRecord) -> None:
        if self._disk.index.get(record.key) is not None or self._disk.keeping.policy.was_chosen(record):
            self._disk.keeping.owe(record)

    # --- asked

    def _version_of(self, ino: int) -> str | None:
        part = self._disk.hydration.table.get(ino)
        if part is not None:
            return (part.mark.version or None) if part.mark is not None else None
        return self._cluster.copies.version_of(ino)

    def _is_gone(self, stored: DiskStep) -> bool:
        """Removed by whoever: the catalogue that had the step, and that this node sees now, has it no more."""
        view = self._cluster.view
        return view.connected and stored.cluster == view.cluster_id and "/".join(stored.key) not in view.tree

    def _is_spare(self, stored: DiskStep) -> bool:
        """It is of a catalogue that was lost, so nobody will ask for it by its versions."""
        view = self._cluster.view
        return view.connected and (stored.cluster != view.cluster_id or self._is_gone(stored))

    def _tier_of(self, mark: StubMark) -> str:
        if not mark.version:
            return "object"
        copies = self._cluster.copies
        is_on_disk = copies.path_in_ram(mark.version) is None and copies.on_disk(mark.version) is not None
        return "disk" if is_on_disk else "replica"

    def _forget(self, version: str) -> None:
        self._disk.index.forget_version(version)
        self._disk.keeping.look_again()
