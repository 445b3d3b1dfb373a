"""Directories and open files that get another name: what is known of their steps goes along.

The tree has been changed already when anything here is called; nothing here can be refused.
"""

from __future__ import annotations

import logging

from tierfs.steps import generations
from tierfs.steps.names import StepPath
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

log = logging.getLogger("tierfs.steps")

#: The note of a step whose directory got its name by a rename: that rename is its writer's commit (orbax, NeMo).
MOVED_IN = "the directory was moved into place"


def drop(registry: StepRegistry, record: StepRecord, inner: str) -> None:
    """A file of the step is gone, or is elsewhere now."""
    entry = record.manifest.files.pop(inner, None)
    record.manifest.added.discard(inner)
    if record.is_complete and entry is not None:
        record.manifest.bytes -= entry.size_bytes
        registry.object_tier.changed(record)


class Moves:
    """`writing` says in which step an inode is open for writing; it is kept right here too."""

    def __init__(self, registry: StepRegistry, writing: dict[int, Key]) -> None:
        self.registry = registry
        self._writing = writing

    def writer_moved(self, record: StepRecord, nodeid: int, now_in: StepRecord | None, inner: str) -> None:
        """A file that is open for writing has another name."""
        writer = record.writers.pop(nodeid)
        if now_in is None or not inner:
            self._writing.pop(nodeid, None)
            return
        writer.inner = inner
        now_in.writers[nodeid] = writer
        self._writing[nodeid] = now_in.key

    def directory_moved(self, old: str, new: str) -> None:
        self._steps_moved([(old, new)])
        source, target = self.registry.names.locate(old), self.registry.names.locate(new)
        if target is not None and target.inner == "" and self.registry.at(target) is None:
            made = self.registry.at_or_new(target)
            if made is not None:
                made.manifest.note = MOVED_IN
                made.manifest.files = made.scan()
                self.registry.judge_soon(made)
        if source is not None and source.inner:
            self._moved_inside(source, target)
        if target is not None and target.inner and (source is None or source.step_rel != target.step_rel):
            self._rescan(target)

    def _steps_moved(self, pairs: list[tuple[str, str]]) -> None:
        """Steps at or below the first path of each pair are at or below the second one now."""
        moves: list[tuple[StepRecord, StepPath | None]] = []
        namespaces = set()
        for record in list(self.registry.records.values()):
            for old, new in pairs:
                if record.rel != old and not record.rel.startswith(old + "/"):
                    continue
                namespaces.add(record.manifest.namespace)
                rel = new + record.rel[len(old) :]
                where = self.registry.names.locate(rel)
                if where is not None and where.inner:
                    where = None
                if where is None:
                    self._leaves_the_steps(record, rel)
                else:
                    namespaces.add(where.namespace)
                moves.append((record, where))
                break
        self.registry.move(moves)
        for record, where in moves:
            for nodeid in record.writers:
                if where is None:
                    self._writing.pop(nodeid, None)
                else:
                    self._writing[nodeid] = record.key
        if len(pairs) == 1:
            self.registry.latest.moved(*pairs[0])
        for namespace in namespaces:
            self.registry.update_latest(namespace)

    def _leaves_the_steps(self, record: StepRecord, rel: str) -> None:
        """A step gets a name that is none: it is moved whole, so what was written over it is given up."""
        self.registry.records.pop(record.key, None)
        record.directory = self.registry.root / rel
        try:
            generations.give_up(self.registry, record, "the step was moved away")
        except OSError as error:
            log.error("the old generation can't be put back: %s", error, extra=self.registry.extra(record))

    def _moved_inside(self, source: StepPath, target: StepPath | None) -> None:
        """A directory inside a step has another name, or is elsewhere now."""
        record = self.registry.at(source)
        if record is None:
            return
        stays = target is not None and target.step_rel == source.step_rel
        now_in = self.registry.at_or_new(target) if target is not None else None
        below = source.inner + "/"
        for nodeid, writer in list(record.writers.items()):
            if writer.inner.startswith(below):
                inner = f"{target.inner}/{writer.inner[len(below) :]}".lstrip("/") if target is not None else ""
                self.writer_moved(record, nodeid, now_in, inner)
        for inner, entry in list(record.manifest.files.items()):
            if inner.startswith(below):
                was_added = inner in record.manifest.added
                drop(self.registry, record, inner)
                if stays and target is not None:
                    moved = target.inner + inner[len(source.inner) :]
                    record.manifest.files[moved] = entry
                    if record.is_complete:
                        record.manifest.bytes += entry.size_bytes
                    if was_added:
                        record.manifest.added.add(moved)
        record.touch()
        self.registry.judge_soon(record)

    def _rescan(self, where: StepPath) -> None:
        """Files came into a step with a directory, or changed places."""
        record = self.registry.at_or_new(where)
        if record is None:
            return
        before = record.manifest.files
        record.manifest.files = record.scan()
        if record.is_complete and record.manifest.files != before:
            record.manifest.added |= record.manifest.files.keys() - before.keys()
            record.manifest.added &= record.manifest.files.keys()
            record.manifest.bytes = sum(entry.size_bytes for entry in record.manifest.files.values())
            self.registry.object_tier.changed(record)
        record.touch()
        self.registry.judge_soon(record)

    def exchanged(self, old: str, new: str) -> None:
        self._steps_moved([(old, new), (new, old)])
        for rel in (old, new):
            where = self.registry.names.locate(rel)
            if where is not None:
                self._rescan(where)
