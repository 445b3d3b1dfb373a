"""Marks of what has to be published: which come next, which wait, and when what was marked before is done."""

from __future__ import annotations

import trio

from tierfs.steps.names import StepNames

#: ("step", namespace, step) or ("path", rel).
Mark = tuple[str, ...]

#: Marks that are worked on at the same time.
IN_FLIGHT = 8


class Marks:
    """In the order in which they came; one after the other in each lane, which is a step, or a directory of the root.

    A mark that is added while it is worked on is worked on again, once.
    """

    def __init__(self, names: StepNames) -> None:
        self._names = names
        self._dirty: dict[Mark, int] = {}
        self._flying: dict[Mark, int] = {}
        self._not_before: dict[Mark, float] = {}
        self._serial = 0
        self._wake = trio.Event()
        self._progress = trio.Event()

    def __len__(self) -> int:
        return len(self._dirty) + len(self._flying)

    def has(self, mark: Mark) -> bool:
        return mark in self._dirty or mark in self._flying

    def is_due(self, mark: Mark) -> bool:
        """It is worked on, or can be now."""
        return mark in self._flying or (mark in self._dirty and self._not_before.get(mark, 0.0) <= trio.current_time())

    def add(self, *marks: Mark) -> None:
        for mark in marks:
            self._serial += 1
            self._dirty.setdefault(mark, self._serial)
        self._wake.set()

    def add_last(self, mark: Mark) -> None:
        """The same, behind all others also where it was marked before."""
        self._dirty.pop(mark, None)
        self.add(mark)

    def take(self) -> list[Mark]:
        """What can be worked on now; `done` has to be told of each."""
        now = trio.current_time()
        lanes = {self._lane(mark) for mark in self._flying}
        taken = []
        for mark in sorted(self._dirty, key=self._dirty.__getitem__):
            if len(self._flying) >= IN_FLIGHT:
                break
            lane = self._lane(mark)
            if lane not in lanes and self._not_before.get(mark, 0.0) <= now:
                lanes.add(lane)
                self._flying[mark] = self._dirty.pop(mark)
                taken.append(mark)
        return taken

    async def wait(self) -> None:
        """Until there may be something to take."""
        now = trio.current_time()
        waits = [self._not_before[mark] - now for mark in self._dirty if mark in self._not_before]
        with trio.move_on_after(max(0.01, min([5.0, *waits]))):
            await self._wake.wait()
        self._wake = trio.Event()

    def again(self, mark: Mark, in_s: float) -> None:
        """It was taken and is to be worked on again."""
        self._not_before[mark] = trio.current_time() + in_s
        self._dirty[mark] = min(serials) if (serials := self._serials(mark)) else self._serial

    def done(self, mark: Mark) -> None:
        self._flying.pop(mark, None)
        if mark not in self._dirty:
            self._not_before.pop(mark, None)
        self._progress.set()
        self._progress = trio.Event()
        self._wake.set()

    async def flushed(self, mark: Mark | None, *, within_s: float) -> bool:
        """Until what was marked before this call (in the lane of `mark`) is done; False where it takes longer."""
        before, lane = self._serial, None if mark is None else self._lane(mark)
        with trio.move_on_after(within_s):
            while self._is_left(before, lane):
                await self._progress.wait()
            return True
        return not self._is_left(before, lane)

    def _is_left(self, before: int, lane: tuple[str, ...] | None) -> bool:
        return any(
            serial <= before and (lane is None or self._lane(mark) == lane)
            for marks in (self._dirty, self._flying)
            for mark, serial in marks.items()
        )

    def _serials(self, mark: Mark) -> list[int]:
        return [marks[mark] for marks in (self._flying, self._dirty) if mark in marks]

    def _lane(self, mark: Mark) -> tuple[str, ...]:
        if mark[0] == "step":
            return mark[1:]
        where = self._names.locate(mark[1])
        return (where.namespace, where.step) if where is not None else (mark[1].partition("/")[0],)
