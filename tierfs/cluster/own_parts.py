"""This node's own parts in the catalogue: put in pages, only where they differ, and never out of order.

Each put compares that no page of the part is newer than what this node knows of it. So a put whose answer was lost and
that is carried out late changes nothing that was put after it; and a part that is given up is put empty rather than
deleted, since a deleted one would let such a put through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierfs.catalog.keys import part_key, part_prefix
from tierfs.catalog.records import FILES_A_PAGE, FileRecord, Part, from_bytes, to_bytes
from tierfs.catalog.store import Compare, KeyStore, Put
from tierfs.cluster.local_files import writing_generation
from tierfs.errors import RecordDamaged
from tierfs.steps.names import StepPath
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.view import View

#: A transaction carries about so many bytes of pages: etcd refuses requests above 1.5 MiB.
_BYTES_AT_ONCE = 900 << 10
#: Parts that are remembered; what is not is read again.
_KEPT = 4096

Files = dict[str, FileRecord]
_Place = tuple[Key, int, bool]


@dataclass
class KnownPart:
    """What the catalogue has of it: each page's files, and the newest change of them."""

    pages: list[Files] = field(default_factory=list)
    revision: int = 0

    def files(self) -> Files:
        return {inner: file for page in self.pages for inner, file in page.items()}


class OwnParts:
    """One user at a time a step: see `Publisher.alone_at`."""

    def __init__(self, store: KeyStore, node: str) -> None:
        self.node = node
        self._store = store
        self._known: dict[_Place, KnownPart] = {}
        self._forgotten: set[_Place] = set()

    async def known(self, key: Key, generation: int, *, added: bool = False) -> KnownPart:
        """What the catalogue has of the part, read where this daemon did not put it. CatalogError."""
        place = key, generation, added
        part = self._known.get(place)
        if part is None:
            prefix = part_prefix(*key, generation, self.node, added=added)
            found, _ = await self._store.range(prefix)
            part = KnownPart(revision=max((value.mod_revision for value in found), default=0))
            for value in found:
                page = value.key.removeprefix(prefix)
                if not (page.isascii() and page.isdigit() and len(page) == 4):
                    continue
                part.pages += [{} for _ in range(len(part.pages), int(page) + 1)]
                try:
                    part.pages[int(page)] = from_bytes(Part, value.value).files
                except RecordDamaged:
                    # It is put again, since an empty page's files differ from any that this node has.
                    part.pages[int(page)] = {}
            self._remember(place, part)
        return part

    def has_put(self, key: Key, generation: int) -> bool:
        """This daemon put files of it, or may have."""
        place = key, generation, False
        part = self._known.get(place)
        return place in self._forgotten or (part is not None and any(part.pages))

    def revision(self, key: Key, generation: int) -> int:
        """The newest change of it that this daemon knows; 0 for none."""
        part = self._known.get((key, generation, False))
        return part.revision if part is not None else 0

    def forget(self, key: Key, generation: int | None = None) -> None:
        """What is known may be wrong: it is read again."""
        for place in [place for place in self._known if place[0] == key and generation in (None, place[1])]:
            del self._known[place]
            self._forgotten.add(place)

    def step_gone(self, key: Key) -> None:
        """Another step may get that name."""
        self.forget(key)
        self._forgotten = {place for place in self._forgotten if place[0] != key}

    def compare(self, key: Key, generation: int, part: KnownPart, *, added: bool = False) -> Compare:
        """Holds while the catalogue has nothing newer of the part than `part`."""
        return Compare(
            part_prefix(*key, generation, self.node, added=added), "mod", "less", part.revision + 1, is_prefix=True
        )

    async def put(
        self, key: Key, generation: int, files: Mapping[str, FileRecord], compares: Sequence[Compare], *, added: bool
    ) -> bool:
        """Make the part these files. False where a comparison did not hold. CatalogError."""
        part = await self.known(key, generation, added=added)
        pages = _pages(files)
        pages += [{} for _ in range(len(pages), len(part.pages))]
        changed = [at for at, page in enumerate(pages) if at >= len(part.pages) or page != part.pages[at]]
        while changed:
            puts, taken = self._some(key, generation, pages, changed, added=added)
            result = await self._store.txn([*compares, self.compare(key, generation, part, added=added)], puts)
            if not result.succeeded:
                self.forget(key, generation)
                return False
            self.was_put(key, generation, part, {at: pages[at] for at in taken}, result.revision, added=added)
            changed = changed[len(taken) :]
        return True

    def was_put(
        self, key: Key, generation: int, part: KnownPart, pages: Mapping[int, Files], revision: int, *, added: bool
    ) -> None:
        part.pages += [{} for _ in range(len(part.pages), max(pages, default=-1) + 1)]
        for at, page in pages.items():
            part.pages[at] = page
        part.revision = revision
        self._remember((key, generation, added), part)

    def page(self, key: Key, generation: int, at: int, files: Files, *, added: bool = False) -> Put:
        value = to_bytes(Part(self.node, generation, files))
        return Put(part_key(*key, generation, self.node, at, added=added), value)

    def _some(
        self, key: Key, generation: int, pages: list[Files], changed: list[int], *, added: bool
    ) -> tuple[list[Put], list[int]]:
        puts: list[Put] = []
        size = 0
        for at in changed:
            put = self.page(key, generation, at, pages[at], added=added)
            size += len(put.value)
            if puts and (size > _BYTES_AT_ONCE or len(puts) == 100):
                break
            puts.append(put)
        return puts, changed[: len(puts)]

    def _remember(self, place: _Place, part: KnownPart) -> None:
        self._known.pop(place, None)
        self._forgotten.discard(place)
        self._known[place] = part
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]


def _pages(files: Mapping[str, FileRecord]) -> list[Files]:
    names = sorted(files)
    return [
        {inner: files[inner] for inner in names[at : at + FILES_A_PAGE]} for at in range(0, len(names), FILES_A_PAGE)
    ]


def revision_now(registry: StepRegistry, view: View, parts: OwnParts, where: StepPath | None) -> int:
    """What a file gets that is opened for writing now: above all revisions that this node knows, and above any other
    file of its name. A part that was put just before, without that file, makes it exact."""
    record = registry.at(where) if where is not None else None
    if where is None or record is None:
        return view.revision
    generation = writing_generation(record.manifest)
    known = view.known_files(record.key, generation)
    other = known.files.get(where.inner) if known is not None else None
    return max(
        view.revision,
        parts.revision(record.key, generation),
        known.revision if known is not None else 0,
        other.opened_at + 1 if other is not None else 0,
    )
