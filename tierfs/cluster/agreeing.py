"""The commit of a step by all nodes: one transaction, made by the node that has the marker.

It exists only when every file that the marker names is sealed and listed by the node that wrote it, at one revision of
the catalogue: the transaction compares that no part of the generation is newer than what was judged, that nobody
completed the step meanwhile, and that its directory is the one that this node knows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import trio

from tierfs.catalog.keys import parts_prefix, state_key, tree_key
from tierfs.catalog.records import FILES_A_PAGE, FileRecord, StepState, to_bytes
from tierfs.catalog.store import Compare, Put
from tierfs.cluster.local_files import writing_generation
from tierfs.cluster.publishing import Publisher
from tierfs.cluster.putting_away import put_away_others
from tierfs.cluster.step_files import StepFiles, merge
from tierfs.cluster.tree_names import CATCH_UP_S, TryAgain
from tierfs.errors import CatalogError, CatalogUnavailable, CommitRefused, MarkerUnreadable
from tierfs.steps.cluster import Agreement as Outcome
from tierfs.steps.completion import Shortfall
from tierfs.steps.markers import MarkerContent, is_data_file_name, read_dcp_marker
from tierfs.steps.record import StepRecord
from tierfs.steps.registry import Key, StepRegistry

if TYPE_CHECKING:
    from tierfs.cluster.copies import Copies
    from tierfs.cluster.tables import Seen
    from tierfs.cluster.view import Change, View

log = logging.getLogger("tierfs.cluster")

_T = TypeVar("_T")

#: After the catalogue came back each node first tells what it wrote: so long no other node's file counts, or is missed.
SETTLED_AFTER_S = 2.0
#: How long a commit waits that will be asked for again.
IMPATIENT_S = 0.5
#: Between two looks at the other nodes' parts, while something is missing.
_LOOK_AGAIN_S = 0.1
_LOOK_AGAIN_MOST_S = 1.0
#: Between the commit and the rename of the marker here there is no more than this, seconds.
_COMPLETING_S = 5.0
#: More are merged in a thread: about 1 ms.
_INLINE_FILES = 500
#: Where the catalogue was waited for in vain already, the next commit waits only so long.
_SHORT_WAIT_S = 0.5


@dataclass(frozen=True)
class _Wanted:
    """What is to be committed."""

    record: StepRecord
    generation: int
    marker: str | None
    marker_at: str | None
    content: MarkerContent | None


@dataclass(frozen=True)
class _Judged:
    """All files of the step if it were committed now, and whose they are."""

    merged: StepFiles
    mine: dict[str, FileRecord]
    #: The catalogue's commit that it would come after.
    seen: Seen[StepState] | None
    lacking: Shortfall
    #: The nodes whose files are missing are not there now, and may come back.
    may_come: bool = False


class Agreement:
    """Used from the trio thread."""

    def __init__(self, registry: StepRegistry, view: View, publisher: Publisher, copies: Copies, node: str) -> None:
        self.registry, self.view, self.publisher, self.node = registry, view, publisher, node
        self._copies = copies
        self._agreed: dict[Key, tuple[StepState, float]] = {}
        self._waited_in_vain = False
        self.settled_after_s = SETTLED_AFTER_S
        #: This node is a member: before that it commits nothing (`Membership.member`).
        self.is_member: Callable[[], bool] = lambda: True
        self._read_at = -math.inf
        view.listen(self._seen)
        publisher.commit = self.commit_complete
        publisher.is_completing = self.is_completing

    async def agree(
        self,
        record: StepRecord,
        marker: str | None,
        content: MarkerContent | None,
        marker_at: str | None,
        *,
        patient: bool = True,
    ) -> Outcome:
        """See `tierfs.steps.cluster.Cluster.agree`. `marker_at` lies inside the step, as names in `content` do."""
        expected = self.publisher.expected.get(record.key)
        if content is None and expected:
            content = MarkerContent(dict(expected))
        wanted = _Wanted(record, writing_generation(record.manifest), marker, marker_at, content)
        self.publisher.waiting_markers.pop(record.key, None)
        ends_at = trio.current_time() + (self.registry.settings.cluster.wait_s if patient else IMPATIENT_S)
        try:
            agreed = await self._agree(wanted, ends_at)
        except TryAgain as error:
            log.info("%s is not committed yet: %s", record.rel, error)
            agreed = False
        if agreed:
            return "agreed"
        outcome = await self._without_catalogue(wanted)
        if outcome == "pending":
            if marker is not None:
                self.publisher.waiting_markers[record.key] = marker
            put_away_others(self.registry, self._copies, record, content.files if content is not None else {})
        return outcome

    async def commit_complete(self, record: StepRecord) -> None:
        """The commit of a step that was completed without the catalogue. CatalogError, TryAgain.

        The caller has the step for itself (`Publisher.alone_at`). CommitRefused does not come out of it: a step that is
        complete here names its own files.
        """
        wanted = _Wanted(record, record.manifest.generation, record.manifest.marker, record.manifest.marker, None)
        mine = {
            inner: file
            for inner, file in (await self.publisher.files.every(record)).items()
            if inner not in record.manifest.added
        }
        if lacking := await self._lacking(record, mine):
            # Names of other nodes' files were not made here: one that knows them all commits.
            raise TryAgain(f"{record.rel} is published by a node that has all of its names; this one lacks {lacking}")
        seen = self.view.states.get(record.key)
        merged = await self._merged(wanted, mine)
        if any(merged.files[inner].version != file.version for inner, file in mine.items()):
            # What another node is writing under these names has no part in what was whole here before.
            mine = {inner: replace(file, opened_at=merged.revision + 1) for inner, file in mine.items()}
            merged = await _merge(merged, self.node, mine)
        if await self._try(wanted, _Judged(merged, mine, seen, Shortfall())) is None:
            raise TryAgain(f"others changed {record.rel}")
        self.completed(record)
        record.unsaved = True

    async def _lacking(self, record: StepRecord, mine: dict[str, FileRecord]) -> str:
        """A file that the step's marker names and this node does not know; "" for none, or where it can't be told."""
        marker = self.registry.rules.match(record.manifest.marker or "")
        if marker is None or marker.kind != "dcp" or record.manifest.marker is None:
            return ""
        file = mine.get(record.manifest.marker)
        if file is None:
            return record.manifest.marker
        if not self._copies.has(file.version):
            return ""
        try:
            content = await trio.to_thread.run_sync(read_dcp_marker, record.directory / record.manifest.marker)
        except MarkerUnreadable:
            return ""
        directory = f"{marker.directory}/" if marker.directory else ""
        return next((directory + name for name in sorted(content.files) if directory + name not in mine), "")

    def completed(self, record: StepRecord) -> None:
        """The step is complete here: its manifest says when, as the catalogue does."""
        self.publisher.expected.pop(record.key, None)
        self.publisher.waiting_markers.pop(record.key, None)
        state, _ = self._agreed.pop(record.key, (None, 0.0))
        if state is not None and state.generation == record.manifest.generation:
            record.manifest.completed_at = state.completed_at

    def is_completing(self, key: Key) -> bool:
        """The commit was made by or for this node just now, and the step is about to be complete here."""
        return self._agreed.get(key, (None, 0.0))[1] > trio.current_time()

    def _note_agreed(self, key: Key, state: StepState) -> None:
        self._agreed[key] = state, trio.current_time() + _COMPLETING_S

    # --- with the catalogue

    async def _agree(self, wanted: _Wanted, ends_at: float) -> bool:
        """False where the catalogue can't be reached, or files may still come of nodes that are away."""
        began, pause_s = trio.current_time(), _LOOK_AGAIN_S
        judged: _Judged | None = None
        look = False
        while await self._is_connected(ends_at):
            try:
                async with self.publisher.alone_at(wanted.record.key):
                    if await self._is_committed(wanted, look=look):
                        return True
                    look = True
                    judged = await self._judge(wanted)
                    unsettled_s = self._read_at + self.settled_after_s - trio.current_time()
                    if unsettled_s > 0 and self._names_others(wanted, judged):
                        pause_s = min(unsettled_s, _LOOK_AGAIN_MOST_S)
                    elif not judged.lacking:
                        state = await self._try(wanted, judged)
                        if state is not None:
                            return True
                        if trio.current_time() >= ends_at:
                            return False
                        continue
            except CatalogUnavailable as error:
                log.info("committing %s: %s", wanted.record.rel, error.message)
                self.view.doubt()
                continue
            except CatalogError as error:
                log.warning("committing %s: %s", wanted.record.rel, error.message)
                return False
            if trio.current_time() + pause_s > ends_at:
                if judged.may_come or not judged.lacking or began < self._read_at + self.settled_after_s:
                    return False
                raise self._refused(wanted, judged.lacking)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_AGAIN_MOST_S)
        return False

    def _seen(self, change: Change) -> None:
        if change.kind == "reset":
            self._read_at = trio.current_time()

    def _names_others(self, wanted: _Wanted, judged: _Judged) -> bool:
        named = judged.merged.files if wanted.content is None else wanted.content.files
        files = judged.merged.files
        return any(inner in files and files[inner].node != self.node for inner in named)

    async def _is_connected(self, ends_at: float) -> bool:
        def is_there() -> bool:
            return self.view.connected and self.is_member()

        if not is_there():
            longest_s = ends_at - trio.current_time()
            within_s = max(0.0, min(longest_s, _SHORT_WAIT_S) if self._waited_in_vain else longest_s)
            self._waited_in_vain = not await self.view.until(is_there, within_s=within_s)
            return not self._waited_in_vain
        self._waited_in_vain = False
        return True

    async def _is_committed(self, wanted: _Wanted, *, look: bool) -> bool:
        """The generation is complete already, by this node (an answer that was lost) or another; `look` asks for it.

        CommitRefused where what this node wrote has no part in it, or the step was removed.
        """
        record = wanted.record
        if not await self.publisher.join_step(record):
            raise self._refuse(record, "another node removed the step")
        key = record.key
        if look:
            await self.view.caught_up(keys=(state_key(*key), tree_key(record.rel)), within_s=CATCH_UP_S)
        seen = self.view.states.get(key)
        if seen is None or seen.record.generation < wanted.generation:
            return False
        state = seen.record
        if state.generation == wanted.generation:
            merged = (await self.view.files(key, state.generation)).files
            mine = await self._mine(wanted)
            named = None if wanted.content is None else wanted.content.files
            if all(
                inner in merged and merged[inner].version == file.version
                for inner, file in mine.items()
                if named is None or inner in named or inner == wanted.marker
            ):
                self._note_agreed(key, state)
                return True
        self.publisher.on_committed(key)
        raise self._refuse(record, f"the node {state.node} completed generation {state.generation} with other files")

    async def _judge(self, wanted: _Wanted) -> _Judged:
        """Hold what is wanted against all nodes' parts as they are now."""
        record, key = wanted.record, wanted.record.key
        seen = self.view.states.get(key)
        mine = await self._mine(wanted)
        prior = await self._prior(wanted, seen)
        merged = await self._merged(wanted, mine)
        carried = self._carried(wanted, merged, prior)
        if carried:
            mine |= carried
            merged = await _merge(merged, self.node, mine)
        if wanted.content is None:
            return _Judged(merged, mine, seen, Shortfall())
        missing, short, stale, still_open, away = [], [], [], [], False
        is_open = record.open_names()
        for at, (inner, least) in enumerate(sorted(wanted.content.files.items())):
            if at % 64 == 63:
                await trio.lowlevel.checkpoint()
            file = merged.files.get(inner)
            if file is None:
                if inner in is_open:
                    still_open.append(inner)
                elif prior is not None and inner in prior.files:
                    stale.append(inner)
                else:
                    missing.append(inner)
            elif file.size_bytes < least:
                short.append((inner, file.size_bytes, least))
            elif inner in mine and record.is_not_written_again(inner):
                stale.append(inner)
            elif file.node not in self.view.nodes and file.node != self.node:
                # Others may hold it; but its node may be cut off, and writing the file again right now.
                missing.append(inner)
                away = True
        lacking = Shortfall(tuple(missing), tuple(short), tuple(stale), tuple(still_open))
        away = away or any(
            files and node not in self.view.nodes and node != self.node for node, files in merged.parts.items()
        )
        return _Judged(merged, mine, seen, lacking, may_come=away)

    async def _mine(self, wanted: _Wanted) -> dict[str, FileRecord]:
        """This node's files as they will be once the marker has its name."""
        record = wanted.record
        mine = await self.publisher.files.own(record)
        if wanted.marker is not None and wanted.marker_at is not None:
            mine.pop(wanted.marker_at, None)
            entry = record.manifest.files.get(wanted.marker_at)
            file = self.publisher.files.describe(record.directory / wanted.marker_at, entry, record)
            if file is not None:
                mine[wanted.marker] = file
        return mine

    async def _merged(self, wanted: _Wanted, mine: dict[str, FileRecord]) -> StepFiles:
        """All nodes' parts as of now, with this node's own as it is here."""
        known = await self.view.files(wanted.record.key, wanted.generation)
        return await _merge(known, self.node, mine)

    async def _prior(self, wanted: _Wanted, seen: Seen[StepState] | None) -> StepFiles | None:
        """The generation that this one comes after."""
        if seen is None or seen.record.generation >= wanted.generation:
            return None
        return await self.view.files(wanted.record.key, seen.record.generation)

    def _carried(self, wanted: _Wanted, merged: StepFiles, prior: StepFiles | None) -> dict[str, FileRecord]:
        """Files of the older generation that were neither written again nor removed, and stay in the step."""
        if prior is None:
            return {}
        current = wanted.record.manifest.overwrite
        named = wanted.content.files if wanted.content is not None else {}
        carried = {}
        for inner, file in prior.files.items():
            is_data = is_data_file_name(inner.rpartition("/")[2]) is not None
            if inner in merged.files or inner in named or is_data or self.registry.rules.match(inner) is not None:
                continue
            path = wanted.record.directory / inner
            if current is not None and inner in current.old_files and not path.is_symlink() and not path.exists():
                continue
            carried[inner] = file
        return carried

    async def _try(self, wanted: _Wanted, judged: _Judged) -> StepState | None:
        """The transaction. None where something changed meanwhile: to be judged anew. CatalogError."""
        merged, mine, seen = judged.merged, judged.mine, judged.seen
        record, key, generation = wanted.record, wanted.record.key, wanted.generation
        if not await self.publisher.join_step(record):
            raise self._refuse(record, "another node removed the step")
        if seen is not None and seen.record.generation >= generation:
            return None
        parts, compares = self.publisher.parts, self.publisher.compares(record, seen)
        # A marker is not to be seen before the commit: where a part takes several pages, it has the last to itself.
        shown = {inner: file for inner, file in mine.items() if inner != wanted.marker}
        last = {inner: file for inner, file in mine.items() if inner == wanted.marker}
        if len(shown) <= FILES_A_PAGE:
            shown, last, at = {}, mine, 0
        else:
            if not await parts.put(key, generation, shown, compares, added=False):
                return None
            at = -(-len(shown) // FILES_A_PAGE)
            known = await self.view.files(key, generation)
            others = {node: files for node, files in known.parts.items() if node != self.node}
            if others != {node: files for node, files in merged.parts.items() if node != self.node}:
                return None
            merged = await _merge(known, self.node, mine)
        known_part = await parts.known(key, generation)
        pages = {at: last} | {above: {} for above in range(at + 1, len(known_part.pages))}
        state = await self._state(wanted, merged)
        result = await self.publisher.store.txn(
            [
                *compares,
                Compare(parts_prefix(*key, generation), "mod", "less", merged.revision + 1, is_prefix=True),
            ],
            [
                *(parts.page(key, generation, number, files) for number, files in pages.items()),
                Put(state_key(*key), to_bytes(state)),
            ],
        )
        if not result.succeeded:
            parts.forget(key, generation)
            await self.view.caught_up(keys=(state_key(*key), tree_key(record.rel)), within_s=CATCH_UP_S)
            return None
        parts.was_put(key, generation, known_part, pages, result.revision, added=False)
        self._note_agreed(key, state)
        for entry in self.publisher.journal.at(record.rel, "alone"):
            self.publisher.journal.done(entry)
        if seen is not None:
            await self._drop_parts(key, seen.record.generation)
        return state

    async def _state(self, wanted: _Wanted, merged: StepFiles) -> StepState:
        counts, size = await _in_thread(len(merged.files), lambda: _count(merged))
        manifest = wanted.record.manifest
        return StepState(
            number=manifest.number,
            generation=wanted.generation,
            completed_at=manifest.completed_at if wanted.record.is_complete and manifest.completed_at else time.time(),
            node=self.node,
            marker=wanted.marker,
            marker_file=merged.files.get(wanted.marker) if wanted.marker is not None else None,
            parts=counts,
            files=len(merged.files),
            bytes=size,
        )

    async def _drop_parts(self, key: Key, generation: int) -> None:
        """Of the generation before. Left there they would only take room."""
        try:
            await self.publisher.store.delete(parts_prefix(*key, generation), is_prefix=True)
        except CatalogError as error:
            log.info("parts of generation %d of %s stay in the catalogue: %s", generation, "/".join(key), error)
        self.publisher.parts.forget(key, generation)

    # --- without it

    async def _without_catalogue(self, wanted: _Wanted) -> Outcome:
        """alone where all that is named is this node's, and here; pending else."""
        record = wanted.record
        if self.view.connected and self.is_member():
            return "pending"  # for files of nodes that are away, or since others go on changing the step
        known = self.view.known_files(record.key, wanted.generation)
        here = await self.publisher.files.every(record)
        mine = await self._mine(wanted)
        named = wanted.content.files if wanted.content is not None else dict.fromkeys(here, 0)
        for inner, least in named.items():
            file = mine.get(inner) or here.get(inner)
            if (
                file is None
                or file.size_bytes < least
                or record.is_not_written_again(inner)
                or not self._copies.has(file.version)
            ):
                return "pending"
        if wanted.content is None and known is not None and any(known.parts.keys() - {self.node}):
            return "pending"
        self.publisher.completed_alone(record, wanted.generation)
        return "alone"

    # --- refusals

    def _refused(self, wanted: _Wanted, lacking: Shortfall) -> CommitRefused:
        return self._refuse(wanted.record, lacking.sentence(), lacking)

    def _refuse(self, record: StepRecord, sentence: str, lacking: Shortfall | None = None) -> CommitRefused:
        """Says it to people, as `tierfs.steps.commits` does; the error is for the program."""
        message = (
            f"commit of {record.rel} refused: {sentence}. The step stays incomplete, older steps stay whole; save it "
            "again"
        )
        record.manifest.note = f"commit refused: {sentence}"
        record.unsaved = True
        log.error("%s", message, extra=self.registry.extra(record))
        self.registry.lines.write(
            record.manifest.namespace, f"commit refused: {sentence}", level="ERROR", step=record.manifest.number
        )
        self.registry.problem("error", message, record.rel)
        lacking = lacking or Shortfall()
        return CommitRefused(
            message,
            missing=lacking.missing + lacking.stale + lacking.still_open,
            short={name: (has, least) for name, has, least in lacking.short},
        )


async def _merge(known: StepFiles, node: str, mine: dict[str, FileRecord]) -> StepFiles:
    """With this node's part as it is here."""
    parts = {**known.parts, node: mine}
    return await _in_thread(
        sum(map(len, parts.values())),
        lambda: merge(known.key, known.generation, known.revision, parts, known.added),
    )


def _count(merged: StepFiles) -> tuple[dict[str, int], int]:
    """Files by the node whose part lists them, and all their bytes."""
    counts: dict[str, int] = {}
    for file in merged.files.values():
        for part in merged.parts_of_version.get(file.version, ())[:1]:
            counts[part] = counts.get(part, 0) + 1
    return counts, sum(file.size_bytes for file in merged.files.values())


async def _in_thread(files: int, work: Callable[[], _T]) -> _T:
    """Where it takes longer than a request should wait."""
    if files <= _INLINE_FILES:
        return work()
    return await trio.to_thread.run_sync(work)
