"""The files of the parts that concern this node: those of a complete generation, of the nodes that it holds copies for.

In a small cluster, or where several nodes wrote files of one name, all parts are read, which others need too (`View`
keeps them). In a large one only the parts that are asked for: all nodes reading all parts of each step would be the
square of the cluster.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from tierfs.catalog import keys
from tierfs.catalog.records import FileRecord, Part, StepState, from_bytes
from tierfs.catalog.store import KeyStore
from tierfs.cluster.view import View
from tierfs.steps.registry import Key

#: Up to so many parts a step is small; small files of such steps are on every node, so it reads all parts anyway.
SMALL_STEP_PARTS = 64
#: Parts read on their own that are kept.
_KEPT = 512

Files = Mapping[str, FileRecord]


class PartFiles:
    def __init__(self, store: KeyStore, view: View) -> None:
        self._store = store
        self._view = view
        self._kept: OrderedDict[tuple[Key, int, int, str], Files] = OrderedDict()

    async def read(
        self, key: Key, state: StepState, create_revision: int, authors: Collection[str]
    ) -> dict[str, Files]:
        """By author, the files of its part that the step holds: not those that another node's newer ones stand for.

        Of a small step all authors' parts, else of those asked for. CatalogUnavailable, RecordDamaged.
        """
        if len(state.parts) <= SMALL_STEP_PARTS or sum(state.parts.values()) > state.files:
            files = await self._view.files(key, state.generation)
            shown = files.files
            return {
                author: {inner: file for inner, file in part.items() if shown.get(inner) == file}
                for author, part in files.parts.items()
            }
        found: dict[str, Files] = {}
        for author in authors:
            if author in state.parts:
                found[author] = await self._one(key, state.generation, create_revision, author)
        return found

    async def _one(self, key: Key, generation: int, create_revision: int, author: str) -> Files:
        where = key, generation, create_revision, author
        known = self._kept.get(where)
        if known is None:
            # Frozen by the commit, so it may be kept; another step of that name has another create_revision.
            values, _ = await self._store.range(keys.part_prefix(*key, generation, author))
            files: dict[str, FileRecord] = {}
            for value in values:
                files.update(from_bytes(Part, value.value).files)
            known = self._kept[where] = files
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(where)
        return known
