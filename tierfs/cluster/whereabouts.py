"""Who holds the bytes of a version, as the catalogue says it: asked for when a stub is read, and kept for seconds."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from tierfs.catalog.records import FileRecord, Holding
from tierfs.checksum import from_text
from tierfs.cluster.step_files import StepFiles
from tierfs.errors import CatalogError
from tierfs.hydrate.stubs import StubMark
from tierfs.steps.registry import Key

log = logging.getLogger("tierfs.cluster")

#: What was read of a step's parts and holdings is believed for so long.
KEPT_S = 3.0
#: Asked again at most so often for a version that was not among it.
AGAIN_S = 0.3
#: The catalogue may take so long; then what is known has to do.
WITHIN_S = 2.0
#: Steps that are read side by side.
STEPS_KEPT = 64


class CatalogView(Protocol):
    """What of `tierfs.cluster.view.View` is used here. `nodes` has the live ones."""

    @property
    def nodes(self) -> Mapping[str, Any]: ...

    @property
    def states(self) -> Mapping[Key, Any]: ...

    async def files(self, key: Key, generation: int, *, fresh: bool = False) -> StepFiles: ...

    def known_files(self, key: Key, generation: int) -> StepFiles | None: ...

    async def holdings(self, key: Key) -> dict[str, Holding]: ...

    def holders(self, files: StepFiles, holdings: Mapping[str, Holding], file: FileRecord) -> list[str]: ...


@dataclass(frozen=True)
class Whereabout:
    """Live nodes that hold the version, without this one; and its CRC64NVME where the catalogue knows it."""

    holders: tuple[str, ...]
    checksum: int | None = None


@dataclass
class _Known:
    read_at: float
    files: list[StepFiles] = field(default_factory=list)
    holdings: dict[str, Holding] = field(default_factory=dict)
    by_version: dict[str, tuple[StepFiles, FileRecord]] = field(default_factory=dict)
    found: dict[str, Whereabout] = field(default_factory=dict)


class Whereabouts:
    """`node` is this one."""

    def __init__(self, view: CatalogView, node: str) -> None:
        self._view = view
        self._node = node
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        self._locks: dict[Key, trio.Lock] = {}

    async def of(self, mark: StubMark, *, anew: bool = False) -> Whereabout:
        """`anew`: what is known did not do. With the catalogue away it is what was known, then a guess: the author."""
        key = (mark.namespace, mark.step)
        known = self._known.get(key)
        if known is None or self._is_old(known, mark.version, anew=anew):
            known = await self._read(key, mark.version, anew=anew)
        return self._found(known, mark.version)

    def _is_old(self, known: _Known, version: str, *, anew: bool) -> bool:
        age_s = trio.current_time() - known.read_at
        return age_s >= (AGAIN_S if anew or version not in known.by_version else KEPT_S)

    async def _read(self, key: Key, version: str, *, anew: bool) -> _Known:
        lock = self._locks.setdefault(key, trio.Lock())
        async with lock:
            known = self._known.get(key)
            if known is None or self._is_old(known, version, anew=anew):
                known = self._known[key] = await self._ask(key, version, known)
                self._known.move_to_end(key)
                while len(self._known) > STEPS_KEPT:
                    self._known.popitem(last=False)
        if not lock.statistics().tasks_waiting:
            self._locks.pop(key, None)
        return known

    async def _ask(self, key: Key, version: str, before: _Known | None) -> _Known:
        """Parts and holdings of what is complete, and the parts of what is being written where they are at hand."""
        state = self._view.states.get(key)
        generation = state.record.generation if state is not None else 0
        known = _Known(trio.current_time())
        is_new = before is not None and version not in before.by_version  # added to what is complete
        try:
            with trio.fail_after(WITHIN_S):
                if generation:
                    known.files.append(await self._view.files(key, generation, fresh=is_new))
                known.holdings = dict(await self._view.holdings(key))
        except (CatalogError, trio.TooSlowError) as error:
            log.debug("%s/%s: who holds it is not known anew: %s", *key, error)
            known.holdings = before.holdings if before is not None else {}
            kept = self._view.known_files(key, generation)
            known.files = [kept] if kept is not None else list(before.files) if before is not None else []
        written = self._view.known_files(key, generation + 1)
        if written is not None:
            known.files.append(written)
        if before is not None and [id(files) for files in before.files] == [id(files) for files in known.files]:
            known.by_version = before.by_version  # 100,000 files take some 10 ms
        else:
            for files in known.files:
                for file in files.files.values():
                    known.by_version.setdefault(file.version, (files, file))
        return known

    def _found(self, known: _Known, version: str) -> Whereabout:
        found = known.found.get(version)
        if found is None:
            found = known.found[version] = self._look_up(known, version)
        nodes = self._view.nodes
        return Whereabout(tuple(node for node in found.holders if node in nodes and node != self._node), found.checksum)

    def _look_up(self, known: _Known, version: str) -> Whereabout:
        found = known.by_version.get(version)
        if found is None:
            # Of a step that is being written, or a name outside of steps; or the catalogue is away.
            author = version.partition("/")[0]
            holding = [node for node, held in known.holdings.items() if version in held.versions]
            return Whereabout(tuple(dict.fromkeys([author, *holding])))
        files, file = found
        checksum = from_text(file.checksum) if file.checksum is not None else None
        return Whereabout(tuple(self._view.holders(files, known.holdings, file)), checksum)
