"""Names that stubs and steps of the object tier may not get: their bytes are known by the step that they are of.

`mv` and `shutil.move` copy where a rename answers EXDEV, which brings the bytes.
"""

from __future__ import annotations

import errno
import os
import stat

from tierfs.steps.names import StepPath
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import StepRegistry


class StubMoves:
    """Called before anything is changed."""

    def __init__(self, registry: StepRegistry) -> None:
        self._registry = registry

    async def before_rename(self, old: str, new: str, *, exchange: bool) -> None:
        """OSError (EXDEV) where a stub would leave its step, or a step with stubs its name."""
        self._refuse_if_leaving(old, new, exchange=exchange)
        if exchange:
            self._refuse_if_leaving(new, old, exchange=True)
            return
        target = self._registry.names.locate(new)
        replaced = self._registry.at(target) if target is not None and target.inner == "" else None
        if replaced is not None and not replaced.manifest.populated:
            await self._registry.object_tier.populate(replaced)  # it is not empty, so it can't be replaced

    async def before_link(self, old: str | None, new: str | None, nodeid: int) -> None:
        """A stub that is linked into another step gets its bytes first: it must outlive the step that it is of."""
        if not self._registry.object_tier.is_stub(nodeid):
            return
        source = self._registry.names.locate(old) if old is not None else None
        target = self._registry.names.locate(new) if new is not None else None
        if source is None or target is None or source.step_rel != target.step_rel:
            await self._registry.object_tier.hydrate(nodeid)

    def _refuse_if_leaving(self, old: str, new: str, *, exchange: bool) -> None:
        source, target = self._registry.names.locate(old), self._registry.names.locate(new)
        if source is not None and source.inner:
            stays = target is not None and target.inner != "" and target.step_rel == source.step_rel
            refused = not stays and self._holds_stubs(source)
        else:
            below = [
                record
                for record in self._registry.records.values()
                if record.rel == old or record.rel.startswith(old + "/")
            ]
            refused = any(
                self._has_stubs(record, "") and (exchange or not self._follow(record, old, new)) for record in below
            )
        if refused:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old)

    def _follow(self, record: StepRecord, old: str, new: str) -> bool:
        """The bytes of its stubs are other nodes', which know of the rename, and it stays a step."""
        where = self._registry.names.locate(new + record.rel[len(old) :])
        is_step = where is not None and where.inner == ""
        return is_step and self._registry.is_shared(record) and not record.is_persisted

    def _holds_stubs(self, where: StepPath) -> bool:
        record = self._registry.at(where)
        if record is None:
            return False
        try:
            info = os.lstat(record.directory / where.inner)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(info.st_mode):
            return self._has_stubs(record, where.inner + "/")
        return self._registry.object_tier.is_stub(info.st_ino)

    def _has_stubs(self, record: StepRecord, below: str) -> bool:
        is_stub = self._registry.object_tier.is_stub
        return not record.manifest.populated or any(
            is_stub(entry.ino) for inner, entry in record.manifest.files.items() if inner.startswith(below)
        )
