"""Bringing the bytes of stubs ahead of whoever will read them: what `tierfs prefetch` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from tierfs.errors import NoRoom, NotFound, StepBusy
from tierfs.hydrate.room import MARGIN_BYTES, MARGIN_SHARE
from tierfs.persist.reporting import Progress, all_of, reporting
from tierfs.persist.selection import Selected, select
from tierfs.steps.registry import Key, StepRegistry
from tierfs.units import format_size

if TYPE_CHECKING:
    from tierfs.hydrate.hydration import Hydration

#: Files that are fetched side by side; each is fetched in parallel ranges already.
FILES_AT_ONCE = 4


@dataclass
class _File:
    """A file to be fetched: what was here when that began, and whether it is done."""

    path: str
    size_bytes: int
    had_bytes: int = 0
    is_whole: bool = False


class Prefetching:
    """From the object tier, from other nodes, or both: whatever `hydration` gets its bytes from."""

    def __init__(self, registry: StepRegistry, hydration: Hydration) -> None:
        self._registry = registry
        self._hydration = hydration

    async def run(self, paths: Sequence[str], *, globs: Sequence[str] = (), progress: Progress) -> dict[str, Any]:
        """Bring the bytes of all stubs below the paths (relative to the mount's root; none is everything) into RAM.

        With `globs` only of files whose path inside their step matches one of them; `*` matches `/` too. `files` and
        `bytes` are what was fetched, `already` the files that were there. Raises NoRoom before anything is fetched
        where the tier can't hold it, also after evicting what retention lets go; NotFound, ObjectError, PeerError.
        """
        meant = await self._meant(paths)
        with self._registry.using([chosen[0].record for chosen in meant.values()]):
            files: dict[int, _File] = {}
            for chosen in meant.values():
                await self._show(chosen)
                files.update(_matching(chosen, globs))
            if not files and (globs or any(chosen[0].inner for chosen in meant.values())):
                what = f" that matches {' or '.join(globs)}" if globs else ""
                where = ", ".join(paths) or "the mount"
                raise NotFound(f"there is no file {where}{what}; `tierfs ls` shows what there is")
            stubs = {ino: file for ino, file in files.items() if self._hydration.is_stub(ino)}
            for ino, file in stubs.items():
                file.had_bytes = self._hydration.hydrated_bytes(ino)
            wanted = sum(file.size_bytes - file.had_bytes for file in stubs.values())
            self._make_room(wanted)
            await reporting(
                lambda: all_of((partial(self._fetch, ino, file) for ino, file in stubs.items()), at_once=FILES_AT_ONCE),
                lambda: self._fetching(stubs),
                progress,
            )
        return {"files": len(stubs), "bytes": wanted, "already": len(files) - len(stubs)}

    async def _meant(self, paths: Sequence[str]) -> dict[Key, list[Selected]]:
        """By step, what of it the paths mean. NotFound."""
        meant: dict[Key, list[Selected]] = {}
        for rel in paths or [""]:
            if rel and self._registry.cluster.shares:
                await self._registry.cluster.show(rel)
            for found in select(self._registry, rel):
                meant.setdefault(found.record.key, []).append(found)
        return meant

    async def _show(self, chosen: Sequence[Selected]) -> None:
        """All names of the step are there. StepBusy for one that is named and not complete."""
        record = chosen[0].record
        if not record.is_complete:
            if any(each.is_named for each in chosen):
                raise StepBusy(f"{record.rel} is not complete; only of complete steps there is anything to fetch")
            return
        if self._registry.is_shared(record):
            await self._registry.cluster.show_listing(record.rel)
        if not record.manifest.populated:
            await self._hydration.populate(record)

    async def _fetch(self, ino: int, file: _File) -> None:
        await self._hydration.hydrate(ino)
        file.is_whole = True

    def _fetching(self, stubs: Mapping[int, _File]) -> dict[str, Any]:
        """How far these files are."""
        here = 0
        for ino, file in stubs.items():
            held = file.size_bytes if file.is_whole else min(file.size_bytes, self._hydration.hydrated_bytes(ino))
            here += max(0, held - file.had_bytes)
        return {
            "files": sum(file.is_whole for file in stubs.values()),
            "files_total": len(stubs),
            "bytes": here,
            "bytes_total": sum(file.size_bytes - file.had_bytes for file in stubs.values()),
            "path": next((file.path for file in stubs.values() if not file.is_whole), ""),
        }

    def _make_room(self, wanted_bytes: int) -> None:
        usage = self._registry.tier.usage()
        free = max(0, usage.free_bytes - min(MARGIN_BYTES, usage.size_bytes // MARGIN_SHARE))
        if wanted_bytes <= free:
            return
        most = free + self._registry.evictable_bytes()
        if wanted_bytes > most:
            raise NoRoom(
                f"the RAM tier can't hold {format_size(wanted_bytes)} more: {format_size(free)} are free, and evicting "
                f"what retention allows gives {format_size(most - free)}; evict or unpin steps, prefetch fewer, or "
                f"mount with a larger size",
                needed_bytes=wanted_bytes,
                free_bytes=most,
            )
        self._registry.make_room(wanted_bytes - free)


def _matching(chosen: Sequence[Selected], globs: Sequence[str]) -> dict[int, _File]:
    """The files of the step that are meant, by inode."""
    record = chosen[0].record
    return {
        entry.ino: _File(f"{record.rel}/{inner}", entry.size_bytes)
        for inner, entry in sorted(record.manifest.files.items())
        if any(each.holds(inner) for each in chosen) and (not globs or any(fnmatchcase(inner, glob) for glob in globs))
    }
