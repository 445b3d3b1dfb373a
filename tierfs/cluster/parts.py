"""The parts of steps as read from the catalogue: kept, and read on from where they were read last.

A page that did not change is not read again (`newer_than`), so a part that is given up has to be put empty rather than
deleted, see `step_files.py`. Kept are at most so many files; what was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, Part
from tierfs.catalog.store import KeyStore, KeyValue
from tierfs.cluster.step_files import StepFiles, is_shard, merge
from tierfs.cluster.watched import Reader
from tierfs.errors import PathRefused
from tierfs.steps.names import safe_component
from tierfs.steps.registry import Key

#: About 0.6 KiB each.
MOST_FILES = 200_000
#: Above so many bytes of pages, or files to merge, it is done in a thread: about 1 ms.
INLINE_BYTES = 4 << 10
INLINE_FILES = 500
#: Steps are read by so many threads at most; each waits for the others' interpreter lock anyway.
THREADS = 2

#: Whose page: the node, whether of additions, the page's number.
_Page = tuple[str, bool, int]
_Pages = dict[_Page, dict[str, FileRecord]]


@dataclass
class _Kept:
    files: StepFiles
    pages: _Pages
    read_at: int
    #: The revision of the step's state at which it was known to be complete so; 0 while it is written.
    settled_at: int
    marker: str | None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = sum(map(len, self.pages.values())) + 1


class Parts:
    """Reads and keeps. One reading of a generation at a time: the caller sees to it."""

    def __init__(self, store: KeyStore, reader: Reader, *, most_files: int = MOST_FILES) -> None:
        self._store = store
        self._reader = reader
        self._most_files = most_files
        self._kept: OrderedDict[tuple[Key, int], _Kept] = OrderedDict()
        self._generations: dict[Key, set[int]] = {}
        self._count = 0
        self._limiter = trio.CapacityLimiter(THREADS)
        #: What a framework's own markers are called: an addition never replaces one.
        self.is_marker: Callable[[str], bool] = lambda inner: False

    def known(self, key: Key, generation: int) -> StepFiles | None:
        kept = self._kept.get((key, generation))
        return kept.files if kept is not None else None

    def settled(self, key: Key, generation: int, settled_at: int) -> StepFiles | None:
        """What was read once the step's state had that revision."""
        kept = self._kept.get((key, generation))
        if kept is None or kept.settled_at != settled_at:
            return None
        self._kept.move_to_end((key, generation))
        return kept.files

    async def read(self, key: Key, generation: int, *, settled_at: int, marker: str | None) -> StepFiles:
        """All parts as of now. CatalogUnavailable."""
        prefix = keys.parts_prefix(*key, generation)
        kept = self._kept.get((key, generation))
        values, revision = await self._store.range(prefix, newer_than=kept.read_at if kept is not None else 0)
        if kept is not None and self._kept.get((key, generation)) is not kept:
            # Forgotten meanwhile: another step may have that name now, and the old one's pages are not in it.
            kept = None
            values, revision = await self._store.range(prefix)
        if kept is not None and not values and kept.marker == marker:
            kept.read_at, kept.settled_at = revision, settled_at
            self._kept.move_to_end((key, generation))
            return kept.files
        pages = kept.pages if kept is not None else {}

        def absorb() -> _Kept:
            return self._absorb(key, generation, pages, values, revision, settled_at, marker)

        size = sum(len(value.value) for value in values)
        if size > INLINE_BYTES or (kept is not None and kept.count > INLINE_FILES):
            now = await trio.to_thread.run_sync(absorb, limiter=self._limiter)
        else:
            now = absorb()
        # Forgotten while the thread ran: the answer is as good as any that is read before the news comes, but not kept.
        if self._kept.get((key, generation)) is kept:
            self._keep(key, generation, now)
        return now.files

    def forget(self, key: Key, *, before: int | None = None) -> None:
        """The step is gone or another one; with `before` only older generations are."""
        for generation in sorted(self._generations.get(key, ())):
            if before is None or generation < before:
                self._drop(key, generation)

    def clear(self) -> None:
        for key in list(self._generations):
            self.forget(key)

    def _keep(self, key: Key, generation: int, kept: _Kept) -> None:
        if (key, generation) in self._kept:
            self._drop(key, generation)
        self._kept[key, generation] = kept
        self._generations.setdefault(key, set()).add(generation)
        self._count += kept.count
        while self._count > self._most_files and len(self._kept) > 1:
            (oldest_key, oldest), _ = next(iter(self._kept.items()))
            self._drop(oldest_key, oldest)

    def _drop(self, key: Key, generation: int) -> None:
        self._count -= self._kept.pop((key, generation)).count
        self._generations[key].discard(generation)
        if not self._generations[key]:
            del self._generations[key]

    def _absorb(
        self,
        key: Key,
        generation: int,
        before: _Pages,
        values: Sequence[KeyValue],
        revision: int,
        settled_at: int,
        marker: str | None,
    ) -> _Kept:
        pages = dict(before)
        for value in values:
            page = self._page(value.key)
            part = self._reader.record(Part, value) if page is not None else None
            if page is None or part is None:
                continue
            if part.node != page[0] or part.generation != generation:
                why = f"it is of the node {part.node!r}, generation {part.generation}"
                self._reader.tell(value.key, value.mod_revision, why)
                continue
            pages[page] = part.files

        def is_protected(inner: str, file: FileRecord) -> bool:
            return inner == marker or self.is_marker(inner) or is_shard(inner, file)

        parts, added = _joined(pages, added=False), _joined(pages, added=True)
        files = merge(key, generation, revision, parts, added, is_protected=is_protected)
        return _Kept(files, pages, revision, settled_at, marker)

    def _page(self, key: str) -> _Page | None:
        node, slash, number = key.rpartition("/")
        node = node.rpartition("/")[2]
        added = node.endswith(keys.ADDED)
        try:
            safe_component(node.removesuffix(keys.ADDED))
        except PathRefused as error:
            self._reader.tell(key, 0, error.message)
            return None
        if not slash or not (number.isascii() and number.isdigit()) or len(number) > 9:
            self._reader.tell(key, 0, "it ends with no page's number")
            return None
        return node.removesuffix(keys.ADDED), added, int(number)


def _joined(pages: Mapping[_Page, Mapping[str, FileRecord]], *, added: bool) -> dict[str, dict[str, FileRecord]]:
    """By node, all pages as one. A part that is empty is none."""
    parts: dict[str, dict[str, FileRecord]] = {}
    for page in sorted(page for page in pages if page[1] == added and pages[page]):
        parts.setdefault(page[0], {}).update(pages[page])
    return parts
